"""The op pair that every path meets: cp_inductor::attention and cp_inductor::attention_backward.

    attention(query, key, value, extras, source, ...) -> [out, lse, *kept]
    attention_backward(grad_out, query, key, value, out, lse, extras, kept, ...) -> [dq, dk, dv]

Local shards in, local shards out. Captured before AOTAutograd, the op brings its own autograd, so
that the partitioner saves q, k, v, out and lse, as flash attention does, and never weighs a
collective. Wherever it is met unlowered (eager, another backend, `config.enabled = False`) its
kernel runs the very functions that `lower_attention` traces: `run_forward` and `run_backward`.

Its source says where the plan is from: a recipe, or each batch, whose plan is then among the
extras. The op of a plan per batch names no rank, so that all ranks have one graph.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from cp_inductor.kept import on_reset
from cp_inductor.plan import Recipe, backward_plan, forward_plan
from cp_inductor.run.attention import PER_BATCH, Attention
from cp_inductor.run.executor import run_backward, run_forward
from cp_inductor.run.records import reads_shard
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.kernels import empty_like_rows
from cp_inductor.tiles.stand_in import fold_lse_gradient
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.torch_private.tracing import tensors_in
from cp_inductor.trust.agreement import agreed
from cp_inductor.trust.exchanges import named_steps

# The arguments behind the tensors, of which `Attention.of` makes an attention.
_ARGUMENTS = (
    "str source, SymInt rank, float? scale, str kernel, str group_name, float dropout_p,"
    ' bool has_bias, str kernel_options=""'
)


@torch.library.custom_op(
    "cp_inductor::attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor[] extras, {_ARGUMENTS}) -> Tensor[]",
)
def attention(
    query: Tensor, key: Tensor, value: Tensor, extras: list[Tensor], *arguments: Any
) -> list[Tensor]:
    """Attend from this rank's queries to the keys of all ranks of a process group.

    It takes and returns the tensors of `run_forward`; G divides H, and causal needs S == T. Of the
    results, the buffers are not differentiable. The arguments are those of an `Attention`, its
    source as text; all but the rank are the same on all ranks.
    """
    spec, name = Attention.of(*arguments), "cp_inductor::attention"
    with agreed(spec, query, key, extras, site=name), named_steps(spec, "forward", name):
        return run_forward(spec, query, key, value, *extras)


@torch.library.custom_op(
    "cp_inductor::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
    f" Tensor[] extras, Tensor[] kept, {_ARGUMENTS}) -> Tensor[]",
)
def attention_backward(grad_out: Tensor, *rest: Any) -> list[Tensor]:
    """Differentiate `attention`: [dq, dk, dv], and dbias if there is one, shaped as they are."""
    *tensors, extras, kept = rest[: NUM_TENSORS[BACKWARD] - 1]
    spec = Attention.of(*rest[NUM_TENSORS[BACKWARD] - 1 :])
    with named_steps(spec, "backward", "cp_inductor::attention"):
        return run_backward(spec, grad_out, *tensors, *extras, *kept)


# Fakes of a recipe's attention run the same functions: what strides results have depends on the
# rank's part of the plan. What the batch decides is laid out alike on all ranks.
@attention.register_fake
def _(query: Tensor, *rest: Any) -> list[Tensor]:
    if Attention.of(*rest[NUM_TENSORS[FORWARD] - 1 :]).is_per_batch:
        of_lse = accumulation_dtype(query)
        return [empty_like_rows(query), empty_like_rows(query[..., 0], of_lse)]
    return _run_once(attention._init_fn, query, *rest)


@attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    if Attention.of(*rest[NUM_TENSORS[BACKWARD] - 4 :]).is_per_batch:
        return [empty_like_rows(tensor) for tensor in (query, key, value)]
    return _run_once(attention_backward._init_fn, grad_out, query, key, value, *rest)


_layouts = dict[Any, Any]()
on_reset(_layouts.clear)


def _run_once(function: Any, *arguments: Any) -> list[Tensor]:
    """Run a function on fakes; results of arguments laid out as before are laid out as before.

    A layer is traced several times, and its sizes are those of the other layers.
    """
    tensors = tensors_in(arguments)
    results: list[Tensor]
    if any(isinstance(size, torch.SymInt) for t in tensors for size in (*t.shape, *t.stride())):
        results = function(*arguments)
        return results
    key = function, _layout(arguments)
    if key not in _layouts:
        _layouts[key] = _layout(function(*arguments))
    like, made = tensors[0], _layouts[key]
    return [like.new_empty_strided(size, stride, dtype=dtype) for dtype, _, size, stride in made]


def _layout(value: Any) -> Any:
    """Return how tensors are laid out, also those in lists; other values unchanged."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout, value))
    if isinstance(value, Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride()
    return value


FORWARD: Any = torch.ops.cp_inductor.attention.default
BACKWARD: Any = torch.ops.cp_inductor.attention_backward.default

# How many arguments of each are tensors, or lists of them.
NUM_TENSORS: Mapping[object, int] = {FORWARD: 4, BACKWARD: 8}


def attention_of(node: fx.Node) -> Attention | None:
    """Return which attention a node of a graph is; None if it is none."""
    if node.target not in NUM_TENSORS:
        return None
    arguments: Any = node.args[NUM_TENSORS[node.target] :]
    return Attention.of(*arguments)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, extras, *ctx.arguments = inputs
    out, *rest = output
    ctx.num_extras, ctx.key_shape = len(extras), key.shape
    spec = Attention.of(*ctx.arguments)
    shards = [query, key, value] if spec.is_per_batch or reads_shard(spec) else []
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
def _flops(query: torch.Size, key: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Count what this rank computes, for FlopCounterMode and for memory budgets that weigh it."""
    source, rank, *_ = args[NUM_TENSORS[FORWARD] - 2 :]
    if source.startswith(PER_BATCH):
        return _flops_of_causal(query, key)
    return query[0] * forward_plan(Recipe.parse(source)).flops(rank)


@register_flop_formula(torch.ops.cp_inductor.attention_backward)
def _backward_flops(
    grad_out: torch.Size, query: torch.Size, key: torch.Size, *args: Any, **kwargs: Any
) -> int:
    source, rank, *_ = args[NUM_TENSORS[BACKWARD] - 3 :]
    if source.startswith(PER_BATCH):
        return 5 * _flops_of_causal(query, key) // 2
    return grad_out[0] * backward_plan(Recipe.parse(source)).flops(rank)


def _flops_of_causal(query: torch.Size, key: torch.Size) -> int:
    """Return what a rank computes of causal attention. What it really is, only the batch says."""
    batch, heads, length, head_dim = query
    return 2 * batch * heads * length * key[2] * head_dim
