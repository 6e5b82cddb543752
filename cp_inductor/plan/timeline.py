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
from cp_inductor.plan.grid import Grid, lengths_of
from cp_inductor.plan.ir import (
    Direction,
    Payload,
    PlanData,
    Shape,
    bytes_per_row,
    flops_per_pair,
    num_pairs,
)
from cp_inductor.plan.tiles import Assignment, Tiles


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
    flops, calls = np.zeros((2, len(plan.stages), plan.grid.world_size))
    for index, stage in enumerate(plan.stages):
        for tile in stage.tiles:
            flops[index, tile.rank] += plan.tile_flops(tile)
            calls[index, tile.rank] += 1
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
    count = _Counter(grid, shape)
    stages = [stage for stage in assigned.stages(grid) if stage.reads or not stage.index]
    tiles, reads = [stage.tiles for stage in stages], [stage.reads for stage in stages]
    later = [stage.backward_tiles for stage in stages]
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

    def __init__(self, grid: Grid, shape: Shape) -> None:
        self.grid, self.shape = grid, shape
        self.owners = np.arange(grid.num_chunks) // grid.chunks_per_rank
        self.edges = np.arange(grid.world_size + 1) * grid.chunks_per_rank
        self.tokens = {of_keys: lengths_of(grid, of_keys=of_keys) for of_keys in (False, True)}

    def work(self, tiles: Tiles, direction: Direction) -> tuple[np.ndarray, np.ndarray]:
        """Return (stages, P): the flops of each rank, and its tiles."""
        flops, calls = np.zeros((2, len(tiles), self.grid.world_size))
        of_pair = flops_per_pair(direction, self.shape)
        for index, stage in enumerate(tiles):
            for tile in stage:
                flops[index, tile.rank] += num_pairs(self.grid, tile) * len(tile.heads) * of_pair
                calls[index, tile.rank] += 1
        return flops, calls

    def last_uses(self, tiles: Tiles, *, of_keys: bool) -> np.ndarray:
        """Return the same for what is sent home after its last use, to where it is fetched from."""
        return self.first_uses(tiles[::-1], of_keys=of_keys)[::-1, ::-1]

    def first_uses(self, tiles: Tiles, *, of_keys: bool) -> np.ndarray:
        """Return (stages, 2, P): rows of heads that each rank sends and receives, when needed."""
        tokens = self.tokens[of_keys]
        before = np.concatenate([[0], np.cumsum(tokens)])
        at_hand: dict[tuple[int, int, int], np.ndarray] = {}
        moved = np.zeros((len(tiles), 2, self.grid.world_size))
        for (sent, received), stage in zip(moved, tiles, strict=True):
            for tile in stage:
                heads = self.shape.kv_heads(tile.heads) if of_keys else tile.heads
                key = tile.rank, heads.start, heads.stop
                if key not in at_hand:
                    at_hand[key] = self.owners == tile.rank
                has = at_hand[key]
                for span in tile.keys if of_keys else tile.queries:
                    part = has[span.start : span.stop]
                    first, last = self.owners[span.start], self.owners[span.stop - 1]
                    if part.any():
                        rows = np.where(part, 0, tokens[span.start : span.stop])
                        places = self.owners[span.start : span.stop] - first
                        of_owners = np.bincount(places, rows, last - first + 1)
                    else:  # most often nothing is at hand, and chunks need not be looked at
                        edges = self.edges[first : last + 2].clip(span.start, span.stop)
                        of_owners = np.diff(before[edges])
                    sent[first : last + 1] += of_owners * len(heads)
                    received[tile.rank] += of_owners.sum() * len(heads)
                    part[:] = True
        return moved
