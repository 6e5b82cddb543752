"""Assign tiles under a mask that is neither full nor causal.

    keys ->     0 1 2 3 4 5 6 7        a sliding window: c causal, f full, p partial, nothing else
    queries 0   c                      exists, is computed, or is fetched
            1   f c
            2   p f c
            3     p f c

The rule classifies the grid of chunks once. Every cell that holds pairs is assigned to a rank: to
the owner of its queries, or, if that would give ranks unequal work, by blocks with equally many
pairs. The cells of a rank in a stage become few tiles: triangles with the kernel's own causal flag,
rectangles without a mask, and rectangles with a mask, in which some cells may be empty if that
saves a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.grid import Grid, Span, lengths_of
from cp_inductor.plan.ir import Mask, Shape, Tile
from cp_inductor.plan.tiles import Tiles, parts_of_equal_weight

# Rows of cells join to one tile under a mask as long as cells that hold pairs are at least this
# share of it. From LONG_CHUNK_TOKENS on, empty cells cost more than another call, so more is asked.
# `benchmarks/masks.py` judges the values.
MIN_FILLED = 0.6
MIN_FILLED_LONG = 0.8
LONG_CHUNK_TOKENS = 512
# Full cells join a tile under a mask, and so save a call, if they are at most so many times as many
# as its partial ones.
MAX_FULL_PER_PARTIAL = 2


def cells_of(grid: Grid, rule: Rule) -> np.ndarray:
    """Return which pairs of each two chunks exist, as `Cell` counts (query chunks, key chunks)."""
    bounds = []
    for of_keys in (False, True):
        starts = np.cumsum([0, *lengths_of(grid, of_keys=of_keys)])
        bounds.append((starts[:-1].astype(float), starts[1:] - 1.0))
    return rule.cells(*bounds)


def masked_rows(grid: Grid, shape: Shape, cells: np.ndarray, num_stages: int) -> Tiles:
    """Every rank computes its own queries."""
    owners = np.arange(grid.num_chunks) // grid.chunks_per_rank
    ranks = np.broadcast_to(owners[:, None], cells.shape)
    return stage_cells(grid, shape, cells, ranks, num_stages, by_keys=True)


def stage_cells(
    grid: Grid,
    shape: Shape,
    cells: np.ndarray,
    ranks: np.ndarray,
    num_stages: int,
    *,
    by_keys: bool,
) -> Tiles:
    """Assign a stage to every cell, and make tiles of the cells that a rank has in each stage.

    Cells of a rank's own queries and own keys are in stage 0, which needs nothing from others. The
    rest is cut along the keys, or the queries, into stages with equally many cells.
    """
    tiles: Tiles = [[] for _ in range(num_stages + 1)]
    for rank, at_row, at_column in _by_rank(cells, ranks):
        own = grid.own(rank)
        rows, place = np.unique(at_row, return_inverse=True)
        everything = cells[rows]
        mine = np.full_like(everything, Cell.EMPTY)
        mine[place, at_column] = everything[place, at_column]
        near = np.zeros_like(mine)
        is_own = (rows >= own.start) & (rows < own.stop)
        near[is_own, own.start : own.stop] = mine[is_own, own.start : own.stop]
        tiles[0] += tiles_of_cells(grid, rank, shape.all_heads, rows, near, everything)
        far = np.where(near, Cell.EMPTY, mine)
        stage_of = _stages_along(far.T if by_keys else far, num_stages, own if by_keys else None)
        for stage in range(num_stages):
            here = stage_of == stage
            part = np.where(here[None] if by_keys else here[:, None], far, Cell.EMPTY)
            made = tiles_of_cells(grid, rank, shape.all_heads, rows, part, everything)
            tiles[stage + 1] += made
    return tiles


def _by_rank(cells: np.ndarray, ranks: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield each rank that has cells, with their rows and columns."""
    rows, columns = np.nonzero(cells != Cell.EMPTY)
    owners = ranks[rows, columns]
    order = np.argsort(owners, kind="stable")
    names, starts = np.unique(owners[order], return_index=True)
    parts = np.split(order, starts[1:]) if len(names) else []
    for rank, part in zip(names, parts, strict=True):
        yield int(rank), rows[part], columns[part]


