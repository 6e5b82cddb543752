"""Let ranks branch alike on a condition over a sharded tensor.

    if mask.all(): ...      a DTensor [Partial]: this rank's part  =>  that of all ranks, on each

A rank whose part says otherwise would take another branch than the others, and wait for them there.
Numbers are left alone: `item()` of a sum that is Partial is this rank's part, which a rank may read
alone, to log it.

Assumes: all ranks ask for the condition, as they run the same program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.dtensor import register_dtensor_handler, without_handler
from cp_inductor.torch_private.modes import run_uncompiled

ITEM = torch.ops.aten._local_scalar_dense.default


def branch_alike() -> None:
    """Register the handler; a second call changes nothing."""
    run_uncompiled(_item)
    register_dtensor_handler(ITEM, _item)


def _item(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    local = tensor.to_local()
    # A fake one is traced.
    is_run = type(local) is Tensor and tensor.device_mesh.get_coordinate() is not None
    if tensor.dtype is torch.bool and is_run:
        whole: Any = tensor.detach()
        return op(whole.full_tensor())
    return without_handler(op, args, kwargs)
