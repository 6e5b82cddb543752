"""Queries stay with their owners, or rows of them move until all ranks have the same work."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import Pairs, chunks_before, own_chunks, stage_areas
from cp_inductor.plan.grid import Grid
from cp_inductor.plan.ir import Shape
from cp_inductor.plan.strategies.strategy import Strategy
from cp_inductor.plan.tiles import Tiles


def own_rows(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Every rank computes its own queries, which is unbalanced if the mask is causal."""
    ranks = range(grid.world_size)
    areas = [(own_chunks(grid, rank), chunks_before(grid, rank)) for rank in ranks]
    return stage_areas(grid, shape, pairs, areas, num_stages, by_keys=True)


def rows(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Under a causal mask, every rank computes a row near the start and a row near the end.

    These balance each other. One is its own, and the queries of the other are fetched.
    """
    if grid.chunks_per_rank % 2 or not _is_causal(pairs.cells):
        return own_rows(grid, shape, pairs, num_stages)
    world_size = grid.world_size
    pieces = np.arange(grid.num_chunks).reshape(2 * world_size, -1)
    both = [(piece, 2 * world_size - 1 - piece) for piece in range(world_size)]
    foreign = [[sum(p // 2 != r for p in pair) for r in range(world_size)] for pair in both]
    of_rank = np.argsort(linear_sum_assignment(np.array(foreign))[1])
    areas = [
        (pieces[[*both[pair]]].ravel(), chunks_before(grid, rank))
        for rank, pair in enumerate(of_rank)
    ]
    return stage_areas(grid, shape, pairs, areas, num_stages, by_keys=True)


def _is_causal(cells: np.ndarray) -> bool:
    is_below = not np.triu(cells, 1).any() and bool((cells.diagonal() == Cell.CAUSAL).all())
    return is_below and np.count_nonzero(cells == Cell.FULL) == len(cells) * (len(cells) - 1) // 2


ROWS = Strategy(
    name="rows",
    assign=rows,
    is_groupable=True,
)
