"""The mean loss of a sharded batch of tokens: the sum of all ranks over the count of all ranks.

    nll_loss(log_probabilities [Shard(0)], target, reduction="mean", ignore_index=-100)
      => sum over this rank's tokens / all_reduce(tokens that count)          Partial("sum")

DTensor (torch 2.11 to 2.15) takes the mean of every rank's tokens, and of these the average: with
as many ignored targets on each rank that is the mean, with others it is not, and it refuses shards
of unequal length. A causal language model ignores the last target of the sequence, which one rank
holds, padding is at the end, and packed documents anywhere. What is not a mean over sharded tokens
goes DTensor's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from cp_inductor.torch_private import (
    bind_arguments,
    dispatch_as_dtensor,
    register_dtensor_handler,
)

__all__ = ["is_averaged", "register_dtensor_loss"]

aten = torch.ops.aten

MEAN, SUM = 1, 2  # at::Reduction

# In the input of nll_loss, (N, C) or (N, C, ...).
CLASS_DIM = 1


def register_dtensor_loss() -> None:
    """Teach DTensor the mean over sharded tokens; process-wide, idempotent."""
    for op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        register_dtensor_handler(op, _mean_loss)
    for op in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
        register_dtensor_handler(op, _mean_loss_backward)


def is_averaged(loss: object) -> bool:
    """Whether a value is the average of what ranks computed each of their own tokens."""
    return isinstance(loss, DTensor) and any(
        isinstance(placement, Partial) and placement.reduce_op == "avg"
        for placement in loss.placements
    )


def _mean_loss(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind_arguments(op, args, kwargs)
    if bound["reduction"] != MEAN or not _is_of_sharded_tokens(bound["self"]):
        return dispatch_as_dtensor(op, args, kwargs)
    total, weight = dispatch_as_dtensor(op, (*_with_reduction(bound, SUM),), {})
    weight = weight.redistribute(weight.device_mesh, [Replicate()] * weight.device_mesh.ndim)
    mean = total.to_local() / weight.to_local()
    return DTensor.from_local(mean, total.device_mesh, total.placements, run_check=False), weight


def _mean_loss_backward(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    bound = bind_arguments(op, args, kwargs)
    if bound["reduction"] != MEAN or not _is_of_sharded_tokens(bound["self"]):
        return dispatch_as_dtensor(op, args, kwargs)
    grad, weight = bound["grad_output"], bound["total_weight"]
    mesh = weight.device_mesh
    whole = [Replicate()] * mesh.ndim
    if isinstance(grad, DTensor):
        grad = grad.redistribute(mesh, whole).to_local()
    local = weight.redistribute(mesh, whole).to_local()
    bound["grad_output"] = DTensor.from_local(grad / local, mesh, whole, run_check=False)
    return dispatch_as_dtensor(op, (*_with_reduction(bound, SUM),), {})


def _is_of_sharded_tokens(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor) or tensor.ndim <= CLASS_DIM:
        return False
    dims = {getattr(placement, "dim", None) for placement in tensor.placements}
    return bool(dims - {None, CLASS_DIM})


def _with_reduction(bound: dict[str, Any], reduction: int) -> tuple[Any, ...]:
    return tuple((bound | {"reduction": reduction}).values())
