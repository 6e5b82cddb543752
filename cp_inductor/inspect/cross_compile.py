"""Generate the code that any rank of a job would run, on a machine without its peers and its GPU.

    code = cross_compile(model, (x,), world_size=1024, rank=517, target="cuda:sm_90").code
    code["forward"]     =>  "... torch.ops._c10d_functional.all_to_all_single.default(buf7, ..."

This does what torch.compile would do on that rank, up to the generated source. Dynamo, AOTAutograd
and Inductor run on tensors without data, in a fake process group, for a fake device. The model is
not executed, and the state of torch is restored. Triton can compile the kernels for a GPU that does
not exist; cuobjdump, a tool that comes with Triton, reads from the machine code what they use.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from cp_inductor.backend.failed_trace import errors_unwrapped, trace_for
from cp_inductor.errors import UnsupportedTarget
from cp_inductor.inspect.compile_for import (
    GPU,
    Target,
    check_triton,
    compile_for,
    generates,
    settings_for,
    target_for_code,
)
from cp_inductor.inspect.pretend import pretend_gpu
from cp_inductor.inspect.world import Example, import_file, place, pretended_world
from cp_inductor.passes.settings import read_settings
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.dynamo import compile_state_kept
from cp_inductor.torch_private.inductor import compile_triton_kernel, cuobjdump_path


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


@dataclass(frozen=True, slots=True)
class CrossCompiled:
    """The code that one rank would run.

    Attributes:
        rank: the global rank.
        world_size: number of ranks.
        target: such as ``cuda:sm_90``.
        graphs: the aten graphs that Inductor was given, with attentions lowered: "forward" and
            "backward", or "inference".
        code: the source that Inductor generates for each graph: a wrapper and its kernels.
    """

    rank: int
    world_size: int
    target: str
    graphs: Mapping[str, fx.GraphModule]
    code: Mapping[str, str]

    def compile_kernels(self) -> tuple[CompiledKernel, ...]:
        """Compile every Triton kernel of the code to machine code.

        Returns:
            One entry per kernel and configuration. Inductor would time the configurations of a
            kernel on the device and keep the fastest.

        Raises:
            UnsupportedTarget: the target is a CPU.
            MissingTriton: triton is not installed.
        """
        gpu = Target.parse(self.target).gpu
        if gpu is None:
            raise UnsupportedTarget(
                site="compile_kernels()",
                expected="code for a GPU",
                got=f"target={self.target!r}, whose code is C++",
                remedy="cross-compile for a GPU, such as 'cuda:sm_90'",
            )
        check_triton()
        graphs = (_compile_kernels(code, kind, gpu) for kind, code in self.code.items())
        return tuple(chain.from_iterable(graphs))


def cross_compile(
    model: Callable[..., Any],
    args: Sequence[Any] | Callable[[DeviceMesh], Sequence[Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int,
    rank: int = 0,
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    placements: Sequence[Placement] | None = None,
    target: str = "cuda:sm_90",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> CrossCompiled:
    """Generate the code that one rank of a job would run, without the job.

    This works for everything that ``torch.compile(model, backend="cp_inductor", fullgraph=True)``
    compiles. The result has a backward if gradients are enabled and something requires them.
    Nothing is measured: where Inductor would time candidates on the device, the default is used
    (padding of odd matrix sizes) or the option is refused (``max_autotune``). Not thread-safe.

    Args:
        model: a module or a function. A module is not changed: a copy without data is compiled.
        args: its arguments, or a function from the mesh to the arguments. Only shapes, strides,
            dtypes and requires_grad of tensors matter; their device may also be "meta". DTensors
            keep their placements, and are moved to the axes of the same names of the mesh here.
        kwargs: keyword arguments of the model.
        world_size: number of ranks.
        rank: the global rank to generate code for.
        mesh_shape: shape of the mesh over all ranks; by default ``(world_size,)``.
        mesh_dim_names: names of its axes; by default ("cp",) or ("dp", "cp").
        placements: one per mesh axis. If given, plain tensors are whole and become DTensors with
            these placements, and the model's parameters are replicated. If not given, and no
            argument is a DTensor, plain tensors are this rank's shards on the axis of
            ``options["mesh"]``.
        target: "cpu", "cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "cuda:a100", "cuda:h100",
            "cuda:h200" or "cuda:b200".
        dynamic: as torch.compile's.
        mode: as torch.compile's.
        options: as torch.compile's for this backend. ``"mesh"`` is the name of an axis (by default
            "cp"), or a mesh whose axis has that name.

    Returns:
        The graphs and the code.

    Raises:
        CPError: an attention cannot be rewritten; the target, the mesh or the rank does not exist;
            or triton is missing.
    """
    chip = target_for_code(target)
    with pretended_world(rank, world_size, mesh_shape, mesh_dim_names) as mesh:
        example = Example(model, args, kwargs or {}, options or {}, dynamic, mode)
        return cross_compile_here(place(example, mesh, placements), target=chip)


def cross_compile_here(example: Example, *, target: Target) -> CrossCompiled:
    """Do as `cross_compile`, for this rank in the current group, with tensors as they are."""
    graphs: dict[str, fx.GraphModule] = {}
    code: dict[str, str] = {}

    def keep(kind: str, gm: fx.GraphModule, text: str, constants: object) -> Any:
        graphs[kind], code[kind] = gm, text
        return stop

    compile_and_stop(example, target, generates(target, keep))
    return CrossCompiled(dist.get_rank(), dist.get_world_size(), target.name, graphs, code)


def kernel_sources(code: str) -> dict[str, str]:
    """Return the source of every Triton kernel in generated code, by kernel name."""
    sources = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, source = (ast.literal_eval(argument) for argument in node.args[:2])
            sources[name] = source
    return sources


def _compile_kernels(code: str, graph: str, gpu: GPU) -> Iterator[CompiledKernel]:
    """Compile every Triton kernel of a graph's code, in every configuration of the kernel."""
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


def count_tiles(graph: fx.GraphModule) -> str:
    """Say how many tiles a lowered graph has, by their kernels."""
    counts = Counter(str(node.target) for node in graph.graph.nodes if node.target in TILE_OPS)
    each = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))
    return f"tiles: {each or 'none'}"


class Done(Exception):
    """Raised in place of running the compiled model, when its code has been generated."""


def stop(*args: Any) -> None:
    """Run nothing, in place of a compiled graph."""
    raise Done


def compile_and_stop(example: Example, target: Target, inner_compile: Callable[..., Any]) -> None:
    """Compile a call for a target, its lowered graphs by `inner_compile`, and run nothing."""
    mode = example.mode
    settings = settings_for(target, read_settings(example.options), mode)

    def take(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        compile_for(target, gm, example_inputs, settings, mode, inner_compile=inner_compile)

    trace_and_stop(example, take)


def trace_and_stop(example: Example, take: Callable[[fx.GraphModule, Sequence[Any]], None]) -> None:
    """Have Dynamo trace a call of a model whole, give the graph to `take`, and run nothing."""
    model = example.model

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo caches compiled code by code object, and remembers the sizes of earlier calls by name.
    run.__code__ = run.__code__.replace(co_name=f"run_{uuid4().hex}")
    backend = partial(_give_and_stop, take)
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=example.dynamic)
    with compile_state_kept(), suppress(Done):
        compiled(*example.args, **example.kwargs)


def _give_and_stop(
    take: Callable[[fx.GraphModule, Sequence[Any]], None],
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    with errors_unwrapped():
        take(gm, example_inputs)
    return stop


trace_for(_give_and_stop, is_run=False)
