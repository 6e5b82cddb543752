"""Call the ops of flex attention, forward and backward, on one device.

Read in torch 2.11.0, 2.13.0 and 2.15.0.

The ops are higher-order: a mask and a score function are traced into subgraphs, which Inductor
generates into its Triton templates. Their arguments change between versions: `BlockMask` knows how
many entries its tuple has. They give the log of sums in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._higher_order_ops.flex_attention  # registers the ops
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions

FLEX_FORWARD = torch.ops.higher_order.flex_attention
FLEX_BACKWARD = torch.ops.higher_order.flex_attention_backward

# The decoding template, for few queries, computes other blocks than the tables name.
_OPTIONS: dict[str, Any] = (
    {"BACKEND": "TRITON"}
    if "BACKEND" in FlexKernelOptions.__annotations__
    else {"FORCE_USE_FLEX_ATTENTION": True}
)

Mod = Callable[..., Tensor]


def flex_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    score_mod: Mod,
    scale: float,
    score_buffers: Sequence[Tensor],
    mask_buffers: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Attend to the pairs of a block mask.

    Args:
        query: (B, H, S, D).
        key, value: (B, G, T, D).
        block_mask: its mask_mod is called with b, h, m, n and `mask_buffers`.
        score_mod: called with a scaled score, b, h, m, n and `score_buffers`.
        scale: of the scores.
        score_buffers, mask_buffers: tensors that the functions read.

    Returns:
        out (B, H, S, D) and lse (B, H, S), natural log, float32 at least; of a row without a pair
        0 and -inf.
    """
    out, lse, *_ = FLEX_FORWARD(
        query,
        key,
        value,
        score_mod,
        block_mask.as_tuple(),
        scale,
        dict(_OPTIONS),
        tuple(score_buffers),
        tuple(mask_buffers),
    )
    return out, lse * math.log(2)


def flex_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    block_mask: BlockMask,
    score_mod: Mod,
    scale: float,
    score_buffers: Sequence[Tensor],
    mask_buffers: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `flex_forward`, of whose rows this may be a part of the keys.

    The op computes <out, grad_out> in the dtype of the inputs, which is too coarse for rows that
    attend to one key. So it is given no out, and delta as if it were the gradient of the lse.

    Args:
        query, key, value, block_mask, score_mod, scale, score_buffers, mask_buffers: as there.
            The score function adds to a score what does not depend on it.
        grad_out: (B, H, S, D).
        lse: (B, H, S), of whole rows, natural log.
        delta: (B, H, S), <out, grad_out>, in float32 (float64 for float64).

    Returns:
        Gradients of query, key and value.
    """

    def joint(*args: Tensor) -> list[Tensor | None]:
        """Return the gradients of a score, of the four indices and of the buffers."""
        return [args[5], *[None] * (4 + len(score_buffers))]

    grads: Any = FLEX_BACKWARD(
        query,
        key,
        value,
        torch.zeros_like(grad_out),
        lse / math.log(2),
        grad_out,
        delta * -math.log(2),
        score_mod,
        joint,
        block_mask.as_tuple(),
        scale,
        dict(_OPTIONS),
        tuple(score_buffers),
        tuple(mask_buffers),
    )
    dq, dk, dv, *_ = grads
    return dq, dk, dv
