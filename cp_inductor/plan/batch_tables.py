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

from dataclasses import dataclass
from enum import Enum

import numpy as np

from cp_inductor.plan.batch import BatchPlan
from cp_inductor.plan.batch_cells import BLOCK, Chunks
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
    """Which parts there are, in which order, and which exchanges."""

    stages: int  # that fetch
    world_size: int  # P

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.stages + 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        fetching, computing = range(1, self.stages + 1), range(self.stages + 2)
        parts = [Part(Kind.SEND, side, stage) for stage in fetching for side in Side]
        parts += [Part(Kind.TILE, side, stage) for stage in computing for side in Side]
        parts += [Part(Kind.CELLS, Side.QUERY, stage) for stage in computing]
        parts += [Part(Kind.HOME, side, stage) for stage in fetching for side in Side]
        return (*parts, *(Part(Kind.SUM, side) for side in Side))

    @property
    def exchanges(self) -> tuple[Part, ...]:
        """The parts that say what is sent in an exchange."""
        return tuple(part for part in self.parts if part.kind in (Kind.SEND, Kind.HOME))

    @property
    def num_sizes(self) -> int:
        """How many numbers `RankTables.sizes` has."""
        return 2 * len(self.parts) + (2 * self.world_size + 1) * len(self.exchanges)

    def place(self, part: Part) -> int:
        """Return where the sizes hold the first number, and the count of numbers, of a part."""
        return 2 * self.parts.index(part)

    def place_of_rows(self, exchange: Part) -> int:
        """Return where the sizes hold the rows sent to each rank, then those received from each.

        Behind these there is the number of rows that all ranks send.
        """
        of_exchange = 2 * self.world_size + 1
        return 2 * len(self.parts) + of_exchange * self.exchanges.index(exchange)


@dataclass(frozen=True, eq=False)
class RankTables:
    """The numbers."""

    sizes: np.ndarray  # see `Layout.place`, `Layout.place_of_rows`; int64
    numbers: np.ndarray  # all parts, one behind the other; int64


def rank_tables(plan: BatchPlan, rank: int, *, num_queries: int, num_keys: int) -> RankTables:
    """Return a rank's part of a plan as numbers, given the tokens that it stores of all entries."""
    return _NumbersOfRank(plan, rank, {Side.QUERY: num_queries, Side.KEY: num_keys}).make()


