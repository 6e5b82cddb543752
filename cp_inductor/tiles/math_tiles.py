"""Tiles in plain operations, for what no kernel does along a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_inductor.tiles.combine import finite_lse
from cp_inductor.tiles.kernels import Gradients, Kernel, Partial, TileCall, repeat_heads, sum_heads


class Math(Kernel):
    """Attention in plain operations, in float32 (float64 for float64), on any device.

    For dropout whose mask is given, gradients of a bias, and scores that are changed by more than a
    bias. Its results stay in that dtype: they are rounded once, when those of all tiles
    are combined.

    Args:
        keep: (B, H, S, T), what each probability is multiplied with; None keeps all.
        needs_bias_grad: the bias is learned.

    Attributes:
        bias_grad: that of the bias (B | 1, H | 1, S, T), if it is learned, after `backward`.
    """

    bias_grad: Tensor

    def __init__(self, keep: Tensor | None = None, *, needs_bias_grad: bool = False) -> None:
        self.keep, self.needs_bias_grad = keep, needs_bias_grad

    def forward(self, call: TileCall) -> Partial:
        """See `Kernel.forward`; the call is not causal: what exists is in its bias."""
        scores = _scores(call)
        lse = torch.logsumexp(scores, -1)
        probabilities = torch.exp(scores - finite_lse(lse).unsqueeze(-1))
        if self.keep is not None:
            probabilities = probabilities * self.keep
        wide = repeat_heads(call.value.to(scores.dtype), call.query.shape[1])
        return Partial(torch.matmul(probabilities, wide), lse)

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """See `Kernel.backward`; gradients are in float32."""
        query, key, value = call.tensors
        scores, num_heads = _scores(call), query.shape[1]
        dtype = scores.dtype
        probabilities = torch.exp(scores - finite_lse(whole.lse.to(dtype)).unsqueeze(-1))
        grad = grad_out.to(dtype)
        wide_value = repeat_heads(value.to(dtype), num_heads)
        grad_probabilities = torch.matmul(grad, wide_value.transpose(-1, -2))
        kept = probabilities
        if self.keep is not None:
            kept, grad_probabilities = probabilities * self.keep, grad_probabilities * self.keep
        dv = torch.matmul(kept.transpose(-1, -2), grad)
        delta = (grad * whole.out.to(dtype)).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - delta)
        factor, grad_products = call.factor, grad_scores
        if call.change is not None:
            grad_products = grad_scores * _masked(call, call.change.slope(_products(call)))
        dq = torch.matmul(grad_products, repeat_heads(key.to(dtype), num_heads)) * factor
        dk = torch.matmul(grad_products.transpose(-1, -2), query.to(dtype)) * factor
        dk, dv = sum_heads(dk, key.shape[1]), sum_heads(dv, key.shape[1])
        if self.needs_bias_grad:
            assert call.bias is not None
            dims = [dim for dim in (0, 1) if call.bias.shape[dim] == 1]
            self.bias_grad = grad_scores.sum(dims, keepdim=True) if dims else grad_scores
        return dq, dk, dv


def _scores(call: TileCall) -> Tensor:
    scores = _products(call)
    if call.change is not None:
        # What has overflowed where there is no pair would be no number.
        scores = _masked(call, call.change.value(scores))
    return scores if call.bias is None else scores + call.bias.to(scores.dtype)


def _products(call: TileCall) -> Tensor:
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    wide_key = repeat_heads(call.key.to(dtype), call.query.shape[1])
    return torch.matmul(call.query.to(dtype), wide_key.transpose(-1, -2)) * call.factor


def _masked(call: TileCall, numbers: Tensor) -> Tensor:
    """Replace numbers of pairs that do not exist by 0."""
    return numbers if call.bias is None else numbers.masked_fill(call.bias == -float("inf"), 0.0)
