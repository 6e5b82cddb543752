"""Execute all ranks of a plan abstractly: check it, and estimate its time.

A plan is wrong if a (query, key, head) that is needed is not computed exactly once; if a tile runs
before its data arrives; if a rank sends data that it does not have; if results are not sent home
exactly once; or if bytes or flops differ from the expressions of `cp_inductor.plan.cost`.

A plan that passes cannot deadlock: exchanges are collectives, in the order of the stages on all
ranks, and the data to send is there before an exchange starts.
"""

from __future__ import annotations

import numpy as np

from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.assign_masked import cells_of
from cp_inductor.plan.cost import Device, Link, most_flops, most_received_bytes, sizes_of
from cp_inductor.plan.grid import Grid, Span, lengths_of
from cp_inductor.plan.ir import Direction, Mask, Payload, PlanData, Tile, Transfer
from cp_inductor.plan.timeline import Timeline, loads_of
from cp_inductor.plan.transfers import message_order

# Results (rank x chunk x head) of a plan whose ways home are checked: 512 MiB of int16.
MAX_RESULTS = 1 << 28


class InvalidPlan(AssertionError):
    """A plan that must not be executed, because of a bug of ours."""


def simulate(plan: PlanData, link: Link | None = None, device: Device | None = None) -> Timeline:
    """Check a plan, and return its timeline.

    Raises:
        InvalidPlan: the plan is wrong; see the module.
    """
    _check_tiles(plan)
    _check_coverage(plan)
    _check_data(plan)
    _check_homes(plan)
    _check_costs(plan)
    return predict_timeline(plan, link, device)


def predict_timeline(
    plan: PlanData, link: Link | None = None, device: Device | None = None
) -> Timeline:
    """Return the timeline of a plan without checking it."""
    return loads_of(plan).timeline(link or Link(), device or Device())


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
    for start in edges[:-1]:
        computed = np.zeros((num_chunks, num_chunks), dtype=np.int16)
        for tile in tiles:
            if tile.heads.start <= start < tile.heads.stop:
                _add_pairs(computed, tile, cells)
        computed *= (lengths[0][:, None] > 0) & (lengths[1][None] > 0)
        wrong = np.argwhere(computed != needed)
        require(
            not len(wrong),
            f"{len(wrong)} pairs of chunks are not computed once, head {start}: {wrong[:3]}",
        )


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


def _check_data(plan: PlanData) -> None:
    """Run the exchanges: check that what is sent, and what a tile reads, is there."""
    grid, shape = plan.grid, plan.shape
    held = [_Holdings(plan, rank) for rank in range(grid.world_size)]
    for index, stage in enumerate(plan.stages):
        # The fetch of a stage starts before the tiles of the one before: what it sends must have
        # been there then, so that nothing that arrives with this exchange is sent by it.
        _check_ends(stage.fetch, grid, f"fetch of stage {index}")
        for transfer in stage.fetch:
            require(
                held[transfer.source].has(transfer.payload, transfer.span, transfer.heads, grid),
                f"stage {index}:",
                transfer,
                "sends what is not there",
            )
        for transfer in stage.fetch:
            held[transfer.destination].add(transfer)
        for tile in stage.tiles:
            query = Payload.QUERY if plan.direction is Direction.FORWARD else Payload.QUERY_GRAD_OUT
            for payload, spans, heads in (
                (query, tile.queries, tile.heads),
                (Payload.KEY_VALUE, tile.keys, shape.kv_heads(tile.heads)),
            ):
                for span in spans:
                    require(
                        held[tile.rank].has(payload, span, heads, grid),
                        f"stage {index}:",
                        tile,
                        f"misses {payload.word}{span}",
                    )


