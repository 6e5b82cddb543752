"""Execute all ranks of a batch plan abstractly, from the numbers that graphs read.

    numbers of all ranks
      . exchange       every row is named by its token; a rank has its own, and those that arrive
      . tile           blocks of 128 rows, and which of these meet
      . sum            which results make up each own row
      =>
    InvalidPlan: stage 1: rank 2 is sent 128 rows by rank 0, and expects 256

Numbers are wrong if two ranks expect different messages; if a tile reads a row that is not there,
or takes it for another token; if two blocks of a cell do not meet once; if a result does not get
home, or is summed twice; or if the rows that move are not those that the plan counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cp_inductor.plan.batch import BatchPlan
from cp_inductor.plan.batch_chunks import BLOCK, Chunks
from cp_inductor.plan.batch_tables import COLUMNS, Kind, Layout, Part, RankTables, Side
from cp_inductor.plan.ir import Transfers
from cp_inductor.plan.simulate import require
from tests.support.batch_plans import chunks_moved

# The name of a row that is no token's, and of a result that is no row's.
NOTHING = -1


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
    programs = [_Program(layout, rank, found) for rank, found in enumerate(tables)]
    sides = {
        Side.QUERY: _SideOfRanks(Side.QUERY, plan.queries, programs),
        Side.KEY: _SideOfRanks(Side.KEY, plan.keys, programs),
    }
    met: list[np.ndarray] = []
    for stage in range(layout.last + 1):
        for side in sides.values():
            side.fetch(stage)
        for program in programs:
            blocks = [side.read_blocks(program, stage) for side in sides.values()]
            met.append(_meet(program, stage, *blocks))
    _check_cells(plan, np.concatenate(met))
    for side in sides.values():
        side.bring_home()
        side.check_sums()
        for moved, stages in (side.num_fetched, plan.fetches), (side.num_home, plan.homes):
            transfers, of_keys = Transfers.joined(stages), side.side is Side.KEY
            _, rank, chunk = chunks_moved(transfers, of_keys=of_keys)
            counted = np.bincount(rank, side.chunks.length[chunk], plan.world_size)
            same = bool((moved == counted).all())
            require(same, side.side.value, "rows move that the plan does not count")


class _Program:
    """The numbers of one rank, read as graphs read them."""

    def __init__(self, layout: Layout, rank: int, tables: RankTables) -> None:
        self.layout, self.rank, self.tables = layout, rank, tables
        require(len(tables.sizes) == layout.num_sizes, "rank", rank, "has other sizes")

    def part(self, part: Part) -> np.ndarray:
        """Return the numbers of a part."""
        place = self.layout.place(part)
        start, length = self.tables.sizes[place : place + 2].tolist()
        is_there = start >= 0 and length >= 0 and start + length <= len(self.tables.numbers)
        require(is_there, f"rank {self.rank}: {part} is not among the numbers")
        return self.tables.numbers[start : start + length]

    def counts(self, exchange: Part) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the rows sent to each rank, those received from each, and those of all ranks."""
        place, size = self.layout.place_of_rows(exchange), self.layout.world_size
        counts = self.tables.sizes[place : place + 2 * size + 1]
        return counts[:size], counts[size:-1], int(counts[-1])


