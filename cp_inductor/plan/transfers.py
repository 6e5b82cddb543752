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

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
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
    *,
    returns: bool = False,
) -> PlanData:
    """Return the forward plan of the tiles and fetches of each stage.

    Args:
        grid, shape, mask, strategy, num_kept, rule, returns: see `PlanData`.
        tiles, fetches: of each stage.
        backward_tiles: of each stage, if the backward computes other tiles; all stages are kept.
    """
    way = fetches if returns else None
    homes = _homes(grid, shape, tiles, Payload.PARTIAL, way)
    later = backward_tiles or [()] * len(tiles)
    if backward_tiles is not None:
        num_kept = max(num_kept, len(tiles))
    stages = tuple(
        Stage(fetch, tuple(own), home, tuple(of_backward))
        for fetch, own, home, of_backward in zip_longest(fetches, tiles, homes, later, fillvalue=())
    )
    direction = Direction.FORWARD
    return PlanData(
        grid, shape, mask, strategy, direction, num_kept, stages, rule=rule, returns=returns
    )


def plan_backward(plan: PlanData) -> PlanData:
    """Return the backward plan of a forward plan."""
    assert plan.direction is Direction.FORWARD
    tiles = [stage.tiles for stage in plan.stages]
    if plan.has_backward_tiles:
        tiles = [stage.backward_tiles for stage in plan.stages]
    way = [stage.fetch for stage in plan.stages] if plan.returns else None
    queries, keys = (
        _homes(plan.grid, plan.shape, tiles, payload, way)
        for payload in (Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD)
    )
    again = [
        _refetch(stage.fetch, is_kept=index < plan.num_kept)
        for index, stage in enumerate(plan.stages)
    ]
    stages = [
        Stage(fetch, tuple(own), _sorted([*of_queries, *of_keys]))
        for fetch, own, of_queries, of_keys in zip_longest(
            again, tiles, queries, keys, fillvalue=()
        )
    ]
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
        plan.returns,
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
    fetches: list[list[Transfer]] = [[] for _ in tiles]
    for payload in (Payload.QUERY, Payload.KEY_VALUE):
        for fetch, uses in zip(fetches, _first_uses(grid, shape, tiles, payload), strict=True):
            fetch += [
                Transfer(payload, part, heads, owner, rank) for rank, heads, owner, part in uses
            ]
    return [_sorted(fetch) for fetch in fetches]


def _first_uses(
    grid: Grid, shape: Shape, tiles: Iterable[Sequence[Tile]], payload: Payload
) -> Iterator[list[tuple[int, Span, int, Span]]]:
    """Yield, for each stage, (rank, heads, owner, chunks) of others' that are met there first."""
    # (rank, heads) -> which chunks were met; a rank has its own from the beginning.
    met: dict[tuple[int, Span], np.ndarray] = {}
    for stage in tiles:
        found: list[tuple[int, Span, int, Span]] = []
        for tile in stage:
            if not has_tokens(grid, tile):
                continue
            spans, heads = _side(tile, payload, shape)
            has = met.setdefault((tile.rank, heads), _own(grid, tile.rank))
            for span in spans:
                for missing in _missing(has, span):
                    found += [
                        (tile.rank, heads, owner, part)
                        for owner, part in _parts(grid, missing, payload)
                    ]
                has[span.start : span.stop] = True
        yield found


def fetch_by_way(
    grid: Grid,
    shape: Shape,
    tiles: Sequence[Sequence[Tile]],
    entries: Callable[[int], np.ndarray],
) -> list[tuple[Transfer, ...]]:
    """Return, for each stage, what its tiles need, by way of the ranks at which it enters a node.

    What enters is there one stage before another rank needs it. So no stage passes on what it
    brings.

    Args:
        grid, shape: of the attention.
        tiles: of each stage. Those of the first read only what enters at their rank.
        entries: rank -> (chunks,), the rank of its node at which each chunk enters.
    """
    owners = _owners(grid)
    fetches: list[list[Transfer]] = [[] for _ in tiles]
    for payload in (Payload.QUERY, Payload.KEY_VALUE):
        needed = _stages_of_use(grid, shape, tiles[::-1], payload)
        first_uses = {key: len(tiles) - 1 - stages for key, stages in needed.items()}
        for (rank, heads), stages in list(first_uses.items()):
            stages[owners == rank] = len(tiles)
            entry = entries(rank)
            is_passed = (stages < len(tiles)) & (entry != rank) & (entry != owners)
            for other in np.unique(entry[is_passed]).tolist():
                earlier = first_uses.setdefault((other, heads), np.full_like(stages, len(tiles)))
                before = np.where(is_passed & (entry == other), stages - 1, len(tiles))
                np.minimum(earlier, before, out=earlier)
        for (rank, heads), stages in first_uses.items():
            sources = np.where(entries(rank) == rank, owners, entries(rank))
            for span in _runs(np.where(stages < len(tiles), stages, -1), owners):
                source = int(sources[span.start])
                transfer = Transfer(payload, span, heads, source, rank)
                fetches[stages[span.start]].append(transfer)
    return [_sorted(fetch) for fetch in fetches]


