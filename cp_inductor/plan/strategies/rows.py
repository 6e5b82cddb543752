"""Queries stay with their owners, or rows of them move until all ranks have the same work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from cp_inductor.plan.assign_masked import masked_rows
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, Shape
from cp_inductor.plan.strategies.strategy import Pairs, Strategy
from cp_inductor.plan.tiles import Rect, Tiles, add_rects, own_tiles, slice_rects


def own_rows(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Every rank computes its own queries, which is unbalanced if the mask is causal."""
    if not isinstance(pairs, Mask):
        return masked_rows(grid, shape, pairs, num_stages)
    pieces = [[grid.own(rank)] for rank in range(grid.world_size)]
    return _stage_rows(grid, shape, pairs, pieces, num_stages)


def rows(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Every rank computes a row near the start and a row near the end, which balance each other.

    One is its own, and the queries of the other are fetched; squares on the diagonal stay with
    their owners.
    """
    if pairs is not Mask.CAUSAL:
        return own_rows(grid, shape, pairs, num_stages)
    world_size = grid.world_size
    half = grid.chunks_per_rank // 2
    both = [(piece, 2 * world_size - 1 - piece) for piece in range(world_size)]
    foreign = [[sum(p // 2 != r for p in pair) for r in range(world_size)] for pair in both]
    ranks = linear_sum_assignment(np.array(foreign))[1]
    pieces: list[list[Span]] = [[] for _ in range(world_size)]
    for rank, pair in zip(ranks, both, strict=True):
        pieces[rank] = [Span(piece * half, (piece + 1) * half) for piece in pair]
    return _stage_rows(grid, shape, pairs, pieces, num_stages)


def _stage_rows(
    grid: Grid, shape: Shape, mask: Mask, pieces: Sequence[list[Span]], num_stages: int
) -> Tiles:
    tiles = own_tiles(grid, shape, mask, num_stages)
    for rank in range(grid.world_size):
        rects = [rect for piece in pieces[rank] for rect in _past_of(grid, mask, piece)]
        # From the nearest owner backward, so that not all ask the same one at once.
        first = grid.own(rank).start
        slices = slice_rects(rects, num_stages, grid.num_chunks, by_keys=True, first=first)
        add_rects(tiles, shape, rank, slices)
    return tiles


def _past_of(grid: Grid, mask: Mask, piece: Span) -> list[Rect]:
    """Return what a row of queries sees besides the tile of its owner's own keys."""
    own = grid.own(grid.owner(piece.start))
    seen = [Span(0, own.start)]
    if mask is Mask.FULL:
        seen.append(Span(own.stop, grid.num_chunks))
    return [Rect(piece, keys) for keys in seen if len(keys) > 0]


ROWS = Strategy(
    name="rows",
    assign=rows,
    is_groupable=True,
)
