"""How long a plan takes: what its exchanges move and its tiles compute, stage by stage.

    fetch 0 . tiles 0         fetch i + 1 runs during tiles i
              fetch 1 . tiles 1
                        home 0      results go home during the tiles of the next stage

The planner times many assignments of tiles before it makes a plan of one of them. `loads_of_tiles`
counts what a plan would move without making its transfers, and gives the same numbers as
`loads_of`, which counts a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_inductor.plan.cost import Device, Link
from cp_inductor.plan.grid import Grid, tokens_before
from cp_inductor.plan.ir import (
    Direction,
    Payload,
    PlanData,
    Shape,
    bytes_per_row,
    flops_per_pair,
)
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
        fetch, home: (stages, 2, P), bytes that each rank sends and receives.
        flops: (stages, P), of the tiles.
        calls: (stages, P), the number of tiles.
    """

    fetch: np.ndarray
    home: np.ndarray
    flops: np.ndarray
    calls: np.ndarray

    def events(self, link: Link, device: Device) -> list[Event]:
        """Return what each rank does when, all in step; exchanges follow each other on the link."""
        fetch, home = (
            [_exchange_s(stage, link) for stage in exchanges]
            for exchanges in (self.fetch, self.home)
        )
        compute = self.flops / device.flops_per_s + self.calls * device.launch_s
        events = [Event("fetch 0", True, 0.0, fetch[0])]
        now = network = float(fetch[0].max())
        for index, tiles in enumerate(compute):
            is_last = index + 1 == len(fetch)
            if not is_last:
                start = max(network, now)
                events.append(Event(f"fetch {index + 1}", True, start, fetch[index + 1]))
                network = start + float(fetch[index + 1].max())
            arrived = network
            events.append(Event(f"tiles {index}", False, now, tiles))
            now += float(tiles.max())
            if home[index].any():
                start = max(network, now)
                events.append(Event(f"home {index}", True, start, home[index]))
                network = start + float(home[index].max())
            if not is_last:
                now = max(now, arrived)
        return [event for event in events if event.seconds.any()]

    def timeline(self, link: Link, device: Device) -> Timeline:
        """Return how long the stages take, with all ranks in step."""
        events = self.events(link, device)
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
        return np.asarray((self.fetch + self.home)[:, 1].sum(0))


def _exchange_s(num_bytes: np.ndarray, link: Link) -> np.ndarray:
    """Return (P,) seconds of (2, P) bytes that ranks send and receive."""
    most = num_bytes.max(0)
    return np.where(most > 0, link.latency_s + most / link.bytes_per_s, 0.0)


def loads_of(plan: PlanData) -> Loads:
    """Count what a plan moves and computes."""
    count = _Counter(plan.grid, plan.shape, len(plan.stages))
    flops, calls = count.work(TileColumns.of(stage.tiles for stage in plan.stages), plan.direction)
    fetch, home = plan.loads.swapaxes(0, 1).astype(float)
    return Loads(fetch, home, flops, calls)


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


def loads_of_tiles(grid: Grid, shape: Shape, assigned: Assignment, num_kept: int = 0) -> TileLoads:
    """Count what an assignment of tiles would move and compute, as the plans of it would.

    Args:
        grid, shape: of the attention.
        assigned: the tiles.
        num_kept: number of stages whose fetched data is kept for the backward.
    """
    stages = [stage for stage in assigned.stages(grid) if stage.reads or not stage.index]
    tiles = later = reads = TileColumns.of([stage.tiles for stage in stages])
    if assigned.backward is not None:
        later = TileColumns.of([stage.backward_tiles for stage in stages])
        reads = TileColumns.of([stage.reads for stage in stages])
    count = _Counter(grid, shape, len(stages))
    queries, keys = (count.first_uses(reads, of_keys=of_keys) for of_keys in (False, True))
    return_of = {of_keys: count.last_uses(later, of_keys=of_keys) for of_keys in (False, True)}
    out = return_of[False] if assigned.backward is None else count.last_uses(tiles, of_keys=False)

    def of(payload: Payload, rows: np.ndarray) -> np.ndarray:
        return rows * bytes_per_row(payload, shape) * shape.batch

    fetch = of(Payload.QUERY, queries) + of(Payload.KEY_VALUE, keys)
    again = of(Payload.QUERY_GRAD_OUT, queries) + of(Payload.KEY_VALUE, keys)
    again[:num_kept] = of(Payload.GRAD_OUT, queries)[:num_kept]
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

    def __init__(self, grid: Grid, shape: Shape, num_stages: int) -> None:
        self.grid, self.shape, self.num_stages = grid, shape, num_stages
        self.before = {
            of_keys: np.array(tokens_before(grid, of_keys=of_keys)) for of_keys in (False, True)
        }

    def work(self, tiles: TileColumns, direction: Direction) -> tuple[np.ndarray, np.ndarray]:
        """Return (stages, P): the flops of each rank, and its tiles."""
        num_tiles, size = len(tiles.rank), (self.num_stages, self.grid.world_size)
        queries = tiles.queries.sums(self.before[False], num_tiles)
        pairs = queries * tiles.keys.sums(self.before[True], num_tiles)
        pairs = np.where(tiles.is_causal, queries * (queries + 1) / 2, pairs)
        of_heads = (tiles.last_head - tiles.first_head) * flops_per_pair(direction, self.shape)
        at = np.ravel_multi_index((tiles.stage, tiles.rank), size)
        flops, calls = (
            np.bincount(at, weights, size[0] * size[1]).reshape(size)
            for weights in (pairs * of_heads, np.ones(num_tiles))
        )
        return flops, calls

    def last_uses(self, tiles: TileColumns, *, of_keys: bool) -> np.ndarray:
        """Return the same for what is sent home after its last use, to where it is fetched from."""
        return self.first_uses(tiles, of_keys=of_keys, order=-1)[::-1, ::-1]

    def first_uses(self, tiles: TileColumns, *, of_keys: bool, order: int = 1) -> np.ndarray:
        """Return (stages, 2, P): rows of heads that each rank sends and receives, when needed.

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
        return np.diff(counted, axis=0)

    def _rows(
        self, has: Runs, ranks: np.ndarray, num_heads: np.ndarray, *, of_keys: bool
    ) -> np.ndarray:
        """Return (2, P): rows of heads that are had of each rank, and that each rank has."""
        before, size = self.before[of_keys], self.grid.num_chunks + 1
        (line, start), stop = np.divmod(has.starts, size), has.stops % size
        heads = num_heads[line]
        times = np.bincount(start, heads, size) - np.bincount(stop, heads, size)
        rows = np.cumsum(times)[:-1] * np.diff(before)
        had_of = rows.reshape(self.grid.world_size, -1).sum(1)
        tokens = (before[stop] - before[start]) * heads
        has_of = np.bincount(ranks[line], tokens, self.grid.world_size)
        return np.stack([had_of, has_of])
