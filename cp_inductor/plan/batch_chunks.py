"""Chunks of a batch: which rank stores which tokens, cut to pieces of at most so many tokens.

ranks of 300 and 200 tokens, chunks of 256, one entry
  => rank 0: tokens 0..255, 256..299     rank 1: tokens 300..499

Heads may be cut into groups. Each chunk is of one group then: the same tokens are as many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_inductor.plan.grid import spread

BLOCK = 128  # tokens of a side of a block, in which work is counted


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks, sorted by (rank, entry, group, position); arrays of int64 with one number per chunk.

    Attributes:
        rank: the rank that stores it.
        entry: its batch entry.
        group: its group of heads.
        first: the position of its first token along the sequence.
        length: its tokens, 1 to `size`. All but the last of a rank's entry are full.
        row: its first row in its rank's storage, whose rows are (entry, local token, group). The
            next token's is `num_groups` behind it.
        size: tokens of a full chunk, a multiple of BLOCK.
        num_groups: of heads.
    """

    rank: np.ndarray
    entry: np.ndarray
    group: np.ndarray
    first: np.ndarray
    length: np.ndarray
    row: np.ndarray
    size: int
    num_groups: int

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def num_blocks(self) -> np.ndarray:
        """The blocks of each chunk; the last may be short."""
        return -(-self.length // BLOCK)


def chunks_of(batch: int, lengths: Sequence[int], size: int, num_groups: int = 1) -> Chunks:
    """Cut the shards of all ranks into chunks.

    Args:
        batch: number of batch entries.
        lengths: the tokens of each rank, of one entry; may be 0 and need not be equal.
        size: tokens of a full chunk, a multiple of BLOCK.
        num_groups: of heads.
    """
    assert size > 0 and size % BLOCK == 0, size
    local = np.asarray(lengths, dtype=np.int64)
    start = np.cumsum(local) - local
    num_of_entry = -(-local // size)
    num_of_rank = num_of_entry * batch * num_groups
    rank, index = spread(num_of_rank)
    lane, number = np.divmod(index, np.maximum(1, num_of_entry)[rank])
    entry, group = np.divmod(lane, num_groups)
    token = number * size
    return Chunks(
        rank=rank,
        entry=entry,
        group=group,
        first=start[rank] + token,
        length=np.minimum(size, local[rank] - token),
        row=(entry * local[rank] + token) * num_groups + group,
        size=size,
        num_groups=num_groups,
    )
