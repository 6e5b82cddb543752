"""Gather along a sharded dim: add up what each rank has found, at once.

DTensor (torch 2.13) leaves each rank's part with a mask of what the rank does not hold, and adds
the parts up when they are used. The mask has the shape of the result, so a view of the result, such
as `squeeze`, fails there. A rank without elements fails, and the others wait for it: then all
gather from the whole.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import register_dtensor_handler, without_handler

GATHER = torch.ops.aten.gather.default


def add_up_gathered() -> None:
    """Register the function; a second call changes nothing."""
    register_dtensor_handler(GATHER, _gather)


def _gather(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind_arguments(op, args, kwargs)
    source = _whole_if_short(bound.pop("self"), bound["dim"])
    out = without_handler(op, (source,), bound)
    if not isinstance(out, DTensor) or not any(map(_is_masked, out.placements)):
        return out
    return out.redistribute(
        placements=[Replicate() if _is_masked(place) else place for place in out.placements]
    )


def _whole_if_short(tensor: Any, dim: int) -> Any:
    """Return a tensor of which every rank has elements along a dim."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return tensor
    along, length = Shard(dim % tensor.ndim), tensor.shape[dim]
    mesh = tensor.device_mesh
    count = prod(mesh.size(axis) for axis, p in enumerate(tensor.placements) if p == along)
    if (count - 1) * -(-length // count) < length:
        return tensor
    return tensor.redistribute(
        placements=[Replicate() if p == along else p for p in tensor.placements]
    )


def _is_masked(place: Placement) -> bool:
    return place.is_partial() and type(place) is not Partial
