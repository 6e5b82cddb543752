"""Queries stay with their owners, or rows of them move until all ranks have the same work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from cp_inductor.plan.assign_masked import masked_rows
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, Shape
from cp_inductor.plan.strategies.strategy import LAYOUTS, Strategy
from cp_inductor.plan.tiles import Rect, Tiles, add_rects, own_tiles, slice_rects


def own_rows(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
    """Every rank computes its own queries, which is unbalanced if the mask is causal."""
    pieces = [[_piece(grid, rank, whole=True)] for rank in range(grid.world_size)]
    if grid.layout == "zigzag":
        pieces = [_own_halves(grid, rank) for rank in range(grid.world_size)]
    return _stage_rows(grid, shape, mask, pieces, num_stages)


def rows(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
    """Every rank computes a row near the start and a row near the end, which balance each other.

    Under the zigzag layout, both rows are its own. With contiguous shards, one is its own and the
    queries of the other are fetched; squares on the diagonal stay with their owners.
    """
    world_size = grid.world_size
    if mask is Mask.FULL or grid.layout == "zigzag":
        return own_rows(grid, shape, mask, num_stages)
    half = grid.chunks_per_rank // 2
    pairs = [(piece, 2 * world_size - 1 - piece) for piece in range(world_size)]
    foreign = [[sum(p // 2 != r for p in pair) for r in range(world_size)] for pair in pairs]
    ranks = linear_sum_assignment(np.array(foreign))[1]
    pieces: list[list[Span]] = [[] for _ in range(world_size)]
    for rank, pair in zip(ranks, pairs, strict=True):
        pieces[rank] = [Span(piece * half, (piece + 1) * half) for piece in pair]
    return _stage_rows(grid, shape, mask, pieces, num_stages)


def _stage_rows(
    grid: Grid, shape: Shape, mask: Mask, pieces: Sequence[list[Span]], num_stages: int
) -> Tiles:
    tiles = own_tiles(grid, shape, mask, num_stages)
    for rank in range(grid.world_size):
        rects = [rect for piece in pieces[rank] for rect in _past_of(grid, mask, piece)]
        # From the nearest owner backward, so that not all ask the same one at once.
        first = grid.position(grid.own(rank).start)
        slices = slice_rects(rects, num_stages, grid.num_chunks, by_keys=True, first=first)
        add_rects(tiles, grid, shape, rank, slices)
    return tiles


def _past_of(grid: Grid, mask: Mask, piece: Span) -> list[Rect]:
    """Return what a row of queries sees besides the tile of its owner's own keys."""
    if mask is Mask.CAUSAL and grid.layout == "contiguous":
        own = grid.own(grid.owner(piece.start))
        return [Rect(piece, Span(0, own.start))]
    end = piece.start if mask is Mask.CAUSAL else grid.num_chunks
    rank = grid.owner(grid.spans_at(piece.start, piece.start + 1)[0].start)
    rects: list[Rect] = []
    start = 0
    for hole in sorted(_pieces_of(grid, rank)):
        if hole.start < end:
            rects.append(Rect(piece, Span(start, hole.start)))
            start = hole.stop
    return [rect for rect in [*rects, Rect(piece, Span(start, end))] if len(rect.keys) > 0]


def _pieces_of(grid: Grid, rank: int) -> list[Span]:
    """Return the positions that a rank holds."""
    if grid.layout == "zigzag":
        return _own_halves(grid, rank)
    return [_piece(grid, rank, whole=True)]


def _piece(grid: Grid, index: int, *, whole: bool) -> Span:
    size = grid.chunks_per_rank if whole else grid.chunks_per_rank // 2
    return Span(index * size, (index + 1) * size)


def _own_halves(grid: Grid, rank: int) -> list[Span]:
    last = 2 * grid.world_size - 1
    return [_piece(grid, piece, whole=False) for piece in (rank, last - rank)]


ROWS = Strategy(
    name="rows",
    assign=rows,
    assign_masked=masked_rows,
    layouts_of_auto=LAYOUTS,
    is_groupable=True,
)
