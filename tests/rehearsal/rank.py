"""What one rank of a rehearsal does: make the model, compile it for the target, run it, gather.

torch.compile(model, backend="cp_inductor")     as in a training script
  the graph, lowered                            as in a training script
  code for cuda:sm_90                           as `cross_compile` generates it
  run on a pretended device                     here
loss.backward()                                 as in a training script
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor.backend.compile as backend
from cp_inductor.inspect.compile_for import Target, compile_for, generates, settings_for
from cp_inductor.inspect.world import load_example
from cp_inductor.modules.parallelize import parallelize
from cp_inductor.passes.settings import Settings
from cp_inductor.torch_private.dynamo import compiled_anew
from cp_inductor.torch_private.flex import flex_gradients_on_cpu
from tests.rehearsal.device import Device
from tests.rehearsal.exchanges import Exchanges
from tests.rehearsal.program import load_program
from tests.rehearsal.reference import compare, copy_of, gradients_of, loss_of, named
from tests.rehearsal.report import RankReport
from tests.support.ranks import world_mesh
from tests.support.reference import full


@dataclass(frozen=True)
class Job:
    """What is to be rehearsed.

    Attributes:
        model: a module, or a function.
        args: its arguments, or a function from the mesh to this rank's arguments: DTensors, unless
            there is a placement.
        kwargs: keyword arguments of the model.
        world_size: number of ranks.
        target: a GPU, as of `cross_compile`.
        placement: on the mesh of all ranks. If given, plain tensors are whole and become DTensors
            of this placement, and the model is given to `cp_inductor.parallelize`.
        loss: from the outputs to a scalar; by default the output, if it is one, or else half the
            sum of the squares of all floating outputs.
        options: as torch.compile's.
        within: makes a context in which the model is called, such as
            `integrations.sinks.flex_sinks_on_cpu`, which gpt_oss of transformers needs here.
        reference: what one process calls in place of the model, if the CPU cannot compute it, such
            as the same model with ``attn_implementation="eager"``. A module is given the weights.
        folder: where generated code is to be left; by default nowhere.
        named: in place of model, args and kwargs: a function, as on the command line.
    """

    model: Any = None
    args: Any = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 2
    target: str = "cuda:sm_90"
    placement: Placement | None = None
    loss: Callable[[Any], Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    reference: Any = None
    folder: str | None = None
    named: str | None = None


def play(job: Job, folder: Path) -> tuple[RankReport, Any]:
    """Play one rank, in a process whose process group is that of the world.

    Returns:
        What its programs did; and of the first rank outputs, gradients, their differences from one
        process, and why there are none.
    """
    device = Device(dist.get_rank())
    with ExitStack() as around:
        around.enter_context(implicit_replication())
        around.enter_context(flex_gradients_on_cpu())
        around.enter_context(job.within())
        model, args, kwargs, options = _call_of(job, world_mesh())
        whole = _whole((args, kwargs))
        on_one = copy_of(model) if job.reference is None else job.reference
        if isinstance(job.reference, nn.Module):
            job.reference.load_state_dict(copy_of(model).state_dict())
        exchanges = Exchanges(device)
        around.enter_context(_rehearsed(job, device, exchanges, folder))
        run = torch.compile(model, backend="cp_inductor", fullgraph=True, options=options or None)
        outputs = run(*args, **kwargs)
        loss = loss_of(outputs, job.loss)
        if loss is not None and loss.requires_grad:
            loss.backward()
        exchanges.finish()
    results = _whole((outputs, loss, gradients_of(model, args, kwargs)))
    if device.rank:
        return device.report, None
    # One process: what would wait for other ranks, which are gone, fails at once.
    dist.destroy_process_group()
    with flex_gradients_on_cpu(), job.within():
        compared = compare(on_one, *whole, named(*results), job.loss)
    return device.report, (results[0], results[2], *compared)


def _whole(tree: Any) -> Any:
    """Return copies of tensors, of DTensors whole; every rank takes part."""

    def copy(tensor: Tensor) -> Tensor:
        copied: Tensor = full(tensor.detach()).clone()
        return copied.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, copy, tree)


def _call_of(job: Job, mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """Return a model, this rank's arguments, and options for torch.compile."""
    torch.manual_seed(0)
    model, args, kwargs, options = job.model, job.args, dict(job.kwargs), dict(job.options)
    if job.named is not None:
        example = load_example(job.named, mesh)
        model, args, kwargs = example.model, example.args, dict(example.kwargs)
        options |= example.options
    args = tuple(args(mesh) if callable(args) else args)
    if job.placement is not None:

        def place(tensor: Tensor) -> Tensor:
            placed: Tensor = distribute_tensor(tensor.detach(), mesh, [job.placement])
            return placed.requires_grad_(tensor.requires_grad)

        args, kwargs = pytree.tree_map_only(Tensor, place, (args, kwargs))
        model = parallelize(model, mesh) if isinstance(model, nn.Module) else model
    return model, args, kwargs, options


@contextmanager
def _rehearsed(job: Job, device: Device, exchanges: Exchanges, folder: Path) -> Iterator[None]:
    """Within this context, what the backend compiles runs on the device."""
    target = Target.parse(job.target)

    def load(
        kind: str, graph: fx.GraphModule, code: str, constants: Mapping[str, Any]
    ) -> Callable[..., Any]:
        # Only AOTAutograd knows which tensors that a backward saved are free to be used again.
        read_only = () if kind == "backward" else _read_only_inputs(graph.graph)
        path = folder / f"rank{device.rank}_{kind}.py"
        return load_program(code, path, device, exchanges, constants, read_only)

    def compile_graph(
        gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, mode: str | None
    ) -> Callable[..., Any]:
        here, inner_compile = settings_for(target, settings, mode), generates(target, load)
        return compile_for(target, gm, inputs, here, mode, inner_compile=inner_compile)

    with mock.patch.object(backend, "compile_through_inductor", compile_graph), compiled_anew():
        yield


def _read_only_inputs(graph: fx.Graph) -> list[int]:
    """Return the places of inputs that no op of a graph writes to."""
    written = {
        argument
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        for argument, described in zip(node.args, node.target._schema.arguments, strict=False)
        if described.is_write
    }
    inputs = graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if node not in written]
