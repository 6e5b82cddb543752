"""Derive plans from tiles: who computes what determines what must move.

    rank 0: tile q[2:4] x kv[0:1]        owner of q[2:4] is rank 1
      =>
    use q[2:4] of rank 1 by rank 0       in each stage whose tiles read it
      =>
    fetch q[2:4] 1 -> 0    at the first of these stages, once
    home out[2:4] 0 -> 1   after the last of them, once

Uses are rows of integers, of all ranks and stages at once: the transfers that would bring them from
their owners, and the stage behind these. The uses of a batch are so as well.

The backward plan is a function of the forward plan. It has the same tiles at the same ranks, or
others that read what the forward fetched, so that fetched data may be kept. Every fetched query is
fetched with the gradient of its output, every fetched key and value is fetched again, and the
gradients of both are sent home.

Over several nodes, what a rank needs of another node enters its node at one rank, one stage before
it is passed on, so that no stage passes on what it brings. Results go back the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from cp_inductor.plan.grid import Grid, spread, tokens_before
from cp_inductor.plan.ir import (
    DESTINATION,
    FIRST_HEAD,
    LAST_HEAD,
    PAYLOAD,
    SOURCE,
    STAGE,
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
    payloads = Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD
    homes = homes_of(plan.grid, plan.shape, tiles, payloads, plan.num_nodes)
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


def fetches_of(
    grid: Grid, shape: Shape, tiles: Sequence[Sequence[Tile]], num_nodes: int = 1
) -> list[Transfers]:
    """Return, for each stage, what its tiles need and do not have yet.

    Over several nodes, tiles of the first stage read only what enters at their rank.
    """
    columns, found = TileColumns.of(tiles), []
    for payload in (Payload.QUERY, Payload.KEY_VALUE):
        uses = _with_entries(grid, _uses_of(grid, shape, columns, payload), num_nodes, later=-1)
        uses = _joined(_once(uses))
        uses[:, SOURCE] = _neighbors(grid, uses, num_nodes)
        found.append(uses)
    return by_stage(found, len(tiles))


def homes_of(
    grid: Grid,
    shape: Shape,
    tiles: Sequence[Sequence[Tile]],
    payloads: Sequence[Payload],
    num_nodes: int = 1,
) -> list[Transfers]:
    """Return, for each stage, the results to send home after it: those whose last tile is in it.

    Over several nodes, a rank passes results on, with its own, when all have arrived: perhaps in
    one more stage.
    """
    columns, found = TileColumns.of(tiles), []
    for payload in payloads:
        uses = _uses_of(grid, shape, columns, payload, by_chunk=num_nodes > 1)
        uses = _once(_with_entries(grid, uses, num_nodes, later=1), is_last=True)
        if num_nodes > 1 and len(uses):
            _spread_last_hops(grid, uses, num_nodes, of_keys=payload.is_of_keys)
        uses = _joined(uses)
        ends = uses[:, DESTINATION], _neighbors(grid, uses, num_nodes)
        uses[:, [SOURCE, DESTINATION]] = np.stack(ends, axis=1)
        found.append(uses)
    num_stages = max(len(tiles), *(1 + int(uses[:, STAGE].max(initial=0)) for uses in found))
    return by_stage(found, num_stages)


def _neighbors(grid: Grid, uses: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return whom each rank gets its part from: the owner, or the rank where it enters its node."""
    rank, owner, size = uses[:, DESTINATION], uses[:, SOURCE], grid.world_size // num_nodes
    # If there is one node, what an owner has "enters" it at the owner.
    entry = rank // size * size + owner // num_nodes
    return np.where(entry == rank, owner, entry)


def _with_entries(grid: Grid, uses: np.ndarray, num_nodes: int, *, later: int) -> np.ndarray:
    """Return uses, and those of the ranks that pass something on, so many stages later."""
    neighbor = _neighbors(grid, uses, num_nodes)
    is_passed = neighbor != uses[:, SOURCE]
    passed = uses[is_passed]
    passed[:, DESTINATION] = neighbor[is_passed]
    passed[:, STAGE] += later
    return np.concatenate([uses, passed])


def _spread_last_hops(grid: Grid, uses: np.ndarray, num_nodes: int, *, of_keys: bool) -> None:
    """Let results leave later on their last hop, if they are early, when most ranks move.

    In an exchange all wait for the rank that moves most. What a few ranks alone move costs all of
    them as much as if they all did.
    """
    at = np.flatnonzero(_neighbors(grid, uses, num_nodes) == uses[:, SOURCE])
    owner, rank, start, stop, _, first_head, last_head, stage = uses[at].T
    before = np.array(tokens_before(grid, of_keys=of_keys))
    size = (last_head - first_head) * (before[stop] - before[start])
    # One chunk of each owner, then the next, so that owners receive as evenly.
    turn = start % grid.chunks_per_rank
    for end in (rank, owner):
        num_stages = int(stage.max()) + 1
        loads = np.bincount(end * num_stages + stage, size, grid.world_size * num_stages)
        loads = loads.reshape(-1, num_stages)
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
    uses[at, STAGE] = stage


