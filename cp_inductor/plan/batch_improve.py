"""Move work between ranks until the rank that receives most receives less.

    rank 0 computes (query 7, key 1) and (query 7, key 2), and fetched query 7 for these alone
    rank 3 has query 7, and fetched keys 1 and 2
      =>
    rank 3 computes both, and rank 0 computes cells of rank 3 of which it has both segments

A cell is a query segment and a key segment. A *line* of a rank is all cells that it computes with
one query segment, or with one key segment. Lines move as a whole, so that the rank that gives one
away need not fetch its segment.

Prices are integers, so that sums are exact and every rank finds the same moves, whatever library
adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NOBODY = -1

# How dear a token is to the rank that receives it: PRICE_AT_MEAN if the rank receives as much as
# the mean, and more if it receives more, with this power, up to MAX_PRICE. The limit keeps sums
# exact in float64. `benchmarks/documents.py` judges the power and the unit.
PRICE_POWER = 3
PRICE_AT_MEAN = 16
MAX_PRICE = 1 << 12
# An assignment is better if the sum over ranks of what each receives, to this power, is less. A
# high power counts most what the worst rank receives.
RECEIVED_POWER = 4
# How many moves are tried, and of how many of the ranks that receive most.
MAX_MOVES, MAX_MOVING_RANKS = 50, 4
# If the best lines were tried in vain, so many of the next best are considered.
MAX_LINES_TRIED = 4


@dataclass(frozen=True, eq=False)
class Lines:
    """Segments, which are runs of chunks of one rank: those of queries, then those of keys."""

    # row and column: of each cell, its query segment, and its key segment counted from 0.
    row: np.ndarray
    column: np.ndarray
    num_rows: int  # how many query segments there are
    owner: np.ndarray  # who stores each segment
    group: np.ndarray  # of heads, of its first chunk
    # cost_in and cost_home: of a rank that fetches it, and of its owner then, to which results
    # come.
    cost_in: np.ndarray
    cost_home: np.ndarray

    def is_own(self, world_size: int) -> np.ndarray:
        """Return (ranks, segments), which each rank stores."""
        return np.asarray(self.owner == np.arange(world_size)[:, None])

    def received(self, is_fetched: np.ndarray) -> np.ndarray:
        """Return what each rank receives, if (ranks, segments) says which it fetches."""
        home = self.cost_home * is_fetched.sum(0)
        return is_fetched @ self.cost_in + np.bincount(self.owner, home, len(is_fetched))

    def sum(self, weight: np.ndarray) -> np.ndarray:
        """Return (rows, columns), the weight of the cells of two segments."""
        shape = self.num_rows, len(self.owner) - self.num_rows
        flat = self.row * shape[1] + self.column
        return np.bincount(flat, weight, shape[0] * shape[1]).reshape(shape)

    def cross(self, line: int, across: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and the columns in which a line crosses others."""
        along = np.full(len(across), line)
        rows, columns = (along, across) if line < self.num_rows else (across, along)
        return rows, columns - self.num_rows


# A rank that gives a line away, the rank that gets it, and the line.
Move = tuple[int, int, int]


