"""Merge what tiles computed: partial results over disjoint keys, and gradients.

    out_i, lse_i        =>    lse = log sum exp(lse_i),    out = sum exp(lse_i - lse) out_i

Shapes: B batch, H query heads, S queries, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from cp_inductor.tiles.kernels import Partial

# Partials that one kernel combines. More are combined in groups, which bounds both the tensors
# kept alive and the arguments of the generated kernel.
MAX_COMBINED = 8


def combine(partials: Sequence[Partial], *, dtype: torch.dtype | None = None) -> Partial:
    """Merge partials over disjoint keys into the result over all of them.

    lse = log sum exp(lse_i), out = sum exp(lse_i - lse) out_i, in float32 (float64 for float64):
    each partial is read once and the result written once, where a running accumulator would be
    read and written at every step (Milakov and Gimelshein 2018, arXiv 1805.02867, gives the
    algebra). A row with lse_i = -inf, which saw no key, counts for nothing; a row that saw none
    in any partial has out 0 and lse -inf.

    Args:
        partials: at least one, each out (B, H, S, D) and lse (B, H, S).
        dtype: of the result's out; that of the first partial's, if not given.

    Returns:
        out in `dtype`, lse in the dtype of theirs.
    """
    dtype, lse_dtype = dtype or partials[0].out.dtype, partials[0].lse.dtype
    # Groups hand on a result that is not yet rounded to the output dtype.
    while len(partials) > MAX_COMBINED:
        partials = [_combine_group(partials[:MAX_COMBINED]), *partials[MAX_COMBINED:]]
    out, lse = _combine_group(partials) if len(partials) > 1 else partials[0]
    return Partial(out.to(dtype), lse.to(lse_dtype))


def _combine_group(partials: Sequence[Partial]) -> Partial:
    dtype = accumulation_dtype(partials[0].out)
    # Not stacked, which would copy them.
    lses = [partial.lse.to(dtype) for partial in partials]
    highest = finite_lse(reduce(torch.maximum, lses))
    weights = [torch.exp(lse - highest) for lse in lses]
    total = reduce(torch.add, weights)
    divisor = total.masked_fill(total == 0, 1.0)
    # out first: its strides, not those of the lse, are to be the strides of the result.
    weighted = [
        partial.out.to(dtype) * (weight / divisor).unsqueeze(-1)
        for partial, weight in zip(partials, weights, strict=True)
    ]
    return Partial(reduce(torch.add, weighted), torch.log(total) + highest)


def combine_stack(out: Tensor, lse: Tensor) -> Partial:
    """Merge partials over disjoint keys that are one tensor, out (n, ..., S, D), as `combine` does.

    The result is in float32 (float64 for float64).
    """
    dtype = accumulation_dtype(out)
    lse = lse.to(dtype)
    highest = finite_lse(lse.amax(0))
    weights = torch.exp(lse - highest)
    total = weights.sum(0)
    # Dividing by the total, the weights add up to 1 whatever the lse was rounded to.
    weights = (weights / total.masked_fill(total == 0, 1.0)).unsqueeze(-1)
    return Partial((out.to(dtype) * weights).sum(0), torch.log(total) + highest)


def finite_lse(lse: Tensor) -> Tensor:
    """Return the lse of rows; for one that saw no key at all, any finite reference.

    It keeps exp(-inf - reference) = 0.
    """
    return lse.masked_fill(lse == -float("inf"), 0.0)


def sum_grads(grads: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    """Add gradients of one shape in float32 (float64 for float64), in one pass.

    The sum is in a dtype, or in that of the first gradient.
    """
    dtype = dtype or grads[0].dtype
    if len(grads) == 1:
        return grads[0].to(dtype)
    total = grads[0].to(accumulation_dtype(grads[0]))
    for grad in grads[1:]:
        total = total + grad.to(total.dtype)
    return total.to(dtype)


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return what sums of such tensors are computed in: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)
