"""Execute all ranks of a plan abstractly: check it, and estimate its time.

A plan is wrong if a (query, key, head) that is needed is not computed exactly once; if a tile runs
before its data arrives; if a rank sends data that it does not have; or if results are not sent home
exactly once. A plan that passes cannot deadlock: exchanges are collectives, in the order of the
stages on all ranks, and the data to send is there before an exchange starts.

fetch 0 . tiles 0         fetch i + 1 runs during tiles i
          fetch 1 . tiles 1
                    home 0      results go home during the tiles of the next stage
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import causal_cells, cells_of
from cp_inductor.plan.grid import Span, lengths_of
from cp_inductor.plan.ir import (
    DESTINATION,
    FIRST_HEAD,
    IS_OF_KEYS,
    LAST_HEAD,
    PAYLOAD,
    SOURCE,
    START,
    STOP,
    Direction,
    Mask,
    PlanData,
    Tile,
    Transfers,
    flops_per_pair,
)
from cp_inductor.plan.machine import Machine

# When what is at a place arrives there, or leaves it, if that is not in a stage.
BEFORE, HOME, NEVER = -1, 2**15 - 2, 2**15 - 1


class InvalidPlan(AssertionError):
    """A plan that must not be executed, because of a bug of ours."""


def simulate(plan: PlanData, machine: Machine | None = None) -> Timeline:
    """Check a plan, and return its timeline.

    Raises:
        InvalidPlan: the plan is wrong; see the module.
    """
    _check_coverage(plan)
    _check_exchanges(plan)
    for of_keys in (False, True):
        _check_places(plan, of_keys=of_keys)
    machine = machine or Machine()
    return loads_of(plan, machine).timeline(machine)


def require(condition: bool, *what: object) -> None:
    """Raise `InvalidPlan`, which says what is wrong, unless a condition holds."""
    if not condition:
        raise InvalidPlan(" ".join(map(str, what)))


def _check_coverage(plan: PlanData) -> None:
    """Check that each needed pair of chunks is computed once for every head, and no other."""
    grid, whole = plan.grid, plan.shape.all_heads
    cells = cells_of(grid, plan.mask, plan.rule)
    has_tokens = np.logical_and.outer(*(lengths_of(grid, of_keys=k) > 0 for k in (False, True)))
    needed = (cells != Cell.EMPTY) & has_tokens
    runs, seen = plan.tiles_of_heads or [(whole, [])], set()
    require(Span(runs[0][0].start, runs[-1][0].stop) == whole, "heads are missing")
    for heads, tiles in runs:
        # Groups of ranks that split the heads compute the same tiles, each for heads of its own.
        same = tuple(sorted((tile.queries, tile.keys, tile.mask.value) for tile in tiles))
        if same in seen:
            continue
        seen.add(same)
        computed = np.zeros(cells.shape, dtype=np.int16)
        for tile in tiles:
            sides = ([slice(s.start, s.stop) for s in of] for of in (tile.queries, tile.keys))
            area = np.ix_(*(np.r_[tuple(spans)] for spans in sides))
            _check_mask(tile, cells[area], plan.mask)
            computed[area] += cells[area] != Cell.EMPTY
        wrong = np.argwhere(computed * has_tokens != needed)
        require(
            not len(wrong),
            f"{len(wrong)} pairs of chunks are not computed once, heads {heads}: {wrong[:3]}",
        )


def _check_mask(tile: Tile, cells: np.ndarray, mask: Mask) -> None:
    """Check a tile's mask against its cells."""
    if tile.mask is Mask.CAUSAL:
        require(tile.queries == tile.keys, tile, "is causal and not square")
        require(tile.queries == tuple(sorted(tile.queries)), tile, "is not in order of position")
        is_causal = np.array_equal(cells, causal_cells(len(cells)))
        require(is_causal, tile, "is not causal under the mask")
    elif tile.mask is Mask.FULL:
        require(bool((cells == Cell.FULL).all()), tile, "sees pairs that do not exist")
    else:
        require(mask is Mask.PARTIAL, tile, "is under a mask that the plan has not")


def _check_exchanges(plan: PlanData) -> None:
    """Check that transfers join two ranks, once, in a message order that both ends know.

    Results go to the owners of their chunks, if they go no other way.
    """
    size = plan.grid.chunks_per_rank
    for index, stage in enumerate(plan.stages):
        for kind, moved in (("fetch", stage.fetch), ("home", stage.home)):
            where, columns = f"{kind} of stage {index}:", moved.columns
            owner, last_owner = columns[:, START] // size, (columns[:, STOP] - 1) // size
            for wrong, what in (
                (columns[:, SOURCE] == columns[:, DESTINATION], "goes nowhere"),
                (owner != last_owner, "has several owners"),
                (
                    (owner != columns[:, DESTINATION]) & (kind == "home" and not plan.returns),
                    "is a result that does not go home",
                ),
            ):
                require(not wrong.any(), where, *Transfers(columns[wrong][:1]), what)
            is_new = (np.diff(columns[:, :LAST_HEAD], axis=0) != 0).any(1)
            require(moved == moved.sorted() and bool(is_new.all()), where, "is out of order")


