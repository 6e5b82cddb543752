"""Assign ranks to the cells of a batch, so that work is balanced and little moves.

    a rank begins with its own queries and keys     q {4 5}      x k {4 5}
    it takes what it can compute with them          (4 4) (5 4) (5 5)
    it adds the query or the key segment that       q {4 5}      x k {2 4 5}
      brings most work for what it costs            + (4 2) (5 2)
    ... until it has its share                      q {4 5 7}    x k {2 4 5}

The rank with the least work is next, so that all grow together, and what a rank has fetched for one
cell serves all others: long documents are cut in two dims, and neither their queries nor their keys
go to everyone. It is done with segments of several chunks first, and then with chunks, for what did
not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_inductor.plan.batch_cells import Cells
from cp_inductor.plan.batch_chunks import Chunks

# Work of a rank over the mean: up to here ranks take what is left.
SHARE = 1.0
MAX_SHARE = 1.045
# Segments of all ranks, by level, and of a rank at least.
LEVELS = (64, 1024)
MIN_SEGMENTS = (4, 8)
NOBODY = -1
# By how much a segment of another owner is less welcome for each rank that it is away.
NEARNESS = 1e-4


@dataclass(frozen=True, slots=True)
class Prices:
    """What a token costs, in the elements of a token's K and V.

    Attributes:
        query_in: q, forward; q and the gradient of out, backward.
        query_home: out, forward; dq, backward.
        key_in: k and v, forward and again backward.
        key_home: their gradients.
    """

    query_in: float
    query_home: float
    key_in: float = 2.0
    key_home: float = 1.0

    @staticmethod
    def of(num_heads: int, num_kv_heads: int) -> Prices:
        """Return the prices of an attention. The statistics of rows hardly count."""
        ratio = num_heads / (2 * num_kv_heads)
        return Prices(3 * ratio, 2 * ratio)


def assign_ranks(
    cells: Cells, queries: Chunks, keys: Chunks, world_size: int, prices: Prices
) -> np.ndarray:
    """Return the rank of each cell."""
    rank = np.full(len(cells.query), NOBODY)
    total = float(cells.weight.sum())
    if world_size == 1 or not total:
        return np.zeros_like(rank)
    for level in range(len(LEVELS)):
        todo = rank == NOBODY
        if not todo.any():
            break
        num = max(LEVELS[level] // world_size, MIN_SEGMENTS[level])
        of_query, of_key = (_segments(chunks, num, world_size) for chunks in (queries, keys))
        grown = _Growth(cells, rank, of_query, of_key, world_size, prices)
        at = of_query.of_chunk[cells.query[todo]], of_key.of_chunk[cells.key[todo]]
        rank[todo] = grown.run(SHARE * total / world_size)[at]
    todo = np.flatnonzero(rank == NOBODY)
    loads = np.bincount(rank[rank >= 0], cells.weight[rank >= 0], world_size)
    for cell in todo:
        rank[cell] = loads.argmin()
        loads[rank[cell]] += cells.weight[cell]
    return rank


@dataclass(frozen=True, eq=False)
class _Segments:
    """Runs of chunks of one rank.

    Attributes:
        of_chunk: the segment of each chunk.
        rank: who stores it.
        length: its tokens.
    """

    of_chunk: np.ndarray
    rank: np.ndarray
    length: np.ndarray


def _segments(chunks: Chunks, num_of_rank: int, world_size: int) -> _Segments:
    count = np.bincount(chunks.rank, minlength=world_size)
    inside = np.arange(len(chunks)) - (np.cumsum(count) - count)[chunks.rank]
    num = np.minimum(count, num_of_rank)
    of_chunk = (np.cumsum(num) - num)[chunks.rank] + inside * num[chunks.rank] // count[chunks.rank]
    rank = np.repeat(np.arange(world_size), num)
    return _Segments(of_chunk, rank, np.bincount(of_chunk, chunks.length, len(rank)))


class _Growth:
    """Ranks that take cells of segments."""

    def __init__(
        self,
        cells: Cells,
        rank: np.ndarray,
        queries: _Segments,
        keys: _Segments,
        world_size: int,
        prices: Prices,
    ) -> None:
        shape = len(queries.rank), len(keys.rank)
        at = queries.of_chunk[cells.query], keys.of_chunk[cells.key]
        flat = at[0] * shape[1] + at[1]
        todo = rank == NOBODY
        # What nobody has taken yet, by (query segment, key segment), and who takes it.
        self.left = np.bincount(flat[todo], cells.weight[todo], shape[0] * shape[1]).reshape(shape)
        self.taken = np.full(shape, NOBODY)
        self.load = np.bincount(rank[~todo], cells.weight[~todo], world_size)
        ranks = np.arange(world_size)[:, None]
        # Which query segments, and which key segments, a rank has.
        self.has_query = queries.rank[None] == ranks
        self.has_key = keys.rank[None] == ranks
        self.has_query[rank[~todo], at[0][~todo]] = True
        self.has_key[rank[~todo], at[1][~todo]] = True
        self.queries, self.keys, self.prices, self.world_size = queries, keys, prices, world_size
        near_query = 1 - NEARNESS * np.abs(queries.rank[None] - ranks) / world_size
        near_key = 1 - NEARNESS * np.abs(keys.rank[None] - ranks) / world_size
        self.value_of_query = near_query / ((prices.query_in + prices.query_home) * queries.length)
        self.value_of_key = near_key / ((prices.key_in + prices.key_home) * keys.length)

    def run(self, share: float) -> np.ndarray:
        """Return who takes each (query segment, key segment), or nobody.

        Args:
            share: the most that a rank takes.
        """
        self._take_own(share)
        self.steps = 0
        grows = np.ones(self.world_size, dtype=bool)
        while grows.any() and self.left.any():
            rank = int(np.where(grows, self.load, np.inf).argmin())
            grows[rank] = self._grow(rank, share - self.load[rank])
            self.steps += 1
        return self.taken

    def _take_own(self, share: float) -> None:
        """Every rank takes what it has both sides of, nearest to the diagonal first."""
        for rank in range(self.world_size):
            queries = np.flatnonzero(self.has_query[rank])
            keys = np.flatnonzero(self.has_key[rank])
            left = self.left[np.ix_(queries, keys)]
            row, column = np.nonzero(left)
            order = np.argsort(np.abs(queries[row] - keys[column]), kind="stable")
            self._take(rank, queries[row[order]], keys[column[order]], share - self.load[rank])

    def _take(self, rank: int, query: np.ndarray, key: np.ndarray, room: float) -> None:
        """Take cells in this order, as many as there is room for."""
        weight = self.left[query, key]
        fits = np.cumsum(weight) <= room
        query, key = query[fits], key[fits]
        self.load[rank] += weight[fits].sum()
        self.left[query, key] = 0
        self.taken[query, key] = rank

    def _grow(self, rank: int, room: float) -> bool:
        """Add the segment that brings most for its cost; return whether there was any."""
        has_query, has_key = self.has_query[rank], self.has_key[rank]
        by_query = self.left[:, np.flatnonzero(has_key)].sum(1)
        by_key = self.left[np.flatnonzero(has_query)].sum(0)
        by_query[has_query] = 0
        by_key[has_key] = 0
        value_of_query = np.minimum(by_query, room) * self.value_of_query[rank]
        value_of_key = np.minimum(by_key, room) * self.value_of_key[rank]
        query, key = int(value_of_query.argmax()), int(value_of_key.argmax())
        if value_of_query[query] >= value_of_key[key]:
            if not value_of_query[query]:
                return self._seed(rank, room)
            has_query[query] = True
            columns = np.flatnonzero(has_key & (self.left[query] > 0))
            before = self.load[rank]
            self._take(rank, np.full(len(columns), query), columns, room)
            return self.load[rank] > before
        has_key[key] = True
        rows = np.flatnonzero(has_query & (self.left[:, key] > 0))
        before = self.load[rank]
        self._take(rank, rows, np.full(len(rows), key), room)
        return self.load[rank] > before

    def _seed(self, rank: int, room: float) -> bool:
        """Begin with a cell of which the rank has neither side."""
        query = int(self.left.sum(1).argmax())
        column = np.where(self.left[query] > 0, self.left.sum(0), 0)
        key = int(column.argmax())
        weight = self.left[query, key]
        if not 0 < weight <= room:
            return False
        self.has_query[rank, query] = self.has_key[rank, key] = True
        self._take(rank, np.array([query]), np.array([key]), room)
        return True
