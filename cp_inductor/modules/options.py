"""How a model is parallelized, and what ranks check and compare before one hands out its weights.

    rank 0: q.weight, k.weight        rank 1: k.weight, q.weight
      => RanksDisagree on both: module 1: q (Linear): weight float32 [4, 4] on rank 0, k ...

Weights are handed out one by one, in the order of the modules. If models differ, a rank takes one
weight for another, waits for ever, or aborts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cp_inductor.dtensor.wrap import wrap_parts
from cp_inductor.errors import InvalidArgument
from cp_inductor.modules.weights import ShardedWeights, scale_gradient
from cp_inductor.trust.agreement import agree_once
from cp_inductor.trust.record import Entry

SITE = "parallelize"


@dataclass(eq=False)
class Options:
    """How a model was parallelized, and so how its modules read their tensors while it runs.

    Attributes:
        mesh, tokenwise, recurrent, whole, seq_dims, outputs, gradients: arguments of `parallelize`.
        weights: how parameters are stored in shards; None leaves them.
        everywhere: placements of a tensor that every rank has whole.
    """

    mesh: DeviceMesh
    tokenwise: tuple[type[nn.Module], ...] = ()
    recurrent: tuple[type[nn.Module], ...] = ()
    whole: tuple[type[nn.Module], ...] = ()
    seq_dims: Mapping[str, int | None] = field(default_factory=dict)
    outputs: str = "sharded"
    weights: ShardedWeights | None = None
    gradients: str = "sum"
    everywhere: tuple[Placement, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.everywhere = (Replicate(),) * self.mesh.ndim

    @property
    def everybody(self) -> DeviceMesh:
        """Of the ranks that get the weights of the first."""
        return self.mesh if self.weights is None else self.weights.mesh

    def as_dtensor(self, tensor: Tensor) -> Tensor:
        """Return a DTensor on the mesh, of a plain tensor that every rank has whole.

        A DTensor over other ranks, as by tensor parallelism, stays one on its own mesh.
        """
        if isinstance(tensor, DTensor):
            if not self.is_beside(tensor):
                return tensor if self.weights is None else self.weights.gather(tensor, self.mesh)
            whole = cast("DTensor", self.as_dtensor(tensor.to_local()))
            local = whole.to_local(grad_placements=[Partial()] * self.mesh.ndim)
            return wrap_parts(local, tensor.device_mesh, tensor.placements, tensor.shape)
        of_gradient: list[Placement] | None = None
        if self.gradients == "partial":
            of_gradient = [Partial()] * self.mesh.ndim
            if tensor.requires_grad:
                tensor = scale_gradient(tensor, self.mesh.size())
        return DTensor.from_local(
            tensor, self.mesh, self.everywhere, run_check=False, grad_placements=of_gradient
        )

    def is_beside(self, tensor: Tensor) -> bool:
        """Whether a tensor is a DTensor over other ranks, which is read as it is."""
        return (
            self.weights is None and isinstance(tensor, DTensor) and tensor.device_mesh != self.mesh
        )


def refuse_argument(argument: str, expected: str, got: str, remedy: str) -> NoReturn:
    """Refuse what `parallelize` was given, under a name if one argument is at fault."""
    site = f"{SITE}(..., {argument}=)" if argument else SITE
    raise InvalidArgument(site=site, expected=expected, got=got, remedy=remedy)


def check_arguments(
    model: object, mesh: object, classes: Mapping[str, object], **others: object
) -> None:
    """Refuse arguments of `parallelize` that cannot be meant, whatever the model."""
    if not isinstance(model, nn.Module) or not isinstance(mesh, DeviceMesh):
        refuse_argument(
            "",
            "an nn.Module and a DeviceMesh",
            f"a {type(model).__name__} and a {type(mesh).__name__}",
            'call parallelize(model, mesh["cp"])',
        )
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        refuse_argument(
            "",
            "a mesh of one axis, or of axes that have names",
            f"{mesh.ndim} axes without names",
            'init_device_mesh(..., mesh_dim_names=("cp", "tp")), and of it mesh["cp"]',
        )
    for name, known in (("outputs", ("sharded", "whole")), ("gradients", ("sum", "partial"))):
        if others[name] not in known:
            expected = f"{known[0]!r} or {known[1]!r}"
            refuse_argument(name, expected, f"{others[name]!r}", "name one of the two")
    dims = others["seq_dims"]
    is_table = isinstance(dims, Mapping) and all(
        isinstance(name, str) and (dim is None or type(dim) is int) for name, dim in dims.items()
    )
    if dims is not None and not is_table:
        example = 'seq_dims={"pixel_values": 2, "lengths": None}'
        refuse_argument("seq_dims", "a dict of dims by names", f"{dims!r:.80}", example)
    for name, named in classes.items():
        given = named if isinstance(named, Iterable) else (named,)
        if isinstance(named, (str, type)) or not all(isinstance(one, type) for one in given):
            example = f"pass the classes themselves, as in {name}=[type(model.layers[0].mixer)]"
            refuse_argument(name, "a list of classes of modules", f"{named!r:.80}", example)


def agree_on_model(model: nn.Module, options: Options, check: Callable[[], None]) -> None:
    """Compare the modules of a model, their parameters and buffers, on all ranks that get it.

    Names, classes, shapes, dtypes, ties, what requires or has a gradient, and what is distributed
    must be the same. Values are not compared, nor whether modules are in training.

    Args:
        model: this rank's.
        options: if it stores weights in shards, tensors may be on "meta" on some ranks.
        check: refuses models. If one rank refuses, the others raise as well.

    Raises:
        RanksDisagree: a rank has another model, or did not come.
        ProcessGroupError: the store does not answer.
    """

    def describe() -> Entry:
        check()
        known: dict[int, str] = {}
        with_meta = options.weights is None
        modules = [_describe(name, one, known, with_meta) for name, one in model.named_modules()]
        fields = {f"module {number}": text for number, text in enumerate(modules)}
        remedy = "build the same model on every rank, from one configuration; values may differ"
        what = {"what": "a model", "modules": str(len(modules))}
        return Entry(SITE, {**what, **fields}, ("modules",), remedy)

    agree_once([str(group.group_name) for group in options.everybody.get_all_groups()], describe)


def _describe(name: str, module: nn.Module, known: dict[int, str], with_meta: bool) -> str:
    """Name a module, and what it holds itself."""
    held = []
    for table, kind in ((module._parameters, ""), (module._buffers, "buffer ")):
        for key, tensor in table.items():
            if tensor is not None:
                first = known.setdefault(id(tensor), f"{name}.{key}")
                what = " ".join(_words(tensor, with_meta))
                held.append(f"{kind}{key} {what if first == f'{name}.{key}' else f'is {first}'}")
    return f"{name or 'the model'} ({type(module).__qualname__}): {', '.join(held) or 'no tensor'}"


def _words(tensor: Tensor, with_meta: bool) -> Iterator[str]:
    yield f"{_dtype(tensor)} {list(tensor.shape)}"
    if isinstance(tensor, DTensor):
        yield f"distributed as {tensor.placements}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        yield "frozen"
    if with_meta and tensor.is_meta:
        yield "on meta"
    if tensor.grad is not None:
        yield f"with a gradient, {_dtype(tensor.grad)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
