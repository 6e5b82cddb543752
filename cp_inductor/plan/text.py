"""Plans as text, one line per action, for reading.

See `cp_inductor.plan.ir` for a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from cp_inductor.plan.grid import Grid
from cp_inductor.plan.ir import PlanData, Shape, Stage, Tile, Transfer


def format_plan(plan: PlanData) -> str:
    """Return a plan as text."""
    lines = [
        f"plan {plan.strategy} {plan.mask.value} {plan.direction.value} kept={plan.num_kept}"
        + " returning" * plan.returns,
        *([f"rule {plan.rule}"] if plan.rule else []),
        "grid " + _format_fields(plan.grid),
        "shape " + _format_fields(plan.shape),
        *(f"kept: {_format_transfer(transfer)}" for transfer in plan.kept_fetches),
        *_format_stages(plan.stages),
    ]
    return "\n".join(lines) + "\n"


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
