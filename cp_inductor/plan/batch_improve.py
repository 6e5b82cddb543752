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

from cp_inductor.plan.ir import Prices

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
class Segments:
    """Runs of chunks of one rank.

    Attributes:
        of_chunk: the segment of each chunk.
        rank: who stores it.
        length: its tokens.
        group: of heads, of its first chunk.
    """

    of_chunk: np.ndarray
    rank: np.ndarray
    length: np.ndarray
    group: np.ndarray


@dataclass(frozen=True, slots=True)
class LineMove:
    """A line that moves.

    Attributes:
        source, destination: ranks.
        side: 0 for a line of a query segment, 1 for a line of a key segment.
        segment: its number.
    """

    source: int
    destination: int
    side: int
    segment: int


class LineMoves:
    """Who computes each cell, and the moves that improve it."""

    def __init__(
        self,
        weight: np.ndarray,
        rank: np.ndarray,
        sides: tuple[Segments, Segments],
        prices: Prices,
        max_load: float,
        fixed: np.ndarray,
    ) -> None:
        """Begin with an assignment.

        Args:
            weight: of each cell, (query segments, key segments).
            rank: who computes it; -1 for nobody. Changed in place.
            sides: the query segments, and the key segments.
            prices: of a token that is fetched, or whose result is sent home.
            max_load: the most weight that a rank may have after a move.
            fixed: the weight of each rank that does not move.
        """
        world_size = len(fixed)
        self.weight, self.rank, self.sides = weight, rank, sides
        self.world_size, self.max_load = world_size, max_load
        # In halves of an element, of what is fetched and what is sent home, for each side.
        self.prices = (
            (round(2 * prices.query_in), round(2 * prices.query_home)),
            (round(2 * prices.key_in), round(2 * prices.key_home)),
        )
        row, column = np.nonzero(rank >= 0)
        of_cell = rank[row, column]
        self.load = np.bincount(of_cell, weight[row, column], world_size) + fixed
        # For each side, how many cells of each segment a rank computes, (ranks, segments).
        self.num_cells = [
            np.bincount(
                of_cell * len(side.rank) + segment, minlength=world_size * len(side.rank)
            ).reshape(world_size, -1)
            for side, segment in zip(self.sides, (row, column), strict=True)
        ]
        ranks = np.arange(world_size)[:, None]
        self.is_own = [side.rank[None] == ranks for side in self.sides]

    def received(self) -> np.ndarray:
        """Return what each rank receives, in the unit of the prices."""
        total = np.zeros(self.world_size)
        parts = zip(self.sides, self.prices, self.is_own, self.num_cells, strict=True)
        for side, (price_in, price_home), is_own, num_cells in parts:
            is_fetched = (num_cells > 0) & ~is_own
            total += price_in * (is_fetched @ side.length)
            home = price_home * is_fetched.sum(0) * side.length
            total += np.bincount(side.rank, home, self.world_size)
        return total

    def improve(self) -> None:
        """Move lines of the ranks that receive most, as long as that helps."""
        received = self.received()
        least = _badness(received)
        rejected: set[LineMove] = set()
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
            handed_over = self._apply(move)
            now = self.received()
            is_even = max(self.load[move.source], self.load[move.destination]) <= self.max_load
            if is_even and _badness(now) < least:
                received, least = now, _badness(now)
                is_stuck[:] = False
            else:
                for rows, columns, source, destination in handed_over[::-1]:
                    self._hand_over(rows, columns, destination, source)
                rejected.add(move)

    # --- Which line to move -------------------------------------------------------------------

    def _best_move(
        self, rank: int, received: np.ndarray, rejected: set[LineMove]
    ) -> LineMove | None:
        """Return the move of a line of a rank that saves most; None if none saves anything."""
        dear = _price_of_ranks(received)
        # The segments of which the rank computes cells, and these cells.
        used = [np.flatnonzero(num_cells[rank]) for num_cells in self.num_cells]
        place = np.ix_(*used)
        mine = (self.rank[place] == rank).astype(np.float64)
        weight = mine * self.weight[place]
        missing, paid = [], []
        parts = zip(self.sides, self.prices, self._has(), self.is_own, used, strict=True)
        for side, (price_in, price_home), has, is_own, of in parts:
            # What it costs that a rank has a segment of another, (ranks, segments).
            price = price_in * dear[:, None] + price_home * dear[side.rank[of]]
            cost = price * side.length[of]
            missing.append(np.where(has[:, of], 0.0, cost))
            paid.append(np.where(is_own[rank, of], 0.0, cost[rank]))
        # Cells that the other rank may give back make room for a line.
        room = self.max_load - self.load + self._load_within_reach(rank)
        best, most = None, 0.0
        for at, other in ((0, 1), (1, 0)):
            lines, weights = (mine, weight) if at == 0 else (mine.T, weight.T)
            if not len(used[at]):
                continue
            # A segment of the other side is saved as well if no other line has cells of it.
            is_alone = self.num_cells[other][rank, used[other]] == 1
            saved = paid[at] + lines @ (paid[other] * is_alone)
            spent = missing[at].T + lines @ missing[other].T
            gain = saved[:, None] - spent
            gain[weights.sum(1)[:, None] > room[None]] = 0
            gain[:, rank] = 0
            for _ in range(MAX_LINES_TRIED):
                line, to = divmod(int(gain.argmax()), self.world_size)
                if gain[line, to] <= most:
                    break
                move = LineMove(rank, to, at, int(used[at][line]))
                if move not in rejected:
                    best, most = move, float(gain[line, to])
                    break
                gain[line, to] = 0
        return best

    def _has(self) -> list[np.ndarray]:
        """Return for each side which segments each rank stores or fetches."""
        return [
            is_own | (num_cells > 0)
            for is_own, num_cells in zip(self.is_own, self.num_cells, strict=True)
        ]

    def _load_within_reach(self, rank: int) -> np.ndarray:
        """Return the weight of each rank's cells of which a given rank has both segments."""
        rows, columns = (np.flatnonzero(has[rank]) for has in self._has())
        place = np.ix_(rows, columns)
        of_cell, weight = self.rank[place].ravel(), self.weight[place].ravel()
        is_computed = of_cell >= 0
        return np.bincount(of_cell[is_computed], weight[is_computed], self.world_size)

    # --- Moving it ----------------------------------------------------------------------------

    def _apply(self, move: LineMove) -> list[tuple[np.ndarray, np.ndarray, int, int]]:
        """Move a line, and make room for it; return how `_hand_over` was called."""
        source, destination = move.source, move.destination
        has_row, has_column = (has[source] for has in self._has())
        (has_row, has_column)[move.side][move.segment] = False
        of_cell = self.rank[move.segment] if move.side == 0 else self.rank[:, move.segment]
        across = np.flatnonzero(of_cell == source)
        along = np.full(len(across), move.segment)
        rows, columns = (along, across) if move.side == 0 else (across, along)
        handed_over = [(rows, columns, source, destination)]
        self._hand_over(*handed_over[0])
        excess = self.load[destination] - self.max_load
        if excess <= 0:
            return handed_over
        # The source has both segments of these. Those are first whose segments the destination uses
        # least.
        rows, columns = np.nonzero((self.rank == destination) & has_row[:, None] & has_column[None])
        of_rows, of_columns = (counts[destination] for counts in self.num_cells)
        order = np.argsort(np.minimum(of_rows[rows], of_columns[columns]), kind="stable")
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
        for num_cells, segments in zip(self.num_cells, (rows, columns), strict=True):
            np.subtract.at(num_cells[source], segments, 1)
            np.add.at(num_cells[destination], segments, 1)


def _price_of_ranks(received: np.ndarray) -> np.ndarray:
    """Return how dear what a rank receives is to it, a whole number for each rank."""
    mean = max(1.0, float(received.mean()))
    price = np.rint(PRICE_AT_MEAN * (received / mean) ** PRICE_POWER)
    return np.minimum(price, MAX_PRICE) + 1


def _badness(received: np.ndarray) -> float:
    return float((received**RECEIVED_POWER).sum())