class _NumbersOfRank:
    def __init__(self, plan: BatchPlan, rank: int, num_tokens: dict[Side, int]) -> None:
        self.plan, self.rank, self.num_groups = plan, rank, plan.num_groups
        self.num_rows = {side: plan.num_groups * num for side, num in num_tokens.items()}
        self.layout = Layout(plan.stages, plan.world_size)
        # The cells that this rank computes in each stage; of own cells, half are late.
        mine = np.flatnonzero(plan.rank == rank)
        stage = plan.stage[mine]
        own = mine[stage == 0]
        # By whole chunks of queries: what one row sees is computed at once.
        by_query = np.bincount(plan.query[own], plan.weight[own])
        is_late = np.cumsum(by_query) - by_query >= by_query.sum() / 2
        stage[stage == 0] = np.where(is_late[plan.query[own]], self.layout.last, 0)
        self.cells = [mine[stage == number] for number in range(self.layout.last + 1)]
        # The chunks that each stage computes with, in order.
        self.used = {
            side: [np.unique(of_cell[cells]) for cells in self.cells]
            for side, (_, of_cell) in zip(Side, plan.sides, strict=True)
        }
        self.parts: dict[Part, np.ndarray] = {}
        self.rows: dict[Part, np.ndarray] = {}

    def make(self) -> RankTables:
        for side, (chunks, _) in zip(Side, self.plan.sides, strict=True):
            self._add(side, chunks)
        for stage, cells in enumerate(self.cells):
            queries, keys = (self.used[side][stage] for side in Side)
            is_computed = np.zeros((max(1, len(queries)), max(1, len(keys))), np.int64)
            rows = np.searchsorted(queries, self.plan.query[cells])
            is_computed[rows, np.searchsorted(keys, self.plan.key[cells])] = 1
            self.parts[Part(Kind.CELLS, Side.QUERY, stage)] = is_computed
        layout = self.layout
        flat = [self.parts[part].reshape(-1) for part in layout.parts]
        lengths = np.array([len(numbers) for numbers in flat])
        of_parts = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1).ravel()
        sizes = np.concatenate([of_parts, *(self.rows[part] for part in layout.exchanges)])
        return RankTables(sizes, np.concatenate(flat))

    def _add(self, side: Side, chunks: Chunks) -> None:
        """Make all parts of a side but CELLS."""
        is_own = chunks.rank == self.rank
        # The first row of each chunk in the pool, and how far the next one is.
        in_pool = np.where(is_own, 1 + chunks.row, -1)
        step = np.where(is_own, self.num_groups, 1)
        lane = chunks.entry * self.num_groups + chunks.group
        next_row = 1 + self.num_rows[side]
        # Chunks whose results this rank has, and the first row of each.
        results, next_result = [], 1
        came_home = []
        for stage, used in enumerate(self.used[side]):
            exchanges = 1 <= stage <= self.layout.stages
            if exchanges:
                send = Part(Kind.SEND, side, stage)
                sent, got = self._exchange(send, chunks, self.plan.fetches[stage])
                self.parts[send] = _ranges(chunks.row[sent], chunks.length[sent], self.num_groups)
                in_pool[got], next_row = _pack(chunks.length[got], next_row)
            at, block = spread(chunks.num_blocks[used])
            chunk, token = used[at], block * BLOCK
            # A row of cells for each chunk of queries, a column for each of keys.
            num_columns = max(1, len(self.used[Side.KEY][stage]))
            slots = at * (num_columns if side is Side.QUERY else 1)
            tile = np.stack(
                [
                    in_pool[chunk] + token * step[chunk],
                    step[chunk],
                    np.minimum(BLOCK, chunks.length[chunk] - token),
                    lane[chunk],
                    chunks.first[chunk] + token,
                    slots,
                ],
                axis=1,
            )
            # Or a block without rows.
            tile = tile if len(tile) else np.zeros((1, len(COLUMNS)), np.int64)
            self.parts[Part(Kind.TILE, side, stage)] = tile
            rows, _ = _pack(BLOCK * chunks.num_blocks[used], 0)
            results.append((used[is_own[used]], next_result + rows[is_own[used]]))
            next_result += BLOCK * len(tile)
            if exchanges:
                home = Part(Kind.HOME, side, stage)
                sent, got = self._exchange(home, chunks, self.plan.homes[stage])
                self.parts[home] = _ranges(rows[np.searchsorted(used, sent)], chunks.length[sent])
                came_home.append(got)
        for got in came_home:
            rows, next_result = _pack(chunks.length[got], next_result)
            results.append((got, rows))
        which, rows = map(np.concatenate, zip(*results, strict=True))
        self.parts[Part(Kind.SUM, side)] = self._sum(side, chunks, which, rows)

    def _exchange(
        self, part: Part, chunks: Chunks, transfers: Transfers
    ) -> tuple[np.ndarray, np.ndarray]:
        """Note the rows of an exchange.

        Returns:
            The chunks that this rank sends, by destination, and receives, by source.
        """
        is_of_side = IS_OF_KEYS[transfers.columns[:, PAYLOAD]] == (part.side is Side.KEY)
        sources, destinations, which = transfers.columns[is_of_side, :STOP].T
        lengths = chunks.length[which]
        is_sent, is_received = sources == self.rank, destinations == self.rank
        to_ranks = np.bincount(destinations[is_sent], lengths[is_sent], self.layout.world_size)
        of_ranks = np.bincount(sources[is_received], lengths[is_received], self.layout.world_size)
        counts = np.concatenate([to_ranks, of_ranks, [lengths.sum()]])
        self.rows[part] = counts.astype(np.int64)
        return which[is_sent], which[is_received]

    def _sum(self, side: Side, chunks: Chunks, which: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return which rows of results make up each own row, (n, rows): 0 where there are fewer."""
        order = np.argsort(which, kind="stable")
        which, rows = which[order], rows[order]
        number = np.arange(len(which)) - np.searchsorted(which, which)
        depth = max(MIN_SUMMED, int(number.max(initial=-1)) + 1)
        total = np.zeros((depth, self.num_rows[side]), np.int64)
        lengths = chunks.length[which]
        at = _ranges(chunks.row[which], lengths, self.num_groups)
        total[np.repeat(number, lengths), at] = _ranges(rows, lengths)
        return total


def _pack(lengths: np.ndarray, start: int) -> tuple[np.ndarray, int]:
    """Return where each of some ranges begins, one behind the other, and where the last ends."""
    ends = start + np.cumsum(lengths)
    return ends - lengths, start + int(lengths.sum())


def _ranges(starts: np.ndarray, lengths: np.ndarray, step: int = 1) -> np.ndarray:
    """Return start, start + step, ... of each range, one behind the other."""
    of_range, place = spread(lengths)
    return starts[of_range] + step * place
