"""How long a plan takes: what its exchanges move and its tiles compute, stage by stage.

    fetch 0 . tiles 0         fetch i + 1 runs during tiles i
              fetch 1 . tiles 1
                        home 0      results go home during the tiles of the next stage

The planner times many assignments of tiles before it makes a plan of one of them. `loads_of_tiles`
counts what a plan would move without making its transfers, and gives the same numbers as
`loads_of`, which counts a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_inductor.plan.grid import Grid, tokens_before
from cp_inductor.plan.ir import (
    Direction,
    Payload,
    PlanData,
    Shape,
    bytes_per_row,
    flops_per_pair,
)
from cp_inductor.plan.machine import Level, Machine
from cp_inductor.plan.runs import Runs
from cp_inductor.plan.tile_columns import TileColumns
from cp_inductor.plan.tiles import Assignment


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
    """Tiles or an exchange of one stage.

    Attributes:
        name: such as "fetch 1".
        is_exchange: or tiles.
        start_s: when ranks begin.
        seconds: (P,), how long each of them takes.
    """

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
        flops: (stages, P), of the tiles.
        wasted: (stages, P), what kernels compute beyond that, in whole blocks of causal tiles.
        calls: (stages, P), the number of tiles.
    """

    fetch: np.ndarray
    home: np.ndarray
    flops: np.ndarray
    wasted: np.ndarray
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
        compute = (self.flops + self.wasted) / device.flops_per_s + self.calls * device.launch_s
        if device.at_once:
            compute = _shared_s(compute, machine)
        events = [Event("fetch 0", True, 0.0, fetch[0])]
        now = network = float(fetch[0].max())
        for index, tiles in enumerate(compute):
            is_last = index + 1 == len(fetch)
            if not is_last:
                start = max(network, now)
                events.append(Event(f"fetch {index + 1}", True, start, fetch[index + 1]))
                network = start + float(fetch[index + 1].max())
            arrived = network
            if device.hidden < 1 and tiles.any():
                # The cores that compute move the data, too.
                during = min(float(tiles.max()), max(0.0, network - now))
                tiles = tiles + (1 - device.hidden) * during
            events.append(Event(f"tiles {index}", False, now, tiles))
            now += float(tiles.max())
            if home[index].any():
                start = max(network, now)
                events.append(Event(f"home {index}", True, start, home[index]))
                network = start + float(home[index].max())
            if not is_last:
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

    @property
    def balance(self) -> float:
        """Flops of the busiest rank over the mean of all ranks; 1.0 is perfect."""
        flops = self.flops.sum(0)
        return float(flops.max() * len(flops) / flops.sum()) if flops.any() else 1.0

    @property
    def received(self) -> np.ndarray:
        """(P,), the bytes that each rank receives."""
        return self.received_over(slice(None))

    def received_over(self, level: int | slice) -> np.ndarray:
        """(P,), the bytes that each rank receives over some levels; -1 is the outermost."""
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
    count = _Counter(plan.grid, plan.shape, machine, len(plan.stages))
    work = count.work(TileColumns.of(stage.tiles for stage in plan.stages), plan.direction)
    moved = [plan.loads]
    if len(machine.levels) > 1:
        outer = plan.loads_between([machine.node_of(rank) for rank in range(plan.grid.world_size)])
        moved = [plan.loads - outer, outer]
    fetch, home = np.array(moved, dtype=float).transpose(2, 0, 1, 3, 4)
    return Loads(fetch, home, *work)


@dataclass(frozen=True)
class TileLoads:
    """What an assignment of tiles moves and computes, if every rank fetches from the owners.

    Attributes:
        forward, backward: of both directions.
        balance: pairs of the busiest rank over the mean of all ranks; 1.0 is perfect.
        num_calls: the most tiles that a rank has, forward and backward.
    """

    forward: Loads
    backward: Loads
    balance: float
    num_calls: int