def _stages_along(cells: np.ndarray, num_stages: int, own: Span | None) -> np.ndarray:
    """Return the stage of each row of cells, with equally many cells in each stage.

    Args:
        cells: the cells to compute, which are cut by rows.
        num_stages: how many stages there are.
        own: the rank's own chunks, if rows are all chunks. The walk then begins at the nearest
            chunk before them and continues from the end, so that ranks do not all ask the same
            owner at once.
    """
    num_rows = len(cells)
    order = np.arange(num_rows)
    if own is not None:
        order = (own.start - 1 - order) % num_rows
    stage = np.empty(num_rows, dtype=np.int64)
    stage[order] = parts_of_equal_weight((cells != Cell.EMPTY).sum(1)[order], num_stages)
    return stage


def _min_filled(grid: Grid) -> float:
    is_long = grid.num_tokens(Span(0, 1), of_keys=True) >= LONG_CHUNK_TOKENS
    return MIN_FILLED_LONG if is_long else MIN_FILLED


def tiles_of_cells(
    grid: Grid,
    rank: int,
    heads: Span,
    rows: np.ndarray,
    cells: np.ndarray,
    everything: np.ndarray,
) -> list[Tile]:
    """Make tiles of cells.

    Args:
        grid: of the chunks.
        rank: that computes them.
        heads: of the tiles.
        rows: the query chunk of each row.
        cells: (rows, key chunks), the cells to compute.
        everything: all cells of these rows, including those that are computed elsewhere.
    """
    cells = cells.copy()
    found: list[Tile] = []

    def add(queries: Sequence[int] | np.ndarray, keys: np.ndarray, mask: Mask) -> None:
        found.append(Tile(rank, _spans(queries), _spans(keys), heads, mask))

    for first, last in _triangles(rows, cells):
        chunks = rows[first:last]
        add(chunks, chunks, Mask.CAUSAL)
        cells[first:last, chunks] = Cell.EMPTY
    # What is left of triangles is under a mask as any other.
    has_partial = (cells == Cell.PARTIAL) | (cells == Cell.CAUSAL)
    num_partial = has_partial.sum(1)
    is_joined = (cells == Cell.FULL).sum(1) <= MAX_FULL_PER_PARTIAL * num_partial
    partial = has_partial | ((cells == Cell.FULL) & (is_joined & (num_partial > 0))[:, None])
    full = (cells == Cell.FULL) & ~partial
    for first, last, keys in _equal_rows(rows, full):
        add(rows[first:last], keys, Mask.FULL)
    elsewhere = (everything != Cell.EMPTY) & ~partial
    for first, last, keys in _similar_rows(rows, partial, elsewhere, _min_filled(grid)):
        add(rows[first:last], keys, Mask.PARTIAL)
    return found


def _triangles(rows: np.ndarray, cells: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield runs of rows that are exactly causal against their own chunks.

    Rows that have other cells under a mask are left out.
    """
    is_alone = ~(cells == Cell.PARTIAL).any(1)
    first = 0
    while first < len(rows):
        last = first
        while last < len(rows) and rows[last] == rows[first] + last - first and is_alone[last]:
            column = cells[first : last + 1, rows[last]]
            row = cells[last, rows[first] : rows[last]]
            if column[-1] != Cell.CAUSAL or column[:-1].any() or (row != Cell.FULL).any():
                break
            last += 1
        if last > first:
            yield first, last
        first = max(last, first + 1)


def _equal_rows(rows: np.ndarray, wanted: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield runs of rows with the same keys."""
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and (wanted[last] == wanted[first]).all():
            last += 1
        if wanted[first].any():
            yield first, last, np.flatnonzero(wanted[first])
        first = last


def _similar_rows(
    rows: np.ndarray, wanted: np.ndarray, taken: np.ndarray, min_filled: float
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield runs of rows and the keys of any of them, as long as few of these cells are empty."""
    first = 0
    while first < len(rows):
        keys, filled, last = wanted[first].copy(), int(wanted[first].sum()), first + 1
        while filled and last < len(rows):
            more = keys | wanted[last]
            area = int(more.sum()) * (last + 1 - first)
            now = filled + int(wanted[last].sum())
            if now < min_filled * area or (taken[first : last + 1] & more).any():
                break
            keys, filled, last = more, now, last + 1
        if filled:
            yield first, last, np.flatnonzero(keys)
        first = last


def _spans(chunks: Sequence[int] | np.ndarray) -> tuple[Span, ...]:
    """Join adjacent chunks, in order, to spans."""
    chunks = np.asarray(chunks)
    breaks = np.flatnonzero(np.diff(chunks) != 1) + 1
    return tuple(Span(int(run[0]), int(run[-1]) + 1) for run in np.split(chunks, breaks))
