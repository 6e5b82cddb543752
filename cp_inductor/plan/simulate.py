"""Execute all ranks of a plan abstractly: check it, and estimate its time.

A plan is wrong if a (query, key, head) that is needed is not computed exactly once; if a tile runs
before its data arrives; if a rank sends data that it does not have; if results are not sent home
exactly once; or if bytes or flops differ from the expressions of `cp_inductor.plan.cost`.

A plan that passes cannot deadlock: exchanges are collectives, in the order of the stages on all
ranks, and the data to send is there before an exchange starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.assign_masked import cells_of
from cp_inductor.plan.columns import (
    DESTINATION,
    PAYLOAD,
    SOURCE,
    START,
    STOP,
    are_in_order,
    cells_of_columns,
)
from cp_inductor.plan.cost import most_flops, most_received_bytes, sizes_of
from cp_inductor.plan.grid import Grid, Span, lengths_of
from cp_inductor.plan.ir import Direction, Mask, Payload, PlanData, Tile, Transfer, columns_of
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.timeline import Timeline, loads_of

# (rank, chunk, head) in a table of what ranks hold, or have to send home: 512 MiB of int16.
MAX_CELLS = 1 << 28


class InvalidPlan(AssertionError):
    """A plan that must not be executed, because of a bug of ours."""


def simulate(plan: PlanData, machine: Machine | None = None) -> Timeline:
    """Check a plan, and return its timeline.

    Raises:
        InvalidPlan: the plan is wrong; see the module.
    """
    _check_tiles(plan)
    _check_coverage(plan)
    _check_data(plan)
    _check_homes(plan)
    _check_costs(plan)
    return predict_timeline(plan, machine)


def predict_timeline(plan: PlanData, machine: Machine | None = None) -> Timeline:
    """Return the timeline of a plan without checking it."""
    machine = machine or Machine()
    return loads_of(plan, machine).timeline(machine)


def require(condition: bool, *what: object) -> None:
    """Raise `InvalidPlan`, which says what is wrong, unless a condition holds."""
    if not condition:
        raise InvalidPlan(" ".join(map(str, what)))


def _check_tiles(plan: PlanData) -> None:
    for stage in plan.stages:
        for tile in stage.tiles:
            queries, keys = _positions(plan.grid, tile.queries), _positions(plan.grid, tile.keys)
            if tile.mask is Mask.CAUSAL:
                require(tile.queries == tile.keys, tile, "is causal and not square")
                require(bool((np.diff(queries) > 0).all()), tile, "is not in order of position")
            elif tile.mask is Mask.PARTIAL:
                require(plan.mask is Mask.PARTIAL, tile, "is under a mask that the plan has not")
            elif plan.mask is Mask.CAUSAL:
                # A run of chunks may lie in the past of all queries without being a tile apart.
                require(int(keys.max()) < int(queries.min()), tile, "sees the future")


def _positions(grid: Grid, spans: tuple[Span, ...]) -> np.ndarray:
    return np.array([grid.position(c) for span in spans for c in range(span.start, span.stop)])


def _check_coverage(plan: PlanData) -> None:
    """Check that each needed pair of chunks is computed once for every head, and no other."""
    grid, num_chunks = plan.grid, plan.grid.num_chunks
    cells = cells_of(grid, Rule.parse(plan.rule)) if plan.mask is Mask.PARTIAL else None
    position = np.array([grid.position(chunk) for chunk in range(num_chunks)])
    # 2 for all pairs of two chunks, 1 for the causal half of a chunk with itself.
    needed = np.full((num_chunks, num_chunks), 2, dtype=np.int16)
    if plan.mask is Mask.CAUSAL:
        needed = 2 * (position[:, None] > position[None]) + np.eye(num_chunks, dtype=np.int16)
    if cells is not None:
        needed = 2 * (cells != Cell.EMPTY).astype(np.int16)
    lengths = [lengths_of(grid, of_keys=of_keys) for of_keys in (False, True)]
    needed = needed * ((lengths[0][:, None] > 0) & (lengths[1][None] > 0))
    tiles = [tile for stage in plan.stages for tile in stage.tiles]
    edges = sorted({edge for tile in tiles for edge in (tile.heads.start, tile.heads.stop)})
    whole = plan.shape.all_heads
    require(not tiles or (edges[0], edges[-1]) == (whole.start, whole.stop), "heads are missing")
    seen = set()
    for start in edges[:-1]:
        own = [tile for tile in tiles if tile.heads.start <= start < tile.heads.stop]
        # Groups of ranks that split the heads compute the same tiles, each for heads of its own.
        same = tuple(sorted((tile.queries, tile.keys, tile.mask.value) for tile in own))
        if same in seen:
            continue
        seen.add(same)
        computed = np.zeros((num_chunks, num_chunks), dtype=np.int16)
        for tile in own:
            _add_pairs(computed, tile, cells)
        computed *= (lengths[0][:, None] > 0) & (lengths[1][None] > 0)
        if not np.array_equal(computed, needed):
            wrong = np.argwhere(computed != needed)
            what = f"{len(wrong)} pairs of chunks are not computed once, head {start}: {wrong[:3]}"
            raise InvalidPlan(what)


def _add_pairs(computed: np.ndarray, tile: Tile, cells: np.ndarray | None) -> None:
    if cells is not None:
        _add_cells(computed, tile, cells)
        return
    if tile.mask is Mask.FULL:
        for queries in tile.queries:
            for keys in tile.keys:
                computed[queries.start : queries.stop, keys.start : keys.stop] += 2
        return
    chunks = [c for span in tile.queries for c in range(span.start, span.stop)]
    order = np.arange(len(chunks))
    pairs = 2 * (order[:, None] > order[None]) + np.eye(len(chunks), dtype=np.int16)
    computed[np.ix_(chunks, chunks)] += pairs.astype(np.int16)


def _add_cells(computed: np.ndarray, tile: Tile, cells: np.ndarray) -> None:
    """Count the cells of a tile under a rule, and check its mask against them."""
    queries, keys = (
        np.array([chunk for span in spans for chunk in range(span.start, span.stop)])
        for spans in (tile.queries, tile.keys)
    )
    area = np.ix_(queries, keys)
    part = cells[area]
    if tile.mask is Mask.CAUSAL:
        order = np.arange(len(queries))
        expected = np.where(order[:, None] > order[None], Cell.FULL, Cell.EMPTY)
        np.fill_diagonal(expected, Cell.CAUSAL)
        require(bool((part == expected).all()), tile, "is not causal under the rule")
    elif tile.mask is Mask.FULL:
        require(bool((part == Cell.FULL).all()), tile, "is not full under the rule")
    computed[area] += 2 * (part != Cell.EMPTY).astype(np.int16)


# What a rank holds from the start, of its own chunks, by direction.
_QUERIES = (Payload.QUERY, Payload.QUERY_GRAD_OUT, Payload.GRAD_OUT)


def _blocks_of_ranks(plan: PlanData) -> Iterator[Span]:
    """Yield all ranks in blocks, whose tables (rank, chunk, head) have at most `MAX_CELLS`."""
    size = max(1, MAX_CELLS // (plan.grid.num_chunks * plan.shape.num_heads))
    for start in range(0, plan.grid.world_size, size):
        yield Span(start, min(start + size, plan.grid.world_size))


def _of_ranks(columns: np.ndarray, end: int, ranks: Span) -> np.ndarray:
    """Return the transfers that begin or end at some ranks, which then count from 0."""
    column = columns[:, end]
    chosen = columns[(column >= ranks.start) & (column < ranks.stop)]
    chosen[:, end] -= ranks.start
    return chosen


def _check_data(plan: PlanData) -> None:
    """Run the exchanges: check that what is sent, and what a tile reads, is there."""
    for index, (stage, (fetch, _)) in enumerate(zip(plan.stages, plan.columns, strict=True)):
        _check_ends(stage.fetch, fetch, plan.grid, f"fetch of stage {index}")
    for ranks in _blocks_of_ranks(plan):
        _check_data_of(plan, ranks)


def _check_data_of(plan: PlanData, ranks: Span) -> None:
    grid, shape = plan.grid, plan.shape
    held = _Holdings(plan, ranks)
    for index, (stage, (fetch, _)) in enumerate(zip(plan.stages, plan.columns, strict=True)):
        # The fetch of a stage starts before the tiles of the one before: what it sends must have
        # been there then, so that nothing that arrives with this exchange is sent by it. What a
        # rank owns is there.
        passed_on = np.flatnonzero(fetch[:, START] // grid.chunks_per_rank != fetch[:, SOURCE])
        for transfer in map(stage.fetch.__getitem__, passed_on.tolist()):
            if transfer.source in range(ranks.start, ranks.stop) and not held.has(
                transfer.source, transfer.payload, transfer.span, transfer.heads
            ):
                raise InvalidPlan(f"stage {index}: {transfer} sends what is not there")
        held.add(fetch, f"stage {index}:")
        query = Payload.QUERY if plan.direction is Direction.FORWARD else Payload.QUERY_GRAD_OUT
        for tile in stage.tiles:
            if tile.rank not in range(ranks.start, ranks.stop):
                continue
            for payload, spans, heads in (
                (query, tile.queries, tile.heads),
                (Payload.KEY_VALUE, tile.keys, shape.kv_heads(tile.heads)),
            ):
                for span in spans:
                    if not held.has(tile.rank, payload, span, heads):
                        raise InvalidPlan(f"stage {index}: {tile} misses {payload.word}{span}")


class _Holdings:
    """The chunks and heads of queries and keys that some ranks have."""

    def __init__(self, plan: PlanData, ranks: Span) -> None:
        self.grid, self.ranks = plan.grid, ranks
        shape = len(ranks), plan.grid.num_chunks
        self.queries = np.zeros((*shape, plan.shape.num_heads), dtype=bool)
        self.keys = np.zeros((*shape, plan.shape.num_kv_heads), dtype=bool)
        for at, rank in enumerate(range(ranks.start, ranks.stop)):
            own = plan.grid.own(rank)
            self.queries[at, own.start : own.stop] = True
            self.keys[at, own.start : own.stop] = True
        if plan.direction is Direction.BACKWARD:
            # The kept stages' keys are here already.
            kept = columns_of(plan.kept_fetches)
            self.add(kept[kept[:, PAYLOAD] == Payload.KEY_VALUE.order], "what was kept:")

    def add(self, columns: np.ndarray, where: str) -> None:
        columns = _of_ranks(columns, DESTINATION, self.ranks)
        are_queries = np.isin(columns[:, PAYLOAD], [payload.order for payload in _QUERIES])
        for table, chosen in ((self.queries, are_queries), (self.keys, ~are_queries)):
            cells = cells_of_columns(columns[chosen], DESTINATION, table.shape)
            is_new = len(np.unique(cells)) == len(cells) and not table.flat[cells].any()
            require(is_new, where, "a fetch brings what is there already")
            table.flat[cells] = True

    def has(self, rank: int, payload: Payload, span: Span, heads: Span) -> bool:
        table = (self.queries if payload in _QUERIES else self.keys)[rank - self.ranks.start]
        return bool(table[span.start : span.stop, heads.start : heads.stop].all()) or all(
            table[chunk, heads.start : heads.stop].all()
            or not self.grid.num_tokens(Span(chunk, chunk + 1), of_keys=payload.is_of_keys)
            for chunk in range(span.start, span.stop)
        )


def _check_ends(transfers: Sequence[Transfer], columns: np.ndarray, grid: Grid, where: str) -> None:
    """Check that transfers join two ranks, once, in a message order that both ends know."""
    size = grid.chunks_per_rank
    for wrong, what in (
        (columns[:, SOURCE] == columns[:, DESTINATION], "goes nowhere"),
        (columns[:, START] // size != (columns[:, STOP] - 1) // size, "has several owners"),
    ):
        if wrong.any():
            raise InvalidPlan(f"{where} {transfers[int(wrong.argmax())]} {what}")
    require(are_in_order(columns), where, "is out of order")


def _check_homes(plan: PlanData) -> None:
    """Check that results of foreign chunks are sent home once, after the last tile of each.

    Every rank that has such results must send them. So must a rank that results of foreign chunks
    were sent to, after they have arrived: it sends them once, whereupon nothing more may arrive. So
    they cannot go round in circles, and what is sent reaches the owner.
    """
    payloads = (
        (Payload.PARTIAL,)
        if plan.direction is Direction.FORWARD
        else (Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD)
    )
    for index, (stage, (_, home)) in enumerate(zip(plan.stages, plan.columns, strict=True)):
        _check_ends(stage.home, home, plan.grid, f"home of stage {index}")
        is_home = home[:, START] // plan.grid.chunks_per_rank == home[:, DESTINATION]
        require(plan.returns or bool(is_home.all()), f"stage {index}: a result does not go home")
    for ranks in _blocks_of_ranks(plan):
        for payload in payloads:
            _check_homes_of(plan, payload, ranks)


def _check_homes_of(plan: PlanData, payload: Payload, ranks: Span) -> None:
    of_keys = payload.is_of_keys
    num_heads = plan.shape.num_kv_heads if of_keys else plan.shape.num_heads
    last = np.full((len(ranks), plan.grid.num_chunks, num_heads), -1, dtype=np.int16)
    for index, stage in enumerate(plan.stages):
        for tile in stage.tiles:
            if tile.rank in range(ranks.start, ranks.stop):
                heads = plan.shape.kv_heads(tile.heads) if of_keys else tile.heads
                table = last[tile.rank - ranks.start, :, heads.start : heads.stop]
                for span in tile.keys if of_keys else tile.queries:
                    table[span.start : span.stop] = index
    for index, (_, home) in enumerate(plan.columns):
        columns = _of_ranks(home[home[:, PAYLOAD] == payload.order], DESTINATION, ranks)
        cells = cells_of_columns(columns, DESTINATION, last.shape)
        last.flat[cells] = np.maximum(last.flat[cells], index + 1)
    empty = lengths_of(plan.grid, of_keys=of_keys) == 0
    last[:, empty] = -1
    for at, rank in enumerate(range(ranks.start, ranks.stop)):
        own = plan.grid.own(rank)
        last[at, own.start : own.stop] = -1
    for index, (_, home) in enumerate(plan.columns):
        columns = _of_ranks(home[home[:, PAYLOAD] == payload.order], SOURCE, ranks)
        cells = cells_of_columns(columns, SOURCE, last.shape)
        cells = cells[~empty[np.unravel_index(cells, last.shape)[1]]]
        is_right = len(np.unique(cells)) == len(cells) and (last.flat[cells] == index).all()
        require(bool(is_right), f"stage {index}: {payload.word} is early, late or twice")
        last.flat[cells] = -1
    require(bool((last == -1).all()), f"{payload.word} stays away from home")


def _check_costs(plan: PlanData) -> None:
    """Check that expressions and counts are equal, if all chunks have one length."""
    grid = plan.grid
    if grid.query_length % grid.num_chunks or grid.key_length % grid.num_chunks:
        return
    sizes, ranks = sizes_of(plan), range(grid.world_size)
    flops, received = most_flops(plan).subs(sizes), most_received_bytes(plan).subs(sizes)
    require(flops == max(map(plan.flops, ranks)), f"flops are not {flops}")
    require(received == max(map(plan.bytes_received, ranks)), f"bytes are not {received}")
    sent, got = (sum(map(f, ranks)) for f in (plan.bytes_sent, plan.bytes_received))
    require(sent == got, f"{sent} bytes are sent and {got} received")
