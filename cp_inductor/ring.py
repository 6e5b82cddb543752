"""The one description of ring attention: run it, or trace it and inline what it did.

    forward     pack kv . start . tile 0 . wait . start . tile 1 . wait . tile 2 . combine
    backward    the same, and each tile's (dk, dv) is on its way home while the next tile runs

The eager kernels of the op pair call these functions on tensors; `lower_attention` calls them on
fakes and inlines the trace. Collectives are emitted as a start and a wait, never through the
functional-collective wrappers, which put the wait right behind its start when traced.

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim.
A block is a key and a value, or their gradients, stacked: (2, B, G, T, D), the unit that travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from cp_inductor.kernels import Partial, get_kernel
from cp_inductor.plan import Exchange, RingStep, TileMask, plan_ring
from cp_inductor.torch_private import rank_and_size

__all__ = ["Ring", "combine", "ring_backward", "ring_forward", "sum_grads"]

# Partials that one kernel combines. More are combined in groups, which bounds both the tensors
# kept alive and the arguments of the generated kernel.
MAX_COMBINED = 8


@dataclass(frozen=True, slots=True)
class Ring:
    """Everything about one sequence-sharded attention but its tensors.

    Attributes:
        is_causal: queries see keys of the same or earlier global positions.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: name for `kernels.get_kernel`.
        group_name: c10d name of the process group behind the sequence axis.
    """

    is_causal: bool
    scale: float | None
    kernel: str
    group_name: str

    def plan(self) -> tuple[RingStep, ...]:
        """Plan this rank's part."""
        rank, world_size = rank_and_size(self.group_name)
        return plan_ring(rank, world_size, is_causal=self.is_causal)


def ring_forward(ring: Ring, query: Tensor, key: Tensor, value: Tensor) -> Partial:
    """Attend to the keys of all ranks.

    Args:
        ring: what to compute and among whom.
        query: (B, H, S, D), this rank's shard, any strides.
        key, value: (B, G, T, D), this rank's shards; T may differ from S unless causal.

    Returns:
        out (B, H, S, D) in the input dtype, lse (B, H, S) over the keys of all ranks.
    """
    kernel, steps = get_kernel(ring.kernel), ring.plan()
    block = _pack(key, value) if _is_sent(steps[0].rotate) else None
    partials = []
    for index, step in enumerate(steps):
        arriving = _start(step.rotate, block, key, ring)
        if step.mask is not TileMask.EMPTY:
            # The own tile reads key and value where they lie and does not wait for the packing.
            tile_key, tile_value = (key, value) if index == 0 else _unpack(block)
            is_causal = step.mask is TileMask.CAUSAL
            partials.append(
                kernel.forward(query, tile_key, tile_value, is_causal=is_causal, scale=ring.scale)
            )
        if arriving is not None:
            block = _wait(arriving)
    return combine(partials)


