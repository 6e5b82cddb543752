"""Accumulate along a sharded dim: each rank its own part, then what the ranks before it leave.

    cumsum(x (B, S) [Shard(1)], 1)
      =>
    own = cumsum(x's part, 1)
    out = own + the sum of the last column of every rank before     (B, S) [Shard(1)]

DTensor (2.13) gathers the whole of such a tensor on every rank. Here it gathers a column of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.dtensor.wrap import wrap_parts
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import register_dtensor_handler, without_handler

aten = torch.ops.aten

# What a rank makes of its own results and those of one before it.
Join = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def _join_by(function: Callable[[Tensor, Tensor], Tensor]) -> Join:
    return lambda before, own: [function(before[0], own[0])]


def _join_extremes(is_later: Callable[[Tensor, Tensor], Tensor]) -> Join:
    """Of equal values the last counts, and a nan counts more than any number."""

    def join(before: Sequence[Tensor], own: Sequence[Tensor]) -> Sequence[Tensor]:
        (value, place), (own_value, own_place) = before, own
        takes_own = is_later(own_value, value) | own_value.isnan()
        return [
            torch.where(takes_own, own_value, value),
            torch.where(takes_own, own_place, place),
        ]

    return join


OPS: dict[Any, Join] = {
    aten.cumsum.default: _join_by(torch.add),
    aten.cumprod.default: _join_by(torch.mul),
    aten.logcumsumexp.default: _join_by(torch.logaddexp),
    aten.cummax.default: _join_extremes(torch.ge),
    aten.cummin.default: _join_extremes(torch.le),
}


def accumulate_in_parts() -> None:
    """Register the handlers; a second call changes nothing."""
    for op in OPS:
        register_dtensor_handler(op, _accumulate)


def _accumulate(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    bound = bind_arguments(op, args, kwargs)
    tensor, dim = bound["self"], bound["dim"]
    axis = _axis_of(tensor, dim)
    if axis is None:
        return without_handler(op, args, kwargs)
    mesh, part = tensor.device_mesh, tensor.to_local()
    dim %= tensor.ndim
    results = op(part, *args[1:], **kwargs)
    own = list(results) if isinstance(results, tuple) else [results]
    rank, size = mesh.get_local_rank(axis), mesh.size(axis)
    if len(own) > 1:  # places in the part become those in the whole
        own[1] = own[1] + rank * (-(-tensor.shape[dim] // size))
    # Ranks without elements are the last, and no other reads what they send.
    length = part.shape[dim]
    columns = [one.narrow(dim, length - 1, 1) if length else _column(one, dim) for one in own]
    before = [_of_all_ranks(column, tensor, axis) for column in columns]
    if rank and length:
        last = [one[0] for one in before]
        for place in range(1, rank):
            last = list(OPS[op](last, [one[place] for one in before]))
        own = list(OPS[op](last, own))
    wrapped = [wrap_parts(one, mesh, tensor.placements, tensor.shape) for one in own]
    return tuple(wrapped) if isinstance(results, tuple) else wrapped[0]


def _axis_of(tensor: Any, dim: int) -> int | None:
    """Return the one axis that shards a dim, if the others shard other dims or nothing."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return None
    if any(type(place) not in (Shard, Replicate) for place in tensor.placements):
        return None
    along = Shard(dim % max(tensor.ndim, 1))
    axes = [axis for axis, place in enumerate(tensor.placements) if place == along]
    return axes[0] if len(axes) == 1 else None


def _column(one: Tensor, dim: int) -> Tensor:
    shape = list(one.shape)
    shape[dim] = 1
    return one.new_zeros(shape)


def _of_all_ranks(column: Tensor, tensor: DTensor, axis: int) -> Tensor:
    mesh = tensor.device_mesh
    parts: list[Any] = [Replicate()] * mesh.ndim
    parts[axis] = Shard(0)
    shards = DTensor.from_local(column[None].contiguous(), mesh, parts, run_check=False)
    gathered: Tensor = shards.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
    return gathered
