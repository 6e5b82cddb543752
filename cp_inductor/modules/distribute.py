"""Replicate a model on the ranks that share its sequence: each holds all weights and buffers.

    embedding.weight, head.weight: one Parameter       embedding.weight, head.weight: one Parameter,
    rotary.inv_freq: a buffer, not persistent     =>   a DTensor [Replicate]
                                                       rotary.inv_freq: a DTensor, not persistent

torch's `distribute_module` makes a new parameter for each name. It makes two parameters of tied
weights, each with a part of the gradient. The first loss is right, but from the first optimizer
step on the two train apart, and nothing says so. This module replaces each tensor once, under all
its names.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cp_inductor.dtensor.rules import register_rules
from cp_inductor.dtensor.rules.loss import correct_losses_along
from cp_inductor.errors import (
    InvalidArgument,
    SequenceWarning,
    UnsupportedPlacement,
    UntiedWeights,
)
from cp_inductor.modules.libraries import libraries
from cp_inductor.modules.own_tokens import run_on_own_tokens
from cp_inductor.modules.same_model import agree_on_model
from cp_inductor.modules.tokenwise import run_on_shards
from cp_inductor.modules.whole import run_known_on_whole, run_on_whole
from cp_inductor.torch_private.dynamo import has_tensor_hooks

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module holds a parameter or buffer.

    Attributes:
        module: the module that holds it.
        key: its key in that module.
        name: its name in the whole model.
    """

    module: nn.Module
    key: str
    name: str


def distribute(
    model: Module,
    mesh: DeviceMesh,
    *,
    tokenwise: Sequence[type[nn.Module]] = (),
    recurrent: Sequence[type[nn.Module]] = (),
    whole: Sequence[type[nn.Module]] = (),
) -> Module:
    """Replicate the parameters and buffers of a model on all ranks of a mesh, in place.

    This does what `torch.distributed.tensor.distribute_module` does without a partition function,
    but keeps tied weights tied, and modules that occur twice shared. Everything else in the model
    stays as it is: hooks, configurations, and which buffers are persistent. After this call, mean
    losses on the mesh are over all tokens: `cp_inductor.dtensor.rules.loss`.

    Build optimizers afterwards, because the parameters are new objects; a SequenceWarning says if
    one was built before. The new parameters keep the attributes
    and ``requires_grad`` of the old ones. DTensors that are already on the mesh are left alone, so
    a second call changes nothing.

    Args:
        model: the same on every rank, except for its values; ranks compare that first. Afterwards
            all have the values of the first rank of each mesh axis, also of gradients. A model on
            "meta" stays on "meta"; ``to_empty`` then makes new parameters, so tie them again after.
        mesh: of any number of axes; weights are whole on all of its ranks. If it has several axes,
            every DTensor that the model is given must be on this mesh.
        tokenwise: classes of modules that treat every token alone, and run on this rank's tokens.
            Their first argument is (B, S, ...) or (T, ...), and so is their result. Mixtures of
            experts of transformers are known.
        recurrent: classes of modules that pass states along the sequence by functions that
            `register_recurrence` or the table of recurrences knows, by `pass_states` or by
            `tokens_before`, and otherwise treat every token alone. They run on this rank's tokens.
            Their first tensor is (B, S, H), and so is their first result. Most state-space layers,
            linear attentions and short convolutions of transformers are known.
        whole: classes of modules that mix tokens in another way than by attention, and run on the
            whole sequence on every rank. Their arguments are gathered. Their results are
            (B, S, ...), or have the sequence in the dim in which it was sharded, and each rank
            keeps its tokens. If no argument is sharded along the sequence, the sequence begins in
            the module, such as the patches of an image. Modules of transformers that mix tokens so,
            and whose recurrence is in no table, are known, and a warning names them.

    Returns:
        The model.

    Raises:
        UntiedWeights: a parameter shares memory with a tensor that is another object, or weights
            have been untied before.
        UnsupportedPlacement: a tensor is of a subclass, on another mesh, or has hooks; or the model
            is wrapped in DistributedDataParallel.
        InvalidArgument: what is named is no class, or the class of no module of the model.
        RanksDisagree: the model of another rank has other modules, tensors or gradients.
    """
    if not isinstance(model, nn.Module) or not isinstance(mesh, DeviceMesh):
        raise UnsupportedPlacement(
            site="distribute",
            expected="an nn.Module and a DeviceMesh",
            got=f"a {type(model).__name__} and a {type(mesh).__name__}",
            remedy="call distribute(model, mesh), or distribute_tensor for a tensor",
        )
    parameters = list(_places(model, "_parameters"))
    buffers = list(_places(model, "_buffers"))
    named = {"tokenwise": tokenwise, "recurrent": recurrent, "whole": whole}
    check = partial(_check, model, mesh, parameters, buffers, named)
    agree_on_model(model, mesh, site="distribute", with_meta=True, check=check)
    _warn_of_optimizers([one for _, one in parameters])
    made: dict[int, Tensor] = {}
    # Each tensor is a broadcast. The order of the modules is the same on every rank.
    for place, old in [*parameters, *buffers]:
        if isinstance(old, DTensor):
            continue
        new = made.get(id(old))
        if new is None:
            made[id(old)] = new = _replicated(old, mesh)
        held = place.module._parameters if isinstance(old, nn.Parameter) else place.module._buffers
        held[place.key] = new  # type: ignore[assignment]
    adapt(model, mesh, tokenwise=tokenwise, recurrent=recurrent, whole=whole)
    return model


