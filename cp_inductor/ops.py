"""The op pair that every path meets: cp_inductor::attention and cp_inductor::attention_backward.

    attention(query, key, value, recipe, scale, kernel, group_name) -> [out, lse, *kept]
    attention_backward(grad_out, query, key, value, out, lse, kept, ...) -> (dq, dk, dv)

Local shards in, local shards out. Captured before AOTAutograd, the op brings its own autograd, so
that the partitioner saves q, k, v, out and lse, as flash attention does, and never weighs a
collective. Wherever it is met unlowered (eager, another backend, `config.enabled = False`) its
kernel runs the very function that `lower_attention` traces.

Shapes: see `cp_inductor.execute`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_inductor.execute import Attention, run_backward, run_forward

__all__ = ["attention", "attention_backward"]


@torch.library.custom_op("cp_inductor::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: str,
    scale: float | None,
    kernel: str,
    group_name: str,
) -> list[Tensor]:
    """Attend from this rank's queries to the keys of all ranks of a process group.

    Args:
        query: (B, H, S, D), this rank's shard.
        key, value: (B, G, T, D), this rank's shards, G dividing H; causal needs S == T.
        recipe: text of a resolved `cp_inductor.plan.Recipe`, the same on all ranks.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: see `cp_inductor.kernels.choose_kernel`.
        group_name: c10d name of the process group, the same on all its ranks.

    Returns:
        out: (B, H, S, D) in the dtype of query.
        lse: (B, H, S), log of the sum of exponentials over all keys; not differentiable.
        kept: flat buffers of what was fetched, as many as the recipe keeps; not differentiable.
    """
    return run_forward(Attention.of(recipe, scale, kernel, group_name), query, key, value)


@torch.library.custom_op("cp_inductor::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: list[Tensor],
    recipe: str,
    scale: float | None,
    kernel: str,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `attention`: (dq, dk, dv), shapes and dtypes of query, key and value."""
    this = Attention.of(recipe, scale, kernel, group_name)
    return run_backward(this, grad_out, query, key, value, out, lse, *kept)


# Fakes run the same functions: what strides results have depends on the rank's part of the plan.
attention.register_fake(attention._init_fn)
attention_backward.register_fake(attention_backward._init_fn)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, *ctx.arguments = inputs
    out, *rest = output
    ctx.save_for_backward(query, key, value, out, *rest)
    ctx.mark_non_differentiable(*rest)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *kept = ctx.saved_tensors
    saved = (query, key, value, out, lse, kept)
    dq, dk, dv = attention_backward(grads[0], *saved, *ctx.arguments)
    return dq, dk, dv, *[None] * len(ctx.arguments)


attention.register_autograd(_backward, setup_context=_setup_context)
