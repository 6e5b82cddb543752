"""Assign stages to the cells of a batch: what is fetched for the next hides behind this one.

    stage 0        cells of a rank's own chunks: they need nothing
    stage 1, 2     what the cells need is fetched a stage earlier, behind whose work it hides

A chunk is fetched for the first stage that needs it. A rank turns to the owners before it first,
the nearest ahead of the others, so that ranks do not all ask the same owner at once.
"""

from __future__ import annotations

import numpy as np

from cp_inductor.plan.batch_cells import Cells
from cp_inductor.plan.ir import Prices

# The least share of own work that is counted with: a rank without any fetches something for stage 1
# all the same.
MIN_OWN_SHARE = 0.1
# How often the interval is halved in which the growth of stages is looked for: from 10 to 1.5e-4.
NUM_BISECTIONS = 16
# Divides in place of a total of nothing.
TINY = 1e-9


def assign_stages(
    cells: Cells,
    rank: np.ndarray,
    world_size: int,
    stages: int,
    prices: Prices,
) -> np.ndarray:
    """Return the stage of each cell, given its rank; what is fetched comes in so many stages."""
    # Owners in the order in which a rank turns to them: those before it, from the nearest on.
    away = [(rank - chunks.rank[chunk]) % world_size for chunks, chunk in cells.sides]
    nearest = np.maximum(*away)
    stage = np.zeros(len(rank), dtype=np.int64)
    far = np.flatnonzero(nearest)
    if not len(far):
        return stage
    # Cells that wait for the same owner stay in the order that they are in.
    far = far[np.argsort((rank * world_size + nearest)[far], kind="stable")]
    at, weight = rank[far], cells.weight[far]
    # What each cell brings that was not there: the first of its rank that needs a chunk brings it.
    cost = np.zeros(len(far))
    of_sides = zip(cells.sides, away, (prices.query_in, prices.key_in), strict=True)
    for (chunks, chunk), from_owner, price in of_sides:
        _, first = np.unique(at * len(chunks) + chunk[far], return_index=True)
        first = first[from_owner[far[first]] > 0]
        cost[first] += chunks.length[chunk[far[first]]] * price
    # Along the cells, bytes and work grow about alike; a stage is a part of both.
    part = (_share(at, cost, world_size) + _share(at, weight, world_size)) / 2
    total = np.bincount(rank, cells.weight, world_size)
    own = 1 - np.bincount(at, weight, world_size) / np.maximum(total, 1.0)
    ends = _ends_of_stages(own, stages)
    stage[far] = 1 + (part[:, None] > ends[at, :-1]).sum(1)
    return stage


def _ends_of_stages(own: np.ndarray, stages: int) -> np.ndarray:
    """Return where the stages 1, 2, ... of each rank end, as shares of what is not its own.

    The fetch of a stage hides behind the work of the one before: its share f(s) is proportional to
    that work, which is the rank's own work for stage 1, and (1 - own) f(s - 1) for the others. The
    share of its own work in all of a rank's is `own`, (ranks,).
    """
    own = np.clip(own, MIN_OWN_SHARE, 1.0)[:, None]
    low, high = np.zeros_like(own), np.full_like(own, 1 / MIN_OWN_SHARE)
    for _ in range(NUM_BISECTIONS):
        ratio = (low + high) / 2
        ends = _ends(own, ratio, stages)
        is_more = ends[:, -1:] > 1
        low, high = np.where(is_more, low, ratio), np.where(is_more, ratio, high)
    return _ends(own, high, stages)


def _ends(own: np.ndarray, ratio: np.ndarray, stages: int) -> np.ndarray:
    growth = np.repeat(ratio * (1 - own), stages, axis=1)
    growth[:, :1] = ratio * own
    return np.cumsum(np.cumprod(growth, axis=1), axis=1)


def _share(rank: np.ndarray, amount: np.ndarray, world_size: int) -> np.ndarray:
    """Return which share of its rank's amounts lies before the middle of each cell."""
    total = np.bincount(rank, amount, world_size)
    before = np.cumsum(total) - total
    middle = np.cumsum(amount) - amount / 2 - before[rank]
    return np.clip(middle / np.maximum(total, TINY)[rank], 0.0, 1.0)
