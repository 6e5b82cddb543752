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

from collections.abc import Sequence
from dataclasses import dataclass

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
    Stage,
    Tile,
    Transfers,
    flops_per_pair,
)
from cp_inductor.plan.machine import Level, Machine


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
        places = _Places(plan, of_keys=of_keys)
        _check_data(plan, places)
        if plan.direction is Direction.BACKWARD or not of_keys:
            _check_homes(plan, places)
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


class _Places:
    """Places in which ranks hold queries, or keys: (P, parts of the heads, chunks).

    No tile or transfer has a part of the heads but in whole.
    """

    def __init__(self, plan: PlanData, *, of_keys: bool) -> None:
        self.of_keys, self.grid, self.shape = of_keys, plan.grid, plan.shape
        num_heads = plan.shape.num_kv_heads if of_keys else plan.shape.num_heads
        moved = [plan.kept_fetches, *(m for s in plan.stages for m in (s.fetch, s.home))]
        boxes = [self._boxes(transfers, SOURCE) for transfers in moved]
        boxes += [self._boxes_of_tiles(stage) for stage in plan.stages]
        self.edges = np.unique([0, num_heads, *np.concatenate(boxes)[:, 3:].ravel()])
        own = [(rank, plan.grid.own(rank)) for rank in range(plan.grid.world_size)]
        self.own = self._count(np.array([(r, s.start, s.stop, 0, num_heads) for r, s in own])) > 0

    def of_transfers(self, transfers: Transfers, end: int) -> np.ndarray:
        """Return how many of the transfers of this kind have each place at one end."""
        return self._count(self._boxes(transfers, end))

    def of_tiles(self, stage: Stage) -> np.ndarray:
        """Return how many tiles of a stage read each place."""
        return self._count(self._boxes_of_tiles(stage))

    def _boxes(self, transfers: Transfers, end: int) -> np.ndarray:
        """Return (n, 5), of each transfer a rank, the first and last chunk, and those of heads."""
        columns = transfers.columns[IS_OF_KEYS[transfers.columns[:, PAYLOAD]] == self.of_keys]
        return columns[:, [end, START, STOP, FIRST_HEAD, LAST_HEAD]]

    def _boxes_of_tiles(self, stage: Stage) -> np.ndarray:
        rows = [
            (tile.rank, span.start, span.stop, heads.start, heads.stop)
            for tile in stage.tiles
            for spans, heads in [tile.side(self.shape, of_keys=self.of_keys)]
            for span in spans
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    def _count(self, boxes: np.ndarray) -> np.ndarray:
        size = self.grid.world_size, len(self.edges) - 1, self.grid.num_chunks
        counts, heads = np.zeros(size, np.int16), np.searchsorted(self.edges, boxes[:, 3:])
        for rank, start, stop, first, last in np.hstack([boxes[:, :3], heads]).tolist():
            counts[rank, first:last, start:stop] += 1
        return counts * (lengths_of(self.grid, of_keys=self.of_keys) > 0)


def _check_data(plan: PlanData, places: _Places) -> None:
    """Run the exchanges: check that what is sent, and what a tile reads, is there."""
    held = places.own.astype(np.int16)
    if plan.direction is Direction.BACKWARD and places.of_keys:
        held += places.of_transfers(plan.kept_fetches, DESTINATION)
        require(held.max() <= 1, "what was kept is there already")
    for index, stage in enumerate(plan.stages):
        # The fetch of a stage starts before the tiles of the one before: what it sends must have
        # been there then, so that nothing that arrives with this exchange is sent by it.
        sent = places.of_transfers(stage.fetch, SOURCE)
        _require_held(sent, held, f"stage {index}: a rank sends what is not there:")
        held += places.of_transfers(stage.fetch, DESTINATION)
        require(held.max() <= 1, f"stage {index}: a fetch brings what is there already")
        what = "keys" if places.of_keys else "queries"
        _require_held(places.of_tiles(stage), held, f"stage {index}: a tile misses {what}:")


def _require_held(needed: np.ndarray, held: np.ndarray, *what: object) -> None:
    """Require that what is needed is held. What is not is named: rank, part of heads, chunk."""
    lacking = np.argwhere((needed > 0) & (held == 0))
    require(not len(lacking), *what, lacking[:3].tolist())


def _check_homes(plan: PlanData, places: _Places) -> None:
    """Check that results of foreign chunks are sent home once, not before the last tile of each.

    Every rank that has such results must send them. So must a rank that results of foreign chunks
    were sent to, after they have arrived: it sends them once, whereupon nothing more may arrive. So
    they cannot go round in circles, and what is sent reaches the owner.
    """
    what = "results of keys" if places.of_keys else "results of queries"
    # From behind the last stage on: what is added to or arrives later, and what was sent later. A
    # tile adds to what leaves with its stage or later; what arrives with a stage leaves after it.
    added, sent = places.own, np.zeros_like(places.own)
    for index, stage in reversed([*enumerate(plan.stages)]):
        leaving = places.of_transfers(stage.home, SOURCE)
        added = added | (places.of_transfers(stage.home, DESTINATION) > 0)
        is_right = (leaving + (added | sent)).max() <= 1
        require(is_right, f"stage {index}: {what} are early or twice")
        sent = sent | (leaving > 0)
        added = added | (places.of_tiles(stage) > 0)
    home = sent | places.own
    require(not (home & ~added).any(), f"{what} that nobody has computed are sent")
    require(not (added & ~home).any(), what, "stay away from home")


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
    """What each rank does in each stage of one direction.

    Attributes:
        fetch, home: (levels, stages, 2, P), bytes that each rank sends and receives over each
            level of links.
        flops: (stages, P), of the tiles, and what kernels compute beyond them, in whole blocks of
            causal tiles.
        calls: (stages, P), the number of tiles.
    """

    fetch: np.ndarray
    home: np.ndarray
    flops: np.ndarray
    calls: np.ndarray

    def events(self, machine: Machine) -> list[Event]:
        """Return what each rank does when, all in step; exchanges follow each other on the links.

        The levels of links move data at the same time.
        """
        fetch, home = (
            [_exchange_s(stage, machine.levels) for stage in exchanges.swapaxes(0, 1)]
            for exchanges in (self.fetch, self.home)
        )
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
        moved = (self.fetch + self.home)[level, ..., 1, :]
        return np.asarray(moved.reshape(-1, moved.shape[-1]).sum(0))


def _exchange_s(num_bytes: np.ndarray, levels: Sequence[Level]) -> np.ndarray:
    """Return (P,) seconds of (levels, 2, P) bytes that ranks send and receive."""
    most = num_bytes.max(1)
    seconds = [
        np.where(row > 0, level.latency_s + row / level.bytes_per_s, 0.0)
        for row, level in zip(most, levels, strict=True)
    ]
    return np.asarray(np.max(seconds, axis=0))


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
    fetch, home = np.array(moved, dtype=float).transpose(2, 0, 1, 3, 4)
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
    return Loads(fetch, home, flops, calls)
