"""Accumulate along a sharded dim: each rank its own part, then what the ranks before it leave.

    cumsum(x (B, S) [Shard(1)], 1)
      =>
    own = cumsum(x's part, 1)
    out = own + the sum of the last column of every rank before     (B, S) [Shard(1)]

So do `cumprod`, `cummax` and `cummin`, whose indices are those of the whole. DTensor (2.13) gathers
the whole of such a tensor on every rank. Here it gathers a column of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.dtensor.wrap import whole_tensor, wrap_parts
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import without_handler

aten = torch.ops.aten

_Results = tuple[Tensor, ...]


def _each(join: Callable[[Tensor, Tensor], Tensor], last: _Results, own: _Results) -> _Results:
    return (join(last[0], own[0]),)


def _further(is_further: Callable[[Tensor, Tensor], Tensor], last: _Results, own: _Results) -> Any:
    """Choose values and their indices: the last of equal ones, and of those not numbers."""
    is_own = own[0].isnan() | (is_further(own[0], last[0]) & ~last[0].isnan())
    return tuple(torch.where(is_own, *pair) for pair in zip(own, last, strict=True))


# What a rank makes of what those before it leave, and its own.
OPS: dict[Any, Callable[[_Results, _Results], _Results]] = {
    aten.cumsum.default: partial(_each, torch.add),
    aten.logcumsumexp.default: partial(_each, torch.logaddexp),
    aten.cumprod.default: partial(_each, torch.mul),
    aten.cummax.default: partial(_further, torch.ge),
    aten.cummin.default: partial(_further, torch.le),
}


def accumulate(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Accumulate along a sharded dim, a column of every rank gathered; other dims as DTensor."""
    bound = bind_arguments(op, args, kwargs)
    tensor, dim = bound["self"], bound["dim"]
    axis = _axis_of(tensor, dim)
    if axis is None:
        return without_handler(op, args, kwargs)
    mesh, part, dim = tensor.device_mesh, tensor.to_local(), dim % tensor.ndim
    found = op(part, *args[1:], **kwargs)
    own = found if isinstance(found, tuple) else (found,)
    rank, length = mesh.get_local_rank(axis), part.shape[dim]
    if len(own) == 2:  # the second are indices
        own = own[0], own[1] + rank * -(-tensor.shape[dim] // mesh.size(axis))
    # Ranks without elements are the last, and no other reads what they send.
    shape = (*part.shape[:dim], 1, *part.shape[dim + 1 :])
    columns = [
        values.narrow(dim, length - 1, 1) if length else values.new_zeros(shape) for values in own
    ]
    places: list[Any] = [Replicate()] * mesh.ndim
    places[axis] = Shard(0)
    parts = (column[None].contiguous() for column in columns)
    wrapped = (DTensor.from_local(part, mesh, places, run_check=False) for part in parts)
    before = list(zip(*(whole_tensor(column).unbind(0) for column in wrapped), strict=True))
    joined = OPS[op](reduce(OPS[op], before[: max(rank, 1)]), own)
    if not (rank and length):
        # Every rank reads what it has gathered: where a compiled forward does not, torch's
        # partitioner lets the backward of other ranks alone gather again.
        always = torch.ones((), dtype=torch.bool, device=part.device)
        joined = tuple(torch.where(always, *pair) for pair in zip(own, joined, strict=True))
    outs = tuple(wrap_parts(out, mesh, tensor.placements, tensor.shape) for out in joined)
    return outs if isinstance(found, tuple) else outs[0]


def _axis_of(tensor: Any, dim: int) -> int | None:
    """Return the one axis that shards a dim, if the others shard other dims or nothing."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return None
    if any(type(place) not in (Shard, Replicate) for place in tensor.placements):
        return None
    along = Shard(dim % max(tensor.ndim, 1))
    axes = [axis for axis, place in enumerate(tensor.placements) if place == along]
    return axes[0] if len(axes) == 1 else None
