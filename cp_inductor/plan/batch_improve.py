"""Move work between ranks until the rank that receives most receives less.

    rank 0 has the cells (7 1) (7 2) of query 7, which it fetched for these alone
    rank 3 has query 7, and fetched keys 1 and 2
      =>
    rank 3 takes them, and rank 0 takes cells of rank 3 of which it has both sides

A line is all that a rank computes of one query segment, or of one key segment. Prices are integers,
so that sums are exact and every rank finds the same moves, whatever library adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# How much of its bytes over the mean, to this power, a rank counts.
POWER = 3
UNIT = 16
MAX_PRICE = 1 << 12


@dataclass(frozen=True, eq=False)
class Side:
    """Query segments, or key segments.

    Attributes:
        owner: who stores each.
        length: its tokens.
        price_in, price_home: of a token, twice.
    """

    owner: np.ndarray
    length: np.ndarray
    price_in: int
    price_home: int


class Improvement:
    """Who computes each (query segment, key segment), and what moves therefore."""

    def __init__(
        self,
        weight: np.ndarray,
        taken: np.ndarray,
        queries: Side,
        keys: Side,
        world_size: int,
        most: float,
    ) -> None:
        """Begin with what growth has found.

        Args:
            weight: of each (query segment, key segment).
            taken: who computes it; -1 for nobody. Changed in place.
            queries, keys: the segments.
            world_size: number of ranks.
            most: weight that a rank may have.
        """
        self.weight, self.taken, self.world_size, self.most = weight, taken, world_size, most
        self.sides = queries, keys
        row, column = np.nonzero(taken >= 0)
        rank = taken[row, column]
        self.load = np.bincount(rank, weight[row, column], world_size)
        # How many cells of each segment a rank computes.
        self.counts = [
            np.bincount(
                rank * len(side.owner) + at, minlength=world_size * len(side.owner)
            ).reshape(world_size, -1)
            for side, at in zip(self.sides, (row, column), strict=True)
        ]
        ranks = np.arange(world_size)[:, None]
        self.owns = [side.owner[None] == ranks for side in self.sides]

    def received(self) -> np.ndarray:
        """Return what each rank receives, at twice the prices."""
        total = np.zeros(self.world_size)
        for side, owns, counts in zip(self.sides, self.owns, self.counts, strict=True):
            fetched = (counts > 0) & ~owns
            total += side.price_in * (fetched @ side.length)
            home = side.price_home * fetched.sum(0) * side.length
            total += np.bincount(side.owner, home, self.world_size)
        return total

    def run(self, num_steps: int, num_ranks: int) -> None:
        """Move lines of the ranks that receive most.

        Args:
            num_steps: try at most so many moves.
            num_ranks: of so many ranks.
        """
        received = self.received()
        best = _badness(received)
        tabu: set[tuple[int, int, int, int]] = set()
        stuck = np.zeros(self.world_size, dtype=bool)
        for _ in range(num_steps):
            worst = np.argsort(-received, kind="stable")[:num_ranks]
            worst = worst[~stuck[worst]]
            if not len(worst):
                break
            rank = int(worst[0])
            move = self._best_move(rank, received, tabu)
            if move is None:
                stuck[rank] = True
                continue
            before = self._save()
            self._move(*move)
            now = self.received()
            is_even = max(self.load[move[0]], self.load[move[3]]) <= self.most
            if is_even and _badness(now) < best:
                received, best = now, _badness(now)
                stuck[:] = False
            else:
                self._restore(before)
                tabu.add(move)

    def _save(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        return self.taken.copy(), self.load.copy(), [counts.copy() for counts in self.counts]

    def _restore(self, saved: tuple[np.ndarray, np.ndarray, list[np.ndarray]]) -> None:
        self.taken[:], self.load, self.counts = saved

    def _best_move(
        self, rank: int, received: np.ndarray, tabu: set[tuple[int, int, int, int]]
    ) -> tuple[int, int, int, int] | None:
        """Return (rank, side, segment, to whom) of the line that saves most; None if none does."""
        mean = max(1.0, float(received.mean()))
        busy = np.minimum(np.rint(UNIT * (received / mean) ** POWER), MAX_PRICE) + 1
        mine = (self.taken == rank).astype(np.float64)
        weight = mine * self.weight
        # What arrives at each rank, and goes home, if it is to have a segment that it has not.
        missing = [
            np.where(
                owns | (counts > 0),
                0.0,
                (side.price_in * busy[:, None] + side.price_home * busy[side.owner]) * side.length,
            )
            for side, owns, counts in zip(self.sides, self.owns, self.counts, strict=True)
        ]
        held = [
            np.where(
                owns[rank],
                0.0,
                (side.price_in * busy[rank] + side.price_home * busy[side.owner]) * side.length,
            )
            for side, owns in zip(self.sides, self.owns, strict=True)
        ]
        back = self._free(rank)
        room = self.most - self.load + back
        found: tuple[float, tuple[int, int, int, int]] | None = None
        for side in (0, 1):
            own_line, of_line = (mine, weight) if side == 0 else (mine.T, weight.T)
            has_line = own_line.any(1)
            lines = np.flatnonzero(has_line)
            if not len(lines):
                continue
            part = own_line[lines]
            alone = held[1 - side] * (self.counts[1 - side][rank] == 1)
            saved = held[side][lines] + part @ alone
            cost = missing[side][:, lines].T + part @ missing[1 - side].T
            gain = saved[:, None] - cost
            heavy = of_line[lines].sum(1)
            gain[heavy[:, None] > room[None]] = 0
            gain[:, rank] = 0
            for _ in range(4):
                at = int(gain.argmax())
                line, to = divmod(at, self.world_size)
                value = float(gain[line, to])
                if value <= 0 or (found is not None and value <= found[0]):
                    break
                move = (rank, side, int(lines[line]), to)
                if move not in tabu:
                    found = value, move
                    break
                gain[line, to] = 0
        return None if found is None else found[1]

    def _free(self, rank: int) -> np.ndarray:
        """Return the weight of each rank's cells of which a rank has both sides."""
        rows, columns = (
            np.flatnonzero(owns[rank] | (counts[rank] > 0))
            for owns, counts in zip(self.owns, self.counts, strict=True)
        )
        place = np.ix_(rows, columns)
        whose, weight = self.taken[place].ravel(), self.weight[place].ravel()
        is_taken = whose >= 0
        return np.bincount(whose[is_taken], weight[is_taken], self.world_size)

    def _move(self, rank: int, side: int, segment: int, to: int) -> None:
        along = self.taken[segment] if side == 0 else self.taken[:, segment]
        others = np.flatnonzero(along == rank)
        same = np.full(len(others), segment)
        rows, columns = (same, others) if side == 0 else (others, same)
        has = [
            owns[rank] | (counts[rank] > 0)
            for owns, counts in zip(self.owns, self.counts, strict=True)
        ]
        has[side][segment] = False
        self._give(rows, columns, rank, to)
        over = self.load[to] - self.most
        if over <= 0:
            return
        # The other rank has too much now: some comes back, of which this one has both sides.
        mine = (self.taken == to) & has[0][:, None] & has[1][None]
        rows, columns = np.nonzero(mine)
        scarce = np.minimum(self.counts[0][to, rows], self.counts[1][to, columns])
        order = np.argsort(scarce, kind="stable")
        done = np.cumsum(self.weight[rows[order], columns[order]])
        num = int(np.searchsorted(done, over)) + 1
        order = order[:num]
        self._give(rows[order], columns[order], to, rank)

    def _give(self, rows: np.ndarray, columns: np.ndarray, source: int, to: int) -> None:
        weight = self.weight[rows, columns].sum()
        self.taken[rows, columns] = to
        self.load[source] -= weight
        self.load[to] += weight
        for counts, at in zip(self.counts, (rows, columns), strict=True):
            np.subtract.at(counts[source], at, 1)
            np.add.at(counts[to], at, 1)


def _badness(received: np.ndarray) -> float:
    """Return what is to become less: it counts most what the worst rank receives."""
    return float(((received / 1024.0) ** 4).sum())
