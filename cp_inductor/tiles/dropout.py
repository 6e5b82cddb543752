"""Which probabilities dropout keeps: a hash of a seed and of a score's place in the attention.

So forward and backward, and all plans, drop the same scores. The seed contains the place of a
rank's batch entries and heads among all, see `cp_inductor.dtensor.axis.seed_of_shard`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# How far apart batch entries are before they are hashed: more than there are heads.
BATCH_STRIDE = 1 << 16

# How far apart keys are before they are hashed.
_KEY_STRIDE = 0x3C6EF35F


def draw_kept(seed: Tensor, places: Sequence[Tensor], p: float, dtype: torch.dtype) -> Tensor:
    """Return 1 / (1 - p) where a score's probability is kept, and 0 where it is dropped.

    Args:
        seed: () int64, of the first batch entry and head.
        places: indices of batch entries, heads, queries and keys, which broadcast to (B, H, S, T).
        p: of dropping one.
        dtype: of the result.
    """
    batch, heads, queries, keys = places
    of_head = _once(_hash(seed + batch * BATCH_STRIDE + heads))
    of_row = _once(_hash(of_head + queries))
    # This makes a number of an index. Inductor computes indices in int32 on a GPU.
    keys = keys & 0xFFFFFFFF
    word = _hash(of_row ^ (keys * _KEY_STRIDE & 0xFFFFFFFF))
    is_kept = word >= int(p * (1 << 32))
    return is_kept.to(dtype) * (1 / (1 - p) if p < 1 else 0.0)


def _hash(word: Tensor) -> Tensor:
    """Scramble 32 bits; no step leaves the range of int64, whose overflow is nobody's promise."""
    word = word & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    return (word >> 16) ^ word


def _once(word: Tensor) -> Tensor:
    """Return the same, behind a reduction: what is before it is not computed again by each reader.

    A hash reads every step twice, and Inductor writes out what is read as often as it is.
    """
    return word.unsqueeze(-1).expand(*word.shape, 16).amax(-1)
