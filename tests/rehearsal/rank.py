"""What one rank of a rehearsal does: make the model, compile it for the target, run it, gather.

    torch.compile(model, backend="cp_inductor")     as in a training script
      the graph, lowered                            as in a training script
      code for cuda:sm_90                           as `cross_compile` generates it
      run on a pretended device                     here
    loss.backward(), optimizers, other graphs       as in a training script

The hook is where the backend compiles a Dynamo graph. So all that is compiled by the backend in
this process is rehearsed: several graphs, graphs after graph breaks, and calls to torch.compile in
the user's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor.backend.compile as backend
from cp_inductor.inspect.compile_for import compile_for, settings_for
from cp_inductor.inspect.load import load_example
from cp_inductor.inspect.targets import Target
from cp_inductor.modules.parallelize import parallelize
from cp_inductor.passes.settings import Settings
from cp_inductor.torch_private.dynamo import compiled_anew
from cp_inductor.torch_private.flex import flex_gradients_on_cpu
from tests.rehearsal.device import Device
from tests.rehearsal.exchanges import Exchanges
from tests.rehearsal.program import load_program
from tests.rehearsal.reference import Whole, compare
from tests.rehearsal.report import NOT_ASKED, Difference, RankReport
from tests.rehearsal.results import gradients_of, is_scalar, loss_of, sequence_dim


@dataclass(frozen=True)
class Job:
    """What is to be rehearsed.

    Attributes:
        model: a module, or a function. If it is not compiled here, a function that compiles what it
            wants by itself, such as a training loop: all that ``backend="cp_inductor"`` compiles in
            it is rehearsed. It calls ``backward()`` itself.
        args: its arguments: tensors with numbers, or on "meta" (random ones then, which differ by
            rank), or a function from the mesh to this rank's arguments, which may be DTensors.
        kwargs: keyword arguments of the model.
        world_size: number of ranks.
        target: a GPU, as of `cross_compile`.
        placement: on the mesh of all ranks. If given, plain tensors are whole and become DTensors
            of this placement, and the model is given to `cp_inductor.parallelize`. If not given,
            and no argument is a DTensor, plain tensors are this rank's shards.
        loss: from the outputs to a scalar; by default the output, if it is one, or else half the
            sum of the squares of all floating outputs. Over plain shards, the loss of all is the
            mean of the ranks'.
        options: as torch.compile's.
        within: makes a context in which the model is called, such as
            `integrations.sinks.flex_sinks_on_cpu`, which gpt_oss of transformers needs here.
        with_grad: whether gradients are computed.
        is_compiled: whether to compile the model, or only to call it.
        is_compared: whether to compute the same on one process, in float64 and in the model's
            dtypes.
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
    options: Mapping[str, Any] | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    with_grad: bool = True
    is_compiled: bool = True
    is_compared: bool = True
    reference: Any = None
    folder: str | None = None
    named: str | None = None


@dataclass(frozen=True)
class Played:
    """What came out of a rank: of the first one everything, of others the report alone.

    Attributes:
        outputs: of the model, whole.
        loss: a scalar, or None.
        gradients: whole, by the names of parameters and the places of arguments.
        differences: from one process, by what is compared.
        uncompared: why there are none.
        report: of this rank.
    """

    outputs: Any
    loss: Tensor | None
    gradients: Mapping[str, Tensor]
    differences: Mapping[str, Difference]
    uncompared: str
    report: RankReport


