"""Plans as text, one line per action, and back.

See `cp_inductor.plan.ir` for a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from cp_inductor.errors import InvalidText
from cp_inductor.mask.grammar import check_text, shortened
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.checks import MAX_CHUNKS, MAX_LENGTH, MAX_WORLD_SIZE, check_count, check_shape
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Direction, Mask, Payload, PlanData, Shape, Stage, Tile, Transfer

# The plan of a ring of 256 ranks is shorter.
MAX_CHARACTERS = 1 << 22

_PAYLOADS = {payload.word: payload for payload in Payload}
# Numbers have at most 12 digits. Their values are checked after they are read.
_NUMBER = r"([0-9]{1,12})"
_RANGE = r"\[[0-9]{1,12}:[0-9]{1,12}\]"
_SPAN = re.compile(r"\[([0-9]+):([0-9]+)\]")
_MASK = f"({'|'.join(mask.value for mask in Mask)})"
_TRANSFER = re.compile(
    f"({'|'.join(map(re.escape, _PAYLOADS))})({_RANGE}) h({_RANGE}) {_NUMBER} -> {_NUMBER}"
)
_TILE = re.compile(
    f"rank {_NUMBER}: (?:backward )?tile q((?:{_RANGE})+) x kv((?:{_RANGE})+) h({_RANGE}) {_MASK}"
)
_FIRST = re.compile(f"plan ([a-z0-9_+]+) {_MASK} (forward|backward) kept={_NUMBER}( returning|)")
_GRID = re.compile(
    f"grid world_size={_NUMBER} chunks_per_rank={_NUMBER}"
    f" query_length={_NUMBER} key_length={_NUMBER}"
)
_SHAPE = re.compile(
    "shape "
    + " ".join(
        f"{name}={_NUMBER}"
        for name in ("batch", "num_heads", "num_kv_heads", "head_dim", "itemsize")
    )
)


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


def _format_stages(stages: Iterable[Stage]) -> list[str]:
    lines = []
    for index, stage in enumerate(stages):
        lines += [f"stage {index}", *(f"  {line}" for line in format_stage(stage))]
    return lines


def format_stage(stage: Stage) -> list[str]:
    """Return the actions of a stage, in the order in which they happen."""
    return [
        *(f"fetch: {_format_transfer(transfer)}" for transfer in stage.fetch),
        *(_format_tile(tile) for tile in stage.tiles),
        *(f"home: {_format_transfer(transfer)}" for transfer in stage.home),
        *(_format_tile(tile, "backward tile") for tile in stage.backward_tiles),
    ]


def _format_fields(value: Grid | Shape) -> str:
    return " ".join(f"{field.name}={getattr(value, field.name)}" for field in fields(value))


def _format_transfer(transfer: Transfer) -> str:
    what = f"{transfer.payload.word}{transfer.span} h{transfer.heads}"
    return f"{what} {transfer.source} -> {transfer.destination}"


def _format_tile(tile: Tile, word: str = "tile") -> str:
    queries, keys = ("".join(map(str, spans)) for spans in (tile.queries, tile.keys))
    return f"rank {tile.rank}: {word} q{queries} x kv{keys} h{tile.heads} {tile.mask.value}"


def parse_plan(text: str) -> PlanData:
    """Return the plan that `format_plan` wrote.

    Raises:
        InvalidText: a line is not a line of a plan, or the text is longer than any plan's.
        InvalidArgument: a size is impossible for an attention.
    """
    check_text(text, MAX_CHARACTERS, site="a plan")
    lines = text.splitlines()
    first = _match(_FIRST, lines.pop(0) if lines else "")
    rule = lines.pop(0).removeprefix("rule ") if lines and lines[0].startswith("rule ") else ""
    if rule:
        Rule.parse(rule)
    grid = Grid(*_match(_GRID, lines.pop(0) if lines else ""))
    shape = Shape(*_match(_SHAPE, lines.pop(0) if lines else ""))
    _check_sizes(grid, shape)
    stages: list[_ReadStage] = []
    kept: list[Transfer] = []
    reader = _ActionReader(grid, shape)
    for line in lines:
        if line.startswith("kept: "):
            kept.append(reader.transfer(line.removeprefix("kept: ")))
        elif line == f"stage {len(stages)}" and len(stages) < MAX_WORLD_SIZE:
            stages.append(([], [], [], []))
        elif stages:
            reader.read(line.strip(), stages[-1])
        else:
            raise _refusal(line)
    strategy, mask, direction, num_kept, returning = first
    return PlanData(
        grid,
        shape,
        Mask(mask),
        strategy,
        Direction(direction),
        num_kept,
        tuple(Stage(*map(tuple, stage)) for stage in stages),  # type: ignore[arg-type]
        tuple(kept),
        rule,
        bool(returning),
    )


def _refusal(line: str) -> InvalidText:
    return InvalidText(
        site="a plan",
        expected="the lines that Plan.format writes",
        got=f"{shortened(line)}, which is not a line of a plan",
        remedy="pass the text unchanged",
    )


def _match(pattern: re.Pattern[str], line: str) -> tuple[Any, ...]:
    """Return the fields of a line, numbers as numbers."""
    match = pattern.fullmatch(line)
    if match is None:
        raise _refusal(line)
    return tuple(int(part) if part.isdigit() else part for part in match.groups())


def _check_sizes(grid: Grid, shape: Shape) -> None:
    sizes = {**_values(grid), **_values(shape)}
    check_shape(sizes, site="a plan")
    for name, most in (("chunks_per_rank", MAX_CHUNKS), ("batch", MAX_LENGTH)):
        check_count(name, sizes[name], 1, most, site="a plan")


def _values(value: Grid | Shape) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


# What is read of a stage, in the order of its fields.
_ReadStage = tuple[list[Transfer], list[Tile], list[Transfer], list[Tile]]


@dataclass(frozen=True, slots=True)
class _ActionReader:
    """Reads the actions of a plan, and checks that they are on its ranks, chunks and heads."""

    grid: Grid
    shape: Shape

    def read(self, line: str, stage: _ReadStage) -> None:
        fetch, tiles, home, backward_tiles = stage
        kind, _, rest = line.partition(": ")
        if kind in ("fetch", "home"):
            (fetch if kind == "fetch" else home).append(self.transfer(rest))
        else:
            (backward_tiles if rest.startswith("backward ") else tiles).append(self.tile(line))

    def transfer(self, text: str) -> Transfer:
        word, span, heads, source, destination = _match(_TRANSFER, text)
        payload = _PAYLOADS[word]
        num_heads = self.shape.num_kv_heads if payload.is_of_keys else self.shape.num_heads
        (chunks,) = self._spans(span, self.grid.num_chunks)
        (some_heads,) = self._spans(heads, num_heads)
        if max(source, destination) >= self.grid.world_size:
            raise _refusal(text)
        return Transfer(payload, chunks, some_heads, source, destination)

    def tile(self, text: str) -> Tile:
        rank, queries, keys, heads, mask = _match(_TILE, text)
        if rank >= self.grid.world_size:
            raise _refusal(text)
        num_chunks = self.grid.num_chunks
        (some_heads,) = self._spans(heads, self.shape.num_heads)
        spans = self._spans(queries, num_chunks), self._spans(keys, num_chunks)
        return Tile(rank, *spans, some_heads, Mask(mask))

    def _spans(self, text: str, most: int) -> tuple[Span, ...]:
        spans = tuple(Span(int(start), int(stop)) for start, stop in _SPAN.findall(text))
        if any(not span.start < span.stop <= most for span in spans):
            raise _refusal(text)
        return spans