def ring_backward(
    ring: Ring,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `ring_forward`.

    Args:
        ring: as in the forward.
        grad_out, query, out: (B, H, S, D), this rank's shards.
        key, value: (B, G, T, D), this rank's shards.
        lse: (B, H, S), over the keys of all ranks.

    Returns:
        Gradients of query, key and value in their shapes and dtypes, summed in float32.
    """
    kernel, steps = get_kernel(ring.kernel), ring.plan()
    block = _pack(key, value) if _is_sent(steps[0].rotate) else None
    grad_queries, grad_keys, grad_values = [], [], []
    homeward = None
    for index, step in enumerate(steps):
        arriving = _start(step.rotate, block, key, ring)
        grad_block = None
        if step.mask is not TileMask.EMPTY:
            tile_key, tile_value = (key, value) if index == 0 else _unpack(block)
            is_causal = step.mask is TileMask.CAUSAL
            dq, dk, dv = kernel.backward(
                grad_out,
                query,
                tile_key,
                tile_value,
                out,
                lse,
                is_causal=is_causal,
                scale=ring.scale,
            )
            grad_queries.append(dq)
            if index == 0:
                grad_keys.append(dk)
                grad_values.append(dv)
            else:
                grad_block = _pack(dk, dv)
        if homeward is not None:
            # What the step before gave back was in flight over this step's tile.
            _collect(_wait(homeward), grad_keys, grad_values)
        homeward = _start(step.give_back, grad_block, key, ring)
        if arriving is not None:
            block = _wait(arriving)
    if homeward is not None:
        _collect(_wait(homeward), grad_keys, grad_values)
    return sum_grads(grad_queries), sum_grads(grad_keys), sum_grads(grad_values)


def combine(partials: Sequence[Partial]) -> Partial:
    """Merge partials over disjoint keys into the result over all of them.

    lse = log sum exp(lse_i), out = sum exp(lse_i - lse) out_i, in float32 (float64 for float64):
    each partial is read once and the result written once, where a running accumulator would be
    read and written at every step (Milakov and Gimelshein 2018, arXiv 1805.02867, gives the
    algebra). A row with lse_i = -inf, which saw no key, counts for nothing; a row that saw none
    in any partial has out 0 and lse -inf.

    Args:
        partials: at least one, each out (B, H, S, D) and lse (B, H, S).

    Returns:
        out in the dtype of the partials' out, lse in the dtype of theirs.
    """
    if len(partials) == 1:
        return partials[0]
    out_dtype, lse_dtype = partials[0].out.dtype, partials[0].lse.dtype
    # Groups hand on a result that is not yet rounded to the output dtype.
    while len(partials) > MAX_COMBINED:
        partials = [_combine_group(partials[:MAX_COMBINED]), *partials[MAX_COMBINED:]]
    out, lse = _combine_group(partials)
    return Partial(out.to(out_dtype), lse.to(lse_dtype))


def _combine_group(partials: Sequence[Partial]) -> Partial:
    dtype = _accumulation_dtype(partials[0].out)
    lses = [partial.lse.to(dtype) for partial in partials]
    highest = reduce(torch.maximum, lses)
    # A row that saw no key at all: any finite reference keeps exp(-inf - reference) = 0.
    highest = highest.masked_fill(highest == -float("inf"), 0.0)
    weights = [torch.exp(lse - highest) for lse in lses]
    total = reduce(torch.add, weights)
    # Dividing by the total, the weights add up to 1 whatever the lse was rounded to.
    divisor = total.masked_fill(total == 0, 1.0)
    # out first: its strides, not those of the lse, are to be the strides of the result.
    weighted = [
        partial.out.to(dtype) * (weight / divisor).unsqueeze(-1)
        for partial, weight in zip(partials, weights, strict=True)
    ]
    lse = torch.log(total) + highest
    return Partial(reduce(torch.add, weighted), lse)


def sum_grads(grads: Sequence[Tensor]) -> Tensor:
    """Add gradients of one shape and dtype in float32 (float64 for float64), in one pass."""
    if len(grads) == 1:
        return grads[0]
    dtype = _accumulation_dtype(grads[0])
    total = grads[0].to(dtype)
    for grad in grads[1:]:
        total = total + grad.to(dtype)
    return total.to(grads[0].dtype)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.stack((key, value))


def _is_sent(exchange: Exchange | None) -> bool:
    """Whether this rank gives anything to an exchange."""
    return exchange is not None and exchange.num_sent > 0


def _unpack(block: Tensor | None) -> tuple[Tensor, Tensor]:
    assert block is not None
    key, value = block.unbind()
    return key, value


def _start(
    exchange: Exchange | None, block: Tensor | None, key: Tensor, ring: Ring
) -> Tensor | None:
    """Start an exchange of the block, in which a rank takes part also with nothing to give."""
    if exchange is None:
        return None
    if not _is_sent(exchange):
        block = key.new_empty((0, *key.shape))
    # Splits count entries of dim 0, of which a block has two.
    receives, sends = ([2 * n for n in side] for side in (exchange.receives, exchange.sends))
    started: Tensor = torch.ops._c10d_functional.all_to_all_single(
        block, receives, sends, ring.group_name
    )
    return started


def _wait(started: Tensor) -> Tensor:
    """Wait for an exchange, also where it brings nothing: its input must outlive it."""
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return waited


def _collect(block: Tensor, grad_keys: list[Tensor], grad_values: list[Tensor]) -> None:
    """Note the gradient of this rank's own keys and values that came home, if one did."""
    if block.shape[0]:
        dk, dv = _unpack(block)
        grad_keys.append(dk)
        grad_values.append(dv)
