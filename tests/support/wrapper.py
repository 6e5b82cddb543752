"""Read the code that Inductor generates: what a wrapper calls, in order, and what kernels touch.

wrapper = Wrapper.read(code)
wrapper.order       ["start", "tile", "wait", ...]: the collectives and the tiles
wrapper.kernels     calls of generated kernels; wrapper.sources has their code
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass, field

from cp_inductor.inspect.cross_compile import kernel_sources

START = "torch.ops._c10d_functional.all_to_all_single.default("
WAIT = "torch.ops._c10d_functional.wait_tensor.default("
TILE = "torch.ops.aten._scaled_dot_product_cudnn_attention.default("
TILE_BACKWARD = "torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default("
TILE_ON_CPU = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default("
TILE_BACKWARD_ON_CPU = TILE_ON_CPU.replace("_cpu.", "_cpu_backward.")
NAMES = {
    START: "start",
    WAIT: "wait",
    TILE: "tile",
    TILE_BACKWARD: "tile",
    TILE_ON_CPU: "tile",
    TILE_BACKWARD_ON_CPU: "tile",
}


@dataclass
class Call:
    """One line of a wrapper that computes or communicates."""

    kind: str
    result: str
    arguments: str
    line: int


@dataclass
class Wrapper:
    """A wrapper's calls and lines, and the sources of its kernels."""

    calls: list[Call] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(code: str) -> Wrapper:
        """Read generated code, of a graph that was not partitioned."""
        wrapper = Wrapper(sources=kernel_sources(code))
        body = code[code.index("def call(") : code.index("return (", code.index("def call("))]
        for number, text in enumerate(body.splitlines()):
            line = text.split("#")[0].strip()
            wrapper.lines.append(line)
            if not line.startswith(("assert_", "del ")):
                wrapper._read_line(line, number)
        return wrapper

    def _read_line(self, line: str, number: int) -> None:
        result, _, rest = line.partition(" = ")
        for name, kind in NAMES.items():
            if name in line:
                given = line[line.index(name) + len(name) :]
                self.calls.append(Call(kind, result if rest else "", given, number))
                return
        kernel = re.match(r"(triton_\w+\.run|cpp_fused_\w+)\((.*)\)", line)
        if kernel:
            self.calls.append(Call(kernel[1].removesuffix(".run"), "", kernel[2], number))
        multiplication = re.match(r"extern_kernels\.(?:add|b|badd)?mm\((.*)\)", line)
        if multiplication:
            self.calls.append(Call("mm", "", multiplication[1], number))

    @property
    def order(self) -> list[str]:
        """Collectives and tiles, in order."""
        return [call.kind for call in self.calls if call.kind in NAMES.values()]

    def of(self, kind: str) -> list[Call]:
        """Return the calls of a kind."""
        return [call for call in self.calls if call.kind == kind]

    @property
    def kernels(self) -> list[Call]:
        """Return the calls of generated kernels."""
        return [call for call in self.calls if call.kind.startswith(("triton_", "cpp_"))]

    def pointers(self, kernel: Call) -> dict[str, str]:
        """Return the pointers of a kernel's source with their dtypes, as {"in_ptr0": "*bf16"}."""
        (signature,) = re.findall(r"'signature': (\{.*?\})", self.sources[kernel.kind])
        return {n: t for n, t in ast.literal_eval(signature).items() if t.startswith("*")}


def allocations(code: str) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every buffer that generated code allocates."""
    found = re.findall(r"empty_strided_\w+\((\(.*?\)), \(.*?\), torch\.(\w+)\)", code)
    return [(ast.literal_eval(shape), dtype) for shape, dtype in found]


def causal_flags(wrapper: Wrapper) -> list[bool]:
    """Return the is_causal argument of every tile."""
    flags = [re.search(r"0\.0, (True|False)", tile.arguments) for tile in wrapper.of("tile")]
    return [flag is not None and flag[1] == "True" for flag in flags]


def normalize(code: str) -> str:
    """Return kernels and wrapper, without what differs between machines and runs.

    Comments, imports, hashes, checks, and the benchmark harness at the end.
    """
    kernels = re.findall(r"@triton\.jit\n(.*?)\n'''", code, flags=re.DOTALL)
    start = code.index("    def call(")
    wrapper = code[start : code.index("runner = Runner", start)]
    lines = [line for line in wrapper.splitlines() if line.strip()]
    kept = [
        line
        for line in lines
        if not line.strip().startswith(("#", "assert_", "del ", "raw_stream", "args.clear"))
    ]
    return "\n\n".join([*kernels, textwrap.dedent("\n".join(kept))]) + "\n"
