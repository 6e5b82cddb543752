"""SDPA on sequence-sharded DTensors, without a compiler: the handlers DTensor calls.

    aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)     q, k, v: DTensor [Shard(2)]
      => wrap(cp_inductor::attention(q.to_local(), k.to_local(), v.to_local()))

Two things hang on them. Eager attention on such tensors is right. And Dynamo, which runs DTensor
on fakes to learn placements, gets through SDPA with the sequence still sharded. Whatever is not
sharded along the sequence goes DTensor's own way; for the CPU kernel, of which DTensor has no
rule up to torch 2.15, that way is registered here (batch and heads may be sharded).

Assumes: handlers are called below autograd, with the arguments of the aten op.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from cp_inductor.errors import CPError, UnsupportedAttention
from cp_inductor.execute import Attention, run_backward, run_forward
from cp_inductor.kernels import choose_kernel
from cp_inductor.limits import check_attention
from cp_inductor.ops import attention, attention_backward
from cp_inductor.recipes import Policy, make_recipe
from cp_inductor.sharding import SequenceAxis, axis_of_tensors, from_local_like
from cp_inductor.torch_private import (
    bind_arguments,
    dispatch_as_dtensor,
    has_dtensor_strategy,
    is_propagating_shapes,
    register_dtensor_handler,
    run_uncompiled,
)

__all__ = ["register_dtensor_attention"]

aten = torch.ops.aten

FORWARD_OPS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
BACKWARD_OPS = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


def register_dtensor_attention() -> None:
    """Teach DTensor attention along a sharded sequence; process-wide, idempotent."""
    run_uncompiled(_attend)
    run_uncompiled(_attend_backward)
    for op in FORWARD_OPS:
        register_dtensor_handler(op, _attend)
    for op in BACKWARD_OPS:
        register_dtensor_handler(op, _attend_backward)
    if not has_dtensor_strategy(FORWARD_OPS[0]):
        register_sharding(FORWARD_OPS[0])(_cpu_forward_shardings)
        register_sharding(BACKWARD_OPS[0])(_cpu_backward_shardings)


def _attend(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind_arguments(op, args, kwargs)
    query, key, value = bound["query"], bound["key"], bound["value"]
    try:
        axis = axis_of_tensors(query, key, value, site=_site(op))
        if axis is None:
            return dispatch_as_dtensor(op, args, kwargs)
        local = [tensor.to_local() for tensor in (query, key, value)]
        _check_supported(op, bound)
        this = _attention(op, bound, axis)
    except CPError:
        if not isinstance(query, DTensor) or not is_propagating_shapes(query.to_local()):
            raise
        # The graph pass is still to come. It refuses the same, and knows the source line.
        return _results_of(op, torch.empty_like(query), torch.empty_like(query[..., 0]), bound)
    if _is_traced(local[0]):
        out, lse = attention(*local, [], *this.arguments)
    else:
        out, lse = run_forward(this, *local)
    # lse is (B, H, S): the dims that are sharded are those of the query.
    return _results_of(op, from_local_like(out, query), from_local_like(lse, query), bound)


def _attend_backward(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    bound = bind_arguments(op, args, kwargs)
    query, key, value = bound["query"], bound["key"], bound["value"]
    axis = axis_of_tensors(query, key, value, site=_site(op))
    if axis is None:
        return dispatch_as_dtensor(op, args, kwargs)
    grad_out = bound["grad_out"] if "grad_out" in bound else bound["grad_out_"]
    grad_out = grad_out.redistribute(query.device_mesh, query.placements)
    tensors = (grad_out, query, key, value, bound["out"], bound["logsumexp"])
    local = [tensor.to_local() for tensor in tensors]
    this = _attention(op, bound, axis)
    if _is_traced(local[0]):
        grads = attention_backward(*local, [], [], *this.arguments)
    else:
        grads = run_backward(this, *local)
    wrapped = tuple(map(from_local_like, grads, (query, key, value)))
    return wrapped + (None,) * (len(op._schema.returns) - len(wrapped))


def _is_traced(local: Tensor) -> bool:
    """Whether a graph is to show the op. Run at once, its collectives show to dispatch modes."""
    return type(local) is not Tensor or torch.compiler.is_compiling()


def _attention(op: torch._ops.OpOverload, bound: dict[str, Any], axis: SequenceAxis) -> Attention:
    query, key, value = bound["query"], bound["key"], bound["value"]
    kernel = choose_kernel(query, key, value, dtype=query.dtype, site=_site(op))
    # Nothing is kept: what DTensor saves for the backward are the results of its own op.
    policy = replace(Policy.read({})[0], keep_bytes=0)
    recipe = make_recipe(
        policy,
        axis,
        query,
        key,
        rule="causal" if bound["is_causal"] else "full",
        dtype=query.dtype,
        site=_site(op),
    )
    return Attention(recipe, bound["scale"], kernel, axis.group_name)


def _check_supported(op: torch._ops.OpOverload, bound: dict[str, Any]) -> None:
    """Refuse what only a compiler sees through.

    Raises:
        UnsupportedAttention: a mask, dropout, or not 4 dims.
    """
    check_attention(query=bound["query"], key=bound["key"], site=_site(op))
    if bound.get("attn_mask") is not None or bound.get("attn_bias") is not None:
        raise UnsupportedAttention(
            site=_site(op),
            expected="attn_mask=None in eager attention over a sharded sequence",
            got="an attn_mask",
            remedy="compile the model, with backend='cp_inductor' or 'cp_aot_eager'",
        )
    if bound["dropout_p"]:
        raise UnsupportedAttention(
            site=_site(op),
            expected="dropout_p=0 in eager attention over a sharded sequence",
            got=f"dropout_p={bound['dropout_p']}",
            remedy="compile the model, with backend='cp_inductor' or 'cp_aot_eager'",
        )


def _site(op: torch._ops.OpOverload) -> str:
    return f"{op.name()} on DTensors"


def _results_of(
    op: torch._ops.OpOverload, out: Tensor, lse: Tensor, bound: dict[str, Any]
) -> tuple[Any, ...]:
    """Fill up the results of a kernel: lengths, and nothing for the state of a dropout."""
    lengths = {"max_q": bound["query"].shape[2], "max_k": bound["key"].shape[2]}
    rest = [lengths.get(returned.name) for returned in op._schema.returns[2:]]
    return out, lse, *rest


def _cpu_forward_shardings(*args: Any, **kwargs: Any) -> list[Any]:
    """Shardings on one mesh axis: outputs (out, lse) for inputs (query, key, value, ...)."""
    rest = [None] * (len(args) - 3)
    placements = (Replicate(), Shard(0), Shard(1))
    return [([p, p], [p, p, p, *rest]) for p in placements]


def _cpu_backward_shardings(*args: Any, **kwargs: Any) -> list[Any]:
    """Outputs (dq, dk, dv) for inputs (grad_out, query, key, value, out, lse, ...)."""
    rest = [None] * (len(args) - 6)
    placements = (Replicate(), Shard(0), Shard(1))
    return [([p, p, p], [p] * 6 + rest) for p in placements]
