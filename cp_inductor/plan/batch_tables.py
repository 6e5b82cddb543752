"""One rank's part of a batch plan as numbers: what the code of all plans reads.

    stage           0           1             2             ...   stages + 1
    fetched                     rows of q     rows of q
                                rows of kv    rows of kv
    computed        own cells   fetched       fetched             own cells
    sent home                   rows of out   rows of out

Rows are tokens as a rank stores them, for each group of heads: (batch entry, local token, group).
A *pool* numbers the rows that a rank has: 0 is a row of zeros, then its own rows follow, then those
that arrived, stage by stage. Tiles are gathered from the pool, block by block of 128 rows. A *lane*
is a group of heads of a batch entry: only rows of one lane make pairs. What has no token reads row
0 and is of no lane.

A second pool numbers results: 0 is a row of nothing, then the rows of all tiles follow, stage by
stage, then those that came home. A rank's own row is the sum of some rows of it.

Half of a rank's own cells are computed in the first stage, while the first rows arrive, and half in
the last, while the last results go home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from cp_inductor.plan.batch import BatchPlan
from cp_inductor.plan.batch_cells import BLOCK
from cp_inductor.plan.grid import spread
from cp_inductor.plan.ir import IS_OF_KEYS, PAYLOAD, STOP, Transfers

# What the numbers say of each block of a tile: the rows of the pool that it reads, as the first,
# the step to the next, and their number; the lane of these, and the position of the first; and
# where the cells have the block.
COLUMNS = ("pool", "step", "length", "lane", "position", "slot")
# What becomes of each of its 128 rows.
ROW_COLUMNS = ("pool", "lane", "position")
# So many rows of results are summed up for each own row at least, some of them of nothing:
# generated code treats a length of 1 as a special case.
MIN_SUMMED = 2


class Side(Enum):
    """Queries, or keys."""

    QUERY = "query"
    KEY = "key"


class Kind(Enum):
    """What a part of the numbers is for."""

    SEND = "send"  # own rows that are sent, by the rank that they are sent to
    HOME = "home"  # rows of a tile that are sent home, likewise
    TILE = "tile"  # the blocks of a tile: COLUMNS of each
    CELLS = "cells"  # for slots of queries and of keys together: 1 if the tile computes them
    SUM = "sum"  # the rows of results that are summed up to own rows: so many for each


@dataclass(frozen=True, slots=True)
class Part:
    """Names one part of the numbers. A SUM has `stage` 0, and CELLS have `side` QUERY."""

    kind: Kind
    side: Side
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parts there are, in which order, and which exchanges.

    Attributes:
        stages: that fetch.
        world_size: P.
    """

    stages: int
    world_size: int

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.stages + 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        fetching, computing = range(1, self.stages + 1), range(self.stages + 2)
        found = [Part(Kind.SEND, side, stage) for stage in fetching for side in Side]
        found += [Part(Kind.TILE, side, stage) for stage in computing for side in Side]
        found += [Part(Kind.CELLS, Side.QUERY, stage) for stage in computing]
        found += [Part(Kind.HOME, side, stage) for stage in fetching for side in Side]
        return (*found, *(Part(Kind.SUM, side) for side in Side))

    @property
    def exchanges(self) -> tuple[Part, ...]:
        """The parts that say what is sent in an exchange."""
        return tuple(part for part in self.parts if part.kind in (Kind.SEND, Kind.HOME))

    @property
    def num_sizes(self) -> int:
        """How many numbers `RankTables.sizes` has."""
        return 2 * len(self.parts) + self._sizes_of_exchange * len(self.exchanges)

    def place(self, part: Part) -> int:
        """Return where the sizes hold the first number, and the count of numbers, of a part."""
        return 2 * self.parts.index(part)

    def place_of_rows(self, exchange: Part) -> int:
        """Return where the sizes hold the rows sent to each rank, then those received from each.

        Behind these there is the number of rows that all ranks send.
        """
        before = self.exchanges.index(exchange)
        return 2 * len(self.parts) + self._sizes_of_exchange * before

    @property
    def _sizes_of_exchange(self) -> int:
        return 2 * self.world_size + 1


@dataclass(frozen=True, eq=False)
class RankTables:
    """The numbers.

    Attributes:
        sizes: see `Layout.place`, `Layout.place_of_rows`; int64.
        numbers: all parts, one behind the other; int64.
    """

    sizes: np.ndarray
    numbers: np.ndarray


