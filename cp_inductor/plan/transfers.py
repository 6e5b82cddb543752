"""Derive plans from tiles: who computes what determines what must move.

    rank 0: tile q[2:4] x kv[0:1]        owner of q[2:4] is rank 1
      =>
    fetch q[2:4] 1 -> 0    at the first stage whose tiles need it, once
    home out[2:4] 0 -> 1   after the last stage whose tiles add to it, once

Tiles, and when ranks use which chunks, are columns of integers: of all ranks and stages at once.

The backward plan is a function of the forward plan. It has the same tiles at the same ranks, or
others that read what the forward fetched, so that fetched data may be kept. Every fetched query is
fetched with the gradient of its output, every fetched key and value is fetched again, and the
gradients of both are sent home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from cp_inductor.plan.grid import Grid, spread, tokens_before
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
    Payload,
    PlanData,
    Shape,
    Stage,
    Tile,
    Transfers,
    message_order,
)

# What each stage fetches, or sends home.
Fetches = Sequence[Transfers]

AnyPlan = TypeVar("AnyPlan", bound=PlanData)


def plan_backward(plan: AnyPlan) -> AnyPlan:
    """Return the backward plan of a forward plan."""
    assert plan.direction is Direction.FORWARD
    has_others = any(stage.backward_tiles for stage in plan.stages)
    tiles = [stage.backward_tiles if has_others else stage.tiles for stage in plan.stages]
    way = [stage.fetch for stage in plan.stages] if plan.returns else None
    payloads = Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD
    homes = homes_of(plan.grid, plan.shape, tiles, payloads, way)
    again = [
        _refetch(stage.fetch, is_kept=index < plan.num_kept)
        for index, stage in enumerate(plan.stages)
    ]
    return replace(
        plan,
        direction=Direction.BACKWARD,
        stages=stages_of(again, tiles, homes),
        kept_fetches=Transfers.joined(stage.fetch for stage in plan.stages[: plan.num_kept]),
    )


def stages_of(
    fetches: Fetches,
    tiles: Sequence[Sequence[Tile]],
    homes: Fetches,
    later: Sequence[Sequence[Tile]] = (),
) -> tuple[Stage, ...]:
    """Return stages, given what each fetches, computes, sends home, and leaves to the backward.

    Results may be on their way for some stages more, in which nothing else happens.
    """
    parts = zip_longest(fetches, tiles, homes, later, fillvalue=())
    return tuple(
        Stage(Transfers.of(fetch), tuple(own), Transfers.of(home), tuple(of_backward))
        for fetch, own, home, of_backward in parts
    )


def _refetch(fetch: Transfers, *, is_kept: bool) -> Transfers:
    """Return what the backward fetches for a fetch of the forward."""
    columns = fetch.columns.copy()
    is_query = columns[:, PAYLOAD] == Payload.QUERY.order
    columns[is_query, PAYLOAD] = (Payload.GRAD_OUT if is_kept else Payload.QUERY_GRAD_OUT).order
    return Transfers(columns[is_query] if is_kept else columns).sorted()


def fetch_directly(grid: Grid, shape: Shape, tiles: Sequence[Sequence[Tile]]) -> list[Transfers]:
    """Return, for each stage, what its tiles need and do not have yet, from its owners."""
    columns = TileColumns.of(tiles)
    found = []
    for payload in (Payload.QUERY, Payload.KEY_VALUE):
        uses = Uses.of(grid, shape, columns, of_keys=payload.is_of_keys)
        found.append(_transfers(uses, payload, SOURCE, uses.owners))
    return by_stage(found, len(tiles))


def fetch_by_way(
    grid: Grid,
    shape: Shape,
    tiles: Sequence[Sequence[Tile]],
    entries: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> list[Transfers]:
    """Return, for each stage, what its tiles need, by way of the ranks at which it enters a node.

    What enters is there one stage before another rank needs it. So no stage passes on what it
    brings.

    Args:
        grid, shape: of the attention.
        tiles: of each stage. Those of the first read only what enters at their rank.
        entries: (n, 1) ranks, (m,) owners -> (n, m), the rank of each node at which what an owner
            holds enters it.
    """
    columns, found = TileColumns.of(tiles), []
    for payload in (Payload.QUERY, Payload.KEY_VALUE):
        uses = Uses.of(grid, shape, columns, of_keys=payload.is_of_keys)
        rank = uses.rank[:, None]
        entry = entries(rank, uses.owners)
        line, part = np.nonzero((uses.stages >= 0) & (entry != rank) & (entry != uses.owners))
        enters = line_of(entry[line, part], *(of[line] for of in uses.heads))
        before = uses.stages[line, part] - 1
        uses = uses.with_lines(enters)
        stages = np.where(uses.stages < 0, len(tiles), uses.stages)
        np.minimum.at(stages, (np.searchsorted(uses.lines, enters), part), before)
        stages[stages == len(tiles)] = -1
        rank = uses.rank[:, None]
        entry = entries(rank, uses.owners)
        sources = np.where(entry == rank, uses.owners, entry)
        found.append(_transfers(replace(uses, stages=stages), payload, SOURCE, sources))
    return by_stage(found, len(tiles))


def _transfers(uses: Uses, payload: Payload, end: int, others: np.ndarray) -> np.ndarray:
    """Return (transfers, 8), the stage and the columns of each: runs of parts of one owner.

    The other ranks, `others` of (parts,) or (lines, parts), are at one end: SOURCE or DESTINATION.
    """
    is_edge = np.ones(uses.stages.shape, bool)
    is_edge[:, 1:] = (uses.stages[:, 1:] != uses.stages[:, :-1]) | (np.diff(uses.owners) != 0)
    edges = np.flatnonzero(is_edge)
    line, first = np.divmod(edges, len(uses.owners))
    last = first + np.diff(edges, append=is_edge.size)
    moves = uses.stages[line, first] >= 0
    line, first, last = line[moves], first[moves], last[moves]
    found = np.empty((len(line), 8), np.int64)
    found[:, 0] = uses.stages[line, first]
    columns = found[:, 1:]
    columns[:, DESTINATION if end == SOURCE else SOURCE] = uses.rank[line]
    columns[:, end] = np.broadcast_to(others, uses.stages.shape)[line, first]
    columns[:, START], columns[:, STOP] = uses.edges[first], uses.edges[last]
    columns[:, PAYLOAD] = payload.order
    columns[:, FIRST_HEAD], columns[:, LAST_HEAD] = (of[line] for of in uses.heads)
    return found


def by_stage(found: Sequence[np.ndarray], num_stages: int) -> list[Transfers]:
    """Return the transfers of each stage, in the order of messages; for arrays of `_transfers`."""
    rows = np.concatenate(found)
    rows = rows[message_order(rows[:, 1:], rows[:, 0])]
    edges = np.searchsorted(rows[:, 0], np.arange(1, num_stages))
    return [Transfers(part[:, 1:]) for part in np.split(rows, edges)]


def homes_of(
    grid: Grid,
    shape: Shape,
    tiles: Sequence[Sequence[Tile]],
    payloads: Sequence[Payload],
    way: Fetches | None = None,
) -> list[Transfers]:
    """Return, for each stage, the results to send home after it: those whose last tile is in it.

    With the fetches that inputs came by, results go back the same way. A rank passes results on,
    with its own, when all have arrived: perhaps in one more stage.
    """
    columns, num_stages, found = TileColumns.of(tiles), len(tiles), []
    for payload in payloads:
        of_keys, by_way = payload.is_of_keys, way is not None
        uses = Uses.of(grid, shape, columns, of_keys=of_keys, is_last=True, by_chunk=by_way)
        others = uses.owners
        if way is not None:
            uses, others = _back_by_way(uses, payload, way)
            num_stages = max(num_stages, int(uses.stages.max(initial=-1)) + 1)
        found.append(_transfers(uses, payload, DESTINATION, others))
    return by_stage(found, num_stages)


def _back_by_way(uses: Uses, payload: Payload, way: Fetches) -> tuple[Uses, np.ndarray]:
    """Return when results leave ranks, and (lines, parts) to whom: where inputs came from."""
    fetched = Transfers.joined(way).columns
    fetched = fetched[IS_OF_KEYS[fetched[:, PAYLOAD]] == payload.is_of_keys]
    came = line_of(fetched[:, DESTINATION], fetched[:, FIRST_HEAD], fetched[:, LAST_HEAD])
    uses = uses.with_lines(came)
    sources = np.full(uses.stages.shape, -1)
    first, last = np.searchsorted(uses.edges, fetched[:, START : STOP + 1].T)
    of, place = spread(last - first)
    sources[np.searchsorted(uses.lines, came[of]), first[of] + place] = fetched[of, SOURCE]
    stages, before = uses.stages, np.empty(0)
    while not np.array_equal(stages, before):
        before = stages.copy()
        line, part = np.nonzero((stages >= 0) & (sources != uses.owners))
        onward = line_of(sources[line, part], *(of[line] for of in uses.heads))
        np.maximum.at(stages, (np.searchsorted(uses.lines, onward), part), stages[line, part] + 1)
        stages[uses.rank[:, None] == uses.owners] = -1
    line, part = np.nonzero((stages >= 0) & (sources == uses.owners))
    stages[line, part] = _spread(uses, line, part)
    return uses, sources


def _spread(uses: Uses, line: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return when results leave on their last hop: later, if they are early, when most ranks move.

    In an exchange all wait for the rank that moves most. What a few ranks alone move costs all of
    them as much as if they all did.
    """
    stage, size = uses.stages[line, part], uses.num_heads[line] * uses.tokens[part]
    # One part of each owner, then the next, so that owners receive as evenly.
    turn = part - np.searchsorted(uses.owners, uses.owners[part])
    for end in (uses.rank[line], uses.owners[part]) if len(stage) else ():
        num_stages = int(stage.max()) + 1
        size_of = (int(end.max()) + 1, num_stages)
        loads = np.bincount(end * num_stages + stage, size, size_of[0] * num_stages)
        loads = loads.reshape(size_of)
        usual = np.median(loads[loads.any(1)], axis=0)
        if not usual.any():
            break
        order = np.lexsort((turn, stage, end))
        moved = np.cumsum(size[order])
        of_rank = np.searchsorted(end[order], end[order])
        middle = moved - size[order] / 2 - (moved - size[order])[of_rank]
        share = middle / loads.sum(1)[end[order]]
        later = np.searchsorted(np.cumsum(usual) / usual.sum(), share)
        stage[order] = np.maximum(stage[order], later)
    return stage