def _check_places(plan: PlanData, *, of_keys: bool) -> None:
    """Check when ranks get, read and send queries, or keys, and when results of these go home.

    A place is a rank, a part of the heads that tiles and transfers have in whole or not at all, and
    a chunk with tokens. Rows are a stage, a rank, and spans of chunks and of heads.

    Every rank that has results of foreign chunks must send them once, not before its last tile of
    each. So must a rank that such results were sent to, after they have arrived. So they cannot go
    round in circles, and what is sent reaches the owner.
    """
    grid, shape, what = plan.grid, plan.shape, "keys" if of_keys else "queries"

    def rows_of(transfers: Transfers, end: int, stage: int) -> np.ndarray:
        columns = transfers.columns[IS_OF_KEYS[transfers.columns[:, PAYLOAD]] == of_keys]
        columns = columns[:, [end, START, STOP, FIRST_HEAD, LAST_HEAD]]
        return np.insert(columns, 0, stage, axis=1)

    num_heads, ranks = shape.num_kv_heads if of_keys else shape.num_heads, range(grid.world_size)
    own = [(BEFORE, r, grid.own(r).start, grid.own(r).stop, 0, num_heads) for r in ranks]
    of_tiles = [
        (index, tile.rank, span.start, span.stop, heads.start, heads.stop)
        for index, stage in enumerate(plan.stages)
        for tile in stage.tiles
        for spans, heads in [tile.side(shape, of_keys=of_keys)]
        for span in spans
    ]
    sent, arriving, leaving, returning = (
        np.concatenate([rows_of(getattr(s, way), end, at) for at, s in enumerate(plan.stages)])
        for way, end in product(("fetch", "home"), (SOURCE, DESTINATION))
    )
    # Queries that were kept wait for the gradients that are fetched.
    kept = rows_of(plan.kept_fetches if of_keys else Transfers(), DESTINATION, BEFORE)
    arriving, read = np.concatenate([own, kept, arriving]), np.array(of_tiles, int).reshape(-1, 6)
    edges = np.unique(np.concatenate([sent, arriving, read, leaving, returning])[:, 4:])
    place = np.append(0, np.cumsum(lengths_of(grid, of_keys=of_keys) > 0))
    for rows in (sent, arriving, read, leaving, returning):
        rows[:, 2:4], rows[:, 4:] = place[rows[:, 2:4]], np.searchsorted(edges, rows[:, 4:])
    arrival = np.full((grid.world_size, len(edges) - 1, place[-1]), NEVER, np.int16)
    _set_times(arrival, arriving[: len(own)], what)
    departure = np.where(arrival == BEFORE, HOME, arrival)
    _set_times(arrival, arriving[len(own) :], "a fetch brings what is there already")
    # The fetch of a stage starts before the tiles of the one before: what it sends must have been
    # there then, so that nothing that arrives with this exchange is sent by it.
    _check_times(arrival, sent, np.less, "a rank sends what is not there")
    _check_times(arrival, read, np.less_equal, f"a tile misses {what}")
    if plan.direction is Direction.FORWARD and of_keys:
        return
    _set_times(departure, leaving, f"results of {what} are early or twice")
    _check_times(departure, read, np.greater_equal, f"results of {what} are early or twice")
    _check_times(departure, returning, np.greater, f"results of {what} are early or twice")
    has_results = np.zeros(departure.shape, dtype=bool)
    for _, rank, start, stop, first, last in np.concatenate([read, returning]).tolist():
        has_results[rank, first:last, start:stop] = True
    is_wrong = (departure < HOME) & ~has_results
    require(not is_wrong.any(), f"results of {what} that nobody has computed are sent")
    is_wrong = (departure == NEVER) & has_results
    require(not is_wrong.any(), f"results of {what} stay away from home")


def _set_times(times: np.ndarray, rows: np.ndarray, what: str) -> None:
    """Set the times of places, each once."""
    for stage, rank, start, stop, first, last in rows.tolist():
        box = times[rank, first:last, start:stop]
        require(bool((box == NEVER).all()), f"stage {stage}, rank {rank}: {what}")
        box[...] = stage


def _check_times(times: np.ndarray, rows: np.ndarray, is_right: np.ufunc, what: str) -> None:
    """Compare the times of places with stages."""
    for stage, rank, start, stop, first, last in rows.tolist():
        box = times[rank, first:last, start:stop]
        require(bool(is_right(box, stage).all()), f"stage {stage}, rank {rank}: {what}")


