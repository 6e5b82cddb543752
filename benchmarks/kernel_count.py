"""How many Triton kernels one attention is, beside flash calls and collectives, and what they move.

    python benchmarks/kernel_count.py
    python benchmarks/kernel_count.py --ranks 8 1024 --strategies auto blocks --kernels

One causal attention (32 heads of 128, 4096 tokens per rank, bfloat16) is cross-compiled for CUDA,
forward and backward, for one rank of each world, without a GPU. Counted in the generated code:
launches of Triton kernels; what they read and write, in MB; flash calls; exchanges; and the time
that the bytes take at 4 TB/s, forward and backward together. --kernels lists every launch.

A kernel over n elements writes each output once. It reads an input once, whole or as much of it as
n elements are. Of inputs that it concatenates, it reads for each element the one that the element
is from: these are the loads under a condition.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.support: reads generated code

from cp_inductor import cross_compile
from tests.support.graphs import attend_causal
from tests.support.wrapper import Call, Wrapper

BYTES_PER_S = 4e12
ITEMSIZE = {"bf16": 2, "fp16": 2, "i16": 2, "fp32": 4, "i32": 4, "fp64": 8, "i64": 8, "i8": 1}


def measure(args: argparse.Namespace, strategy: str, world_size: int) -> dict[str, Any]:
    """Count the kernels of one attention."""
    shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, args.heads, args.tokens, args.head_dim, **shape)
    key = torch.empty(1, args.kv_heads, args.tokens, args.head_dim, **shape)
    rank = min(args.rank, world_size - 1) if args.rank >= 0 else world_size * 3 // 8
    start = time.perf_counter()
    compiled = cross_compile(
        attend_causal,
        (query, key, key),
        world_size=world_size,
        rank=rank,
        options={"strategy": strategy},
    )
    row: dict[str, Any] = {"strategy": strategy, "ranks": world_size, "rank": rank}
    moved = 0
    for kind, code in compiled.code.items():
        wrapper, sizes = Wrapper.read(code), sizes_of_buffers(code)
        launches = [traffic_of_call(wrapper, call, sizes) for call in wrapper.kernels]
        if args.kernels:
            for launch in launches:
                print(kind, launch)
        moved += sum(launch.moved for launch in launches)
        row |= {
            f"{kind} kernels": len(launches),
            f"{kind} MB": round(sum(launch.moved for launch in launches) / 1e6),
            f"{kind} tiles": len(wrapper.of("tile")),
            f"{kind} exchanges": len(wrapper.of("start")),
        }
    row["ms"] = round(1e3 * moved / BYTES_PER_S, 3)
    row["compile s"] = round(time.perf_counter() - start, 1)
    return row


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


def sizes_of_buffers(code: str) -> dict[str, int]:
    """Return the elements of every name in the code of a wrapper, as far as the code says."""
    found = re.findall(r"assert_(?:size_stride|tensor_metadata)\((\w+), (\([^()]*\))", code)
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--rank", type=int, default=-1, help="default: three eighths of the world")
    parser.add_argument("--strategies", nargs="+", default=["auto", "heads", "blocks", "ring"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    rows = [measure(args, strategy, n) for n in args.ranks for strategy in args.strategies]
    print(tabulate(rows, headers="keys"))
    context = {"torch": torch.__version__, "date": str(date.today()), "args": vars(args)}
    print(json.dumps({**context, "rows": rows}))


if __name__ == "__main__":
    main()
