"""What a model must be, and which of its modules compute on plain tensors.

    whole= , and what libraries know        OnWhole: all tokens, on every rank
    recurrent= , and what libraries know    OnOwnTokens: a rank's own, and states along the sequence
    tokenwise= , and what libraries know    OnShards: a rank's own

Modules inside such a module compute on plain tensors as well. All others compute on DTensors.

    rank 0: q.weight, k.weight        rank 1: k.weight, q.weight
      => RanksDisagree on both: module 1: q (Linear): weight float32 [4, 4] on rank 0, k ...

The first rank hands out weights one by one, in the order of the modules. If models differ, a rank
takes one weight for another, waits for ever, or aborts.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from cp_inductor.dtensor.axis import hold_sequences_along, is_first_rank
from cp_inductor.dtensor.rules import register_rules
from cp_inductor.errors import InvalidArgument, UnsupportedPlacement
from cp_inductor.modules.mixers import CONVOLUTIONS, OnOwnTokens, OnWhole
from cp_inductor.modules.reading import Local, ReadsLocally, libraries, read_locally, reading_of
from cp_inductor.modules.recurrences import share_functions
from cp_inductor.modules.tokenwise import OnShards, check_styles, is_tensor_parallel, router
from cp_inductor.modules.weights import Options, ShardedWeights
from cp_inductor.trust.agreement import agree_once
from cp_inductor.trust.record import Entry

SITE = "parallelize"

# How modules compute that are named.
WHOLE, RECURRENT, TOKENWISE = Local(OnWhole), Local(OnOwnTokens, CONVOLUTIONS), Local(OnShards)


def local_of(module: nn.Module, options: Options) -> Local | None:
    """Return how a module computes on plain tensors; None if it computes on DTensors."""
    if isinstance(module, options.whole):
        return WHOLE
    known: Local | None = next(filter(None, (lib.find_local(module) for lib in libraries)), None)
    if known is not None and issubclass(known.mixin, OnOwnTokens):
        return known
    if isinstance(module, options.recurrent):
        return RECURRENT
    return TOKENWISE if known is None and isinstance(module, options.tokenwise) else known


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
    weights, dims = others["weights"], others["seq_dims"]
    is_stored = weights is None or (isinstance(weights, ShardedWeights) and weights.mesh.ndim == 1)
    if not is_stored:
        expected = "a DeviceMesh of one axis"
        refuse_argument("weights", expected, f"{weights!r:.80}", 'pass weights=mesh["cp"]')
    is_table = isinstance(dims, Mapping) and all(
        isinstance(name, str) and (dim is None or type(dim) is int) for name, dim in dims.items()
    )
    if dims is not None and not is_table:
        example = 'seq_dims={"pixel_values": 2, "lengths": None}'
        refuse_argument("seq_dims", "a dict of dims by names", f"{dims!r:.80}", example)
    for name, named in classes.items():
        types = named if isinstance(named, Iterable) else (named,)
        if isinstance(named, (str, type)) or not all(isinstance(item, type) for item in types):
            example = f"pass the classes themselves, as in {name}=[type(model.layers[0].mixer)]"
            refuse_argument(name, "a list of classes of modules", f"{named!r:.80}", example)


def agree_on_model(model: nn.Module, options: Options) -> None:
    """Check a model, and compare its modules, parameters and buffers on all ranks that get it.

    Names, classes, shapes, dtypes, ties, what requires or has a gradient, and what is distributed
    must be the same. Values are not compared, nor whether modules are in training. If weights are
    stored in shards, tensors may be on "meta" on some ranks. If one rank refuses, all others raise.

    Raises:
        InvalidArgument, UnsupportedPlacement: the model cannot be parallelized, or not so.
        RanksDisagree: a rank has another model, or did not come.
        ProcessGroupError: the store does not answer.
    """

    def describe() -> Entry:
        _check_model(model, options)
        known: dict[int, str] = {}
        with_meta = options.weights is None
        modules = [_describe(name, m, known, with_meta) for name, m in model.named_modules()]
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


def _check_model(model: nn.Module, options: Options) -> None:
    """Refuse a model that cannot be parallelized, or not so.

    Raises:
        InvalidArgument: it has no module of a class, or a part belongs to another model; or a
            module mixes tokens within one that has a rank's own alone.
        UnsupportedPlacement: of its parameters and buffers.
    """
    mesh = options.mesh
    if options.weights is not None:
        options.weights.check(model)
    for argument in ("tokenwise", "recurrent", "whole"):
        for named in getattr(options, argument):
            # Nothing would follow, and the module would mix tokens of one rank alone.
            if not any(isinstance(module, named) for module in model.modules()):
                kinds = {type(module).__name__ for module in model.modules()}
                refuse_argument(
                    argument,
                    "classes of modules that the model has",
                    f"{named.__module__}.{named.__qualname__}, of which it has none",
                    "leave it out, or name one of " + ", ".join(sorted(kinds)),
                )
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UnsupportedPlacement(
                site=name,
                expected="a tensor with a shape",
                got=f"a {type(tensor).__name__}, which has none yet",
                remedy="call the model once before, on every rank",
            )
    _check_nesting(model, options)
    check_styles(model, mesh)
    ranks = set(mesh.mesh.flatten().tolist())
    # fully_shard hands out plain weights while the model runs.
    are_handed_out = any(isinstance(module, FSDPModule) for module in model.modules())
    for prefix, module in model.named_modules():
        other = reading_of(module)
        if other and (other.mesh, other.gradients) != (mesh, options.gradients):
            raise InvalidArgument(
                site=f"{SITE}, {prefix}",
                expected="modules of no other model, or of one with the same mesh and gradients=",
                got=f"one on {other.mesh}, whose gradients are"
                f" {'sums' if other.gradients == 'sum' else 'partial'}",
                remedy="parallelize the whole model, once, or all models that share it alike",
            )
        is_known = are_handed_out or is_tensor_parallel(module, mesh)
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if not isinstance(tensor, DTensor) or tensor.device_mesh == mesh:
                continue
            others = tensor.device_mesh.mesh.flatten().tolist()
            if not is_known or len(ranks.intersection(others)) > 1:
                raise UnsupportedPlacement(
                    site=f"{prefix}.{name}".lstrip("."),
                    expected=f"a plain tensor, or a DTensor on {mesh.mesh_dim_names}; or"
                    " fully_shard, or a style of tensor parallelism, over other ranks",
                    got=f"a DTensor on {tensor.device_mesh.mesh_dim_names}",
                    remedy='pass fully_shard a mesh of other ranks, as in mesh["dp"]; or'
                    ' parallelize(..., gradients="partial") first, and then fully_shard; beside'
                    " other DTensors use context_parallel (docs/fsdp.md)",
                )


def _check_nesting(model: nn.Module, options: Options) -> None:
    """Refuse modules that mix tokens within those that have a rank's own alone."""
    locals_of = {module: local_of(module, options) for module in model.modules()}
    for outer, local in locals_of.items():
        if local is None or local.mixin is OnWhole:
            continue
        for name, inner in outer.named_modules():
            other = locals_of[inner]
            mixes = other is not None and issubclass(other.mixin, OnWhole)
            if issubclass(local.mixin, OnOwnTokens):
                mixes = other is WHOLE
            if mixes and inner is not outer:
                raise InvalidArgument(
                    site=f"{SITE}, {type(outer).__name__}.{name}",
                    expected="no module that mixes tokens within one that has a rank's own alone",
                    got=f"a {type(inner).__name__}",
                    remedy="name the outer class in whole=, or neither of the two",
                )


