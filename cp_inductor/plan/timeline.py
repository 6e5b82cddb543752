"""How long a plan takes: what its exchanges move and its tiles compute, stage by stage.

fetch 0 . tiles 0         fetch i + 1 runs during tiles i
          fetch 1 . tiles 1
                    home 0      results go home during the tiles of the next stage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_inductor.plan.ir import PlanData, flops_per_pair
from cp_inductor.plan.machine import Level, Machine


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
