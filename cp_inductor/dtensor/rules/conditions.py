"""Let ranks branch alike on a condition over a sharded tensor, and make tensors of one size.

    if mask.all(): ...      a DTensor [Partial]: this rank's part  =>  that of all ranks, on each
    F.one_hot(labels)       asks for labels.max().item()           =>  that of all ranks, on each
    x * (x > 2).any(1)      DTensor multiplies with each rank's part  =>  with that of all ranks

A rank whose part says otherwise would take another branch than the others, or make a tensor of
another size, and wait for them there. Floating-point numbers are left alone, since a rank may read
one alone, to log it; `item()` of what is Partial is this rank's part, and a warning says so.

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
    """Return whether there is any, on all ranks.

    DTensor (2.13) calls it a sum, as which it goes on into products: 1 + 1 times a number.
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
