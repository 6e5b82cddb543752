"""Call the ops of flex attention on one device, and its functions of one score for all scores.

Read in torch 2.13.0 and 2.15.0. The ops are higher-order: a mask and a score function are traced
into subgraphs, which Inductor generates into its Triton templates. Their arguments change between
versions: `BlockMask` knows how many entries its tuple has. They give the log of sums in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch._higher_order_ops.flex_attention  # registers the ops
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask

# Whose private names mypy does not know.
_MODULE: Any = import_module("torch.nn.attention.flex_attention")

FLEX_FORWARD = torch.ops.higher_order.flex_attention
FLEX_BACKWARD = torch.ops.higher_order.flex_attention_backward

# As `flex_attention` passes them by default (`_apply_kernel_options`, next to it). The template for
# decoding, which few queries would get, is not what the tables are for.
_OPTIONS: dict[str, Any] = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}

# What users may say of how the templates compute (`FlexKernelOptions`), also for one direction.
_TUNED = (
    *("num_warps", "num_stages", "USE_TMA", "PRESCALE_QK"),
    *("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
    *("kpack", "matrix_instr_nonkdim", "waves_per_eu"),
)
TUNING = frozenset(f"{direction}{name}" for direction in ("", "fwd_", "bwd_") for name in _TUNED)


@dataclass(frozen=True, slots=True)
class Flex:
    """What is computed of query, key and value."""

    block_mask: BlockMask  # its mask_mod is called with b, h, m, n and `mask_buffers`
    score_mod: Callable[..., Tensor]  # called with a scaled score, b, h, m, n and `score_buffers`
    # Its derivative by the score, of the same arguments; None is 1.
    slope: Callable[..., Tensor] | None
    scale: float  # of the scores
    # score_buffers and mask_buffers: tensors that the functions read.
    score_buffers: tuple[Tensor, ...]
    mask_buffers: tuple[Tensor, ...]
    # Those of the templates, of `TUNING`, beside those that say what is computed.
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, ...]:
        """Return what both ops take behind their functions of scores."""
        options = {**_OPTIONS, **self.options}
        buffers = (self.score_buffers, self.mask_buffers)
        return self.block_mask.as_tuple(), self.scale, options, *buffers


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
    out, lse, *_ = FLEX_FORWARD(query, key, value, flex.score_mod, *flex.arguments())
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
        *tensors, grad = args[:6]
        if flex.slope is not None:
            grad = grad * flex.slope(*tensors, *args[6:])
        return [grad, *[None] * (4 + len(flex.score_buffers))]

    log_2 = math.log(2)
    tensors = (query, key, value, torch.zeros_like(grad_out), lse / log_2, grad_out, delta * -log_2)
    grads: Any = FLEX_BACKWARD(*tensors, flex.score_mod, joint, *flex.arguments())
    dq, dk, dv, *_ = grads
    return dq, dk, dv


def scores_changed(
    score_mod: Callable[..., Tensor],
    mask_mod: Callable[..., Tensor],
    scores: Tensor,
    of_score_mod: Sequence[Any],
    of_mask_mod: Sequence[Any],
) -> Tensor:
    """Return what FlexAttention takes the softmax of, -inf where there is no pair.

    As `_math_attention_inner` (torch._higher_order_ops.flex_attention).

    Args:
        score_mod: (score, b, h, q, k, *captured) -> score, of scalar tensors.
        mask_mod: (b, h, q, k, *captured) -> bool.
        scores: (B, H, S, T), scaled.
        of_score_mod, of_mask_mod: what they have captured.
    """
    indices = [torch.arange(size, device=scores.device) for size in scores.shape]
    to_mask = _MODULE._vmap_for_bhqkv(mask_mod, prefix=(), suffix=(None,) * len(of_mask_mod))
    with TransformGetItemToIndex():
        allowed = to_mask(*indices, *of_mask_mod)
    changed = bias_at(score_mod, scores, indices, of_score_mod)
    return torch.where(allowed, changed, scores.new_full((), -float("inf")))


def has_blocks(block_mask: Sequence[Any]) -> bool:
    """Whether the BlockMask of a call has blocks, and not one that is longer than any sequence.

    That is what a call without a BlockMask gets: `_create_empty_block_mask`. The op has it as
    `BlockMask.as_tuple` makes it.
    """
    *_, of_queries, of_keys, _ = block_mask
    return min(of_queries, of_keys) < _MODULE._LARGE_SPARSE_BLOCK_SIZE


def bias_at(
    score_mod: Callable[..., Tensor],
    score: Tensor,
    indices: Sequence[Tensor],
    captured: Sequence[Any],
) -> Tensor:
    """Return what a function of one score makes of scores, or of one everywhere; differentiable.

    Args:
        score_mod: (score, b, h, q, k, *captured) -> score, of scalar tensors.
        score: (), or (B, H, S, T).
        indices: of batch entries (B,), heads (H,), queries (S,) and keys (T,).
        captured: what the function has captured.

    Returns:
        (B, H, S, T).
    """
    shape = [index.shape[0] for index in indices]
    call = _MODULE._vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(captured))
    with TransformGetItemToIndex():
        return call(score.expand(shape), *indices, *captured)


@contextmanager
def flex_gradients_on_cpu() -> Iterator[None]:
    """Within this context, let flex_attention take CPU tensors that require a gradient.

    `_validate_device` (torch.nn.attention.flex_attention) refuses them before Dynamo sees the op.
    Its other checks stay. Dynamo guards which function the module has, so that nothing compiled
    within is used outside.
    """
    original = _MODULE._validate_device

    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.device.type != "cpu":
            original(query, key, value)

    with mock.patch.object(_MODULE, "_validate_device", validate):
        yield
