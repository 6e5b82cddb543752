"""Call the ops of flex attention, forward and backward, on one device.

Read in torch 2.13.0 and 2.15.0.

The ops are higher-order: a mask and a score function are traced into subgraphs, which Inductor
generates into its Triton templates. Their arguments change between versions: `BlockMask` knows how
many entries its tuple has. They give the log of sums in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._higher_order_ops.flex_attention  # registers the ops
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions

FLEX_FORWARD = torch.ops.higher_order.flex_attention
FLEX_BACKWARD = torch.ops.higher_order.flex_attention_backward

# As `flex_attention` passes them by default (`_apply_kernel_options`, next to it).
_OPTIONS: dict[str, Any] = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
# The template for decoding, which few queries would get, is not what the tables are for.
_OPTIONS |= (
    {"BACKEND": "TRITON"}
    if "BACKEND" in FlexKernelOptions.__annotations__
    else {"FORCE_USE_FLEX_ATTENTION": True}
)

# What users may say of how the templates compute (`FlexKernelOptions`), also for one direction.
_TUNED = (
    *("num_warps", "num_stages", "USE_TMA", "PRESCALE_QK"),
    *("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
    *("kpack", "matrix_instr_nonkdim", "waves_per_eu"),
)
TUNING = frozenset(f"{direction}{name}" for direction in ("", "fwd_", "bwd_") for name in _TUNED)


@dataclass(frozen=True, slots=True)
class Flex:
    """What is computed of query, key and value.

    Attributes:
        block_mask: its mask_mod is called with b, h, m, n and `mask_buffers`.
        score_mod: called with a scaled score, b, h, m, n and `score_buffers`.
        slope: its derivative by the score, of the same arguments; None is 1.
        scale: of the scores.
        score_buffers, mask_buffers: tensors that the functions read.
        options: of the templates, of `TUNING`, beside those that say what is computed.
    """

    block_mask: BlockMask
    score_mod: Callable[..., Tensor]
    slope: Callable[..., Tensor] | None
    scale: float
    score_buffers: tuple[Tensor, ...]
    mask_buffers: tuple[Tensor, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def flex_forward(query: Tensor, key: Tensor, value: Tensor, flex: Flex) -> tuple[Tensor, Tensor]:
    """Attend to the pairs of a block mask.

    Args:
        query: (B, H, S, D).
        key, value: (B, G, T, D).
        flex: what to compute; its blocks by columns are not read.

    Returns:
        out (B, H, S, D) and lse (B, H, S), natural log, float32 at least; of a row without a pair
        0 and -inf.
    """
    out, lse, *_ = FLEX_FORWARD(
        query,
        key,
        value,
        flex.score_mod,
        flex.block_mask.as_tuple(),
        flex.scale,
        {**_OPTIONS, **flex.options},
        flex.score_buffers,
        flex.mask_buffers,
    )
    return out, lse * math.log(2)


def flex_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    flex: Flex,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `flex_forward`, of whose rows this may be a part of the keys.

    The op computes <out, grad_out> in the dtype of the inputs, which is too coarse for rows that
    attend to one key. So it is given no out, and delta as if it were the gradient of the lse.

    Args:
        query, key, value, flex: as there.
        grad_out: (B, H, S, D).
        lse: (B, H, S), of whole rows, natural log.
        delta: (B, H, S), <out, grad_out>, in float32 (float64 for float64).

    Returns:
        Gradients of query, key and value.
    """

    def joint(*args: Tensor) -> list[Tensor | None]:
        """Return the gradients of a score, of the four indices and of the buffers."""
        *given, grad = args[:6]
        if flex.slope is not None:
            grad = grad * flex.slope(*given, *args[6:])
        return [grad, *[None] * (4 + len(flex.score_buffers))]

    grads: Any = FLEX_BACKWARD(
        query,
        key,
        value,
        torch.zeros_like(grad_out),
        lse / math.log(2),
        grad_out,
        delta * -math.log(2),
        flex.score_mod,
        joint,
        flex.block_mask.as_tuple(),
        flex.scale,
        {**_OPTIONS, **flex.options},
        flex.score_buffers,
        flex.mask_buffers,
    )
    dq, dk, dv, *_ = grads
    return dq, dk, dv
