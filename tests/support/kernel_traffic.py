"""Count what generated Triton kernels read and write, from the code alone.

A kernel over n elements writes each output once. It reads an input once, whole or as much of it as
n elements are. Of inputs that it concatenates, it reads for each element the one that the element
is from: these are the loads under a condition.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass

from tests.support.wrapper import Call, Wrapper

ITEMSIZE = {"bf16": 2, "fp16": 2, "i16": 2, "fp32": 4, "i32": 4, "fp64": 8, "i64": 8, "i8": 1}


@dataclass(frozen=True)
class Traffic:
    """What one launch moves, in bytes."""

    kernel: str
    read: int
    written: int

    @property
    def moved(self) -> int:
        """Both together."""
        return self.read + self.written


def traffic_of(code: str) -> list[Traffic]:
    """Return what each launch of a Triton kernel moves, in order."""
    wrapper = Wrapper.read(code)
    sizes = sizes_of_buffers(code)
    return [traffic_of_call(wrapper, call, sizes) for call in wrapper.kernels]


def sizes_of_buffers(code: str) -> dict[str, int]:
    """Return the elements of every name in the code of a wrapper, as far as the code says."""
    found = re.findall(r"assert_size_stride\((\w+), (\([^()]*\))", code)
    found += re.findall(r"(\w+) = empty_strided_\w+\((\([^()]*\))", code)
    found += re.findall(r"(\w+) = reinterpret_tensor\(\w+, (\([^()]*\))", code)
    return {name: math.prod(ast.literal_eval(shape)) for name, shape in found}


def traffic_of_call(wrapper: Wrapper, call: Call, sizes: dict[str, int]) -> Traffic:
    """Return what one launch moves."""
    source, pointers = wrapper.sources[call.kind], wrapper.pointers(call)
    arguments = call.arguments.split(", stream=")[0].split(", ")
    names = dict(zip(pointers, arguments, strict=False))
    reduced = re.findall(r"^    r\d_numel = (\d+)$", source, re.MULTILINE)
    lengths = [int(argument) for argument in arguments if argument.isdigit()]
    # The lengths of what is reduced are the last ones.
    rows = math.prod(lengths[: len(lengths) - len(reduced)])
    elements = rows * math.prod(map(int, reduced))
    always, either, written = 0, 0, 0
    widest = 0
    for pointer, dtype in pointers.items():
        itemsize = ITEMSIZE[dtype.removeprefix("*")]
        size = sizes.get(names[pointer], elements)
        loads = re.findall(rf"tl\.load\({pointer} \+ .*", source)
        stores = re.findall(rf"tl\.store\({pointer} \+ .*", source)
        most = min(elements if any("r0_" in use for use in loads + stores) else rows, size)
        if stores:
            written += most * itemsize
            widest = max(widest, itemsize)
        # Masks that are no bounds of the launch are conditions on the element.
        elif loads and all(re.search(r"\), .*\btmp\d+", load) for load in loads):
            either += most * itemsize
        elif loads:
            always += most * itemsize
    return Traffic(call.kind, always + min(either, elements * widest), written)
