"""Plans as text, one line per action, and back.

See `cp_inductor.plan.ir` for a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from cp_inductor.plan.ir import (
    Direction,
    Grid,
    Mask,
    Payload,
    Plan,
    Shape,
    Span,
    Stage,
    Tile,
    Transfer,
)

__all__ = ["format_plan", "format_program", "format_stage", "parse_plan"]

_PAYLOADS = {payload.word: payload for payload in Payload}
_SPAN = re.compile(r"\[(\d+):(\d+)\]")
_TRANSFER = re.compile(r"(fetch|home): (\S+?)(\[\d+:\d+\]) h(\[\d+:\d+\]) (\d+) -> (\d+)")
_TILE = re.compile(r"rank (\d+): tile q(\S+) x kv(\S+) h(\[\d+:\d+\]) (\w+)")


def format_plan(plan: Plan) -> str:
    """Return a plan as text."""
    lines = [
        f"plan {plan.strategy} {plan.mask.value} {plan.direction.value} kept={plan.num_kept}",
        *([f"rule {plan.rule}"] if plan.rule else []),
        "grid " + _format_fields(plan.grid),
        "shape " + _format_fields(plan.shape),
        *(f"kept: {_format_transfer(transfer)}" for transfer in plan.kept_fetches),
        *_format_stages(plan.stages),
    ]
    return "\n".join(lines) + "\n"


def format_program(plan: Plan, rank: int) -> str:
    """Return one rank's part of a plan, for people."""
    return "\n".join(_format_stages(plan.program(rank)))


def _format_stages(stages: Iterable[Stage]) -> list[str]:
    lines = []
    for index, stage in enumerate(stages):
        lines += [f"stage {index}", *(f"  {line}" for line in format_stage(stage))]
    return lines


def format_stage(stage: Stage) -> list[str]:
    """Return a stage's actions, in the order in which they happen."""
    return [
        *(f"fetch: {_format_transfer(transfer)}" for transfer in stage.fetch),
        *(_format_tile(tile) for tile in stage.tiles),
        *(f"home: {_format_transfer(transfer)}" for transfer in stage.home),
    ]


def _format_fields(value: Grid | Shape) -> str:
    return " ".join(f"{field.name}={getattr(value, field.name)}" for field in fields(value))


def _format_transfer(transfer: Transfer) -> str:
    what = f"{transfer.payload.word}{transfer.span} h{transfer.heads}"
    return f"{what} {transfer.source} -> {transfer.destination}"


def _format_tile(tile: Tile) -> str:
    queries, keys = ("".join(map(str, spans)) for spans in (tile.queries, tile.keys))
    return f"rank {tile.rank}: tile q{queries} x kv{keys} h{tile.heads} {tile.mask.value}"


def parse_plan(text: str) -> Plan:
    """Return the plan that `format_plan` wrote.

    Raises:
        ValueError: a line is none that it writes.
    """
    first, *lines = text.splitlines()
    rule = lines.pop(0).removeprefix("rule ") if lines[0].startswith("rule ") else ""
    grid, shape, *lines = lines
    _, strategy, mask, direction, num_kept = first.split()
    stages: list[tuple[list[Transfer], list[Tile], list[Transfer]]] = []
    kept: list[Transfer] = []
    for line in lines:
        if line.startswith("kept: "):
            _parse_action(line.replace("kept: ", "fetch: "), kept, [], [])
        elif line.startswith("stage "):
            stages.append(([], [], []))
        else:
            _parse_action(line.strip(), *stages[-1])
    words = {name: _words(line) for name, line in (("grid", grid), ("shape", shape))}
    return Plan(
        Grid(**words["grid"]),  # type: ignore[arg-type]
        Shape(**words["shape"]),  # type: ignore[arg-type]
        Mask(mask),
        strategy,
        Direction(direction),
        int(num_kept.removeprefix("kept=")),
        tuple(Stage(*map(tuple, stage)) for stage in stages),  # type: ignore[arg-type]
        tuple(kept),
        rule,
    )


def _words(line: str) -> dict[str, int | str]:
    pairs = (word.split("=") for word in line.split()[1:])
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def _parse_action(
    line: str, fetch: list[Transfer], tiles: list[Tile], home: list[Transfer]
) -> None:
    if match := _TRANSFER.fullmatch(line):
        kind, payload, span, heads, source, destination = match.groups()
        (chunks,), (some_heads,) = _spans(span), _spans(heads)
        transfer = Transfer(_PAYLOADS[payload], chunks, some_heads, int(source), int(destination))
        (fetch if kind == "fetch" else home).append(transfer)
    elif match := _TILE.fullmatch(line):
        rank, queries, keys, heads, mask = match.groups()
        tiles.append(Tile(int(rank), _spans(queries), _spans(keys), _spans(heads)[0], Mask(mask)))
    else:
        raise ValueError(f"not a line of a plan: {line!r}")


def _spans(text: str) -> tuple[Span, ...]:
    return tuple(Span(int(start), int(stop)) for start, stop in _SPAN.findall(text))
