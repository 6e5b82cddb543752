"""Compile the Triton kernels of generated code to machine code, by Triton's own compiler.

    async_compile.triton('triton_poi_fused_3', '''<source>''')
      =>  CompiledKernel(name, config="XBLOCK=1024 num_warps=4", registers=24, spill_bytes=0, ...)

Triton can compile for a GPU that does not exist. cuobjdump, a tool that comes with Triton, reads
from the machine code which resources a kernel uses.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cp_inductor.inspect.load import import_file
from cp_inductor.inspect.pretend import pretend_gpu
from cp_inductor.inspect.targets import GPU
from cp_inductor.torch_private.triton import compile_triton_kernel, cuobjdump_path


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel in one configuration, as machine code.

    Attributes:
        name: of the kernel.
        graph: "forward", "backward" or "inference".
        config: block sizes and warps, such as ``XBLOCK=1024 num_warps=4 num_stages=1``.
        architecture: such as ``sm_90``.
        registers: per thread.
        spill_bytes: local memory per thread, for values that did not fit into registers.
        shared_bytes: shared memory per block.
        cubin: the machine code.
    """

    name: str
    graph: str
    config: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    cubin: bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data, without the machine code."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "cubin"}


def kernel_sources(code: str) -> dict[str, str]:
    """Return the source of every Triton kernel in generated code, by kernel name."""
    sources = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, source = (ast.literal_eval(argument) for argument in node.args[:2])
            sources[name] = source
    return sources


def compile_kernels(code: str, graph: str, gpu: GPU) -> Iterator[CompiledKernel]:
    """Compile every Triton kernel of generated code, in every configuration of the kernel.

    Args:
        code: that Inductor has generated for a graph.
        graph: the kind of the graph, for the results: "forward", "backward" or "inference".
        gpu: to compile for.
    """
    with tempfile.TemporaryDirectory() as folder, pretend_gpu(gpu):
        for name, source in kernel_sources(code).items():
            path = Path(folder) / f"{name}.py"
            path.write_text(source)
            for config, binary in compile_triton_kernel(getattr(import_file(path), name)):
                cubin = binary.asm["cubin"]
                yield CompiledKernel(
                    name=name,
                    graph=graph,
                    config=config,
                    architecture=f"sm_{gpu.major}{gpu.minor}",
                    shared_bytes=binary.metadata.shared,
                    cubin=cubin,
                    **_usage(cubin, Path(folder) / f"{name}.cubin"),
                )


def _usage(cubin: bytes, path: Path) -> dict[str, int]:
    """Return the registers and spilled bytes that a kernel uses, from its machine code."""
    path.write_bytes(cubin)
    command = [cuobjdump_path(), "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(used["REG"]), "spill_bytes": int(used["STACK"]) + int(used["LOCAL"])}