class _Holdings:
    """The chunks and heads of queries and keys that a rank has."""

    def __init__(self, plan: PlanData, rank: int) -> None:
        num_chunks, own = plan.grid.num_chunks, plan.grid.own(rank)
        self.queries = np.zeros((num_chunks, plan.shape.num_heads), dtype=bool)
        self.keys = np.zeros((num_chunks, plan.shape.num_kv_heads), dtype=bool)
        self.queries[own.start : own.stop] = True
        self.keys[own.start : own.stop] = True
        if plan.direction is Direction.BACKWARD:
            # The kept stages' keys are here already.
            for transfer in plan.kept_fetches:
                if transfer.destination == rank and transfer.payload is Payload.KEY_VALUE:
                    self.add(transfer)

    def add(self, transfer: Transfer) -> None:
        table = self.queries if transfer.payload in _QUERIES else self.keys
        span, heads = transfer.span, transfer.heads
        part = table[span.start : span.stop, heads.start : heads.stop]
        require(not part.any(), transfer, "brings what is there already")
        part[:] = True

    def has(self, payload: Payload, span: Span, heads: Span, grid: Grid) -> bool:
        table = self.queries if payload in _QUERIES else self.keys
        return all(
            table[chunk, heads.start : heads.stop].all()
            or not grid.num_tokens(Span(chunk, chunk + 1), of_keys=payload.is_of_keys)
            for chunk in range(span.start, span.stop)
        )


def _check_ends(transfers: tuple[Transfer, ...], grid: Grid, where: str) -> None:
    """Check that transfers join two ranks, once, in a message order that both ends know."""
    for transfer in transfers:
        require(transfer.source != transfer.destination, where, transfer, "goes nowhere")
        owners = {grid.owner(transfer.span.start), grid.owner(transfer.span.stop - 1)}
        require(len(owners) == 1, where, transfer, "has several owners")
    order = [message_order(transfer) for transfer in transfers]
    require(order == sorted(set(order)), where, "is out of order")


def _check_homes(plan: PlanData) -> None:
    """Check that results of foreign chunks are sent home once, after the last tile of each.

    Every rank that has such results must send them.
    """
    payloads = (
        (Payload.PARTIAL,)
        if plan.direction is Direction.FORWARD
        else (Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD)
    )
    for payload in payloads:
        num_heads = plan.shape.num_kv_heads if payload.is_of_keys else plan.shape.num_heads
        shape = (plan.grid.world_size, plan.grid.num_chunks, num_heads)
        if np.prod(shape) > MAX_RESULTS:
            continue  # a thousand ranks: the derivation is the same one as for sixteen
        last = np.full(shape, -1, dtype=np.int16)
        for index, stage in enumerate(plan.stages):
            for tile in stage.tiles:
                of_keys = payload.is_of_keys
                spans = tile.keys if of_keys else tile.queries
                heads = plan.shape.kv_heads(tile.heads) if of_keys else tile.heads
                for span in spans:
                    last[tile.rank, span.start : span.stop, heads.start : heads.stop] = index
        lengths = lengths_of(plan.grid, of_keys=payload.is_of_keys)
        last[:, lengths == 0] = -1
        for rank in range(plan.grid.world_size):
            own = plan.grid.own(rank)
            last[rank, own.start : own.stop] = -1
        for index, stage in enumerate(plan.stages):
            _check_ends(stage.home, plan.grid, f"home of stage {index}")
            for transfer in stage.home:
                if transfer.payload is payload:
                    _check_home(last, transfer, index, plan.grid, lengths)
        require(bool((last == -1).all()), f"{payload.word} stays away from home")


def _check_home(
    last: np.ndarray, transfer: Transfer, index: int, grid: Grid, lengths: np.ndarray
) -> None:
    span, heads = transfer.span, transfer.heads
    require(grid.owner(span.start) == transfer.destination, transfer, "does not go home")
    part = last[transfer.source, span.start : span.stop, heads.start : heads.stop]
    filled = lengths[span.start : span.stop] > 0
    require(
        bool((part[filled] == index).all()), f"stage {index}:", transfer, "is early, late or twice"
    )
    part[:] = -1


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