def adapt(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tokenwise: Sequence[type[nn.Module]] = (),
    recurrent: Sequence[type[nn.Module]] = (),
    whole: Sequence[type[nn.Module]] = (),
) -> None:
    """Let modules compute as `distribute` says, in a model whose tensors are DTensors already."""
    register_rules()
    for axis in range(mesh.ndim):
        correct_losses_along(mesh, str(mesh.get_group(axis).group_name))
    for library in libraries():
        library.adapt(model)
    run_on_whole(model, whole)
    run_on_own_tokens(model, recurrent)
    run_known_on_whole(model, mesh)
    run_on_shards(model, tokenwise)


def _warn_of_optimizers(parameters: Sequence[Tensor]) -> None:
    """Warn of optimizers that hold parameters which are about to be replaced."""
    replaced = {id(one) for one in parameters if not isinstance(one, DTensor)}
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    held = (one for each in optimizers for group in each.param_groups for one in group["params"])
    if any(id(one) in replaced for one in held):
        warnings.warn(
            "distribute makes new parameters, and an optimizer holds the old ones: it would train"
            " nothing. Build it after distribute",
            SequenceWarning,
            stacklevel=3,
        )


def _places(model: nn.Module, table: str) -> Iterator[tuple[_Place, Tensor]]:
    for prefix, module in model.named_modules():
        for key, tensor in getattr(module, table).items():
            if tensor is not None:
                yield _Place(module, key, f"{prefix}.{key}" if prefix else key), tensor


def _replicated(old: Tensor, mesh: DeviceMesh) -> Tensor:
    # distribute_tensor makes a contiguous copy, but gives the DTensor the strides of the original.
    everywhere = [Replicate()] * mesh.ndim
    new: Tensor = distribute_tensor(old.detach().contiguous(), mesh, everywhere)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        new.requires_grad_(old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)
    if old.grad is not None:
        new.grad = distribute_tensor(old.grad.detach().contiguous(), mesh, everywhere)
    return new


def _check(
    model: nn.Module,
    mesh: DeviceMesh,
    parameters: list[tuple[_Place, Tensor]],
    buffers: list[tuple[_Place, Tensor]],
    named: Mapping[str, Sequence[type[nn.Module]]],
) -> None:
    for argument, classes in named.items():
        _check_named(model, argument, classes)

    def refuse(name: str, expected: str, got: str, remedy: str) -> None:
        raise UnsupportedPlacement(site=name, expected=expected, got=got, remedy=remedy)

    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            refuse(
                name or "the model",
                "a model without DistributedDataParallel",
                "DistributedDataParallel, which holds the parameters that would be replaced",
                "distribute the model inside it, without the wrapper: gradients of DTensors"
                " are reduced as they are computed",
            )
    for place, tensor in [*parameters, *buffers]:
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != mesh:
                refuse(
                    place.name,
                    f"a tensor on the mesh {mesh.mesh_dim_names}",
                    f"a DTensor on {tensor.device_mesh.mesh_dim_names}",
                    "distribute the whole model on one mesh, or use context_parallel, which"
                    " leaves weights as they are",
                )
        elif type(tensor) not in (Tensor, nn.Parameter):
            refuse(
                place.name,
                "a plain tensor",
                f"a {type(tensor).__name__}, whose copy on the mesh would lose its class",
                "materialize or dequantize it first, or use context_parallel, which leaves"
                " weights as they are",
            )
        elif has_tensor_hooks(tensor):
            refuse(
                place.name,
                "a tensor without hooks",
                "one with hooks, which belong to the tensor that is replaced",
                "register them after distribute",
            )
    _check_memory(parameters, buffers)


