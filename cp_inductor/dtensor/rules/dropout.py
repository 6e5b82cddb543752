"""Seeds by global position, so that dropout does not depend on how many ranks hold the tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cp_inductor.dtensor.axis import first_batch_and_head
from cp_inductor.tiles.dropout import BATCH_STRIDE


def seed_of_shard(seed: Tensor, like: Tensor) -> Tensor:
    """Return the seed with which a rank draws its part of the dropout of the whole tensor.

    Args:
        seed: () int64, the same on every rank.
        like: the query (B, H, S, D), a DTensor.
    """
    batch, head = first_batch_and_head(like)
    offset: Any = batch * BATCH_STRIDE + head
    own: Tensor = seed + offset
    return own
