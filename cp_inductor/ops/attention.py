"""The op pair that every path meets: cp_inductor::attention and cp_inductor::attention_backward.

    attention(query, key, value, extras, recipe, ...) -> [out, lse, *kept]
    attention_backward(grad_out, query, key, value, out, lse, extras, kept, ...) -> [dq, dk, dv]

Local shards in, local shards out. Captured before AOTAutograd, the op brings its own autograd, so
that the partitioner saves q, k, v, out and lse, as flash attention does, and never weighs a
collective. Wherever it is met unlowered (eager, another backend, `config.enabled = False`) its
kernel runs the very function that `lower_attention` traces.

Shapes: see `cp_inductor.run.execute`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cp_inductor.plan import Recipe, backward_plan, forward_plan
from cp_inductor.run.attention import Attention
from cp_inductor.run.execute import run_backward, run_forward
from cp_inductor.run.own_transfers import reads_shard
from cp_inductor.tiles.stand_in import fold_lse_gradient
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.trust.agreement import agreed
from cp_inductor.trust.failures import named_steps


@torch.library.custom_op("cp_inductor::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    extras: list[Tensor],
    recipe: str,
    rank: int,
    scale: float | None,
    kernel: str,
    group_name: str,
    dropout_p: float,
    has_bias: bool,
    kernel_options: str = "",
) -> list[Tensor]:
    """Attend from this rank's queries to the keys of all ranks of a process group.

    Args:
        query: (B, H, S, D), this rank's shard.
        key, value: (B, G, T, D), this rank's shards, G dividing H; causal needs S == T.
        extras: what the mask reads, and the seed of dropout; see `Extras`.
        recipe: text of a resolved `cp_inductor.plan.Recipe`, the same on all ranks.
        rank: this process's position among the ranks of the recipe.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: see `cp_inductor.tiles.kernel_table.choose_kernel`.
        group_name: c10d name of the process group, the same on all its ranks.
        dropout_p: probability with which a probability is dropped; then the last extra is a seed.
        has_bias: the last table is a bias that gets a gradient.
        kernel_options: for the templates of tiles under a mask on CUDA; see `FlexCUDA`.

    Returns:
        out: (B, H, S, D) in the dtype of query.
        lse: (B, H, S), log of the sum of exponentials over all keys.
        kept: flat buffers of what was fetched, as many as the recipe keeps; not differentiable.
    """
    this = Attention.of(
        recipe, rank, scale, kernel, group_name, dropout_p, has_bias, kernel_options
    )
    name = "cp_inductor::attention"
    with agreed(this, query, key, extras, site=name), named_steps(this, "forward", name):
        return run_forward(this, query, key, value, *extras)


@torch.library.custom_op("cp_inductor::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: list[Tensor],
    kept: list[Tensor],
    recipe: str,
    rank: int,
    scale: float | None,
    kernel: str,
    group_name: str,
    dropout_p: float,
    has_bias: bool,
    kernel_options: str = "",
) -> list[Tensor]:
    """Differentiate `attention`: [dq, dk, dv], and dbias if there is one, shaped as they are."""
    this = Attention.of(
        recipe, rank, scale, kernel, group_name, dropout_p, has_bias, kernel_options
    )
    with named_steps(this, "backward", "cp_inductor::attention"):
        return list(run_backward(this, grad_out, query, key, value, out, lse, *extras, *kept))


# Fakes run the same functions: what strides results have depends on the rank's part of the plan.
attention.register_fake(attention._init_fn)
attention_backward.register_fake(attention_backward._init_fn)


FORWARD: Any = torch.ops.cp_inductor.attention.default
BACKWARD: Any = torch.ops.cp_inductor.attention_backward.default


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, extras, *ctx.arguments = inputs
    out, *rest = output
    ctx.num_extras, ctx.key_shape = len(extras), key.shape
    shards = [query, key, value] if reads_shard(Attention.of(*ctx.arguments)) else []
    ctx.num_shards = len(shards)
    ctx.save_for_backward(*shards, out, rest[0], *extras, *rest[1:])
    ctx.mark_non_differentiable(*rest[1:])
    # A graph asks for its gradient only if something reads lse.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # asked for once: hooks may recompute them
    shards, (out, lse, *rest) = saved[: ctx.num_shards], saved[ctx.num_shards :]
    # Nothing but their shapes is asked for where they were not saved.
    query, key, value = shards or (out, *[out.new_empty(()).expand(ctx.key_shape)] * 2)
    extras, kept = rest[: ctx.num_extras], rest[ctx.num_extras :]
    grad_out, grad_lse = grads[:2]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        out, grad_out = fold_lse_gradient(out, grad_out, grad_lse)
    tensors = (query, key, value, out, lse, extras, kept)
    dq, dk, dv, *of_bias = attention_backward(grad_out, *tensors, *ctx.arguments)
    of_extras: list[Tensor | None] = [None] * len(extras)
    if of_bias:
        # The last table; behind it there is only the seed of a dropout.
        *_, dropout_p, _, _ = ctx.arguments
        of_extras[-2 if dropout_p else -1] = of_bias[0]
    *_, kernel_options = ctx.arguments
    # Torch counts no argument that has its default.
    num_arguments = len(ctx.arguments) - (kernel_options == "")
    return dq, dk, dv, of_extras, *[None] * num_arguments


run_uncompiled(_backward)
attention.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.cp_inductor.attention)
def _flops(query: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Count what this rank computes, for FlopCounterMode and for memory budgets that weigh it."""
    recipe, rank, *_ = args[3:]
    return query[0] * forward_plan(Recipe.parse(recipe)).flops(rank)


@register_flop_formula(torch.ops.cp_inductor.attention_backward)
def _backward_flops(grad_out: torch.Size, *args: Any, **kwargs: Any) -> int:
    recipe, rank, *_ = args[7:]
    return grad_out[0] * backward_plan(Recipe.parse(recipe)).flops(rank)