def adapt(model: nn.Module, options: Options) -> None:
    """Let modules compute as `parallelize` says, in a model that reads DTensors, in place."""
    register_rules()
    for group in options.mesh.get_all_groups():
        hold_sequences_along(options.mesh, str(group.group_name))
    for library in libraries:
        library.adapt(model)
    places = [place for library in libraries for place in library.find_routers(model).items()]
    routers = {cls: router(place) for cls, place in places}
    known_on_whole: Counter[str] = Counter()
    for module in list(model.modules()):
        local = None if isinstance(module, ReadsLocally) else local_of(module, options)
        if local is None:
            continue
        if issubclass(local.mixin, OnOwnTokens):
            share_functions(module.modules(), local.functions, is_everywhere=local is RECURRENT)
        if local.mixin is OnWhole and local is not WHOLE:
            known_on_whole[type(module).__name__] += 1
        read_locally(module, local.mixin, {**local.inner, **routers})
    if known_on_whole and is_first_rank(options.mesh):
        size = options.mesh.size()
        names = ", ".join(f"{count} x {name}" for name, count in known_on_whole.items())
        warnings.warn(
            f"{names} mix tokens along the sequence by a recurrence or a convolution that is in no"
            " table of cp_inductor: every rank computes these modules on the whole sequence, with"
            " the time and the memory that they take on one process, which is"
            f" {size} times its share on {size} ranks, and keeps its own tokens."
            " Attention and everything else stay sharded. Name their class in recurrent= if"
            " register_recurrence knows their functions, and in whole= to silence this warning.",
            stacklevel=2,
        )
