"""Derive plans from tiles: who computes what determines what must move.

    rank 0: tile q[2:4] x kv[0:1]        owner of q[2:4] is rank 1
      =>
    fetch q[2:4] 1 -> 0    at the first stage whose tiles need it, once
    home out[2:4] 0 -> 1   after the last stage whose tiles add to it, once

The backward plan is a function of the forward plan. It has the same tiles at the same ranks, or
others that read what the forward fetched, so that fetched data may be kept. Every fetched query is
fetched with the gradient of its output, every fetched key and value is fetched again, and the
gradients of both are sent home.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

import numpy as np

from cp_inductor.plan.grid import Grid, Span, tokens_before
from cp_inductor.plan.ir import Direction, Mask, Payload, PlanData, Shape, Stage, Tile, Transfer
from cp_inductor.plan.tiles import has_tokens

# Fetches of each stage, in order.
Fetches = Sequence[tuple[Transfer, ...]]


def plan_forward(
    grid: Grid,
    shape: Shape,
    mask: Mask,
    strategy: str,
    tiles: Sequence[Sequence[Tile]],
    fetches: Fetches,
    num_kept: int = 0,
    rule: str = "",
    backward_tiles: Sequence[Sequence[Tile]] | None = None,
) -> PlanData:
    """Return the forward plan of the tiles and fetches of each stage.

    Args:
        grid, shape, mask, strategy, num_kept, rule: see `PlanData`.
        tiles, fetches: of each stage.
        backward_tiles: of each stage, if the backward computes other tiles; all stages are kept.
    """
    homes = _homes(grid, shape, tiles, Payload.PARTIAL)
    later = backward_tiles or [()] * len(tiles)
    if backward_tiles is not None:
        num_kept = max(num_kept, len(tiles))
    stages = tuple(
        Stage(fetch, tuple(own), home, tuple(of_backward))
        for fetch, own, home, of_backward in zip(fetches, tiles, homes, later, strict=True)
    )
    direction = Direction.FORWARD
    return PlanData(grid, shape, mask, strategy, direction, num_kept, stages, rule=rule)


def plan_backward(plan: PlanData) -> PlanData:
    """Return the backward plan of a forward plan."""
    assert plan.direction is Direction.FORWARD
    tiles = [stage.tiles for stage in plan.stages]
    if plan.has_backward_tiles:
        tiles = [stage.backward_tiles for stage in plan.stages]
    queries = _homes(plan.grid, plan.shape, tiles, Payload.QUERY_GRAD)
    keys = _homes(plan.grid, plan.shape, tiles, Payload.KEY_VALUE_GRAD)
    stages = []
    for index, stage in enumerate(plan.stages):
        fetch = _refetch(stage.fetch, is_kept=index < plan.num_kept)
        stages.append(Stage(fetch, tiles[index], _sorted([*queries[index], *keys[index]])))
    return PlanData(
        plan.grid,
        plan.shape,
        plan.mask,
        plan.strategy,
        Direction.BACKWARD,
        plan.num_kept,
        tuple(stages),
        tuple(t for stage in plan.stages[: plan.num_kept] for t in stage.fetch),
        plan.rule,
    )


def _refetch(fetch: Iterable[Transfer], *, is_kept: bool) -> tuple[Transfer, ...]:
    """Return what the backward fetches for a fetch of the forward."""
    again = []
    for transfer in fetch:
        if transfer.payload is Payload.QUERY:
            payload = Payload.GRAD_OUT if is_kept else Payload.QUERY_GRAD_OUT
        elif is_kept:
            continue
        else:
            again.append(transfer)
            continue
        again.append(
            Transfer(payload, transfer.span, transfer.heads, transfer.source, transfer.destination)
        )
    return _sorted(again)


def fetch_directly(
    grid: Grid, shape: Shape, tiles: Sequence[Sequence[Tile]]
) -> list[tuple[Transfer, ...]]:
    """Return, for each stage, what its tiles need and do not have yet, from its owners."""
    # (rank, payload, heads) -> which chunks are at hand.
    at_hand: dict[tuple[int, Payload, Span], np.ndarray] = {}
    fetches = []
    for stage in tiles:
        fetch: list[Transfer] = []
        for tile in stage:
            if not has_tokens(grid, tile):
                continue
            for payload in (Payload.QUERY, Payload.KEY_VALUE):
                spans, heads = _side(tile, payload, shape)
                has = at_hand.setdefault((tile.rank, payload, heads), _own(grid, tile.rank))
                for span in spans:
                    for missing in _missing(has, span):
                        fetch += [
                            Transfer(payload, part, heads, owner, tile.rank)
                            for owner, part in _parts(grid, missing, payload)
                        ]
                    has[span.start : span.stop] = True
        fetches.append(_sorted(fetch))
    return fetches


def _homes(
    grid: Grid, shape: Shape, tiles: Sequence[Sequence[Tile]], payload: Payload
) -> list[tuple[Transfer, ...]]:
    """Return, for each stage, the results to send home after it: those whose last tile is in it."""
    # Going backward through the stages, the first tile met is the last that adds.
    gone: dict[tuple[int, Span], np.ndarray] = {}
    homes = []
    for stage in reversed(tiles):
        home: list[Transfer] = []
        for tile in stage:
            spans, heads = _side(tile, payload, shape)
            # Nothing of a rank's own has to go anywhere.
            has = gone.setdefault((tile.rank, heads), _own(grid, tile.rank))
            for span in spans:
                for going in _missing(has, span):
                    home += [
                        Transfer(payload, part, heads, tile.rank, owner)
                        for owner, part in _parts(grid, going, payload)
                    ]
                has[span.start : span.stop] = True
        homes.append(_sorted(home))
    return homes[::-1]


def _parts(grid: Grid, span: Span, payload: Payload) -> list[tuple[int, Span]]:
    """Cut a span where the owner changes; return the owners, and their parts that hold tokens."""
    before, size = tokens_before(grid, of_keys=payload.is_of_keys), grid.chunks_per_rank
    first = span.start // size
    edges = [span.start, *range((first + 1) * size, span.stop, size), span.stop]
    return [
        (owner, Span(start, stop))
        for owner, (start, stop) in enumerate(pairwise(edges), first)
        if before[start] < before[stop]
    ]


def _side(tile: Tile, payload: Payload, shape: Shape) -> tuple[tuple[Span, ...], Span]:
    """Return the spans and the heads of a tile that a payload is about."""
    if payload.is_of_keys:
        return tile.keys, shape.kv_heads(tile.heads)
    return tile.queries, tile.heads


def _own(grid: Grid, rank: int) -> np.ndarray:
    own, has = grid.own(rank), np.zeros(grid.num_chunks, dtype=bool)
    has[own.start : own.stop] = True
    return has


def _missing(has: np.ndarray, span: Span) -> Iterator[Span]:
    """Yield the runs of a span that a rank does not have."""
    part = has[span.start : span.stop]
    if not part.any():
        yield span
        return
    lacking = np.flatnonzero(~part)
    if not len(lacking):
        return
    breaks = np.flatnonzero(np.diff(lacking) > 1) + 1
    for run in np.split(lacking, breaks):
        yield Span(span.start + int(run[0]), span.start + int(run[-1]) + 1)


# The sort key of a transfer in an exchange; both of its ends derive it. Payloads of one span are
# adjacent, and are sent as one record. (A million transfers are sorted: not a function in Python.)
message_order = attrgetter(
    "source", "destination", "span.start", "span.stop", "payload.order", "heads.start"
)


def _sorted(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    return tuple(sorted(transfers, key=message_order))
