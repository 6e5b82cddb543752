"""Gather along a sharded dim: add up what each rank has found, at once.

DTensor (torch 2.13) leaves each rank's part with a mask of what the rank does not hold, and adds
the parts up when they are used. The mask has the shape of the result, so a view of the result, such
as `squeeze`, fails there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cp_inductor.torch_private.dtensor import register_dtensor_handler, without_handler

GATHER = torch.ops.aten.gather.default


def add_up_gathered() -> None:
    """Register the function; a second call changes nothing."""
    register_dtensor_handler(GATHER, _gather)


def _gather(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = without_handler(op, args, kwargs)
    if not isinstance(out, DTensor) or not any(map(_is_masked, out.placements)):
        return out
    return out.redistribute(
        placements=[Replicate() if _is_masked(place) else place for place in out.placements]
    )


def _is_masked(place: Placement) -> bool:
    return place.is_partial() and type(place) is not Partial
