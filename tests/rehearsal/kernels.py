"""Run a Triton kernel that Inductor generated, as a launch on the device would.

    triton_poi_fused_3.run(buf0, buf1, 32768, stream=raw_stream0)
      =>  every program of the grid, by Triton's interpreter

The decorators of a kernel choose configurations for the target as they would there, and the grid
is computed by Inductor's own expressions. One thing differs: the interpreter computes a large block
as fast as a small one, so blocks are as large as the kernel's masks allow. Inductor leaves out the
mask of a dim whose length is a multiple of the largest block that it would try; there, blocks
divide the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._inductor.runtime.hints import TRITON_MAX_BLOCK
from torch._inductor.runtime.triton_heuristics import GridExpr

from cp_inductor.inspect.world import import_file
from tests.rehearsal.memory import Argument
from tests.rehearsal.triton_interpreter import NUMBER_SHIFT, constants_of

if TYPE_CHECKING:
    from tests.rehearsal.device import Device

# Elements of a block of all dims: of larger ones numpy's arrays leave the caches.
MOST_ELEMENTS = 1 << 18
DIMS = {"XBLOCK": "X", "YBLOCK": "Y", "ZBLOCK": "Z", "R0_BLOCK": "R0_", "R1_BLOCK": "R1_"}


class Kernel:
    """What stands for a compiled kernel; its decorators made the tuner, which has the function."""

    def __init__(self, device: Device, name: str, tuner: Any) -> None:
        self.device, self.name = device, name
        self.function = tuner.fn
        self.signature: Mapping[str, str] = tuner.triton_meta["signature"]
        self.constants: Mapping[str, Any] = tuner.triton_meta.get("constants", {})
        self.meta: dict[str, Any] = tuner.inductor_meta
        self.config: dict[str, Any] = dict(tuner.configs[0].kwargs)
        known = constants_of(self.function)
        self.parameters = [one for one in self.function.arg_names if one not in known]
        self.parameters += self.meta.get("extra_launcher_args", ())
        self.known = known
        multiples: Any = tuner.triton_meta.get("configs") or ({},)
        names = list(self.signature)
        self.multiples: dict[str, int] = {
            names[place[0]]: value
            for place, hints in multiples[0].items()
            for hint, value in hints
            if hint == "tt.divisibility"
        }

    def run(self, *args: Any, stream: object = None) -> None:
        """Launch the kernel."""
        with self.device.at_work(self.name):
            given = dict(zip(self.parameters, args, strict=True))
            blocks = self._blocks(given)
            config = {name: value for name, value in blocks.items() if name in self.known}
            grid = GridExpr.from_meta(self.meta, config).eval_slow(given | blocks)
            arguments = {
                name: blocks.get(name, self.constants.get(name))
                for name in self.known
                if name in self.function.arg_names
            }
            pointers: list[Argument] = []
            for place, (name, value) in enumerate(given.items()):
                if name in self.function.arg_names:
                    arguments[name] = self._argument(name, value, place, pointers)
            types = {
                name: "i32" if kind == "constexpr" else kind
                for name, kind in self.signature.items()
                if name not in self.known and given[name] is not None
            }
            # For a template, the caller says the grid.
            is_template = bool(self.meta.get("extra_launcher_args"))
            launched = self.device.memory.launched
            with launched(pointers, self._in_place(given), is_template=is_template):
                self.device.interpreter.run(self.function, arguments, types, grid)
        self.device.report.kernels[self.name] += 1

    def _in_place(self, given: Mapping[str, Any]) -> frozenset[int]:
        """Return which of the pointers the kernel both reads and writes, by their order."""
        pointers = [name for name, value in given.items() if isinstance(value, Tensor)]
        mutated = self.meta.get("mutated_arg_names") or ()
        return frozenset(place for place, name in enumerate(pointers) if name in mutated)

    def _argument(self, name: str, value: Any, place: int, pointers: list[Argument]) -> Any:
        """Return an argument as the interpreter takes it; tensors as tagged pointers."""
        if not isinstance(value, Tensor):
            self._check_multiple(name, value, "")
            return value
        written = self.device.argument_at(place)
        pointers.append(Argument(written, self.device.memory.buffer_of(value, written)))
        self.device.memory.check_on_device(value, written)
        self._check_multiple(name, value.data_ptr(), written)
        return value.data_ptr() | (len(pointers) - 1) << int(NUMBER_SHIFT)

    def _check_multiple(self, name: str, value: Any, written: str) -> None:
        """Check what the generated code promises Triton, which loads in vectors accordingly."""
        multiple = self.multiples.get(name, 1)
        if isinstance(value, int) and value % multiple:
            what = f"{name} is not the multiple of {multiple} that the code says it is"
            self.device.note("misaligned argument", written or name, what)

    def _blocks(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if not set(self.config) <= set(DIMS):
            return self.config
        blocks, left = {}, MOST_ELEMENTS
        for name in sorted(self.config, key=list(DIMS).index):
            dim = DIMS[name]
            length = int(given[f"{dim.lower()}numel"])
            block = largest_block(length, TRITON_MAX_BLOCK[dim], left)
            blocks[name] = block
            left = max(left // block, 1)
        return blocks


def largest_block(length: int, most: int, left: int) -> int:
    """Return the largest block of a dim: a power of two up to `left`, or what Inductor would take.

    Args:
        length: of the dim.
        most: the largest block that Inductor would try. A dim that is a multiple of it has no mask.
        left: elements that the block may have.
    """
    if length % most == 0:
        block = length & -length
        while block > max(left, 1) and block > 1:
            block //= 2
        return max(block, 1)
    block = 1 << max(length - 1, 0).bit_length()
    return max(min(block, left), 1)


def load_kernel(device: Device, name: str, source: str, folder: Path) -> Kernel:
    """Import the source of a kernel; to be called where a GPU is pretended."""
    path = folder / f"{name}.py"
    path.write_text(source)
    return Kernel(device, name, getattr(import_file(path), name))
