"""The mean loss over sharded tokens: the sum over all ranks divided by the count over all ranks.

    nll_loss(log_probabilities [Shard(0)], target, reduction="mean", ignore_index=-100)
      => sum over this rank's tokens / all_reduce(tokens that count), summed

DTensor (torch 2.13 to 2.15) takes each rank's mean over its own tokens, and averages these. That is
the mean only if every rank ignores equally many targets. A causal language model ignores the last
target of the sequence, which one rank holds; padding is at the end; packed documents ignore targets
anywhere. DTensor also refuses shards of unequal length. For losses of elements (`mse_loss`,
`huber_loss`, ...) it averages as well, with gradients that are too large by the number of ranks.

Where this library is not used (`dtensor/axis.py`), programs may correct the average by hand: it
stays. Everything that is not a mean over sharded tokens is always left to DTensor.

`torch.distributed.tensor.parallel.loss_parallel` has its own handlers for a sharded vocabulary,
which refuse the mean if tokens are sharded as well. They are asked for the sum instead.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from cp_inductor.dtensor.axis import holds_sequences
from cp_inductor.dtensor.rules.partials import make_whole
from cp_inductor.dtensor.wrap import is_whole, whole_tensor, wrap_whole
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import dispatch_as_dtensor, handler_of_loss_parallel

aten = torch.ops.aten

# Losses of elements. All elements count alike.
_LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
ELEMENT_OPS = [getattr(aten, name).default for name in _LOSSES]
ELEMENT_OPS += [getattr(aten, f"{name}_backward").default for name in _LOSSES]

MEAN, SUM = 1, 2  # at::Reduction
# In the input of nll_loss, (N, C) or (N, C, ...).
CLASS_DIM = 1


def compute_loss(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Compute a loss; or leave it to `loss_parallel` if that is on, and else to DTensor.

    No loss is partial, whoever computes it.
    """
    bound, parallel = bind_arguments(op, args, kwargs), handler_of_loss_parallel(op)
    results = COMPUTED[op](parallel, op, bound)
    if results is None:
        results = (parallel or dispatch_as_dtensor)(op, args, kwargs)
    given = [bound[name] for name in ("self", "target") if isinstance(bound[name], DTensor)]
    if "grad_output" in bound or not holds_sequences(given[0].device_mesh):
        return results
    return pytree.tree_map_only(DTensor, make_whole, results)


def _mean_loss(parallel: Any, op: torch._ops.OpOverload, bound: dict[str, Any]) -> Any:
    logits = bound["self"]
    if not _is_mean_of_tokens(bound) or not holds_sequences(logits.device_mesh):
        return None
    total, weight = (parallel or dispatch_as_dtensor)(op, _as_sum(bound), {})
    mesh = total.device_mesh
    if parallel is None:
        count = whole_tensor(weight)
        return _divided(total, count), wrap_whole(count, mesh)
    # It sums over this rank's tokens, and its backward divides by the count.
    shares = [Partial() if place.is_partial() else Replicate() for place in total.placements]
    count = whole_tensor(DTensor.from_local(weight, mesh, shares, run_check=False))
    return _divided(total, count), count


def _divided(total: DTensor, count: Any) -> DTensor:
    mean = total.to_local() / count
    return DTensor.from_local(mean, total.device_mesh, total.placements, run_check=False)


def _mean_loss_backward(parallel: Any, op: torch._ops.OpOverload, bound: dict[str, Any]) -> Any:
    weight = bound["total_weight"]
    # Our count covers all ranks; DTensor sums its own later. Between a forward and its backward, a
    # mesh may have started to hold sequences.
    is_ours = parallel is None and isinstance(weight, DTensor) and is_whole(weight)
    if not is_ours or not _is_mean_of_tokens(bound):
        return None
    return _sum_backward(op, bound, weight.device_mesh, weight.to_local())


def _sum_backward(
    op: torch._ops.OpOverload, bound: dict[str, Any], mesh: DeviceMesh, count: Any
) -> Any:
    """Call the backward of the sum, with the gradient of a mean over a count."""
    grad = bound["grad_output"]
    grad = wrap_whole((whole_tensor(grad) if isinstance(grad, DTensor) else grad) / count, mesh)
    return dispatch_as_dtensor(op, _as_sum(bound | {"grad_output": grad}), {})


def _mean_of_elements(_: Any, op: torch._ops.OpOverload, bound: dict[str, Any]) -> Any:
    sharded = _sharded_of(bound)
    if bound["reduction"] != MEAN or not sharded or not holds_sequences(sharded[0].device_mesh):
        return None
    count = prod(torch.broadcast_shapes(bound["self"].shape, bound["target"].shape))
    if "grad_output" in bound:
        return _sum_backward(op, bound, sharded[0].device_mesh, count)
    return _divided(dispatch_as_dtensor(op, _as_sum(bound), {}), count)


def _with_logits(parallel: Any, op: torch._ops.OpOverload, bound: dict[str, Any]) -> Any:
    """Compute the loss of each element, by the formula of ATen (Loss.cpp), and reduce these."""
    logits, target, sharded = bound["self"], bound["target"], _sharded_of(bound)
    if parallel is not None or not sharded:
        return None
    if bound["reduction"] == MEAN and not holds_sequences(sharded[0].device_mesh):
        return None
    of_ones = torch.nn.functional.logsigmoid(logits)
    if bound["pos_weight"] is not None:
        of_ones = of_ones * (1 + (bound["pos_weight"] - 1) * target)
    losses = (1 - target) * logits - of_ones
    if bound["weight"] is not None:
        losses = losses * bound["weight"]
    if bound["reduction"] not in (MEAN, SUM):
        return losses
    total = losses.sum()
    return total / losses.numel() if bound["reduction"] == MEAN else total


def _sharded_of(bound: dict[str, Any]) -> list[DTensor]:
    placed = [t for t in (bound["self"], bound["target"]) if isinstance(t, DTensor)]
    return [t for t in placed if any(place.is_shard() for place in t.placements)]


def _is_mean_of_tokens(bound: dict[str, Any]) -> bool:
    tensor = bound["self"]
    if bound["reduction"] != MEAN or not isinstance(tensor, DTensor) or tensor.ndim <= CLASS_DIM:
        return False
    return bool({getattr(p, "dim", None) for p in tensor.placements} - {None, CLASS_DIM})


def _as_sum(bound: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((bound | {"reduction": SUM}).values())


# (what `loss_parallel` computes the op by; the op; its arguments by name) -> the results, or None
# to leave the op to those who would compute it otherwise.
COMPUTED: dict[Any, Callable[[Any, torch._ops.OpOverload, dict[str, Any]], Any]] = {
    aten.nll_loss_forward.default: _mean_loss,
    aten.nll_loss2d_forward.default: _mean_loss,
    aten.nll_loss_backward.default: _mean_loss_backward,
    aten.nll_loss2d_backward.default: _mean_loss_backward,
    **dict.fromkeys(ELEMENT_OPS, _mean_of_elements),
    # torch 2.13 averages the ranks' means of this loss, or does not trace its sum.
    aten.binary_cross_entropy_with_logits.default: _with_logits,
}
