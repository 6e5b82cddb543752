"""The mean loss of a sharded batch of tokens: the sum of all ranks over the count of all ranks.

    nll_loss(log_probabilities [Shard(0)], target, reduction="mean", ignore_index=-100)
      => sum over this rank's tokens / all_reduce(tokens that count)          Partial("sum")

DTensor (torch 2.11 to 2.15) takes the mean of every rank's tokens, and of these the average: with
as many ignored targets on each rank that is the mean, with others it is not, and it refuses shards
of unequal length. A causal language model ignores the last target of the sequence, which one rank
holds, padding is at the end, and packed documents anywhere. What is not a mean over sharded tokens
goes DTensor's own way.

`torch.distributed.tensor.parallel.loss_parallel` registers handlers of its own for a vocabulary
that is sharded, and removes ours when it is left. So DTensor's rule is corrected, too: it is asked
where there is no handler, has all of the input on every rank that once, and brings ours back.
And its handlers refuse the mean where tokens are sharded, too: they are asked for the sum instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from cp_inductor.torch_private import (
    bind_arguments,
    correct_dtensor_rule,
    correct_loss_parallel,
    dispatch_as_dtensor,
    has_dtensor_strategy,
    placements_of_strategy,
    register_dtensor_handler,
    run_uncompiled,
)

__all__ = ["is_averaged", "register_dtensor_loss"]

aten = torch.ops.aten

FORWARD_OPS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
BACKWARD_OPS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)

MEAN, SUM = 1, 2  # at::Reduction

# In the input of nll_loss, (N, C) or (N, C, ...).
CLASS_DIM = 1


def register_dtensor_loss() -> None:
    """Teach DTensor the mean over sharded tokens; process-wide."""
    run_uncompiled(_mean_loss)
    run_uncompiled(_mean_loss_backward)
    _register_handlers()
    for op in FORWARD_OPS:
        if has_dtensor_strategy(op):
            correct_dtensor_rule(op, _has_no_handler, _all_on_every_rank)
        correct_loss_parallel(op, _mean_loss_of_sharded_vocabulary)


def _register_handlers() -> None:
    for op in FORWARD_OPS:
        register_dtensor_handler(op, _mean_loss)
    for op in BACKWARD_OPS:
        register_dtensor_handler(op, _mean_loss_backward)


def _has_no_handler(arguments: Sequence[Any]) -> bool:
    """Whether this is the mean of sharded tokens, which only DTensor's own way leads here."""
    logits, reduction = arguments[0], arguments[3]
    is_ours = reduction == MEAN and _shards_tokens(placements_of_strategy(logits))
    if is_ours:
        _register_handlers()
    return is_ours


def _all_on_every_rank(
    logits: Any, target: Any, weight: Any, *rest: Any
) -> list[tuple[list[Any], list[Any]]]:
    whole = Replicate()
    return [([whole] * 2, [whole] * 2 + [None if weight is None else whole] + [None] * len(rest))]


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


def _mean_loss_of_sharded_vocabulary(
    parallel: Callable[..., Any],
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Have `loss_parallel` add up this rank's tokens; its backward divides by what counts."""
    bound = bind_arguments(op, args, kwargs)
    if bound["reduction"] != MEAN or not _is_of_sharded_tokens(bound["self"]):
        return parallel(op, args, kwargs)
    total, weight = parallel(op, _with_reduction(bound, SUM), {})
    mesh = total.device_mesh
    shares = [
        Partial() if placement.is_partial() else Replicate() for placement in total.placements
    ]
    whole = [Replicate()] * mesh.ndim
    weight = DTensor.from_local(weight, mesh, shares, run_check=False).redistribute(mesh, whole)
    weight = weight.to_local()
    mean = DTensor.from_local(total.to_local() / weight, mesh, total.placements, run_check=False)
    return mean, weight


def _is_of_sharded_tokens(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor) or tensor.ndim <= CLASS_DIM:
        return False
    return _shards_tokens(tensor.placements)


def _shards_tokens(placements: Sequence[Any]) -> bool:
    return bool({getattr(placement, "dim", None) for placement in placements} - {None, CLASS_DIM})


def _with_reduction(bound: dict[str, Any], reduction: int) -> tuple[Any, ...]:
    return tuple((bound | {"reduction": reduction}).values())
