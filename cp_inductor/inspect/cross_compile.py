"""Generate the code that any rank of a job would run, on a machine without its peers and its GPU.

    code = cross_compile(model, (x,), world_size=1024, rank=517, target="cuda:sm_90").code
    code["forward"]     =>  "... torch.ops._c10d_functional.all_to_all_single.default(buf7, ..."

This does what torch.compile would do on that rank, up to the generated source. Dynamo, AOTAutograd
and Inductor run on tensors without data, in a fake process group, for a fake device. The model is
not executed, and the state of torch is restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
    check_triton,
    compile_for,
    settings_for,
    target_for_code,
)
from cp_inductor.inspect.targets import Target
from cp_inductor.inspect.triton_kernels import CompiledKernel, compile_kernels
from cp_inductor.inspect.world import Placer, pretended_world
from cp_inductor.passes.settings import read_settings
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.dynamo import compile_state_kept


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
        return tuple(
            kernel
            for kind, code in self.code.items()
            for kernel in compile_kernels(code, kind, gpu)
        )


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
        given = args(mesh) if callable(args) else args
        placer = Placer(mesh)
        tensors, like = placer.call(given, kwargs or {}, placements)
        return cross_compile_here(
            placer.model(model, like),
            *tensors,
            target=chip,
            dynamic=dynamic,
            mode=mode,
            options=placer.options(options or {}, model, like),
        )


def cross_compile_here(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    target: Target,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> CrossCompiled:
    """Generate the code of this rank in the current process group.

    Args, Returns and Raises are as in `cross_compile`; arguments are used as they are.
    """
    settings = settings_for(target, read_settings(options), mode)
    graphs: dict[str, fx.GraphModule] = {}
    code: dict[str, str] = {}

    def keep(kind: str, gm: fx.GraphModule, text: str, constants: object) -> Any:
        graphs[kind], code[kind] = gm, text
        return stop

    def generate(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        compile_for(target, gm, example_inputs, settings, mode, load=keep)

    trace_and_stop(model, generate, args, kwargs, dynamic=dynamic)
    return CrossCompiled(dist.get_rank(), dist.get_world_size(), target.name, graphs, code)


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


def trace_and_stop(
    model: Callable[..., Any],
    take: Callable[[fx.GraphModule, Sequence[Any]], None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dynamic: bool | None = None,
) -> None:
    """Have Dynamo trace a call of a model whole, give the graph to `take`, and run nothing."""
    backend = partial(_give_and_stop, take)
    compiled = torch.compile(
        _fresh_function(model), backend=backend, fullgraph=True, dynamic=dynamic
    )
    with compile_state_kept(), suppress(Done):
        compiled(*args, **kwargs)


def _give_and_stop(
    take: Callable[[fx.GraphModule, Sequence[Any]], None],
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    with errors_unwrapped():
        take(gm, example_inputs)
    return stop


trace_for(_give_and_stop, is_run=False)


def _fresh_function(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a new function that calls a model, so that Dynamo has no state about it.

    Dynamo caches compiled code by code object, and remembers the sizes of earlier calls by name.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"run_{uuid4().hex}")
    return run
