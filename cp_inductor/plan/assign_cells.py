"""Assign tiles: the cells that each rank computes, in stages, and tiles of them.

    keys ->     0 1 2 3 4 5 6 7        a sliding window: c causal, f full, p partial, nothing else
    queries 0   c                      exists, is computed, or is fetched
            1   f c
            2   p f c
            3     p f c

The mask classifies the grid of chunks once. A strategy gives each rank rows and columns of the
grid, whose cells it computes; squares on the diagonal stay with their owners. The cells of a rank
in a stage become few tiles: triangles with the kernel's own causal flag, rectangles without a mask,
and rectangles with a mask, in which some cells may be empty if that saves a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_inductor.kept import lru_cache
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.grid import Grid, Span, tokens_before
from cp_inductor.plan.ir import Mask, Shape, Tile

# Rows of cells join to one tile under a mask as long as cells that hold pairs are at least this
# share of it. From LONG_CHUNK_TOKENS on, empty cells cost more than another call, so more is asked.
# `benchmarks/masks.py` judges the values.
MIN_FILLED = 0.6
MIN_FILLED_LONG = 0.8
LONG_CHUNK_TOKENS = 512
# Full cells join a tile under a mask, and so save a call, if they are at most so many times as many
# as its partial ones.
MAX_FULL_PER_PARTIAL = 2

# Tiles of all ranks, for each stage.
Tiles = list[list[Tile]]
# The query chunks and the key chunks whose cells a rank computes, in the order of stages.
Area = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Work:
    """What there is to compute: a `Cell` for each two chunks, (query chunks, key chunks).

    It is equal only to itself, so that what was made of it can be kept.
    """

    grid: Grid
    shape: Shape
    cells: np.ndarray

    @cached_property
    def owners(self) -> np.ndarray:
        """The rank that holds each chunk."""
        return np.arange(self.grid.num_chunks) // self.grid.chunks_per_rank

    def far(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return cells, without those of ranks' own queries and own keys."""
        is_far = self.owners[rows][:, None] != self.owners[columns]
        return self.cells[np.ix_(rows, columns)] * is_far

    def own_chunks(self, rank: int) -> np.ndarray:
        """Return the chunks that a rank holds."""
        return np.flatnonzero(self.owners == rank)

    def chunks_before(self, rank: int) -> np.ndarray:
        """Return all chunks, from the nearest before a rank's own on, so that owners take turns.

        Were all to begin with the same owner, it would have to send to all ranks at once.
        """
        return np.roll(np.arange(self.grid.num_chunks), -self.grid.own(rank).start)[::-1]

    @cached_property
    def own_tiles(self) -> list[Tile]:
        """The tiles of each rank's own queries and own keys."""
        own = [(rank, self.own_chunks(rank)) for rank in range(self.grid.world_size)]
        return [tile for rank, chunks in own for tile in self.tiles(rank, chunks, chunks)]

    def tiles(
        self, rank: int, rows: np.ndarray, columns: np.ndarray, *, are_far: bool = False
    ) -> list[Tile]:
        """Make a rank's tiles of the cells of some query chunks and key chunks, or the far ones."""
        everything = self.cells[np.ix_(rows, columns)]
        cells = self.far(rows, columns) if are_far else everything
        tiles: list[Tile] = []

        def add(queries: Sequence[Span], keys: np.ndarray, mask: Mask) -> None:
            tiles.append(Tile(rank, tuple(queries), _spans(keys), self.shape.all_heads, mask))

        if (cells == Cell.CAUSAL).any():
            cells = cells.copy()
            for run in _triangles(rows, columns, cells):
                add(_spans(rows[run]), rows[run], Mask.CAUSAL)
                cells[np.ix_(run, np.isin(columns, rows[run]))] = Cell.EMPTY
        # What is left of triangles is under a mask as any other.
        has_partial = (cells == Cell.PARTIAL) | (cells == Cell.CAUSAL)
        num_partial = has_partial.sum(1)
        is_joined = (cells == Cell.FULL).sum(1) <= MAX_FULL_PER_PARTIAL * num_partial
        partial = has_partial | ((cells == Cell.FULL) & (is_joined & (num_partial > 0))[:, None])
        full = (cells == Cell.FULL) & ~partial
        for queries, keys in _equal_rows(rows, full):
            add(queries, columns[keys], Mask.FULL)
        if num_partial.any():
            elsewhere = (everything != Cell.EMPTY) & ~partial
            is_long = self.grid.num_tokens(Span(0, 1), of_keys=True) >= LONG_CHUNK_TOKENS
            min_filled = MIN_FILLED_LONG if is_long else MIN_FILLED
            for first, last, keys in _similar_rows(partial, elsewhere, min_filled):
                add(_spans(rows[first:last]), columns[keys], Mask.PARTIAL)
        return tiles


