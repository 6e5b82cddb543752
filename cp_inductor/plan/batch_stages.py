"""Assign stages to the cells of a batch: what is fetched for the next hides behind this one.

    stage 0        cells of a rank's own chunks: they need nothing
    stage 1, 2     what the cells need is fetched a stage earlier, about as much for each

A chunk is fetched for the first stage that needs it. A rank turns to the owners before it first,
the nearest ahead of the others, so that ranks do not all ask the same owner at once.
"""

from __future__ import annotations

import numpy as np

from cp_inductor.plan.batch_assign import Prices
from cp_inductor.plan.batch_cells import Cells
from cp_inductor.plan.batch_chunks import Chunks


def assign_stages(
    cells: Cells,
    rank: np.ndarray,
    queries: Chunks,
    keys: Chunks,
    world_size: int,
    stages: int,
    prices: Prices,
) -> np.ndarray:
    """Return the stage of each cell.

    Args:
        cells: of the batch.
        rank: of each cell.
        queries, keys: the chunks.
        world_size: number of ranks.
        stages: of what is fetched.
        prices: of what is fetched.
    """
    foreign_query = queries.rank[cells.query] != rank
    foreign_key = keys.rank[cells.key] != rank
    stage = np.zeros(len(rank), dtype=np.int64)
    far = np.flatnonzero(foreign_query | foreign_key)
    if not len(far):
        return stage
    at, query, key = rank[far], cells.query[far], cells.key[far]
    # Owners in the order in which a rank turns to them: those before it, from the nearest on.
    from_query = (at - queries.rank[query]) % world_size
    from_key = (at - keys.rank[key]) % world_size
    nearest = np.maximum(from_query, from_key)
    order = np.lexsort((key, query, nearest, at))
    at, query, key = at[order], query[order], key[order]
    # What each cell brings that was not there: the first of its rank that needs a chunk brings it.
    cost = np.zeros(len(order))
    for chunks, chunk, foreign, price in (
        (queries, query, foreign_query, prices.query_in),
        (keys, key, foreign_key, prices.key_in),
    ):
        _, first = np.unique(at * len(chunks) + chunk, return_index=True)
        first = first[foreign[far][order][first]]
        cost[first] += chunks.length[chunk[first]] * price
    # Half by cost and half by work: later stages' bytes hide behind earlier stages' work.
    part = (_share(at, cost, world_size) + _share(at, cells.weight[far][order], world_size)) / 2
    stage[far[order]] = 1 + np.minimum((part * stages).astype(np.int64), stages - 1)
    return stage


def _share(rank: np.ndarray, amount: np.ndarray, world_size: int) -> np.ndarray:
    """Return which share of its rank's amounts lies before the middle of each cell."""
    total = np.bincount(rank, amount, world_size)
    before = np.cumsum(total) - total
    middle = np.cumsum(amount) - amount / 2 - before[rank]
    return np.clip(middle / np.maximum(total, 1e-9)[rank], 0.0, 1.0)
