"""Assign ranks to the cells of a batch, so that work is balanced and little moves.

    a rank begins with its own queries and keys     q {4 5}      x k {4 5}
    it takes what it can compute with them          (4 4) (5 4) (5 5)
    it adds the query or the key segment that       q {4 5}      x k {2 4 5}
      brings most work for what it costs            + (4 2) (5 2)
    ... until it has its share                      q {4 5 7}    x k {2 4 5}

The rank with the least work is next, so that all grow together, and what a rank has fetched for one
cell serves all others: long documents are cut in two dims, and neither their queries nor their keys
go to everyone. Where heads are cut into groups, neighboring ranks prefer different groups. Ranks
take segments of several chunks first, and then single chunks, for what did not fit.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from cp_inductor.plan.batch_cells import Cells
from cp_inductor.plan.batch_improve import NOBODY, LineMoves, Lines
from cp_inductor.plan.grid import spread
from cp_inductor.plan.ir import Prices

# The numbers below follow from no theory. `benchmarks/documents.py` judges them: it prints what the
# rank that receives most receives, the balance, and the time that planning takes.

# The weight of a rank over the mean, up to which lines are moved to it.
MAX_IMBALANCE = 1.04
# How many segments of all ranks to begin with, and of one rank at least. Those are taken first that
# make at most MAX_BOXES boxes (of two segments that meet), or MAX_BOXES_PER_RANK for each rank. The
# second level has twice as many. The third has at least MAX_SEGMENTS: these are single chunks,
# unless there are many short batch entries.
NUM_SEGMENTS, MIN_SEGMENTS_PER_RANK = (160, 128, 96, 64), (4, 2)
MAX_BOXES, MAX_BOXES_PER_RANK = 1300, 131
MAX_SEGMENTS = 4096
# Lines are moved after the first level, if at most so many shares of ranks are left to take then;
# otherwise after the second.
MAX_SHARES_LEFT = 2
# How much less welcome a segment is for each rank that its owner is away, over the world size: next
# to nothing, so that it decides between segments that are worth as much.
DISTANCE_PENALTY = 1e-4
# How much more welcome a segment of the rank's own group of heads is.
GROUP_BONUS = 0.3
# How much more a token costs a rank that has received as much as the mean. The mean is raised by a
# share of a rank's own keys, so that the first segments that ranks receive make no difference.
BUSY_PENALTY = 2.0
NEGLIGIBLE_SHARE_OF_KEYS = 0.1


def assign_ranks(
    cells: Cells,
    world_size: int,
    prices: Prices,
    *,
    taken: np.ndarray | None = None,
    num_growing: int = 0,
    max_load: float = 0.0,
) -> np.ndarray:
    """Return the rank of each cell.

    Args:
        taken: the ranks of cells that are decided; NOBODY for others.
        num_growing: the ranks before this one take cells, and the others only store chunks; 0: all.
        max_load: the most weight that moves may give to a rank; 0: `MAX_IMBALANCE` of the mean.
    """
    rank = np.full(len(cells.query), NOBODY) if taken is None else taken.copy()
    num_growing = num_growing or world_size
    # What is decided stays, and does not follow segments.
    is_fixed = rank != NOBODY
    free = np.flatnonzero(~is_fixed)
    fixed = np.bincount(rank[is_fixed], cells.weight[is_fixed], world_size).astype(np.float64)
    fixed[num_growing:] = np.inf
    share = float(cells.weight.sum()) / num_growing
    max_load = max_load or MAX_IMBALANCE * share
    is_improved = num_growing == 1
    # A rank begins with fewer segments if many of them meet.
    for num_of_all, least in product(NUM_SEGMENTS, MIN_SEGMENTS_PER_RANK):
        coarse = max(num_of_all // world_size, least)
        lines = _lines(cells, coarse, world_size, prices)
        num_boxes = np.count_nonzero(np.bincount(lines.row * len(lines.owner) + lines.column))
        if num_boxes <= max(MAX_BOXES, MAX_BOXES_PER_RANK * world_size):
            break
    fine = max(2 * coarse, MAX_SEGMENTS // world_size)
    for level, num in enumerate((coarse, 2 * coarse, fine)):
        if NOBODY not in rank:
            break
        lines = _lines(cells, num, world_size, prices)
        _Growth(cells, rank, lines, world_size).run(share, num_growing)
        left = float(cells.weight[rank == NOBODY].sum())
        if not is_improved and (left <= MAX_SHARES_LEFT * share or level == 1):
            lines = replace(lines, row=lines.row[free], column=lines.column[free])
            moves = LineMoves(lines, cells.weight[free], rank[free], max_load, fixed)
            rank[free] = moves.improve()
            is_improved = True
    loads = np.bincount(rank[rank >= 0], cells.weight[rank >= 0], world_size)
    # A few cells are left that fit nowhere: chunks are too long to balance better.
    for cell in np.flatnonzero(rank == NOBODY):
        rank[cell] = loads[:num_growing].argmin()
        loads[rank[cell]] += cells.weight[cell]
    return rank


def _lines(cells: Cells, num_of_rank: int, world_size: int, prices: Prices) -> Lines:
    """Return segments of the queries and of the keys, at most so many of each rank."""
    at, parts = [], []
    for (chunks, chunk), price in zip(cells.sides, prices, strict=True):
        count = np.bincount(chunks.rank, minlength=world_size)
        _, inside = spread(count)
        num, of = np.minimum(count, num_of_rank), chunks.rank
        segment = (np.cumsum(num) - num)[of] + inside * num[of] // count[of]
        owner = np.repeat(np.arange(world_size), num)
        first = np.searchsorted(segment, np.arange(len(owner)))
        length = np.bincount(segment, chunks.length, len(owner))
        at.append(segment[chunk])
        # In halves of an element. So costs are whole numbers.
        costs = [round(2 * way) * length for way in price]
        parts.append((owner, chunks.group[first], *costs))
    (row, column), num_rows = at, len(parts[0][0])
    owner, group, cost_in, cost_home = map(np.concatenate, zip(*parts, strict=True))
    return Lines(row, column, num_rows, owner, group, cost_in, cost_home)


class _Growth:
    """Ranks that take cells of segments.

    Rows and columns are the query and the key segments of which something is left to take.
    """

    def __init__(self, cells: Cells, rank: np.ndarray, lines: Lines, world_size: int) -> None:
        todo, done = np.flatnonzero(rank == NOBODY), np.flatnonzero(rank != NOBODY)
        has = np.zeros((world_size, len(lines.owner)), dtype=bool)
        has[rank[done], lines.row[done]] = True
        has[rank[done], lines.num_rows + lines.column[done]] = True
        is_own = lines.is_own(world_size)
        self.received = lines.received(has & ~is_own)
        rows, row = np.unique(lines.row[todo], return_inverse=True)
        columns, column = np.unique(lines.column[todo], return_inverse=True)
        kept = np.concatenate([rows, lines.num_rows + columns])
        # Which lines a rank has.
        self.has = (has | is_own)[:, kept]
        names = "owner", "group", "cost_in", "cost_home"
        arrays = {name: getattr(lines, name)[kept] for name in names}
        self.lines = replace(lines, row=row, column=column, num_rows=len(rows), **arrays)
        self.owner, self.num_rows = self.lines.owner, len(rows)
        self.rank, self.todo, self.world_size = rank, todo, world_size
        # What nobody has taken yet, and who takes it.
        self.left = self.lines.sum(cells.weight[todo])
        self.num_left = np.count_nonzero(self.left)
        self.taken = np.full(self.left.shape, NOBODY)
        self.load = np.bincount(rank[done], cells.weight[done], world_size)
        # What each line would bring each rank, for ranks that have asked.
        self.brings = np.zeros(self.has.shape)
        self.has_asked = np.zeros(world_size, dtype=bool)
        # Costs are in halves.
        self.negligible = 2 * NEGLIGIBLE_SHARE_OF_KEYS * (cells.keys.length.sum() / world_size)
        ranks = np.arange(world_size)[:, None]
        self.welcome = 1 - DISTANCE_PENALTY * np.abs(self.owner[None] - ranks) / world_size
        if (num_groups := cells.queries.num_groups) > 1:
            self.welcome[self.lines.group[None] == ranks % num_groups] *= 1 + GROUP_BONUS

    def run(self, share: float, num_growing: int) -> None:
        """Let the first ranks take cells, until each has its share or nothing fits any more."""
        self._take_own(share, num_growing)
        grows = np.arange(self.world_size) < num_growing
        while grows.any() and self.num_left:
            rank = int(np.where(grows, self.load, np.inf).argmin())
            grows[rank] = self._grow(rank, share - self.load[rank])
        self.rank[self.todo] = self.taken[self.lines.row, self.lines.column]

    def _take_own(self, share: float, num_growing: int) -> None:
        """Every rank takes what it has both sides of, nearest to the diagonal first."""
        for rank in range(num_growing):
            queries = np.flatnonzero(self.has[rank, : self.num_rows])
            keys = np.flatnonzero(self.has[rank, self.num_rows :])
            left = self.left[np.ix_(queries, keys)]
            row, column = np.nonzero(left)
            order = np.argsort(np.abs(queries[row] - keys[column]), kind="stable")
            self._take(rank, queries[row[order]], keys[column[order]], share - self.load[rank])

    def _take(self, rank: int, query: np.ndarray, key: np.ndarray, room: float) -> np.ndarray:
        """Take cells in this order, as many as there is room for; return which."""
        weight = self.left[query, key]
        fits = np.cumsum(weight) <= room
        query, key = query[fits], key[fits]
        self.load[rank] += weight[fits].sum()
        self.left[query, key] = 0
        self.num_left -= len(query)
        self.taken[query, key] = rank
        return fits

    def _take_across(self, rank: int, line: int, across: np.ndarray, room: float) -> None:
        """Take the cells of a line and of these lines across it, as many as there is room for."""
        query, key = self.lines.cross(line, across)
        weight = self.left[query, key]
        fits = self._take(rank, query, key, room)
        # Nobody is brought these any more.
        across, weight = across[fits], weight[fits]
        self.brings[:, line] -= self.has[:, across] @ weight
        self.brings[:, across] -= self.has[:, line, None] * weight

    def _grow(self, rank: int, room: float) -> bool:
        """Add the line that brings most for its cost; return whether there was any."""
        has = self.has[rank]
        if not self.has_asked[rank]:
            # Sums of whole numbers, which are exact in any order.
            has_query, has_key = has[: self.num_rows], has[self.num_rows :]
            self.brings[rank] = np.concatenate([self.left @ has_key, has_query @ self.left])
            self.has_asked[rank] = True
        brings = np.where(has, 0, self.brings[rank])
        mean = self.received.sum() / self.world_size
        busy = 1 + BUSY_PENALTY * self.received / (mean + self.negligible)
        cost = self.lines.cost_in * busy[rank] + self.lines.cost_home * busy[self.owner]
        value = np.minimum(brings, room) * self.welcome[rank] / cost
        line = int(value.argmax())
        if value[line] <= 0:
            return self._seed(rank, room)
        before = self.load[rank]
        self._add(rank, line)
        self._take_across(rank, line, np.flatnonzero(has & (self._left_of(line) > 0)), room)
        return bool(self.load[rank] > before)

    def _add(self, rank: int, line: int) -> None:
        if not self.has[rank, line]:
            self.brings[rank] += self._left_of(line)
        self.has[rank, line] = True
        self.received[rank] += self.lines.cost_in[line]
        self.received[self.owner[line]] += self.lines.cost_home[line]

    def _left_of(self, line: int) -> np.ndarray:
        """Return what is left of a line where each other line crosses it."""
        left, key = np.zeros(len(self.owner)), line - self.num_rows
        if key < 0:
            left[self.num_rows :] = self.left[line]
        else:
            left[: self.num_rows] = self.left[:, key]
        return left

    def _seed(self, rank: int, room: float) -> bool:
        """Begin with a cell of which the rank has neither side."""
        query = int(self.left.sum(1).argmax())
        column = np.where(self.left[query] > 0, self.left.sum(0), 0)
        key = int(column.argmax())
        weight = self.left[query, key]
        if not 0 < weight <= room:
            return False
        self._add(rank, query)
        self._add(rank, self.num_rows + key)
        self._take_across(rank, query, np.array([self.num_rows + key]), room)
        return True