@lru_cache(maxsize=4)
def work_of(grid: Grid, shape: Shape, mask: Mask, rule: str) -> Work:
    """Return the work of an attention."""
    return Work(grid, shape, cells_of(grid, mask, rule))


@lru_cache(maxsize=4)
def cells_of(grid: Grid, mask: Mask, rule: str) -> np.ndarray:
    """Return which pairs exist, as the rule says if the mask is partial; see `Work`."""
    cells = np.full((grid.num_chunks, grid.num_chunks), Cell.FULL, np.int8)
    if mask is Mask.CAUSAL:
        cells = causal_cells(grid.num_chunks)
    elif mask is Mask.PARTIAL:
        sides = (tokens_before(grid, of_keys=of_keys).astype(float) for of_keys in (False, True))
        cells = Rule.parse(rule).cells(*((of[:-1], of[1:] - 1) for of in sides)).astype(np.int8)
    cells.flags.writeable = False
    return cells


def causal_cells(size: int) -> np.ndarray:
    """Return (size, size) cells of a causal mask."""
    cells = np.tril(np.full((size, size), Cell.FULL, np.int8))
    np.fill_diagonal(cells, Cell.CAUSAL)
    return cells


def stage_areas(
    work: Work, areas: Sequence[Area], num_stages: int, *, by_keys: bool, together: int = 1
) -> Tiles:
    """Make tiles of the cells of each rank's area, in stages.

    Cells of a rank's own queries and own keys are in stage 0, which needs nothing from others, and
    those of other ranks stay with these. The rest is cut along the keys, or the queries, into
    stages with equally many cells, in the order in which the area has them. So many chunks stay
    together.
    """
    tiles: Tiles = [[*work.own_tiles], *([] for _ in range(num_stages))]
    for rank, (rows, columns) in enumerate(areas):
        weights = np.count_nonzero(work.far(rows, columns), axis=0 if by_keys else 1)
        weights = weights.reshape(-1, together).sum(1)
        stage_of = np.repeat(parts_of_equal_weight(weights, num_stages), together)
        for number, stage in enumerate(tiles[1:]):
            here = stage_of == number
            part = (rows, columns[here]) if by_keys else (rows[here], columns)
            stage += work.tiles(rank, np.sort(part[0]), np.sort(part[1]), are_far=True)
    return tiles


def _triangles(rows: np.ndarray, columns: np.ndarray, cells: np.ndarray) -> list[np.ndarray]:
    """Return runs of rows that are exactly causal against their own chunks.

    Rows that have other cells under a mask are left out.
    """
    at = np.searchsorted(columns, rows).clip(max=len(columns) - 1)
    square = np.where((columns[at] == rows)[None], cells[:, at], Cell.PARTIAL)
    is_alone = ~(cells == Cell.PARTIAL).any(1) & (square.diagonal() == Cell.CAUSAL)
    # Below the diagonal all pairs exist, and above it none: which rows before one are wrong?
    is_wrong = np.tril((square != Cell.FULL) | (square.T != Cell.EMPTY), -1)
    last_wrong = np.where(is_wrong.any(1), len(rows) - 1 - is_wrong[:, ::-1].argmax(1), -1)
    runs: list[list[int]] = []
    for row in np.flatnonzero(is_alone).tolist():
        is_next = runs and runs[-1][-1] == row - 1 and rows[row - 1] == rows[row] - 1
        if is_next and last_wrong[row] < runs[-1][0]:
            runs[-1].append(row)
        else:
            runs.append([row])
    return [np.array(run) for run in runs]