class _SideOfRanks:
    """The queries, or the keys, of all ranks: which rows they have, and which results.

    A row is named by the number of its token among all chunks, and a result by its number among the
    results of all ranks.
    """

    def __init__(self, side: Side, chunks: Chunks, programs: Sequence[_Program]) -> None:
        self.side, self.chunks, self.programs = side, chunks, programs
        self.first_row = np.cumsum(chunks.length) - chunks.length
        self.first_block = np.cumsum(chunks.num_blocks) - chunks.num_blocks
        self.own = [self._own_rows(program.rank) for program in programs]
        self.pools = [np.concatenate([[NOTHING], own]) for own in self.own]
        # The token of each result of all ranks, and the results of each rank's tile of a stage.
        self.tokens: list[np.ndarray] = []
        self.results: dict[tuple[int, int], np.ndarray] = {}
        self.num_results = 0
        self.num_fetched = np.zeros(len(programs), np.int64)
        self.num_home = np.zeros(len(programs), np.int64)
        self.came_home: list[list[np.ndarray]] = [[] for _ in programs]

    def _own_rows(self, rank: int) -> np.ndarray:
        chunks = self.chunks
        mine = np.flatnonzero(chunks.rank == rank)
        own = np.full(int(chunks.length[mine].sum()), NOTHING)
        for chunk in mine:
            inside = np.arange(chunks.length[chunk])
            own[chunks.row[chunk] + inside * chunks.num_groups] = self.first_row[chunk] + inside
        return own

    def fetch(self, stage: int) -> None:
        """Let what a stage fetches arrive."""
        if not 1 <= stage <= self.programs[0].layout.stages:
            return
        arrived = self._exchange(Part(Kind.SEND, self.side, stage), self.own)
        self.num_fetched += [len(rows) for rows in arrived]
        for rank, rows in enumerate(arrived):
            is_new = len(np.unique(rows)) == len(rows) and not np.isin(rows, self.pools[rank]).any()
            where = f"stage {stage}: {self.side.value} rows that rank {rank} has"
            require(is_new, where, "arrive again")
            self.pools[rank] = np.concatenate([self.pools[rank], rows])

    def bring_home(self) -> None:
        """Send home the results of all stages that have any to send."""
        for stage in range(1, self.programs[0].layout.stages + 1):
            of_ranks = [self.results[program.rank, stage] for program in self.programs]
            arrived = self._exchange(Part(Kind.HOME, self.side, stage), of_ranks)
            self.num_home += [len(rows) for rows in arrived]
            for home, rows in zip(self.came_home, arrived, strict=True):
                home.append(rows)

    def _exchange(self, part: Part, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return what arrives at each rank, by source, given the rows that each may send."""
        counts = [program.counts(part) for program in self.programs]
        where = f"stage {part.stage}:"
        pieces: list[list[np.ndarray]] = []
        for program, of_rank, (sent, _, _) in zip(self.programs, rows, counts, strict=True):
            rank, which = program.rank, program.part(part)
            require(sent.sum() == len(which) and sent.min() >= 0, where, rank, "sends other rows")
            require(sent[rank] == 0, where, f"rank {rank} sends to itself")
            require(_are_below(which, len(of_rank)), where, rank, "sends what is not there")
            pieces.append(np.split(of_rank[which], np.cumsum(sent)[:-1]))
        total = sum(int(sent.sum()) for sent, _, _ in counts)
        arrived = []
        for rank, (_, received, of_all) in enumerate(counts):
            require(of_all == total, where, f"rank {rank} takes {of_all} rows for all that move")
            for source, expected in enumerate(received):
                got = len(pieces[source][rank])
                what = f"rank {rank} is sent {got} rows by rank {source}, and expects {expected}"
                require(got == expected, where, what)
            arrived.append(np.concatenate([piece[rank] for piece in pieces]))
        return arrived

    def read_blocks(self, program: _Program, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks that a tile reads, by their numbers, and their slots.

        A block without rows is NOTHING.
        """
        rank, chunks = program.rank, self.chunks
        blocks = program.part(Part(Kind.TILE, self.side, stage))
        where = f"stage {stage}: rank {rank}: {self.side.value}"
        require(len(blocks) > 0 and len(blocks) % len(COLUMNS) == 0, where, "is not of blocks")
        blocks = blocks.reshape(-1, len(COLUMNS))
        pool, step, length, lane, position, slot = blocks.T
        inside = np.arange(BLOCK)
        is_row = inside < length[:, None]
        rows = np.where(is_row, pool[:, None] + inside * step[:, None], 0)
        require(_are_below(rows, len(self.pools[rank])), where, "rows are not there")
        tokens = self.pools[rank][rows]
        first, is_used = tokens[:, 0], length > 0
        require(bool((first[is_used] >= 0).all()), where, "rows have no token")
        chunk = np.searchsorted(self.first_row, first[is_used], side="right") - 1
        start = first[is_used] - self.first_row[chunk]
        expected = np.where(is_row, first[:, None] + inside, NOTHING)
        of_tables = (length, lane, position)
        of_chunks = (
            np.minimum(BLOCK, chunks.length[chunk] - start),
            chunks.entry[chunk] * chunks.num_groups + chunks.group[chunk],
            chunks.first[chunk] + start,
        )
        is_block = (tokens == expected).all() and (start % BLOCK == 0).all()
        for column, known in zip(of_tables, of_chunks, strict=True):
            is_block &= (column[is_used] == known).all()
        require(bool(is_block), where, "rows are other tokens than the numbers say")
        self.results[rank, stage] = self.num_results + np.arange(tokens.size)
        self.num_results += tokens.size
        self.tokens.append(tokens.ravel())
        numbers = np.full(len(blocks), NOTHING)
        numbers[is_used] = self.first_block[chunk] + start // BLOCK
        return numbers, slot

    def check_sums(self) -> None:
        """Check that each result is summed up once, to the row that it is of."""
        tokens = np.concatenate(self.tokens)
        num_sums = np.zeros(len(tokens), np.int64)
        for program, own in zip(self.programs, self.own, strict=True):
            stages = range(program.layout.last + 1)
            tiles = [self.results[program.rank, stage] for stage in stages]
            results = np.concatenate([[NOTHING], *tiles, *self.came_home[program.rank]])
            which = program.part(Part(Kind.SUM, self.side))
            where = f"rank {program.rank}: {self.side.value}"
            is_table = len(which) % max(1, len(own)) == 0 and bool(len(which)) == bool(len(own))
            require(is_table, where, "sums are not of own rows")
            require(_are_below(which, len(results)), where, "sums results that are not there")
            summed = results[which.reshape(-1, len(own))] if len(own) else np.zeros((0, 0), int)
            row, column = np.nonzero(summed != NOTHING)
            found = summed[row, column]
            is_of_row = (tokens[found] == own[column]).all()
            require(bool(is_of_row), where, "sums results of other rows")
            np.add.at(num_sums, found, 1)
        is_once = (num_sums == (tokens != NOTHING)).all()
        require(bool(is_once), f"{self.side.value} results are not summed up once")


def _are_below(numbers: np.ndarray, most: int) -> bool:
    return bool(((numbers >= 0) & (numbers < most)).all())


def _meet(
    program: _Program,
    stage: int,
    queries: tuple[np.ndarray, np.ndarray],
    keys: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return the pairs of blocks that a tile computes, (n, 2)."""
    cells = program.part(Part(Kind.CELLS, Side.QUERY, stage))
    slots = queries[1][:, None] + keys[1]
    where = f"stage {stage}: rank {program.rank}:"
    require(_are_below(slots, len(cells)), where, "blocks have no cell")
    row, column = np.nonzero(cells[slots])
    return np.stack([queries[0][row], keys[0][column]], axis=1)


def _check_cells(plan: BatchPlan, met: np.ndarray) -> None:
    """Check that all blocks of each cell meet once, and no others."""
    num_rows, num_columns = (of.num_blocks for of in (plan.queries, plan.keys))
    rows, columns = num_rows[plan.query], num_columns[plan.key]
    cell = np.repeat(np.arange(len(plan.query)), rows * columns)
    before = np.cumsum(rows * columns) - rows * columns
    row, column = np.divmod(np.arange(len(cell)) - before[cell], columns[cell])
    first_row, first_column = (np.cumsum(num) - num for num in (num_rows, num_columns))
    needed = np.stack(
        [first_row[plan.query[cell]] + row, first_column[plan.key[cell]] + column], axis=1
    )
    found, wanted = (pairs[np.lexsort(pairs.T[::-1])] for pairs in (met, needed))
    require(
        found.shape == wanted.shape and bool((found == wanted).all()),
        f"{len(found)} pairs of blocks meet, not each of {len(wanted)} once",
    )
