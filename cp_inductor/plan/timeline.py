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

from cp_inductor.plan.cost import Device, Link
from cp_inductor.plan.grid import Grid, lengths_of
from cp_inductor.plan.ir import (
    Direction,
    Payload,
    PlanData,
    Shape,
    Tile,
    bytes_per_row,
    flops_per_pair,
    num_pairs,
)
from cp_inductor.plan.tiles import Tiles
from cp_inductor.plan.transfers import has_tokens


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

    def timeline(self, link: Link, device: Device) -> Timeline:
        """Return how long the stages take, with all ranks in step."""
        fetch, home = (
            [_exchange_s(stage, link) for stage in exchanges]
            for exchanges in (self.fetch, self.home)
        )
        compute = (self.flops / device.flops_per_s + self.calls * device.launch_s).max(1).tolist()
        now = network = fetch[0]
        for index, tiles in enumerate(compute):
            if index + 1 < len(fetch):
                network = max(network, now) + fetch[index + 1]
            arrived = network
            now += tiles
            network = max(network, now) + home[index] if home[index] else network
            if index + 1 < len(fetch):
                now = max(now, arrived)
        total = max(now, network)
        return Timeline(total, sum(compute), sum(fetch) + sum(home), total - sum(compute))

    @property
    def received(self) -> np.ndarray:
        """(P,), the bytes that each rank receives."""
        return np.asarray((self.fetch + self.home)[:, 1].sum(0))


def _exchange_s(num_bytes: np.ndarray, link: Link) -> float:
    most = float(num_bytes.max())
    return link.latency_s + most / link.bytes_per_s if most else 0.0


def loads_of(plan: PlanData) -> Loads:
    """Count what a plan moves and computes."""
    grid = plan.grid
    shape = len(plan.stages), 2, grid.world_size
    fetch, home = np.zeros(shape), np.zeros(shape)
    flops, calls = np.zeros(shape[::2]), np.zeros(shape[::2])
    for index, stage in enumerate(plan.stages):
        for transfers, loads in ((stage.fetch, fetch), (stage.home, home)):
            for transfer in transfers:
                num_bytes = plan.num_bytes(transfer)
                loads[index, 0, transfer.source] += num_bytes
                loads[index, 1, transfer.destination] += num_bytes
        for tile in stage.tiles:
            flops[index, tile.rank] += plan.tile_flops(tile)
            calls[index, tile.rank] += 1
    return Loads(fetch, home, flops, calls)


@dataclass(frozen=True)
class TileLoads:
    """What an assignment of tiles moves and computes, if every rank fetches from the owners.

    Attributes:
        shape: of the attention.
        queries, keys, out, key_grads: (stages, 2, P), rows of heads that each rank sends and
            receives: fetched, and sent home.
        pairs: (stages, P), pairs of all heads.
        calls: (stages, P), the number of tiles.
    """

    shape: Shape
    queries: np.ndarray
    keys: np.ndarray
    out: np.ndarray
    key_grads: np.ndarray
    pairs: np.ndarray
    calls: np.ndarray

    def loads(self, direction: Direction, num_kept: int = 0) -> Loads:
        """Return the loads of the forward, or of a backward that has kept some stages."""

        def of(payload: Payload, rows: np.ndarray) -> np.ndarray:
            return rows * bytes_per_row(payload, self.shape) * self.shape.batch

        flops = self.pairs * flops_per_pair(direction, self.shape)
        if direction is Direction.FORWARD:
            fetch = of(Payload.QUERY, self.queries) + of(Payload.KEY_VALUE, self.keys)
            return Loads(fetch, of(Payload.PARTIAL, self.out), flops, self.calls)
        fetch = of(Payload.QUERY_GRAD_OUT, self.queries) + of(Payload.KEY_VALUE, self.keys)
        fetch[:num_kept] = of(Payload.GRAD_OUT, self.queries)[:num_kept]
        home = of(Payload.QUERY_GRAD, self.out) + of(Payload.KEY_VALUE_GRAD, self.key_grads)
        return Loads(fetch, home, flops, self.calls)

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean of all ranks; 1.0 is perfect."""
        pairs = self.pairs.sum(0)
        return float(pairs.max() * len(pairs) / pairs.sum()) if pairs.any() else 1.0


def loads_of_tiles(grid: Grid, shape: Shape, tiles: Tiles) -> TileLoads:
    """Count what an assignment of tiles would move and compute, as `plan_forward` derives it."""
    tiles = [[tile for tile in stage if has_tokens(grid, tile)] for stage in tiles]
    tiles = [stage for index, stage in enumerate(tiles) if stage or not index]
    count = _Counter(grid, shape)
    queries, out = count.moved(tiles, of_keys=False)
    keys, key_grads = count.moved(tiles, of_keys=True)
    pairs, calls = np.zeros((len(tiles), grid.world_size)), np.zeros((len(tiles), grid.world_size))
    for index, stage in enumerate(tiles):
        for tile in stage:
            pairs[index, tile.rank] += num_pairs(grid, tile) * len(tile.heads)
            calls[index, tile.rank] += 1
    return TileLoads(shape, queries, keys, out, key_grads, pairs, calls)


class _Counter:
    """Counts rows that move, by the rule of `fetch_directly`: each once, from its owner."""

    def __init__(self, grid: Grid, shape: Shape) -> None:
        self.grid, self.shape = grid, shape
        self.owners = np.arange(grid.num_chunks) // grid.chunks_per_rank
        self.edges = np.arange(grid.world_size + 1) * grid.chunks_per_rank
        self.tokens = {of_keys: lengths_of(grid, of_keys=of_keys) for of_keys in (False, True)}

    def moved(self, tiles: Tiles, *, of_keys: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return what is fetched, at its first use; and what is sent home, after its last."""
        fetched = self._first_uses(tiles, of_keys=of_keys)
        home = self._first_uses(tiles[::-1], of_keys=of_keys)[::-1]
        return fetched, home[:, ::-1]  # whoever fetched a chunk sends its result

    def _first_uses(self, tiles: Sequence[Sequence[Tile]], *, of_keys: bool) -> np.ndarray:
        """Return (stages, 2, P): rows of heads that each rank sends, and receives."""
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
                    else:  # most often: then nothing need be looked at chunk by chunk
                        edges = self.edges[first : last + 2].clip(span.start, span.stop)
                        of_owners = np.diff(before[edges])
                    sent[first : last + 1] += of_owners * len(heads)
                    received[tile.rank] += of_owners.sum() * len(heads)
                    part[:] = True
        return moved
