"""The op pair that every path meets: cp_inductor::attention and cp_inductor::attention_backward.

    attention(query, key, value, is_causal, scale, kernel, group_name) -> (out, lse)
    attention_backward(grad_out, query, key, value, out, lse, ...) -> (dq, dk, dv)

Local shards in, local shards out. Captured before AOTAutograd, the op brings its own autograd, so
that the partitioner saves q, k, v, out and lse, as flash attention does, and never weighs a
collective. Wherever it is met unlowered (eager, another backend, `config.enabled = False`) its
kernel runs the very function that `lower_attention` traces.

Shapes: see `cp_inductor.ring`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_inductor.kernels import Partial, get_kernel
from cp_inductor.plan import RingStep, TileMask, plan_ring
from cp_inductor.ring import Ring, combine, ring_backward, ring_forward, sum_grads
from cp_inductor.torch_private import rank_and_size

__all__ = ["attention", "attention_backward"]


@torch.library.custom_op("cp_inductor::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    kernel: str,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Attend from this rank's queries to the keys of all ranks of a process group.

    Args:
        query: (B, H, S, D), this rank's shard; ranks hold contiguous, equal pieces in rank order.
        key, value: (B, G, T, D), this rank's shards, G dividing H; causal needs S == T.
        is_causal: mask keys of later global positions.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: see `cp_inductor.kernels.choose_kernel`.
        group_name: c10d name of the process group, the same on all its ranks.

    Returns:
        out: (B, H, S, D) in the dtype, and with the strides, that the kernel gives its output.
        lse: (B, H, S), log of the sum of exponentials over all keys; not differentiable.
    """
    return ring_forward(Ring(is_causal, scale, kernel, group_name), query, key, value)


@torch.library.custom_op("cp_inductor::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
    kernel: str,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `attention`: (dq, dk, dv), shapes and dtypes of query, key and value."""
    ring = Ring(is_causal, scale, kernel, group_name)
    return ring_backward(ring, grad_out, query, key, value, out, lse)


@attention.register_fake
def _fake_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    kernel: str,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    # One tile, and whether there are several to combine, decide the strides.
    num_tiles = sum(step.mask is not TileMask.EMPTY for step in _plan(is_causal, group_name))
    partial = get_kernel(kernel).forward(query, key, value, is_causal=is_causal, scale=scale)
    return combine([partial] * min(2, num_tiles))


@attention_backward.register_fake
def _fake_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
    kernel: str,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    steps = _plan(is_causal, group_name)
    num_tiles = sum(step.mask is not TileMask.EMPTY for step in steps)
    num_home = 1 + sum(step.give_back.num_received for step in steps if step.give_back)
    dq, dk, dv = get_kernel(kernel).backward(
        grad_out, query, key, value, out, lse, is_causal=is_causal, scale=scale
    )
    grad_key, grad_value = (sum_grads([grad] * min(2, num_home)) for grad in (dk, dv))
    return sum_grads([dq] * min(2, num_tiles)), grad_key, grad_value


def _plan(is_causal: bool, group_name: str) -> tuple[RingStep, ...]:
    return plan_ring(*rank_and_size(group_name), is_causal=is_causal)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Partial) -> None:
    query, key, value, *ctx.arguments = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv = attention_backward(grad_out, *ctx.saved_tensors, *ctx.arguments)
    return dq, dk, dv, *[None] * len(ctx.arguments)


attention.register_autograd(_backward, setup_context=_setup_context)