def play(job: Job, folder: Path) -> Played:
    """Play one rank, in a process whose process group is that of the world.

    Args:
        job: what is to be rehearsed.
        folder: for generated code.
    """
    rank = dist.get_rank()
    device = Device(rank)
    with ExitStack() as around:
        around.enter_context(implicit_replication())
        around.enter_context(flex_gradients_on_cpu())
        around.enter_context(torch.set_grad_enabled(job.with_grad))
        around.enter_context(job.within())
        mesh = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("cp",))
        call = _Call.of(job, mesh)
        whole = call.whole() if job.is_compared else None
        exchanges = Exchanges(device)
        around.enter_context(_rehearsed(job, device, exchanges, folder))
        outputs, loss, gradients = call.run()
        exchanges.finish()
    results = call.gather(outputs, loss, gradients)
    if rank != 0:
        return Played(None, None, {}, {}, "", device.report)
    if whole is None:
        return Played(*results, {}, NOT_ASKED, device.report)
    # One process: what would wait for other ranks, which are gone, fails at once.
    dist.destroy_process_group()
    with flex_gradients_on_cpu(), torch.set_grad_enabled(job.with_grad), job.within():
        differences, uncompared = compare(whole, results, job.loss)
    return Played(*results, differences, uncompared, device.report)


@contextmanager
def _rehearsed(job: Job, device: Device, exchanges: Exchanges, folder: Path) -> Iterator[None]:
    """Within this context, what the backend compiles runs on the device."""
    target = Target.parse(job.target)
    numbers: dict[int, int] = {}

    def load(
        kind: str, graph: fx.GraphModule, code: str, constants: Mapping[str, Any], number: int
    ) -> Callable[..., Any]:
        name = f"rank{device.rank}_graph{number}_{kind}"
        device.report.graphs.append(f"graph {number} {kind}")
        # Only AOTAutograd knows which tensors that a backward saved are free to be used again.
        read_only = () if kind == "backward" else _read_only_inputs(graph.graph)
        return load_program(code, folder / f"{name}.py", device, exchanges, constants, read_only)

    def compile_graph(
        gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, mode: str | None
    ) -> Callable[..., Any]:
        number = numbers.setdefault(id(gm), len(numbers))
        return compile_for(
            target,
            gm,
            inputs,
            settings_for(target, settings, mode),
            mode,
            load=partial(load, number=number),
        )

    with mock.patch.object(backend, "compile_through_inductor", compile_graph), compiled_anew():
        yield


def _read_only_inputs(graph: fx.Graph) -> list[int]:
    """Return the places of inputs that no op of a graph writes to."""
    written = {
        argument
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        for argument, described in zip(node.args, node.target._schema.arguments, strict=False)
        if described.alias_info is not None and described.alias_info.is_write
    }
    inputs = graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if node not in written]


