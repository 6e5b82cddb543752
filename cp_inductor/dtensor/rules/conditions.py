"""Let all ranks take the same branch, and make tensors of the same size, from a sharded tensor.

    if mask.all(): ...      mask.all() is a DTensor [Partial]  =>  all ranks read that of the whole
    F.one_hot(labels)       reads labels.max().item()          =>  all ranks read that of the whole
    x * (x > 2).any(1)      DTensor multiplies by a rank's part  =>  by that of the whole

A rank that reads only its own part may take another branch than the others, or make a tensor of
another size, and would then wait for them for ever. Floating-point numbers are left alone, because
a single rank may read one to log it. `item()` of a Partial tensor is this rank's part, and a
warning says so.

Assumes: all ranks ask for the condition or the integer, as they run the same program.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from cp_inductor.errors import SequenceWarning
from cp_inductor.sequence.eager import place_of_caller
from cp_inductor.torch_private.dtensor import register_dtensor_handler, without_handler

ANY = (torch.ops.aten.any.default, torch.ops.aten.any.dim, torch.ops.aten.any.dims)
ITEM = torch.ops.aten._local_scalar_dense.default


def branch_alike() -> None:
    """Register a handler; a second call changes nothing."""
    register_dtensor_handler(ITEM, _item)


def find_any_on_all() -> None:
    """Register a handler; a second call changes nothing."""
    for op in ANY:
        register_dtensor_handler(op, _any)


def _any(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return whether any entry of any rank is true.

    DTensor (2.13) takes the result for a sum over ranks. In a product, two ranks would count twice.
    """
    out: DTensor = without_handler(op, args, kwargs)
    places = [Replicate() if place.is_partial() else place for place in out.placements]
    return out.redistribute(placements=places)


def _item(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    local = tensor.to_local()
    # A fake one is traced.
    is_run = type(local) is Tensor and tensor.device_mesh.get_coordinate() is not None
    if is_run and not (tensor.is_floating_point() or tensor.is_complex()):
        whole: Any = tensor.detach()
        return op(whole.full_tensor())
    if is_run and any(place.is_partial() for place in tensor.placements):
        warnings.warn(
            f"{place_of_caller()} reads a number of {tensor.placements}, which is this rank's part"
            " of that of all ranks; call full_tensor() on every rank first",
            SequenceWarning,
            stacklevel=2,
        )
    return without_handler(op, args, kwargs)