@dataclass(frozen=True, slots=True)
class Timeline:
    """How long a plan takes, in seconds, with all ranks in step.

    Attributes:
        total_s: from the first start to the last combine.
        compute_s: the tiles of the busiest rank of each stage.
        exchange_s: the collectives, one after another.
        exposed_s: the part of exchange_s that no tile hides.
    """

    total_s: float
    compute_s: float
    exchange_s: float
    exposed_s: float


@dataclass(frozen=True)
class Event:
    """Tiles or an exchange of one stage, such as "fetch 1", and how long each rank takes, (P,)."""

    name: str
    is_exchange: bool
    start_s: float
    seconds: np.ndarray


@dataclass(frozen=True)
class Loads:
    """What each rank does in each stage of one direction."""

    # (levels, stages, 2, 2, P), bytes over each level of links: of fetches and results, that each
    # rank sends and receives.
    moved: np.ndarray
    # (stages, P), of the tiles, and what kernels compute beyond them, in whole blocks of causal
    # tiles.
    flops: np.ndarray
    calls: np.ndarray  # (stages, P), the number of tiles

    def events(self, machine: Machine) -> list[Event]:
        """Return what each rank does when, all in step; exchanges follow each other on the links.

        The levels of links move data at the same time.
        """
        of_levels = [
            np.where(most > 0, level.latency_s + most / level.bytes_per_s, 0.0)
            for most, level in zip(self.moved.max(3), machine.levels, strict=True)
        ]
        fetch, home = np.max(of_levels, axis=0).swapaxes(0, 1)
        device = machine.device
        compute = self.flops / device.flops_per_s + self.calls * device.launch_s
        if device.at_once:
            compute = _shared_s(compute, machine)
        events: list[Event] = []
        now = network = 0.0

        def exchange(name: str, seconds: np.ndarray) -> None:
            nonlocal network
            start = max(network, now)
            events.append(Event(name, True, start, seconds))
            network = start + float(seconds.max())

        exchange("fetch 0", fetch[0])
        now = network
        for index, tiles in enumerate(compute):
            if index + 1 < len(fetch):
                exchange(f"fetch {index + 1}", fetch[index + 1])
            arrived = network
            if device.hidden < 1 and tiles.any():
                # The cores that compute move the data, too.
                during = min(float(tiles.max()), max(0.0, network - now))
                tiles = tiles + (1 - device.hidden) * during
            events.append(Event(f"tiles {index}", False, now, tiles))
            now += float(tiles.max())
            exchange(f"home {index}", home[index])
            now = max(now, arrived)
        return [event for event in events if event.seconds.any()]

    def timeline(self, machine: Machine) -> Timeline:
        """Return how long the stages take, with all ranks in step."""
        events = self.events(machine)
        total = max((event.start_s + float(event.seconds.max()) for event in events), default=0.0)
        exchange, compute = (
            sum(float(event.seconds.max()) for event in events if event.is_exchange is kind)
            for kind in (True, False)
        )
        return Timeline(total, compute, exchange, total - compute)

    def received_over(self, level: int | slice = slice(None)) -> np.ndarray:
        """(P,), the bytes that each rank receives over some levels, or all; -1 is the outermost."""
        moved = self.moved[level, ..., 1, :]
        return np.asarray(moved.reshape(-1, moved.shape[-1]).sum(0))


def _shared_s(seconds: np.ndarray, machine: Machine) -> np.ndarray:
    """Return (stages, P) seconds where the ranks of a node share its cores."""
    nodes = np.array([machine.node_of(rank) for rank in range(seconds.shape[1])])
    for node in range(int(nodes[-1]) + 1):
        of_node = seconds[:, nodes == node]
        together = of_node.sum(1, keepdims=True) / machine.device.at_once
        seconds[:, nodes == node] = np.maximum(of_node, np.where(of_node > 0, together, 0.0))
    return seconds


def loads_of(plan: PlanData, machine: Machine | None = None) -> Loads:
    """Count what a plan moves, over each level of links, and computes."""
    machine = machine or Machine()
    moved = [plan.loads]
    if len(machine.levels) > 1:
        outer = plan.loads_between([machine.node_of(rank) for rank in range(plan.grid.world_size)])
        moved = [plan.loads - outer, outer]
    tiles = plan.columns
    queries, keys = tiles.tokens(plan.grid)
    more = np.minimum(queries * machine.device.causal_keys, queries * (queries - 1)) / 2
    pairs = np.where(tiles.is_causal, queries * (queries + 1) / 2 + more, queries * keys)
    num_heads = tiles.last_head - tiles.first_head
    tile_flops = pairs * num_heads * flops_per_pair(plan.direction, plan.shape)
    size = len(plan.stages), plan.grid.world_size
    at = np.ravel_multi_index((tiles.stage, tiles.rank), size)
    flops, calls = (
        np.bincount(at, weights, size[0] * size[1]).reshape(size)
        for weights in (tile_flops, np.ones(len(at)))
    )
    return Loads(np.array(moved, dtype=float), flops, calls)