class LineMoves:
    """Who computes each cell, and the moves that improve it."""

    def __init__(
        self, lines: Lines, weight: np.ndarray, rank: np.ndarray, max_load: float, fixed: np.ndarray
    ) -> None:
        """Begin with the rank of each cell, which is the same for all cells of two segments.

        No move gives a rank more weight than `max_load`; of it, `fixed` does not move.
        """
        self.lines, self.weight, self.max_load = lines, lines.sum(weight), max_load
        self.rank = np.full(self.weight.shape, NOBODY)
        self.rank[lines.row, lines.column] = rank
        self.world_size, num_lines = len(fixed), len(lines.owner)
        self.is_own = lines.is_own(self.world_size)
        row, column = np.nonzero(self.rank >= 0)
        of_cell = self.rank[row, column]
        self.load = np.bincount(of_cell, self.weight[row, column], self.world_size) + fixed
        # How many cells of each segment a rank computes, (ranks, segments).
        self.num_cells = np.zeros((self.world_size, num_lines), np.int64)
        np.add.at(self.num_cells, (of_cell, row), 1)
        np.add.at(self.num_cells, (of_cell, lines.num_rows + column), 1)

    def improve(self) -> np.ndarray:
        """Move lines of the ranks that receive most, while that helps; return who has each cell."""
        received = self.lines.received((self.num_cells > 0) & ~self.is_own)
        rejected: set[Move] = set()
        is_stuck = np.zeros(self.world_size, dtype=bool)
        for _ in range(MAX_MOVES):
            busiest = np.argsort(-received, kind="stable")[:MAX_MOVING_RANKS]
            busiest = busiest[~is_stuck[busiest]]
            if not len(busiest):
                break
            rank = int(busiest[0])
            move = self._best_move(rank, received, rejected)
            if move is None:
                is_stuck[rank] = True
                continue
            handed_over = self._apply(*move)
            now = self.lines.received((self.num_cells > 0) & ~self.is_own)
            is_even = self.load[[*move[:2]]].max() <= self.max_load
            if is_even and _badness(now) < _badness(received):
                received = now
                is_stuck[:] = False
            else:
                for rows, columns, source, destination in handed_over[::-1]:
                    self._hand_over(rows, columns, destination, source)
                rejected.add(move)
        return self.rank[self.lines.row, self.lines.column]

    def _has(self) -> np.ndarray:
        """Return (ranks, segments), which each rank stores or fetches."""
        return (self.num_cells > 0) | self.is_own

    # --- Which line to move -------------------------------------------------------------------

    def _best_move(self, rank: int, received: np.ndarray, rejected: set[Move]) -> Move | None:
        """Return the move of a line of a rank that saves most; None if none saves anything."""
        # The segments of which the rank computes cells, and these cells.
        lines, used = self.lines, np.flatnonzero(self.num_cells[rank])
        if not len(used):
            return None
        dear, has = _price_of_ranks(received), self._has()
        rows, columns = np.split(np.arange(len(used)), [np.searchsorted(used, lines.num_rows)])
        place = np.ix_(used[rows], used[columns] - lines.num_rows)
        mine = (self.rank[place] == rank).astype(np.float64)
        weight = mine * self.weight[place]
        # What it costs that a rank has a segment of another, (ranks, segments).
        cost = lines.cost_in[used] * dear[:, None] + lines.cost_home[used] * dear[lines.owner[used]]
        missing = np.where(has[:, used], 0.0, cost)
        paid = np.where(lines.owner[used] == rank, 0.0, cost[rank])
        # A segment across a line is saved as well if no other line has cells of it.
        saved_across = paid * (self.num_cells[rank, used] == 1)
        # Cells of which the rank has both segments: the other rank may give them back for a line.
        with_both = np.ix_(*np.split(has[rank], [lines.num_rows]))
        of_cell, within_reach = self.rank[with_both].ravel(), self.weight[with_both].ravel()
        is_computed = of_cell >= 0
        room = self.max_load - self.load
        room += np.bincount(of_cell[is_computed], within_reach[is_computed], self.world_size)
        best, most = None, 0.0
        for at, across, cells, weights in (
            (rows, columns, mine, weight),
            (columns, rows, mine.T, weight.T),
        ):
            saved = paid[at] + cells @ saved_across[across]
            gain = saved[:, None] - missing[:, at].T - cells @ missing[:, across].T
            gain[weights.sum(1)[:, None] > room[None]] = 0
            gain[:, rank] = 0
            for _ in range(MAX_LINES_TRIED):
                line, to = divmod(int(gain.argmax()), self.world_size)
                if gain[line, to] <= most:
                    break
                move = rank, to, int(used[at[line]])
                if move not in rejected:
                    best, most = move, float(gain[line, to])
                    break
                gain[line, to] = 0
        return best

    # --- Moving it ----------------------------------------------------------------------------

    def _apply(
        self, source: int, destination: int, line: int
    ) -> list[tuple[np.ndarray, np.ndarray, int, int]]:
        """Move a line, and make room for it; return how `_hand_over` was called."""
        num_rows, has = self.lines.num_rows, self._has()[source]
        has[line] = False
        if line < num_rows:
            across = num_rows + np.flatnonzero(self.rank[line] == source)
        else:
            across = np.flatnonzero(self.rank[:, line - num_rows] == source)
        handed_over = [(*self.lines.cross(line, across), source, destination)]
        self._hand_over(*handed_over[0])
        excess = self.load[destination] - self.max_load
        if excess <= 0:
            return handed_over
        # The source has both segments of these. Those are first whose segments the destination uses
        # least.
        has_both = has[:num_rows, None] & has[None, num_rows:]
        rows, columns = np.nonzero((self.rank == destination) & has_both)
        num_cells = self.num_cells[destination]
        uses = np.minimum(num_cells[rows], num_cells[num_rows + columns])
        order = np.argsort(uses, kind="stable")
        rows, columns = rows[order], columns[order]
        num = int(np.searchsorted(np.cumsum(self.weight[rows, columns]), excess)) + 1
        handed_over.append((rows[:num], columns[:num], destination, source))
        self._hand_over(*handed_over[1])
        return handed_over

    def _hand_over(
        self, rows: np.ndarray, columns: np.ndarray, source: int, destination: int
    ) -> None:
        """Let the destination compute cells of the source."""
        weight = self.weight[rows, columns].sum()
        self.rank[rows, columns] = destination
        self.load[source] -= weight
        self.load[destination] += weight
        lines = np.concatenate([rows, self.lines.num_rows + columns])
        np.subtract.at(self.num_cells[source], lines, 1)
        np.add.at(self.num_cells[destination], lines, 1)


def _price_of_ranks(received: np.ndarray) -> np.ndarray:
    """Return how dear what a rank receives is to it, a whole number for each rank."""
    mean = max(1.0, float(received.mean()))
    price = np.rint(PRICE_AT_MEAN * (received / mean) ** PRICE_POWER)
    return np.minimum(price, MAX_PRICE) + 1


def _badness(received: np.ndarray) -> float:
    return float((received**RECEIVED_POWER).sum())