# --- Uses -----------------------------------------------------------------------------------------


def _uses_of(
    grid: Grid, shape: Shape, tiles: TileColumns, payload: Payload, *, by_chunk: bool = False
) -> np.ndarray:
    """Return (n, 8), what tiles read that their ranks do not store, as transfers and stages.

    Spans are parts of the sequence that tiles read as a whole, or with `by_chunk` single chunks.
    """
    of_keys = payload.is_of_keys
    (of_tile, start, stop), heads = tiles.reads(shape, of_keys=of_keys)
    is_edge = np.full(grid.num_chunks + 1, by_chunk)
    is_edge[:: grid.chunks_per_rank] = is_edge[start] = is_edge[stop] = True
    edges, part_of = np.flatnonzero(is_edge), np.cumsum(is_edge) - 1
    of_span, place = spread(part_of[stop] - part_of[start])
    tile, part = of_tile[of_span], part_of[start][of_span] + place
    has_tokens = np.diff(np.array(tokens_before(grid, of_keys=of_keys))[edges]) > 0
    meets_any = tiles.tokens(grid, of_keys=not of_keys) > 0
    owners = edges[:-1] // grid.chunks_per_rank
    is_used = (owners[part] != tiles.rank[tile]) & has_tokens[part] & meets_any[tile]
    tile, part = tile[is_used], part[is_used]
    kind = np.full_like(part, payload.order)
    moved = owners[part], tiles.rank[tile], edges[part], edges[part + 1], kind
    return np.stack([*moved, *(of[tile] for of in heads), tiles.stage[tile]], axis=1)


def begins(uses: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    """Return (n,), which uses differ in some columns from the one before."""
    found = np.ones(len(uses), bool)
    found[1:] = (np.diff(uses[:, columns], axis=0) != 0).any(1)
    return found


def _once(uses: np.ndarray, *, is_last: bool = False) -> np.ndarray:
    """Return the first, or the last, use of each span by each rank; sorted by rank and span."""
    uses = uses[np.lexsort(uses[:, [STAGE, START, LAST_HEAD, FIRST_HEAD, DESTINATION]].T)]
    is_chosen = begins(uses, [DESTINATION, FIRST_HEAD, LAST_HEAD, START])
    return uses[np.roll(is_chosen, -1) if is_last else is_chosen]


def _joined(uses: np.ndarray) -> np.ndarray:
    """Join sorted uses that differ in nothing but their spans, which touch."""
    is_first = begins(uses, [SOURCE, DESTINATION, PAYLOAD, FIRST_HEAD, LAST_HEAD, STAGE])
    is_first[1:] |= uses[1:, START] != uses[:-1, STOP]
    joined = uses[is_first]
    joined[:, STOP] = uses[np.roll(is_first, -1), STOP]
    return joined


def by_stage(uses: Sequence[np.ndarray], num_stages: int) -> list[Transfers]:
    """Return the transfers of each stage, in the order of messages."""
    rows = np.concatenate(uses)
    rows = rows[message_order(rows, rows[:, STAGE])]
    edges = np.searchsorted(rows[:, STAGE], np.arange(1, num_stages))
    return [Transfers(part[:, :STAGE]) for part in np.split(rows, edges)]


class TileColumns(NamedTuple):
    """The tiles of all ranks and stages, as integers.

    Attributes:
        stage, rank, first_head, last_head, is_causal: (tiles,).
        queries, keys: (3, spans), of each span its tile, its first chunk and that behind it.
    """

    stage: np.ndarray
    rank: np.ndarray
    first_head: np.ndarray
    last_head: np.ndarray
    is_causal: np.ndarray
    queries: np.ndarray
    keys: np.ndarray

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
        of_tiles, *of_spans = (
            np.array(found, np.int64).reshape(-1, width).T
            for found, width in ((rows, 5), (queries, 3), (keys, 3))
        )
        return TileColumns(*of_tiles, *of_spans)

    def tokens(self, grid: Grid, *, of_keys: bool) -> np.ndarray:
        """Return (tiles,), how many queries, or keys, each tile has."""
        of_tile, start, stop = self.keys if of_keys else self.queries
        before = np.array(tokens_before(grid, of_keys=of_keys))
        return np.bincount(of_tile, before[stop] - before[start], len(self.rank))

    def reads(
        self, shape: Shape, *, of_keys: bool
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Return the spans of queries, or of keys, and the heads of these, of each tile."""
        group = shape.num_heads // shape.num_kv_heads if of_keys else 1
        heads = self.first_head // group, (self.last_head - 1) // group + 1
        return self.keys if of_keys else self.queries, heads