@dataclass
class _Call:
    """One call of a model on this rank.

    Attributes:
        job: what is to be rehearsed.
        mesh: over all ranks.
        model: a module or function.
        args, kwargs: this rank's.
        options: for torch.compile.
    """

    job: Job
    mesh: DeviceMesh
    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: dict[str, Any]

    @staticmethod
    def of(job: Job, mesh: DeviceMesh) -> _Call:
        """Make a model and its arguments, with numbers where there are none."""
        torch.manual_seed(0)
        model, args, kwargs = job.model, job.args, dict(job.kwargs)
        options = dict(job.options or {})
        if job.named is not None:
            example = load_example(job.named, mesh)
            model, args, kwargs = example.model, example.args, dict(example.kwargs or {})
            options = {**(example.options or {}), **options}
        args = tuple(args(mesh) if callable(args) else args)
        args, kwargs = _with_numbers((args, kwargs), dist.get_rank())
        if isinstance(model, nn.Module):
            _give_numbers(model)
        if job.placement is not None:
            args, kwargs = pytree.tree_map_only(
                Tensor, partial(_place, mesh=mesh, placement=job.placement), (args, kwargs)
            )
            if isinstance(model, nn.Module):
                model = parallelize(model, mesh)
        has_dtensors = any(isinstance(one, DTensor) for one in pytree.tree_leaves((args, kwargs)))
        if job.is_compiled and not has_dtensors:
            options["mesh"] = mesh
        return _Call(job, mesh, model, args, kwargs, options)

    @property
    def is_plain(self) -> bool:
        """Whether plain tensors are shards."""
        return "mesh" in self.options

    def run(self) -> tuple[Any, Tensor | None, dict[str, Tensor]]:
        """Run forward and backward; return outputs, loss and gradients of this rank."""
        job, run = self.job, self.model
        if job.is_compiled:
            options = self.options or None
            run = torch.compile(run, backend="cp_inductor", fullgraph=True, options=options)
        outputs = run(*self.args, **self.kwargs)
        loss = loss_of(outputs, job.loss)
        # What compiles by itself has its own backward.
        if job.is_compiled and loss is not None and loss.requires_grad:
            (loss / self.mesh.size() if self._is_mean(outputs) else loss).backward()
        return outputs, loss, gradients_of(self.model, self.args, self.kwargs)

    def _is_mean(self, outputs: Any) -> bool:
        """Whether the whole loss is the mean of those of the ranks, and not their sum."""
        return self.is_plain and (self.job.loss is not None or is_scalar(outputs))

    def gather(
        self, outputs: Any, loss: Tensor | None, gradients: Mapping[str, Tensor]
    ) -> tuple[Any, Tensor | None, dict[str, Tensor]]:
        """Return the same of the whole sequence."""
        is_mean = self._is_mean(outputs)
        with torch.no_grad():
            whole = pytree.tree_map_only(Tensor, partial(self._join, of_mean=is_mean), outputs)
            whole_loss = None if loss is None else self._join(loss, of_mean=is_mean)
            grads = {name: self._join_grad(name, grad) for name, grad in gradients.items()}
        return whole, whole_loss, grads

    def _join(self, tensor: Tensor, of_mean: bool = False) -> Tensor:
        if isinstance(tensor, DTensor):
            whole: Tensor = tensor.full_tensor()
            return whole.detach().clone()
        tensor = tensor.detach()
        if not self.is_plain:
            return tensor.clone()
        dim = sequence_dim(tensor)
        if dim is not None:
            return _concatenated(tensor, dim)
        total = tensor.clone()
        if tensor.is_floating_point():
            dist.all_reduce(total)
            return total / self.mesh.size() if of_mean else total
        return total

    def _join_grad(self, name: str, grad: Tensor) -> Tensor:
        """Gradients of plain weights are of this rank's tokens, and are summed."""
        if isinstance(grad, DTensor) or not self.is_plain or name.startswith("args"):
            return self._join(grad)
        total = grad.detach().clone()
        dist.all_reduce(total)
        return total

    def whole(self) -> Whole:
        """Return the model and arguments of one process; every rank takes part."""
        with torch.no_grad():
            args, kwargs = pytree.tree_map_only(
                Tensor, self._whole_argument, (self.args, dict(self.kwargs))
            )
            whole = Whole.of(self.model, args, kwargs).computed_by(self.job.reference)
            return replace(whole, with_backward=self.job.is_compiled)

    def _whole_argument(self, tensor: Tensor) -> Tensor:
        return self._join(tensor).requires_grad_(tensor.requires_grad)


def _concatenated(tensor: Tensor, dim: int) -> Tensor:
    """Return the shards of all ranks, which may differ in length."""
    size = torch.tensor(tensor.shape[dim])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    shards = []
    for rank, length in enumerate(map(int, sizes)):
        shape = [*tensor.shape]
        shape[dim] = length
        mine = rank == dist.get_rank()
        shard = tensor.contiguous() if mine else tensor.new_empty(shape)
        dist.broadcast(shard, rank)
        shards.append(shard)
    return torch.cat(shards, dim)


def _place(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    placed: Tensor = distribute_tensor(tensor.detach(), mesh, [placement])
    return placed.requires_grad_(tensor.requires_grad)


def _with_numbers(tree: Any, rank: int) -> Any:
    """Replace tensors on "meta": floating ones by random numbers, which differ by rank."""
    generator = torch.Generator().manual_seed(1000 + rank)

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return _random(tensor, generator).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, fill, tree)


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if not tensor.is_floating_point():
        return made.zero_()
    return made.copy_(torch.randn(tensor.shape, generator=generator))


def _give_numbers(model: nn.Module) -> None:
    """Replace parameters and buffers on "meta" by random ones, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        tables: Any = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    new: Tensor = (
                        _random(tensor, generator) * max(tensor.shape[-1:] or (1,)) ** -0.5
                    )
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    table[name] = new