def loads_of_plans(forward: PlanData, backward: PlanData, machine: Machine) -> TileLoads:
    """Return the same as `loads_of_tiles` of any plan and its backward."""
    both = loads_of(forward, machine), loads_of(backward, machine)
    calls = (both[0].calls.sum(0) + both[1].calls.sum(0)).max()
    return TileLoads(*both, balance=max(one.balance for one in both), num_calls=int(calls))


def loads_of_tiles(
    grid: Grid,
    shape: Shape,
    assigned: Assignment,
    num_kept: int = 0,
    machine: Machine | None = None,
) -> TileLoads:
    """Count what an assignment of tiles would move and compute, as the plans of it would.

    Args:
        grid, shape: of the attention.
        assigned: the tiles.
        num_kept: number of stages whose fetched data is kept for the backward.
        machine: whose levels of links are told apart.
    """
    stages = [stage for stage in assigned.stages(grid) if stage.reads or not stage.index]
    tiles = later = reads = TileColumns.of([stage.tiles for stage in stages])
    if assigned.backward is not None:
        later = TileColumns.of([stage.backward_tiles for stage in stages])
        reads = TileColumns.of([stage.reads for stage in stages])
    count = _Counter(grid, shape, machine or Machine(), len(stages))
    queries, keys = (count.first_uses(reads, of_keys=of_keys) for of_keys in (False, True))
    return_of = {of_keys: count.last_uses(later, of_keys=of_keys) for of_keys in (False, True)}
    out = return_of[False] if assigned.backward is None else count.last_uses(tiles, of_keys=False)

    def of(payload: Payload, rows: np.ndarray) -> np.ndarray:
        return rows * bytes_per_row(payload, shape) * shape.batch

    fetch = of(Payload.QUERY, queries) + of(Payload.KEY_VALUE, keys)
    again = of(Payload.QUERY_GRAD_OUT, queries) + of(Payload.KEY_VALUE, keys)
    again[:, :num_kept] = of(Payload.GRAD_OUT, queries)[:, :num_kept]
    home = of(Payload.QUERY_GRAD, return_of[False]) + of(Payload.KEY_VALUE_GRAD, return_of[True])
    of_forward = fetch, of(Payload.PARTIAL, out), *count.work(tiles, Direction.FORWARD)
    of_backward = again, home, *count.work(later, Direction.BACKWARD)
    forward, backward = Loads(*of_forward), Loads(*of_backward)
    return TileLoads(
        forward,
        backward,
        balance=max(forward.balance, backward.balance),
        num_calls=int((forward.calls + backward.calls).sum(0).max()),
    )


