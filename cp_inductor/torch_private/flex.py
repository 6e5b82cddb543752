"""What is private of FlexAttention: how its functions of one score are called for all of them.

Read in torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def scores_changed(
    score_mod: Callable[..., Tensor],
    mask_mod: Callable[..., Tensor],
    scores: Tensor,
    of_score_mod: Sequence[Any],
    of_mask_mod: Sequence[Any],
) -> Tensor:
    """Return what FlexAttention takes the softmax of, -inf where there is no pair.

    As `_math_attention_inner` (torch._higher_order_ops.flex_attention), with its
    `_vmap_for_bhqkv` (torch.nn.attention.flex_attention) and `TransformGetItemToIndex`
    (torch._dynamo._trace_wrapped_higher_order_op).

    Args:
        score_mod: (score, b, h, q, k, *captured) -> score, of scalar tensors.
        mask_mod: (b, h, q, k, *captured) -> bool.
        scores: (B, H, S, T), scaled.
        of_score_mod, of_mask_mod: what they have captured.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    flex: Any = import_module("torch.nn.attention.flex_attention")
    indices = [torch.arange(size, device=scores.device) for size in scores.shape]
    to_mask = flex._vmap_for_bhqkv(mask_mod, prefix=(), suffix=(None,) * len(of_mask_mod))
    with TransformGetItemToIndex():
        allowed = to_mask(*indices, *of_mask_mod)
    changed = bias_at(score_mod, scores, indices, of_score_mod)
    return torch.where(allowed, changed, scores.new_full((), -float("inf")))


def has_blocks(block_mask: Sequence[Any]) -> bool:
    """Whether the BlockMask of a call has blocks, and not one that is longer than any sequence.

    That is what a call without a BlockMask gets: `_create_empty_block_mask`.

    Args:
        block_mask: an argument of the op, as `BlockMask.as_tuple` makes it.
    """
    flex: Any = import_module("torch.nn.attention.flex_attention")
    *_, of_queries, of_keys, _ = block_mask
    return min(of_queries, of_keys) < flex._LARGE_SPARSE_BLOCK_SIZE


def bias_at(
    score_mod: Callable[..., Tensor],
    score: Tensor,
    indices: Sequence[Tensor],
    captured: Sequence[Any],
) -> Tensor:
    """Return what a function of one score makes of scores, or of one everywhere; differentiable.

    As `scores_changed`, by `_vmap_for_bhqkv`.

    Args:
        score_mod: (score, b, h, q, k, *captured) -> score, of scalar tensors.
        score: (), or (B, H, S, T).
        indices: of batch entries (B,), heads (H,), queries (S,) and keys (T,).
        captured: what the function has captured.

    Returns:
        (B, H, S, T).
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    flex: Any = import_module("torch.nn.attention.flex_attention")
    shape = [index.shape[0] for index in indices]
    call = flex._vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(captured))
    with TransformGetItemToIndex():
        bias: Tensor = call(score.expand(shape), *indices, *captured)
    return bias


@contextmanager
def flex_gradients_on_cpu() -> Iterator[None]:
    """Within this context, let flex_attention take CPU tensors that require a gradient.

    `_validate_device` (torch.nn.attention.flex_attention) refuses them before Dynamo sees the op.
    Its other checks stay. Dynamo guards which function the module has, so that nothing compiled
    within is used outside.
    """
    flex: Any = import_module("torch.nn.attention.flex_attention")
    original = flex._validate_device

    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.device.type != "cpu":
            original(query, key, value)

    flex._validate_device = validate
    try:
        yield
    finally:
        flex._validate_device = original
