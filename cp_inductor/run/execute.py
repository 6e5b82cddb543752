"""The one description of what a rank does of an attention: run it, or trace it and inline it.

    forward     fetch 0 . [start fetch i+1 . tiles i . start home i . wait fetch i+1] . combine
    backward    the same; what goes home are gradients

The eager kernels of the op pair call these functions on tensors; `lower_attention` calls them on
fakes and inlines the trace.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from cp_inductor.run import view_executor
from cp_inductor.run.attention import Attention


def run_forward(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, *extras: Tensor
) -> list[Tensor]:
    """Attend to the keys of all ranks.

    Args:
        attention: what to compute and among whom.
        query: (B, H, S, D), this rank's shard, any strides.
        key, value: (B, G, T, D), this rank's shards.
        extras: see `Extras`; tables, seed.

    Returns:
        out (B, H, S, D) in the input dtype; lse (B, H, S) over the keys of all ranks; and the
        buffers of the exchanges that are kept for the backward.
    """
    return view_executor.attend(attention, query, key, value, extras)


def run_backward(
    attention: Attention,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Tensor,
) -> list[Tensor]:
    """Differentiate `run_forward`.

    Args:
        attention: as in the forward.
        grad_out, query, out: (B, H, S, D), this rank's shards.
        key, value: (B, G, T, D), this rank's shards. Of these and query nothing but the shape and
            dtype is read unless `reads_shard`.
        lse: (B, H, S), over the keys of all ranks.
        rest: the extras of the forward, and the buffers that it kept.

    Returns:
        Gradients of query, key and value in their shapes and dtypes, summed in float32; and of the
        bias, if there is one.
    """
    extras, kept = rest[: attention.num_extras], rest[attention.num_extras :]
    tensors = (grad_out, query, key, value, out, lse)
    return view_executor.differentiate(attention, *tensors, extras, kept)