class _Counter:
    """Counts rows that move, by the rule of `fetch_directly`: each once, from its owner."""

    def __init__(self, grid: Grid, shape: Shape, machine: Machine, num_stages: int) -> None:
        self.grid, self.shape, self.num_stages = grid, shape, num_stages
        self.before = {
            of_keys: np.array(tokens_before(grid, of_keys=of_keys)) for of_keys in (False, True)
        }
        # Of each rank, the chunks of its node: all chunks where there is one level.
        nodes = np.array([machine.node_of(rank) for rank in range(grid.world_size)])
        self.num_levels, self.causal_keys = len(machine.levels), machine.device.causal_keys
        ends = (np.searchsorted(nodes, nodes, side) for side in ("left", "right"))
        self.near = tuple(end * grid.chunks_per_rank for end in ends)

    def work(self, tiles: TileColumns, direction: Direction) -> Sequence[np.ndarray]:
        """Return (stages, P) of each rank: its flops, what its kernels waste, and its tiles."""
        num_tiles, size = len(tiles.rank), (self.num_stages, self.grid.world_size)
        queries = tiles.queries.sums(self.before[False], num_tiles)
        pairs = queries * tiles.keys.sums(self.before[True], num_tiles)
        pairs = np.where(tiles.is_causal, queries * (queries + 1) / 2, pairs)
        more = np.minimum(queries * self.causal_keys, queries * (queries - 1)) / 2
        more = np.where(tiles.is_causal, more, 0)
        of_heads = (tiles.last_head - tiles.first_head) * flops_per_pair(direction, self.shape)
        at = np.ravel_multi_index((tiles.stage, tiles.rank), size)
        return [
            np.bincount(at, weights, size[0] * size[1]).reshape(size)
            for weights in (pairs * of_heads, more * of_heads, np.ones(num_tiles))
        ]

    def last_uses(self, tiles: TileColumns, *, of_keys: bool) -> np.ndarray:
        """Return the same for what is sent home after its last use, to where it is fetched from."""
        return self.first_uses(tiles, of_keys=of_keys, order=-1)[:, ::-1, ::-1]

    def first_uses(self, tiles: TileColumns, *, of_keys: bool, order: int = 1) -> np.ndarray:
        """Return (levels, stages, 2, P): rows that each rank sends and receives, when needed.

        Args:
            tiles: of all stages.
            of_keys: count keys and values; otherwise queries.
            order: -1 walks the stages from the last.
        """
        group = self.shape.num_heads // self.shape.num_kv_heads if of_keys else 1
        heads = tiles.first_head // group, (tiles.last_head - 1) // group + 1
        # What a rank has of some heads is one line of chunks.
        ends = np.stack([tiles.rank, *heads], axis=1)
        lines, line = np.unique(ends, axis=0, return_inverse=True)
        ranks, num_heads = lines[:, 0], lines[:, 2] - lines[:, 1]
        size = self.grid.num_chunks + 1  # so that lines do not touch
        own = np.arange(len(lines)) * size + ranks * self.grid.chunks_per_rank
        has = Runs.of(own, own + self.grid.chunks_per_rank)
        spans = tiles.keys if of_keys else tiles.queries
        offset, stage = line[spans.tile] * size, tiles.stage[spans.tile]
        counted = [self._rows(has, ranks, num_heads, of_keys=of_keys)]
        for index in range(self.num_stages)[::order]:
            now = stage == index
            has |= Runs(offset[now] + spans.start[now], offset[now] + spans.stop[now])
            counted.append(self._rows(has, ranks, num_heads, of_keys=of_keys))
        return np.diff(counted, axis=0).swapaxes(0, 1)

    def _rows(
        self, has: Runs, ranks: np.ndarray, num_heads: np.ndarray, *, of_keys: bool
    ) -> np.ndarray:
        """Return (levels, 2, P): rows that are had of each rank, and that each rank has."""
        size = self.grid.num_chunks + 1
        (line, start), stop = np.divmod(has.starts, size), has.stops % size
        rows = self._rows_of(line, start, stop, ranks, num_heads, of_keys=of_keys)
        if self.num_levels == 1:
            return rows[None]
        first, last = (end[ranks[line]] for end in self.near)
        start, stop = start.clip(first, last), stop.clip(first, last)
        near = self._rows_of(line, start, stop, ranks, num_heads, of_keys=of_keys)
        return np.stack([near, rows - near])

    def _rows_of(
        self,
        line: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        ranks: np.ndarray,
        num_heads: np.ndarray,
        *,
        of_keys: bool,
    ) -> np.ndarray:
        """Return (2, P) of runs of chunks: the line of each, where it starts and stops."""
        before, size, heads = self.before[of_keys], self.grid.num_chunks + 1, num_heads[line]
        times = np.bincount(start, heads, size) - np.bincount(stop, heads, size)
        rows = np.cumsum(times)[:-1] * np.diff(before)
        had_of = rows.reshape(self.grid.world_size, -1).sum(1)
        tokens = (before[stop] - before[start]) * heads
        has_of = np.bincount(ranks[line], tokens, self.grid.world_size)
        return np.stack([had_of, has_of])
