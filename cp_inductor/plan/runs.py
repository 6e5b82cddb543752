"""Sets of integers on a line, as sorted runs: unions, and what they cover, all at once.

    [2, 5) [4, 7) [9, 10)   =>   [2, 7) [9, 10)

Plans ask what ranks have and lack, for a hundred thousand spans. `Lines` lays the chunks of every
rank, or their tokens, one after another on one line, so that one sort answers for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Disjoint runs [start, stop), in order, none of which touches the next.

    Attributes:
        starts, stops: (runs,) int64.
    """

    starts: np.ndarray
    stops: np.ndarray

    @staticmethod
    def of(starts: np.ndarray, stops: np.ndarray) -> Runs:
        """Return the union of runs, which may be empty, overlap, and stand in any order."""
        order = np.argsort(starts, kind="stable")
        order = order[starts[order] < stops[order]]
        starts, reach = starts[order], np.maximum.accumulate(stops[order])
        is_first = np.append(True, starts[1:] > reach[:-1])[: len(starts)]
        return Runs(starts[is_first], reach[np.roll(is_first, -1)])

    def __or__(self, other: Runs) -> Runs:
        starts = np.concatenate([self.starts, other.starts])
        return Runs.of(starts, np.concatenate([self.stops, other.stops]))

    def __len__(self) -> int:
        """Return how many integers are in the runs."""
        return int((self.stops - self.starts).sum())

    def covers(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return (n,) bool: whether all of [start, stop) is there; an empty run is."""
        at = np.searchsorted(self.starts, starts, side="right") - 1
        reach = np.append(self.stops, -1)[at]  # -1 is where nothing starts before
        return (starts >= stops) | (stops <= reach)


def spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for runs of so many items, the run of each item, and its place within the run."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
