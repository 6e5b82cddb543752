"""The plan that users hold: `PlanData` with methods to simulate and print it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cp_inductor.plan.grid import Grid, tokens_before
from cp_inductor.plan.ir import (
    PAYLOAD,
    Direction,
    Payload,
    PlanData,
    Shape,
    Stage,
    Tile,
    Transfer,
    Transfers,
)
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.picture import draw_panels, panels_of
from cp_inductor.plan.simulate import Timeline, loads_of, simulate
from cp_inductor.plan.transfers import moves_of


@dataclass(frozen=True)
class Plan(PlanData):
    """Which rank computes which tile of an attention, what moves, and when; for all ranks."""

    def format(self) -> str:
        """Return the plan as text, one line per action; see `cp_inductor.plan.ir` for a sample."""
        lines = [
            f"plan {self.strategy} {self.mask.value} {self.direction.value} kept={self.num_kept}"
            + " returning" * self.returns,
            *([f"rule {self.rule}"] if self.rule else []),
            "grid " + _format_fields(self.grid),
            "shape " + _format_fields(self.shape),
            *(f"kept: {_format_transfer(transfer)}" for transfer in self.kept_fetches),
            *_format_stages(self.stages),
        ]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.format()

    def simulate(self, machine: Machine | None = None) -> Timeline:
        """Execute all ranks abstractly; raise `InvalidPlan` if the plan is wrong."""
        return simulate(self, machine)

    def draw(self, path: str | Path) -> None:
        """Write a picture of who computes which (query, key) pairs, for all heads.

        Rows are queries, columns are keys, each color is a rank, and pale areas are under a mask
        that leaves out some of their pairs. Heads that are computed by the same ranks share a
        panel.

        Args:
            path: ends in .png or .svg.

        Raises:
            InvalidArgument: the path ends otherwise, or matplotlib is not installed
                (``pip install 'cp-inductor[draw]'``).
        """
        size, what = self.grid.chunks_per_rank, f"strategy {self.strategy}"
        starts = (tokens_before(self.grid, of_keys=of_keys) for of_keys in (False, True))
        ends = [before[size::size].tolist() for before in starts]
        draw_panels(path, [*panels_of(self)], ends, self.head_pairs, "pairs", what)

    def write_trace(self, path: str | Path, machine: Machine | None = None) -> None:
        """Write the predicted timeline as a trace for https://ui.perfetto.dev or chrome://tracing.

        Each rank is a process with two lanes: tiles, and exchanges.

        Args:
            path: of the file, which is JSON.
            machine: to predict for.
        """
        machine = machine or Machine()
        events = loads_of(self, machine).events(machine)
        trace: list[dict[str, object]] = []
        for rank in range(self.grid.world_size):
            names = [("process_name", 0, f"rank {rank}")]
            names += [("thread_name", lane, of) for lane, of in enumerate(("tiles", "exchange"))]
            for kind, lane, name in names:
                at = {"pid": rank, "tid": lane}
                trace.append({"name": kind, "ph": "M", **at, "args": {"name": name}})
            for event in events:
                at = {"pid": rank, "tid": int(event.is_exchange)}
                span = {"ts": event.start_s * 1e6, "dur": float(event.seconds[rank]) * 1e6}
                trace.append({"name": event.name, "ph": "X", **at, **span})
        Path(path).write_text(json.dumps({"traceEvents": trace}))

    def backward(self) -> Plan:
        """Return the plan of the backward pass, derived from this one."""
        assert self.direction is Direction.FORWARD
        has_others = any(stage.backward_tiles for stage in self.stages)
        stages = []
        for index, stage in enumerate(self.stages):
            is_kept, columns = index < self.num_kept, stage.fetch.columns.copy()
            is_query = columns[:, PAYLOAD] == Payload.QUERY.order
            payload = Payload.GRAD_OUT if is_kept else Payload.QUERY_GRAD_OUT
            columns[is_query, PAYLOAD] = payload.order
            fetch = Transfers(columns[is_query] if is_kept else columns).sorted()
            stages.append(Stage(fetch, stage.backward_tiles if has_others else stage.tiles))
        kept = Transfers.joined(stage.fetch for stage in self.stages[: self.num_kept])
        backward = replace(
            self, direction=Direction.BACKWARD, stages=tuple(stages), kept_fetches=kept
        )
        return backward.with_results(Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD)

    def with_results(self, *payloads: Payload) -> Plan:
        """Return the plan with the transfers of its results, perhaps in some stages more."""
        tiles = [stage.tiles for stage in self.stages]
        homes = moves_of(self.grid, self.shape, tiles, payloads, num_nodes=self.num_nodes)
        stages = [*self.stages, *(Stage() for _ in homes[len(tiles) :])]
        with_homes = (replace(stage, home=home) for stage, home in zip(stages, homes, strict=True))
        return replace(self, stages=tuple(with_homes))


def format_program(plan: PlanData, rank: int) -> str:
    """Return one rank's part of a plan as text, for reading."""
    return "\n".join(_format_stages(plan.program(rank)))


def _format_stages(stages: Iterable[Stage]) -> Iterator[str]:
    """Yield the actions of stages, in the order in which they happen."""
    for index, stage in enumerate(stages):
        yield f"stage {index}"
        yield from (f"  fetch: {_format_transfer(transfer)}" for transfer in stage.fetch)
        yield from (f"  {_format_tile(tile)}" for tile in stage.tiles)
        yield from (f"  home: {_format_transfer(transfer)}" for transfer in stage.home)
        yield from (f"  {_format_tile(tile, 'backward tile')}" for tile in stage.backward_tiles)


def _format_fields(value: Grid | Shape) -> str:
    return " ".join(f"{field.name}={getattr(value, field.name)}" for field in fields(value))


def _format_transfer(transfer: Transfer) -> str:
    what = f"{transfer.payload.word}{transfer.span} h{transfer.heads}"
    return f"{what} {transfer.source} -> {transfer.destination}"


def _format_tile(tile: Tile, word: str = "tile") -> str:
    queries, keys = ("".join(map(str, spans)) for spans in (tile.queries, tile.keys))
    return f"rank {tile.rank}: {word} q{queries} x kv{keys} h{tile.heads} {tile.mask.value}"
