"""Execute all ranks of a batch plan, from the numbers that graphs read, on integers.

    numbers of all ranks
      . exchange       a row is a random integer; a rank has its own, and those that arrive
      . tile           blocks of 128 rows, and which of these meet
      . sum            which results make up each own row
      =>
    InvalidPlan: stage 1: rank 2 is sent 128 rows by rank 0, and expects 256

In place of an attention, a row is multiplied by its lane and position, and by the sum of all rows
that it meets. This is exact modulo 2^64, whatever is added first. So each own row has to be what it
is on one rank: any wrong number in a part that is used makes another one of it. Numbers are wrong,
too, if two ranks expect different messages, if a row arrives that is there already, or if the rows
that move are not those that the plan counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_cells import BLOCK, Chunks
from cp_inductor.plan.batch_tables import COLUMNS, Kind, Layout, Part, RankTables, Side, rank_tables
from cp_inductor.plan.grid import spread
from cp_inductor.plan.ir import DESTINATION, IS_OF_KEYS, PAYLOAD, SOURCE, START, Transfers
from cp_inductor.plan.simulate import require

NOTHING = np.zeros(1, np.uint64)


def simulate_batch(plan: BatchPlan, tables: Sequence[RankTables]) -> None:
    """Check the numbers of all ranks.

    Args:
        plan: of the batch.
        tables: what `rank_tables` made of it, for each rank.

    Raises:
        InvalidPlan: the numbers are wrong; see the module.
    """
    layout = Layout(plan.stages, plan.world_size)
    require(len(tables) == plan.world_size, len(tables), "ranks have numbers")
    is_sized = all(len(found.sizes) == layout.num_sizes for found in tables)
    require(is_sized, "a rank has other sizes")
    queries = _SideOfRanks(Side.QUERY, plan.queries, layout, tables)
    keys = _SideOfRanks(Side.KEY, plan.keys, layout, tables)
    for stage in range(layout.last + 1):
        for side in (queries, keys):
            side.fetch(stage)
        for rank in range(plan.world_size):
            _run_tile(queries, keys, rank, stage)
    for side in (queries, keys):
        side.bring_home()
        for moved, stages in (side.num_fetched, plan.fetches), (side.num_home, plan.homes):
            transfers, of_keys = Transfers.joined(stages), side is keys
            _, rank, chunk = chunks_moved(transfers, of_keys=of_keys)
            counted = np.bincount(rank, side.chunks.length[chunk], plan.world_size)
            same = bool((moved == counted).all())
            require(same, side.side.value, "rows move that the plan does not count")
    queries.check_sums(keys, plan.query, plan.key)
    keys.check_sums(queries, plan.key, plan.query)


class _SideOfRanks:
    """The queries, or the keys, of all ranks: which rows they have, and which results."""

    def __init__(
        self, side: Side, chunks: Chunks, layout: Layout, tables: Sequence[RankTables]
    ) -> None:
        self.side, self.chunks, self.layout, self.tables = side, chunks, layout, tables
        self.chunk, inside = spread(chunks.length)  # of each token
        self.row = chunks.row[self.chunk] + inside * chunks.num_groups
        generator = np.random.default_rng(len(self.chunk))
        tokens = generator.integers(1 << 63, size=len(self.chunk), dtype=np.uint64)
        lane = (chunks.entry * chunks.num_groups + chunks.group)[self.chunk]
        self.factors = tokens * _number_of(lane, chunks.first[self.chunk] + inside)
        self.own = [self._rows_of(rank, tokens) for rank in range(layout.world_size)]
        self.pools = [np.concatenate([NOTHING, own]) for own in self.own]
        # The results of each rank's tiles, by stage, and what came home.
        self.results: list[list[np.ndarray]] = [[] for _ in tables]
        self.came_home: list[list[np.ndarray]] = [[] for _ in tables]
        self.num_fetched, self.num_home = (np.zeros(len(tables), np.int64) for _ in range(2))

    def _rows_of(self, rank: int, tokens: np.ndarray) -> np.ndarray:
        """Return the rows of a rank, of something that all tokens have."""
        is_own = self.chunks.rank[self.chunk] == rank
        rows = np.zeros(np.count_nonzero(is_own), tokens.dtype)
        rows[self.row[is_own]] = tokens[is_own]
        return rows

    def part(self, rank: int, kind: Kind, stage: int = 0) -> np.ndarray:
        """Return the numbers of a part, as graphs read them."""
        found, part = self.tables[rank], Part(kind, self.side, stage)
        place = self.layout.place(part)
        start, length = found.sizes[place : place + 2].tolist()
        is_there = start >= 0 and length >= 0 and start + length <= len(found.numbers)
        require(is_there, f"rank {rank}: {part} is not among the numbers")
        return found.numbers[start : start + length]

    def fetch(self, stage: int) -> None:
        """Let what a stage fetches arrive."""
        if not 1 <= stage <= self.layout.stages:
            return
        arrived = self._exchange(Kind.SEND, stage, self.own)
        self.num_fetched += [len(rows) for rows in arrived]
        for rank, rows in enumerate(arrived):
            is_new = len(np.unique(rows)) == len(rows) and not np.isin(rows, self.pools[rank]).any()
            where = f"stage {stage}: {self.side.value} rows that rank {rank} has"
            require(is_new, where, "arrive again")
            self.pools[rank] = np.concatenate([self.pools[rank], rows])

    def bring_home(self) -> None:
        """Send home the results of all stages that have any to send."""
        for stage in range(1, self.layout.stages + 1):
            of_ranks = [results[stage] for results in self.results]
            arrived = self._exchange(Kind.HOME, stage, of_ranks)
            self.num_home += [len(rows) for rows in arrived]
            for home, rows in zip(self.came_home, arrived, strict=True):
                home.append(rows)

    def _exchange(self, kind: Kind, stage: int, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return what arrives at each rank, by source, given the rows that each may send."""
        size, where = self.layout.world_size, f"stage {stage}:"
        place = self.layout.place_of_rows(Part(kind, self.side, stage))
        counts = [found.sizes[place : place + 2 * size + 1] for found in self.tables]
        pieces: list[list[np.ndarray]] = []
        for rank, (of_rank, count) in enumerate(zip(rows, counts, strict=True)):
            sent, which = count[:size], self.part(rank, kind, stage)
            require(sent.sum() == len(which) and sent.min() >= 0, where, rank, "sends other rows")
            require(sent[rank] == 0, where, f"rank {rank} sends to itself")
            require(_are_below(which, len(of_rank)), where, rank, "sends what is not there")
            pieces.append(np.split(of_rank[which], np.cumsum(sent)[:-1]))
        total = sum(int(count[:size].sum()) for count in counts)
        for rank, (*_, of_all) in enumerate(counts):
            require(of_all == total, where, f"rank {rank} takes {of_all} rows for all that move")
            for source, expected in enumerate(counts[rank][size:-1]):
                got = len(pieces[source][rank])
                what = f"rank {rank} is sent {got} rows by rank {source}, and expects {expected}"
                require(got == expected, where, what)
        return [np.concatenate([piece[rank] for piece in pieces]) for rank in range(size)]

    def read_tile(self, rank: int, stage: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of each block of a tile, which of them there are, and its slot."""
        blocks = self.part(rank, Kind.TILE, stage)
        where = f"stage {stage}: rank {rank}: {self.side.value}"
        require(len(blocks) > 0 and len(blocks) % len(COLUMNS) == 0, where, "is not of blocks")
        pool, step, length, lane, position, slot = blocks.reshape(-1, len(COLUMNS)).T
        require(_are_below(length, BLOCK + 1), where, "a block has more rows than there are")
        inside = np.arange(BLOCK)
        is_row = inside < length[:, None]
        which = np.where(is_row, pool[:, None] + inside * step[:, None], 0)
        require(_are_below(which, len(self.pools[rank])), where, "rows are not there")
        rows = self.pools[rank][which] * _number_of(lane[:, None], position[:, None] + inside)
        return rows, is_row, slot

    def note_results(
        self, rank: int, rows: np.ndarray, is_row: np.ndarray, met: np.ndarray
    ) -> None:
        """Note the results of a tile; nobody is to sum up those of what is no row."""
        results = np.where(is_row, rows * met[:, None], np.uint64(1))
        self.results[rank].append(results.ravel())

    def check_sums(self, others: _SideOfRanks, own: np.ndarray, other: np.ndarray) -> None:
        """Check that the results of each row are summed up.

        Args:
            others: rows that these meet.
            own, other: of each cell of the plan, the chunk of these and that of the others.
        """
        of_chunks, met = (np.zeros(len(side.chunks), np.uint64) for side in (others, self))
        np.add.at(of_chunks, others.chunk, others.factors)
        np.add.at(met, own, of_chunks[other])
        expected = self.factors * met[self.chunk]
        for rank, (tiles, home) in enumerate(zip(self.results, self.came_home, strict=True)):
            results, right = np.concatenate([NOTHING, *tiles, *home]), self._rows_of(rank, expected)
            which, where = self.part(rank, Kind.SUM), f"rank {rank}: {self.side.value}"
            is_table = len(which) % max(1, len(right)) == 0 and bool(len(which)) == bool(len(right))
            require(is_table, where, "sums are not of own rows")
            require(_are_below(which, len(results)), where, "sums results that are not there")
            wrong = np.count_nonzero(results[which].reshape(-1, max(1, len(right))).sum(0) != right)
            require(not wrong, where, f"{wrong} rows are not what they are on one rank")


def _are_below(numbers: np.ndarray, most: int) -> bool:
    return bool(((numbers >= 0) & (numbers < most)).all())


def _number_of(lane: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return a number modulo 2^64 that says which lane and position it is of."""
    mixed: np.ndarray = (lane.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed + position.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)


def _run_tile(queries: _SideOfRanks, keys: _SideOfRanks, rank: int, stage: int) -> None:
    """Note the results of the blocks that a tile computes."""
    cells = queries.part(rank, Kind.CELLS, stage)
    (rows, is_row, row_slots), (columns, is_column, column_slots) = (
        side.read_tile(rank, stage) for side in (queries, keys)
    )
    slots = row_slots[:, None] + column_slots
    require(_are_below(slots, len(cells)), f"stage {stage}: rank {rank}: blocks have no cell")
    meet = (cells[slots] != 0).astype(np.uint64)
    queries.note_results(rank, rows, is_row, meet @ columns.sum(1))
    keys.note_results(rank, columns, is_column, meet.T @ rows.sum(1))


# --- Plans that batches decide, of packed documents, without ranks.

DOCUMENTS = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"
WINDOW = DOCUMENTS + "&(q-k-150<=0)"
BOTH_WAYS = "Eq(t0(b,q)-t0(b,k),0)"
Tables = Mapping[int, np.ndarray]


def plan(
    text: str,
    tables: Tables,
    lengths: Sequence[int],
    *,
    key_lengths: Sequence[int] | None = None,
    heads: tuple[int, int] = (4, 2),
    **how: Any,
) -> BatchPlan:
    """Plan one entry in two stages, unless `how` of `plan_batch` says otherwise."""
    return plan_batch(
        Rule.parse(text),
        tables,
        query_lengths=lengths,
        key_lengths=lengths if key_lengths is None else key_lengths,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        **{"batch": 1, "stages": 2, **how},
    )


def documents(generator: np.random.Generator, batch: int, length: int, mean: int) -> np.ndarray:
    """Return the document number of each token."""
    return np.cumsum(generator.random((batch, length)) < 1 / mean, axis=1)


def chunks_moved(transfers: Transfers, *, of_keys: bool) -> tuple[np.ndarray, ...]:
    """Return the source, the destination and the chunk of each transfer of one side."""
    columns = transfers.columns[IS_OF_KEYS[transfers.columns[:, PAYLOAD]] == of_keys]
    return columns[:, SOURCE], columns[:, DESTINATION], columns[:, START]


def tables_of(
    found: BatchPlan, batch: int, lengths: Sequence[int], key_lengths: Sequence[int] | None = None
) -> list[RankTables]:
    """Return the numbers that the graphs of all ranks read."""
    pairs = zip(lengths, lengths if key_lengths is None else key_lengths, strict=True)
    return [
        rank_tables(found, rank, num_queries=batch * queries, num_keys=batch * keys)
        for rank, (queries, keys) in enumerate(pairs)
    ]


def lognormal(seed: int, length: int, log_mean: float, sigma: float) -> np.ndarray:
    """Return the document number of each token, of a batch packed with lognormal lengths."""
    generator = np.random.default_rng(seed)
    lengths = np.maximum(16, generator.lognormal(log_mean, sigma, length // 16).astype(np.int64))
    ends = np.cumsum(np.minimum(lengths, length))
    return np.searchsorted(ends, np.arange(length), side="right")[None]


def digest(found: BatchPlan) -> str:
    arrays = (found.query, found.key, found.weight, found.rank, found.stage)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