def _equal_rows(
    rows: np.ndarray, wanted: np.ndarray
) -> Iterator[tuple[tuple[Span, ...], np.ndarray]]:
    """Yield the chunks of rows that have the same keys, and where these are."""
    alike: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(wanted.any(1)).tolist():
        alike.setdefault(wanted[row].tobytes(), []).append(row)
    for same in alike.values():
        yield _spans(rows[same]), np.flatnonzero(wanted[same[0]])


def _similar_rows(
    wanted: np.ndarray, taken: np.ndarray, min_filled: float
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield runs of rows and the keys of any of them, as long as few of these cells are empty."""
    first = 0
    while first < len(wanted):
        keys, filled, last = wanted[first].copy(), int(wanted[first].sum()), first + 1
        while filled and last < len(wanted):
            more = keys | wanted[last]
            area = int(more.sum()) * (last + 1 - first)
            now = filled + int(wanted[last].sum())
            if now < min_filled * area or (taken[first : last + 1] & more).any():
                break
            keys, filled, last = more, now, last + 1
        if filled:
            yield first, last, np.flatnonzero(keys)
        first = last


def _spans(chunks: np.ndarray) -> tuple[Span, ...]:
    """Join adjacent chunks, in order, to spans."""
    breaks = np.flatnonzero(np.diff(chunks) != 1) + 1
    return tuple(Span(int(run[0]), int(run[-1]) + 1) for run in np.split(chunks, breaks))


def parts_of_equal_weight(weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the part of each item, so that runs of items have about equal weight.

    An item belongs to the part in which its middle lies. Parts may be empty. Weights
    are integers.
    """
    done = np.cumsum(weights)
    total = int(done[-1]) if len(done) else 0
    middle = 2 * done - weights
    return np.minimum(middle * num_parts // max(1, 2 * total), num_parts - 1)


def is_head_split(shape: Shape, num_parts: int) -> bool:
    """Whether query heads split into this many parts, each with whole KV heads or part of one."""
    if shape.num_heads % num_parts:
        return False
    size, group = shape.num_heads // num_parts, shape.num_heads // shape.num_kv_heads
    return size % group == 0 or group % size == 0


Assign = Callable[[Work, int], Tiles]


@dataclass(frozen=True)
class Strategy:
    """One way to assign tiles to ranks: a row of the table in `cp_inductor.plan.strategies`.

    Planner, tests and the command line read the table, and know no strategy by name.
    """

    name: str  # as users write it
    assign: Assign  # (work, number of stages) -> tiles
    # The same -> tiles of the backward, as many stages as of the forward, if they are others.
    assign_backward: Assign | None = None
    # Keys come from the rank before, which had them one stage before; "auto" leaves it out.
    is_ring: bool = False
    # The strategy that takes its place under a mask that is neither full nor causal.
    under_rules: Strategy | None = None
    num_nodes: int = 1  # over how many nodes it splits the heads; see `moves_of`
    # (ranks) -> the number of stages, if there is no choice; else None.
    num_stages: Callable[[int], int | None] = lambda world_size: None
    # (shape, ranks) -> whether it can split the heads of this shape over them.
    splits: Callable[[Shape, int], bool] = lambda shape, world_size: True
    # (shape, stages) -> of how many stages, from the first, the forward keeps what it fetched for
    # the backward, because that takes the place of the shard's own q, k and v. It is as large, but
    # where several ranks share a KV head.
    free_keep: Callable[[Shape, int], int] = lambda shape, num_stages: 0
    # Groups of ranks may split the heads around it, as in "heads4+blocks".
    is_groupable: bool = False
    # Many chunks for so many ranks balance a causal mask; 0 if pieces do, or nothing does.
    fine: int = 0
    min_chunks: int = 2  # per rank
    # A rank may compute queries of another, and would need their rows of a mask tensor.
    moves_queries: bool = False
