"""Rules of ops that compute entry by entry, as broadcasting aligns them, and of their losses."""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_inductor.graph.collectives import WAIT
from cp_inductor.sequence.rules.call import SUMS, Mixes, OpCall, describe_kind, overloads, rule
from cp_inductor.sequence.types import Shards, Sum, Type

aten = torch.ops.aten

UNIFORM_LIKE = overloads((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like))
COPIES = overloads(
    (
        *(aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift, aten.lift_fresh, aten.neg),
        *(aten.contiguous, aten.copy_, aten.copy, aten.conj, aten._conj, aten.resolve_conj),
        *(torch.ops.prims.convert_element_type, aten.ones_like, aten.zeros_like, aten.empty_like),
    )
)
_ADDING = overloads((aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub))
_DIVIDING = overloads((aten.div, aten.div_))
_SCALING = _DIVIDING | overloads((aten.mul, aten.mul_))


@rule(
    *(*COPIES, *UNIFORM_LIKE, aten.fill_, aten.zero_, aten.masked_fill, aten.masked_fill_),
    *(aten.where.self, aten._neg_view, aten.resolve_neg, aten.real, aten.imag, aten.view.dtype),
    *(aten.nan_to_num, aten.xlogy, aten.isnan, aten.polar, aten.complex, aten.prelu),
    *(aten._prelu_kernel, aten.native_dropout, aten.bernoulli, aten.bernoulli_, aten.normal_),
    *(aten.uniform_, aten.exponential_, aten.log_sigmoid_forward, aten.rand_like),
    *(aten.randn_like, aten.randint_like, aten.rrelu_with_noise, torch.ops.prims.device_put, WAIT),
    tag=torch.Tag.pointwise,
)
def pointwise(call: OpCall) -> list[Type]:
    """Compute entry by entry, as broadcasting aligns them."""
    sums = [given for given in call.types if isinstance(given, Sum)]
    return [_linear(call, sums) if sums else call.aligned(out) for out in call.outs]


def _linear(call: OpCall, sums: list[Sum]) -> Type:
    """Return the type of a result that is linear in sums over ranks."""
    others = [given for given in call.types if not isinstance(given, Sum)]
    shifts = [call.bound.get(name) for name in ("self", "other")]
    is_shifted = bool(others) or any(isinstance(one, (int, float)) and one for one in shifts)
    has_tokens = any(isinstance(given, Shards) for given in others)
    is_alike = len(set(sums)) == 1 and not has_tokens
    # A sum may be divided, and divides nothing.
    is_over = call.op in _DIVIDING and call.type_of(call.bound["self"]) not in sums
    is_copied = call.op in COPIES and not others
    is_added = call.op in _ADDING and is_alike and (sums[0].is_mean or not is_shifted)
    is_scaled = call.op in _SCALING and len(sums) == 1 and not has_tokens and not is_over
    if is_copied or is_added or is_scaled:
        return replace(sums[0], is_alike=is_copied and sums[0].is_alike)
    if call.op in _DIVIDING and sums == call.types == [Sum(is_mean=False)] * 2 and sums[1].is_alike:
        return Sum(is_mean=True)  # over as many tokens on every rank
    given = " and ".join(sorted({describe_kind(given) for given in call.types}))
    raise Mixes(f"{call.op} of {given}, which is not that of the whole sequence", SUMS)


@rule(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy)
@rule(aten.binary_cross_entropy_with_logits, aten.soft_margin_loss)
def element_loss(call: OpCall) -> list[Type]:
    """Compute entry by entry, and reduce."""
    widest = max(call.tensors, key=lambda tensor: tensor.ndim)
    return [_reduced_loss(call, call.aligned(widest))]


def _reduced_loss(call: OpCall, found: Shards) -> Type:
    reduction = call.bound["reduction"]
    if reduction == 1:
        call.check_even(found)
    return found if reduction == 0 else Sum(is_mean=reduction == 1)


@rule(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(call: OpCall) -> list[Type]:
    """Pick each token's log probability by its label."""
    scores, labels = call.shards("self"), call.shards("target")
    is_alike = replace(scores, dim=labels.dim) == labels
    if not is_alike or scores.dim != labels.dim + (labels.dim > 0) or not call.is_same("weight"):
        raise Mixes(f"{call.op} of tokens with labels of others")
    if call.bound["reduction"] == 1 and (call.bound["weight"] is not None or not labels.is_counted):
        raise Mixes(
            f"{call.op}: a mean by weights, or with labels left out, weighs ranks unequally", SUMS
        )
    return [_reduced_loss(call, labels)] * len(call.outs)
