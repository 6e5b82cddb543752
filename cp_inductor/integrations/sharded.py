"""Shard a model's weights over ranks, as FSDP does, where the ranks also share sequences.

    linear.weight (N, K), whole     linear.weight: a DTensor [Shard(0)] over all ranks, which the
                                =>  optimizer trains
    F.linear(x, linear.weight)      F.linear(x, gathered): a DTensor [Replicate] over the ranks of
                                    the sequence, gathered where the module reads it

A rank's gradient of a weight is of its own tokens, and is summed over all ranks as it is scattered
back to shards: one reduce-scatter, over the ranks of a sequence and those with other batches.

Weights are gathered by reading them, not by hooks as in `fully_shard`. Hooks break the graph at
each layer, and a mask that is computed before the first layer would then reach the others as a
tensor of all pairs. Without hooks the model is one graph, in which the compiler reads its masks.

Modules keep their parameters and names; their class becomes a subclass, as in torch's
`parametrize` and `fully_shard`, in which reading a parameter gathers it.

Assumes: activations are DTensors over the ranks of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.same_model import agree_on_model
from cp_inductor.modules.tokenwise import run_on_shards

_IS_SHARDED = "_cp_inductor_is_sharded"


def shard_weights(
    model: nn.Module,
    mesh: DeviceMesh,
    sequence: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    is_float32: bool = False,
    is_offloaded: bool = False,
) -> None:
    """Shard a model's parameters, and replicate its buffers, in place.

    All ranks get the values of the first. Tied weights stay tied. A second call changes nothing.

    Args:
        model: the same on every rank, except for its values; parameters may be on "meta" on others
            than the first rank.
        mesh: 1-D, over which parameters are sharded: the ranks of the sequence, or these and those
            with other batches.
        sequence: 1-D, the ranks that share a sequence, on which activations are.
        param_dtype: in which floating-point parameters are gathered; None leaves theirs.
        reduce_dtype: in which their gradients are summed; None is the parameter's own.
        is_float32: whether shards of parameters that are trained are float32, whatever they were.
        is_offloaded: whether shards are in the host's memory, and so their gradients and the states
            of their optimizer; each is copied to the device when it is gathered.

    Raises:
        UnsupportedPlacement: a parameter is of a subclass.
        RanksDisagree: the model of another rank has other modules or tensors.
    """
    if getattr(model, _IS_SHARDED, False):
        return
    check = partial(_check, model)
    agree_on_model(model, mesh, site="shard_weights", with_meta=False, check=check)

    def read(parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
            return parameter
        is_cast = parameter.is_floating_point()
        shard: Any = parameter.to(mesh.device_type) if is_offloaded else parameter
        gathered = shard.redistribute(
            placements=[Replicate()],
            forward_dtype=param_dtype if is_cast else None,
            backward_dtype=reduce_dtype if is_cast else None,
        )
        local = gathered.to_local(grad_placements=[Partial()])
        return DTensor.from_local(
            local, sequence, [Replicate()], run_check=False, grad_placements=[Partial()]
        )

    # In the order of the modules, which is the same on every rank: each is a collective.
    shared: Tensor
    for places in _places(model, "_parameters"):
        shared = _sharded(_held(places[0]), mesh, is_float32, is_offloaded)
        for _, table, key in places:
            table[key] = shared
    for places in _places(model, "_buffers"):
        shared = distribute_tensor(_held(places[0]).detach().contiguous(), sequence, [Replicate()])
        for _, table, key in places:
            table[key] = shared
    classes: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in list(model.modules()):
        names = tuple(key for key, value in module._parameters.items() if value is not None)
        if names:
            kind = type(module), names
            if kind not in classes:
                classes[kind] = _subclass(*kind, read)
            module.__class__ = classes[kind]
    run_on_shards(model)  # after the classes are made: experts read what these gather
    setattr(model, _IS_SHARDED, True)


_Place = tuple[str, dict[str, Any], str]  # the name in the model, the table that holds it, its key


def _places(model: nn.Module, table: str) -> list[list[_Place]]:
    """Return the places of each tensor, of which tied ones have several."""
    found: dict[int, list[_Place]] = {}
    for prefix, module in model.named_modules():
        held = getattr(module, table)
        for key, tensor in held.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(tensor), []).append((name, held, key))
    return list(found.values())


def _held(place: _Place) -> Tensor:
    _, table, key = place
    tensor: Tensor = table[key]
    return tensor


def _check(model: nn.Module) -> None:
    for (name, table, key), *_ in _places(model, "_parameters"):
        if type(table[key]) is not nn.Parameter:
            raise UnsupportedPlacement(
                site=name,
                expected="a plain parameter",
                got=f"a {type(table[key]).__name__}",
                remedy="let FSDP shard a model that nothing has sharded or quantized before",
            )


def _sharded(old: Tensor, mesh: DeviceMesh, is_float32: bool, is_offloaded: bool) -> nn.Parameter:
    placements: list[Placement] = [Shard(0) if old.ndim else Replicate()]
    whole: Tensor = old.detach()
    if whole.is_meta:
        whole = torch.empty_like(whole, device=mesh.device_type)
    shard: Tensor = distribute_tensor(whole.contiguous(), mesh, placements)
    if is_float32 and old.requires_grad and old.is_floating_point():
        shard = shard.float()
    if is_offloaded:
        shard = shard.cpu()
    new = nn.Parameter(shard, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)
    return new


def _subclass(cls: Any, names: tuple[str, ...], read: Callable[[Tensor], Tensor]) -> Any:
    properties = {name: property(_reader(name, read), _writer(name)) for name in names}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **properties})


def _reader(name: str, read: Callable[[Tensor], Tensor]) -> Any:
    def get(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        return None if parameter is None else read(parameter)

    return get


def _writer(name: str) -> Any:
    def write(module: nn.Module, parameter: Any) -> None:
        module._parameters[name] = parameter

    return write