# --- Columns --------------------------------------------------------------------------------------

# Heads of an attention are fewer: a rank and a span of heads are one integer.
_MAX_HEADS = 1 << 17


class SpanColumns(NamedTuple):
    """Spans of tiles, (spans,) integers: of which tile, and the chunks."""

    tile: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class TileColumns:
    """The tiles of all ranks and stages.

    Attributes:
        stage, rank, first_head, last_head: (tiles,) integers.
        is_causal: (tiles,) bool.
        queries, keys: the spans of all tiles.
    """

    stage: np.ndarray
    rank: np.ndarray
    first_head: np.ndarray
    last_head: np.ndarray
    is_causal: np.ndarray
    queries: SpanColumns
    keys: SpanColumns

    @staticmethod
    def of(stages: Iterable[Sequence[Tile]]) -> TileColumns:
        """Return the tiles of each stage as columns."""
        rows, queries, keys = [], [], []
        flat = ((stage, tile) for stage, tiles in enumerate(stages) for tile in tiles)
        for at, (stage, tile) in enumerate(flat):
            is_causal = tile.mask is Mask.CAUSAL
            rows.append((stage, tile.rank, tile.heads.start, tile.heads.stop, is_causal))
            queries += [(at, span.start, span.stop) for span in tile.queries]
            keys += [(at, span.start, span.stop) for span in tile.keys]
        of_tiles, of_queries, of_keys = (
            np.array(found, np.int64).reshape(-1, width).T
            for found, width in ((rows, 5), (queries, 3), (keys, 3))
        )
        stage, rank, first, last, causal = of_tiles
        spans = SpanColumns(*of_queries), SpanColumns(*of_keys)
        return TileColumns(stage, rank, first, last, causal > 0, *spans)

    def tokens(self, grid: Grid, *, of_keys: bool) -> np.ndarray:
        """Return (tiles,), how many queries, or keys, each tile has."""
        spans, before = self.keys if of_keys else self.queries, tokens_before(grid, of_keys=of_keys)
        lengths = np.array(before)[spans.stop] - np.array(before)[spans.start]
        return np.bincount(spans.tile, lengths, len(self.rank))


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """In which stage ranks use which chunks of others.

    Attributes:
        lines: (lines,) a rank and a span of heads each, as `line_of` writes them; sorted.
        edges: (parts + 1,) chunks where parts of the sequence begin and end, each of one owner and
            used as a whole.
        owners: (parts,) the rank that holds each.
        tokens: (parts,) how many each holds.
        stages: (lines, parts), the stage; -1 for none, for own parts, and for those without tokens.
    """

    lines: np.ndarray
    edges: np.ndarray
    owners: np.ndarray
    tokens: np.ndarray
    stages: np.ndarray

    @staticmethod
    def of(
        grid: Grid,
        shape: Shape,
        tiles: TileColumns,
        *,
        of_keys: bool,
        is_last: bool = False,
        by_chunk: bool = False,
    ) -> Uses:
        """Return the first, or the last, uses of chunks; with `by_chunk` each chunk is a part."""
        group = shape.num_heads // shape.num_kv_heads if of_keys else 1
        heads = tiles.first_head // group, (tiles.last_head - 1) // group + 1
        lines, line = np.unique(line_of(tiles.rank, *heads), return_inverse=True)
        spans = tiles.keys if of_keys else tiles.queries
        is_edge = np.full(grid.num_chunks + 1, by_chunk)
        is_edge[:: grid.chunks_per_rank] = is_edge[spans.start] = is_edge[spans.stop] = True
        edges, part_of = np.flatnonzero(is_edge), np.cumsum(is_edge) - 1
        owners = edges[:-1] // grid.chunks_per_rank
        tokens = np.diff(np.array(tokens_before(grid, of_keys=of_keys))[edges])
        stages = np.full((len(lines), len(owners)), -1, np.int16)
        first = part_of[spans.start]
        of, place = spread(part_of[spans.stop] - first)
        # Tiles stand in the order of stages, and what is written last remains.
        of, place = (of, place) if is_last else (of[::-1], place[::-1])
        is_used = (tiles.tokens(grid, of_keys=not of_keys) > 0)[spans.tile[of]]
        of, place = of[is_used], place[is_used]
        stages[line[spans.tile[of]], first[of] + place] = tiles.stage[spans.tile[of]]
        uses = Uses(lines, edges, owners, tokens, stages)
        stages[(uses.rank[:, None] == owners) | (tokens == 0)] = -1
        return uses

    def with_lines(self, lines: np.ndarray) -> Uses:
        """Return the same uses, with more lines that use nothing."""
        every = np.union1d(self.lines, lines)
        stages = np.full((len(every), len(self.owners)), -1, np.int16)
        stages[np.searchsorted(every, self.lines)] = self.stages
        return replace(self, lines=every, stages=stages)

    @property
    def rank(self) -> np.ndarray:
        """(lines,), the ranks."""
        return self.lines // _MAX_HEADS**2

    @property
    def heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The first head of each line, and the one behind its last."""
        return self.lines // _MAX_HEADS % _MAX_HEADS, self.lines % _MAX_HEADS

    @property
    def num_heads(self) -> np.ndarray:
        """(lines,), how many heads each has."""
        first, last = self.heads
        return last - first


def line_of(rank: np.ndarray, first_head: np.ndarray, last_head: np.ndarray) -> np.ndarray:
    """Return a rank and a span of heads as one integer."""
    return (rank * _MAX_HEADS + first_head) * _MAX_HEADS + last_head