def rank_tables(plan: BatchPlan, rank: int, *, num_queries: int, num_keys: int) -> RankTables:
    """Return a rank's part of a plan as numbers, given the tokens that it stores of all entries."""
    return _NumbersOfRank(plan, rank, {Side.QUERY: num_queries, Side.KEY: num_keys}).make()


class _NumbersOfRank:
    def __init__(self, plan: BatchPlan, rank: int, num_tokens: dict[Side, int]) -> None:
        self.plan, self.rank, self.num_groups = plan, rank, plan.num_groups
        self.num_rows = {side: plan.num_groups * num for side, num in num_tokens.items()}
        self.layout = Layout(plan.stages, plan.world_size)
        self.chunks = {Side.QUERY: plan.queries, Side.KEY: plan.keys}
        self.of_cells = {Side.QUERY: plan.query, Side.KEY: plan.key}
        self.parts: dict[Part, np.ndarray] = {}
        self.rows: dict[Part, np.ndarray] = {}

    def make(self) -> RankTables:
        for side in Side:
            arrived = self._fetch(side)
            self._tiles(side, arrived)
            self._home(side)
        self._cells()
        layout = self.layout
        sizes = np.zeros(layout.num_sizes, np.int64)
        flat = [self.parts[part].reshape(-1) for part in layout.parts]
        lengths = np.array([len(numbers) for numbers in flat])
        sizes[0 : 2 * len(flat) : 2] = np.cumsum(lengths) - lengths
        sizes[1 : 2 * len(flat) : 2] = lengths
        for part in layout.exchanges:
            place = layout.place_of_rows(part)
            sizes[place : place + len(self.rows[part])] = self.rows[part]
        return RankTables(sizes, np.concatenate(flat))

    # --- Exchanges ----------------------------------------------------------------------------

    def _exchange(self, part: Part, transfers: Transfers) -> tuple[np.ndarray, np.ndarray]:
        """Note the rows of an exchange.

        Returns:
            The chunks that this rank sends, by destination, and receives, by source.
        """
        is_of_side = IS_OF_KEYS[transfers.columns[:, PAYLOAD]] == (part.side is Side.KEY)
        sources, destinations, chunks = transfers.columns[is_of_side, :STOP].T
        lengths = self.chunks[part.side].length[chunks]
        is_sent, is_received = sources == self.rank, destinations == self.rank
        size = self.layout.world_size
        of_ranks = [
            np.bincount(others[which], lengths[which], size)
            for others, which in ((destinations, is_sent), (sources, is_received))
        ]
        self.rows[part] = np.concatenate([*of_ranks, [lengths.sum()]]).astype(np.int64)
        return chunks[is_sent], chunks[is_received]

    def _fetch(self, side: Side) -> dict[int, _ChunksInPool]:
        """Make the SEND parts, and return what is in the pool from each stage on."""
        chunks = self.chunks[side]
        arrived: dict[int, _ChunksInPool] = {}
        start = 1 + self.num_rows[side]
        for stage in range(1, self.layout.stages + 1):
            part = Part(Kind.SEND, side, stage)
            sent, got = self._exchange(part, self.plan.fetches[stage])
            self.parts[part] = _ranges(chunks.row[sent], chunks.length[sent], self.num_groups)
            lengths = chunks.length[got]
            arrived[stage] = _ChunksInPool(got, start + np.cumsum(lengths) - lengths)
            start += int(lengths.sum())
        return arrived

    # --- Tiles --------------------------------------------------------------------------------

    @cached_property
    def mine(self) -> np.ndarray:
        """The cells that this rank computes."""
        return np.flatnonzero(self.plan.rank == self.rank)

    @cached_property
    def stages_of_mine(self) -> np.ndarray:
        """Their stages; of own cells, half are late."""
        plan = self.plan
        stage = plan.stage[self.mine].copy()
        own = np.flatnonzero(stage == 0)
        if len(own):
            # By whole chunks of queries: what one row sees is computed at once.
            queries = plan.query[self.mine][own]
            by_query = np.bincount(queries, plan.weight[self.mine][own])
            before = np.cumsum(by_query) - by_query
            stage[own[before[queries] >= by_query.sum() / 2]] = self.layout.last
        return stage

    def _tiles(self, side: Side, arrived: dict[int, _ChunksInPool]) -> None:
        """Make the TILE parts."""
        chunks = self.chunks[side]
        in_pool = np.full(len(chunks.rank), -1, np.int64)
        is_own = chunks.rank == self.rank
        in_pool[is_own] = 1 + chunks.row[is_own]
        step = np.where(is_own, self.num_groups, 1)
        lane = chunks.entry * self.num_groups + chunks.group
        for stage in range(self.layout.stages + 2):
            if stage in arrived:
                in_pool[arrived[stage].chunks] = arrived[stage].rows
            used = self._used(side, stage)
            if not len(used):
                # A block without rows.
                self.parts[Part(Kind.TILE, side, stage)] = np.zeros((1, len(COLUMNS)), np.int64)
                continue
            at, block = spread(chunks.num_blocks[used])
            chunk, token = used[at], block * BLOCK
            # A row of cells for each chunk of queries, a column for each of keys.
            num_columns = max(1, len(self._used(Side.KEY, stage)))
            slots = np.arange(len(used)) * (num_columns if side is Side.QUERY else 1)
            self.parts[Part(Kind.TILE, side, stage)] = np.stack(
                [
                    in_pool[chunk] + token * step[chunk],
                    step[chunk],
                    np.minimum(BLOCK, chunks.length[chunk] - token),
                    lane[chunk],
                    chunks.first[chunk] + token,
                    slots[at],
                ],
                axis=1,
            )

    def _used(self, side: Side, stage: int) -> np.ndarray:
        """Return the chunks that a stage of this rank computes with, in order."""
        return np.unique(self.of_cells[side][self.mine][self.stages_of_mine == stage])

    def _cells(self) -> None:
        """Make the CELLS parts."""
        for stage in range(self.layout.stages + 2):
            queries, keys = (self._used(side, stage) for side in Side)
            is_computed = np.zeros((max(1, len(queries)), max(1, len(keys))), np.int64)
            mine = self.mine[self.stages_of_mine == stage]
            rows = np.searchsorted(queries, self.plan.query[mine])
            is_computed[rows, np.searchsorted(keys, self.plan.key[mine])] = 1
            self.parts[Part(Kind.CELLS, Side.QUERY, stage)] = is_computed

    # --- Results ------------------------------------------------------------------------------

    def _home(self, side: Side) -> None:
        """Make the HOME parts, and the SUM."""
        chunks = self.chunks[side]
        found: list[_ChunksInPool] = []
        start = 1
        in_tile: dict[int, np.ndarray] = {}
        for stage in range(self.layout.stages + 2):
            used = self._used(side, stage)
            blocks = chunks.num_blocks[used]
            rows = np.full(len(chunks.rank), -1, np.int64)
            rows[used] = (np.cumsum(blocks) - blocks) * BLOCK
            in_tile[stage] = rows
            own = used[chunks.rank[used] == self.rank]
            found.append(_ChunksInPool(own, start + rows[own]))
            start += BLOCK * len(self.parts[Part(Kind.TILE, side, stage)])
        for stage in range(1, self.layout.stages + 1):
            part = Part(Kind.HOME, side, stage)
            sent, got = self._exchange(part, self.plan.homes[stage])
            self.parts[part] = _ranges(in_tile[stage][sent], chunks.length[sent])
            lengths = chunks.length[got]
            found.append(_ChunksInPool(got, start + np.cumsum(lengths) - lengths))
            start += int(lengths.sum())
        self.parts[Part(Kind.SUM, side)] = self._sum(side, found)

    def _sum(self, side: Side, found: Sequence[_ChunksInPool]) -> np.ndarray:
        """Return which rows of results make up each own row, (n, rows): 0 where there are fewer."""
        chunks = self.chunks[side]
        which = np.concatenate([some.chunks for some in found])
        rows = np.concatenate([some.rows for some in found])
        order = np.argsort(which, kind="stable")
        which, rows = which[order], rows[order]
        number = np.arange(len(which)) - np.searchsorted(which, which)
        depth = max(MIN_SUMMED, int(number.max()) + 1 if len(number) else 0)
        total = np.zeros((depth, self.num_rows[side]), np.int64)
        lengths = chunks.length[which]
        at = _ranges(chunks.row[which], lengths, self.num_groups)
        total[np.repeat(number, lengths), at] = _ranges(rows, lengths)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _ChunksInPool:
    """Chunks, and the first row of each in a pool."""

    chunks: np.ndarray
    rows: np.ndarray


def _ranges(starts: np.ndarray, lengths: np.ndarray, step: int = 1) -> np.ndarray:
    """Return start, start + step, ... of each range, one behind the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - step * (ends - lengths), lengths) + step * np.arange(total)
