"""Assign ranks to the cells of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_inductor.plan.batch_cells import Cells
from cp_inductor.plan.batch_chunks import Chunks


@dataclass(frozen=True, slots=True)
class Prices:
    """What a token costs, in the elements of a token's K and V.

    Attributes:
        query_in: q, forward; q and the gradient of out, backward.
        query_home: out, forward; dq, backward.
        key_in: k and v, forward and again backward.
        key_home: their gradients.
    """

    query_in: float
    query_home: float
    key_in: float = 2.0
    key_home: float = 1.0

    @staticmethod
    def of(num_heads: int, num_kv_heads: int) -> Prices:
        """Return the prices of an attention. The statistics of rows hardly count."""
        ratio = num_heads / (2 * num_kv_heads)
        return Prices(3 * ratio, 2 * ratio)


def assign_ranks(
    cells: Cells, queries: Chunks, keys: Chunks, world_size: int, prices: Prices
) -> np.ndarray:
    """Return the rank of each cell."""
    return queries.rank[cells.query].copy()