def _check_named(model: nn.Module, argument: str, classes: object) -> None:
    """Refuse names that nothing would follow, as the module would mix tokens of one rank alone."""
    site = f"distribute(..., {argument}=)"
    given = tuple(classes) if isinstance(classes, Iterable) else (classes,)
    if isinstance(classes, (str, type)) or not all(isinstance(one, type) for one in given):
        raise InvalidArgument(
            site=site,
            expected="a list of classes of modules",
            got=f"{classes!r:.80}",
            remedy=f"pass the classes themselves, as in {argument}=[type(model.layers[0].mixer)]",
        )
    for one in given:
        if not any(isinstance(module, one) for module in model.modules()):
            kinds = {type(module).__name__ for module in model.modules()}
            raise InvalidArgument(
                site=site,
                expected="classes of modules that the model has",
                got=f"{one.__module__}.{one.__qualname__}, of which it has none",
                remedy="leave it out, or name one of " + ", ".join(sorted(kinds)),
            )


def _check_memory(
    parameters: list[tuple[_Place, Tensor]], buffers: list[tuple[_Place, Tensor]]
) -> None:
    """Refuse parameters that share elements with another tensor, because their copies would not."""
    by_storage: dict[int, list[tuple[str, Tensor, bool]]] = {}
    for places, is_parameter in ((parameters, True), (buffers, False)):
        for place, tensor in places:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            address = 0 if local.is_meta else local.untyped_storage().data_ptr()
            if address and local.numel():
                others = by_storage.setdefault(address, [])
                for name, other, is_other_parameter in others:
                    if other is tensor or not (is_parameter or is_other_parameter):
                        continue
                    if share_elements(local, _local(other)):
                        raise _shared(name, place.name, isinstance(tensor, DTensor))
                others.append((place.name, tensor, is_parameter))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shared(name: str, other: str, was_distributed: bool) -> UntiedWeights:
    if was_distributed:
        return UntiedWeights(
            site=f"{name} and {other}",
            expected="one parameter under both names",
            got="two DTensors that share memory: they were one parameter before distribute_module",
            remedy="call cp_inductor.distribute(model, mesh) instead of distribute_module",
        )
    return UntiedWeights(
        site=f"{name} and {other}",
        expected="one tensor under both names, or two with separate memory",
        got="two tensors that share memory, which their copies on the mesh would not",
        remedy="make them one parameter (b.weight = a.weight), or clone one of them",
    )


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors of one storage have an element in common.

    Bytes in common are not enough: interleaved parts of one tensor, such as its even and its odd
    columns, have no element in common.
    """
    first, second = (_extent(tensor) for tensor in (one, other))
    if first[0] >= second[1] or second[0] >= first[1]:
        return False
    if one.element_size() != other.element_size():
        return True
    start = min(first[0], second[0])
    marks = torch.zeros((max(first[1], second[1]) - start) // one.element_size(), dtype=torch.bool)
    offsets = ((extent[0] - start) // one.element_size() for extent in (first, second))
    views = [
        marks.as_strided(tensor.size(), tensor.stride(), offset)
        for tensor, offset in zip((one, other), offsets, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor reads, and the byte after the last."""
    start = int(tensor.storage_offset())
    span = zip(tensor.size(), tensor.stride(), strict=True)
    last = start + sum((int(size) - 1) * int(stride) for size, stride in span)
    return start * tensor.element_size(), (last + 1) * tensor.element_size()
