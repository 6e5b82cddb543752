"""Draw tokens once for all ranks that hold the same probabilities.

    multinomial(probabilities (B, V) [Replicate], 1)  =>  what the first rank drew, on every rank

Each rank draws by a generator of its own. DTensor (torch 2.11 to 2.15) takes what they draw for the
same, seeded alike or not: `generate(do_sample=True)` then goes on from another token on each rank,
and attention mixes them. The handler is registered by `distribute`, and is for eager code: what
compiled code draws stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import dispatch_as_dtensor, register_dtensor_handler
from cp_inductor.torch_private.modes import run_uncompiled

MULTINOMIAL = torch.ops.aten.multinomial.default


def draw_once() -> None:
    """Register the handler; a second call changes nothing."""
    run_uncompiled(_multinomial)
    register_dtensor_handler(MULTINOMIAL, _multinomial)


def _multinomial(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    drawn = dispatch_as_dtensor(op, args, kwargs)
    if not isinstance(drawn, DTensor) or bind_arguments(op, args, kwargs)["generator"] is not None:
        return drawn  # of a generator of its own, the program says itself how it is seeded
    mesh, local = drawn.device_mesh, drawn.to_local()
    if mesh.get_coordinate() is None or type(local) is not Tensor:
        return drawn  # a fake one is traced
    for axis, placement in enumerate(drawn.placements):
        if placement.is_replicate() and mesh.size(axis) > 1:
            dist.broadcast(local, group=mesh.get_group(axis), group_src=0)
    return drawn
