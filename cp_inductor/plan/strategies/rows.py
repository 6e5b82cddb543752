"""Queries stay with their owners, or rows of them move until all ranks have the same work.

ring         keys travel from neighbour to neighbour
allgather    all keys in one exchange
rows         rows of queries move
"""

from __future__ import annotations

import numpy as np

from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import Strategy, Tiles, Work, causal_cells, stage_areas
from cp_inductor.plan.ir import Mask, Tile

# A cell of which all pairs exist, or half of them, is a tile of that mask.
_MASKS = {Cell.FULL: Mask.FULL, Cell.CAUSAL: Mask.CAUSAL}


def own_rows(work: Work, num_stages: int) -> Tiles:
    """Every rank computes its own queries, which is unbalanced if the mask is causal."""
    ranks = range(work.grid.world_size)
    areas = [(work.own_chunks(rank), work.chunks_before(rank)) for rank in ranks]
    return stage_areas(work, areas, num_stages, by_keys=True)


def rows(work: Work, num_stages: int) -> Tiles:
    """Under a causal mask, every rank computes a row near the start and a row near the end.

    These balance each other. One is its own, and the queries of the other, which is as far from
    the end as that is from the start, are fetched.
    """
    world_size, num_chunks = work.grid.world_size, work.grid.num_chunks
    is_causal = np.array_equal(work.cells, causal_cells(num_chunks))
    if work.grid.chunks_per_rank % 2 or not is_causal:
        return own_rows(work, num_stages)
    pieces = np.arange(num_chunks).reshape(2 * world_size, -1)
    areas = [
        (pieces[[2 * rank, -1 - 2 * rank]].ravel(), work.chunks_before(rank))
        for rank in range(world_size)
    ]
    return stage_areas(work, areas, num_stages, by_keys=True)


ROWS = Strategy("rows", rows, is_groupable=True)


def ring(work: Work, num_stages: int) -> Tiles:
    """The neighbour ring: stage i has the tile of own queries and the keys of rank - i."""
    grid, heads = work.grid, work.shape.all_heads
    own = [(grid.own(rank),) for rank in range(grid.world_size)]
    first = [spans[0].start for spans in own]
    of_ranks = work.cells[np.ix_(first, first)].tolist()
    return [
        [
            Tile(rank, own[rank], own[rank - step], heads, _MASKS[row[rank - step]])
            for rank, row in enumerate(of_ranks)
            if row[rank - step]
        ]
        for step in range(grid.world_size)
    ]


RING = Strategy(
    name="ring",
    assign=ring,
    is_ring=True,
    under_rules=ROWS,
    num_stages=lambda world_size: max(1, world_size - 1),
    min_chunks=1,
)

ALLGATHER = Strategy("allgather", own_rows, num_stages=lambda world_size: 1, is_groupable=True)