def _stages_of_use(
    grid: Grid, shape: Shape, tiles: Sequence[Sequence[Tile]], payload: Payload
) -> dict[tuple[int, Span], np.ndarray]:
    """Return, for each rank and heads, the last stage whose tiles use a chunk; -1 for none."""
    before = np.array(tokens_before(grid, of_keys=payload.is_of_keys))
    uses: dict[tuple[int, Span], np.ndarray] = {}
    for index, stage in enumerate(tiles):
        for tile in stage:
            spans, heads = _side(tile, payload, shape)
            last = uses.setdefault((tile.rank, heads), np.full(grid.num_chunks, -1))
            for span in spans if has_tokens(grid, tile) else ():
                last[span.start : span.stop] = index
    for last in uses.values():
        last[before[1:] == before[:-1]] = -1
    return uses


def _runs(numbers: np.ndarray, owners: np.ndarray) -> Iterator[Span]:
    """Yield spans of chunks that have one number, 0 or more, and one owner."""
    edges = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(owners) != 0)) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(numbers)]):
        if numbers[start] >= 0:
            yield Span(start, stop)


def _owners(grid: Grid) -> np.ndarray:
    return np.arange(grid.num_chunks) // grid.chunks_per_rank


def _homes_by_way(
    grid: Grid, shape: Shape, tiles: Sequence[Sequence[Tile]], payload: Payload, fetches: Fetches
) -> list[tuple[Transfer, ...]]:
    """Return the same for results that go to where their inputs came from, and on from there.

    A rank passes results on, with its own, when all have arrived: perhaps in one more stage.
    """
    owners = _owners(grid)
    leaving = _stages_of_use(grid, shape, tiles, payload)
    sources = {key: np.full(grid.num_chunks, -1) for key in leaving}
    for transfer in (t for fetch in fetches for t in fetch):
        if transfer.payload.is_of_keys == payload.is_of_keys:
            key = transfer.destination, transfer.heads
            if key not in sources:  # it computes nothing with it, and passes it on
                sources[key], leaving[key] = (np.full(grid.num_chunks, -1) for _ in range(2))
            sources[key][transfer.span.start : transfer.span.stop] = transfer.source
    has_changed = True
    while has_changed:
        has_changed = False
        for (rank, heads), stages in leaving.items():
            stages[owners == rank] = -1
            through = (stages >= 0) & (sources[rank, heads] != owners)
            for other in np.unique(sources[rank, heads][through]).tolist():
                later = leaving[other, heads]
                arrived = np.where(through & (sources[rank, heads] == other), stages + 1, -1)
                has_changed |= bool((arrived > later).any())
                np.maximum(later, arrived, out=later)
    _spread(leaving, sources, owners, np.diff(tokens_before(grid, of_keys=payload.is_of_keys)))
    last = max((int(stages.max()) for stages in leaving.values()), default=-1)
    homes: list[list[Transfer]] = [[] for _ in range(max(len(tiles), last + 1))]
    for (rank, heads), stages in leaving.items():
        for span in _runs(stages, owners):
            destination = int(sources[rank, heads][span.start])
            homes[stages[span.start]].append(Transfer(payload, span, heads, rank, destination))
    return [_sorted(home) for home in homes]


def _spread(
    leaving: dict[tuple[int, Span], np.ndarray],
    sources: dict[tuple[int, Span], np.ndarray],
    owners: np.ndarray,
    tokens: np.ndarray,
) -> None:
    """Delay results that come early, on their last hop, to when most ranks send and receive.

    In an exchange all wait for the rank that moves most. What a few ranks alone move costs all of
    them as much as if they all did.
    """
    hops = [
        (key, chunk)
        for key in leaving
        for chunk in np.flatnonzero((leaving[key] >= 0) & (sources[key] == owners)).tolist()
    ]
    if not hops:
        return
    stage = np.array([leaving[key][chunk] for key, chunk in hops])
    size = np.array([len(key[1]) * int(tokens[chunk]) for key, chunk in hops])
    chunks = np.array([chunk for _, chunk in hops])
    for rank in (np.array([key[0] for key, _ in hops]), owners[chunks]):
        num_stages = int(stage.max()) + 1
        size_of = (int(rank.max()) + 1, num_stages)
        loads = np.bincount(rank * num_stages + stage, size, size_of[0] * num_stages)
        loads = loads.reshape(size_of)
        usual = np.median(loads[loads.any(1)], axis=0)
        if not usual.any():
            return
        # One chunk of each owner, then the next, so that owners receive as evenly.
        order = np.lexsort((chunks - np.searchsorted(owners, owners[chunks]), stage, rank))
        moved = np.cumsum(size[order])
        of_rank = np.searchsorted(rank[order], rank[order])
        middle = moved - size[order] / 2 - (moved - size[order])[of_rank]
        share = middle / loads.sum(1)[rank[order]]
        later = np.searchsorted(np.cumsum(usual) / usual.sum(), share)
        stage[order] = np.maximum(stage[order], later)
    for (key, chunk), new in zip(hops, stage.tolist(), strict=True):
        leaving[key][chunk] = new


def _homes(
    grid: Grid,
    shape: Shape,
    tiles: Sequence[Sequence[Tile]],
    payload: Payload,
    way: Fetches | None = None,
) -> list[tuple[Transfer, ...]]:
    """Return, for each stage, the results to send home after it: those whose last tile is in it.

    With the fetches that inputs came by, results go back the same way.
    """
    if way is not None:
        return _homes_by_way(grid, shape, tiles, payload, way)
    # Going backward through the stages, the first tile met is the last that adds.
    homes = [
        _sorted(Transfer(payload, part, heads, rank, owner) for rank, heads, owner, part in uses)
        for uses in _first_uses(grid, shape, tiles[::-1], payload)
    ]
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
