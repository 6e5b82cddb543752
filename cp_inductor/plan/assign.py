"""Who computes which tile: one function per strategy, each returning tiles per stage.

    ring, own_rows    queries stay with their owners
    rows              the same, but rows change hands until all have as much to do
    blocks            two-dimensional: see `cp_inductor.plan.blocks`
    heads             every rank computes all queries and keys of some heads
    heads N + other   groups of N ranks split the heads, and the groups the rest as `other` does

The tile of a rank's own queries and keys is in stage 0 and needs nothing of others, so that the
first exchange hides behind it. What is left is a set of rectangles, counted in positions; they are
cut across into as many stages as there are to be, with as many pairs each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from cp_inductor.plan.blocks import Block, Weights, assign_blocks, causal_blocks
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, Payload, Shape, Tile, Transfer

# Tiles of all ranks, for each stage.
Tiles = list[list[Tile]]

# How much longer than high a block may be made to be: the best of these is taken.
ASPECTS = (1.0, 1.3, 0.77)
# Beyond so many ranks one is as good as another, and planning takes its time.
MAX_ASPECTS_WORLD = 256
# From twice as many ranks on, groups of world_size / GROUP_WORLD ranks share the diagonal's border.
GROUP_WORLD = 256


@dataclass(frozen=True, slots=True)
class Rect:
    """Queries against keys, both by position; all pairs exist."""

    queries: Span
    keys: Span


def ring(grid: Grid, shape: Shape, mask: Mask) -> Tiles:
    """The neighbour ring: in stage i the tile of the own queries and the keys of rank - i."""
    tiles: Tiles = [[] for _ in range(grid.world_size)]
    for rank in range(grid.world_size):
        own = (grid.own(rank),)
        tiles[0].append(Tile(rank, own, own, shape.all_heads, mask))
        for step in range(1, grid.world_size):
            if mask is Mask.FULL or step <= rank:
                keys = (grid.own((rank - step) % grid.world_size),)
                tiles[step].append(Tile(rank, own, keys, shape.all_heads, Mask.FULL))
    return tiles


def ring_fetches(grid: Grid, shape: Shape, tiles: Tiles) -> list[tuple[Transfer, ...]]:
    """Every tile's keys come from the neighbour, who had them one stage before."""
    heads = shape.kv_heads(shape.all_heads)
    fetches: list[tuple[Transfer, ...]] = [()]
    for stage in tiles[1:]:
        fetch = [
            Transfer(Payload.KEY_VALUE, tile.keys[0], heads, before, tile.rank)
            for tile in stage
            for before in [(tile.rank - 1) % grid.world_size]
            if grid.num_tokens(tile.keys[0], of_keys=True)
        ]
        fetches.append(tuple(sorted(fetch, key=lambda t: (t.source, t.destination))))
    return fetches


def own_rows(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
    """Every rank computes its own queries, unbalanced where the mask is causal."""
    pieces = [[_piece(grid, rank, whole=True)] for rank in range(grid.world_size)]
    if grid.layout == "zigzag":
        pieces = [_own_halves(grid, rank) for rank in range(grid.world_size)]
    return _stage_rows(grid, shape, mask, pieces, num_stages)


def rows(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
    """Every rank computes a row near the start and one near the end, which balance each other.

    Under the zigzag layout these are its own. Of contiguous shards, each rank has one of its own
    and one of another, whose queries travel; squares on the diagonal stay with their owners.
    """
    world_size = grid.world_size
    if mask is Mask.FULL or grid.layout == "zigzag":
        return own_rows(grid, shape, mask, num_stages)
    half = grid.chunks_per_rank // 2
    pairs = [(piece, 2 * world_size - 1 - piece) for piece in range(world_size)]
    foreign = [[sum(p // 2 != r for p in pair) for r in range(world_size)] for pair in pairs]
    ranks = linear_sum_assignment(np.array(foreign))[1]
    pieces: list[list[Span]] = [[] for _ in range(world_size)]
    for rank, pair in zip(ranks, pairs, strict=True):
        pieces[rank] = [Span(piece * half, (piece + 1) * half) for piece in pair]
    return _stage_rows(grid, shape, mask, pieces, num_stages)


def _stage_rows(
    grid: Grid, shape: Shape, mask: Mask, pieces: Sequence[list[Span]], num_stages: int
) -> Tiles:
    tiles = _own_tiles(grid, shape, mask, num_stages)
    for rank in range(grid.world_size):
        rects = [rect for piece in pieces[rank] for rect in _past_of(grid, mask, piece)]
        # From the nearest owner backward, so that not all ask the same one at once.
        first = grid.position(grid.own(rank).start)
        slices = _slice(rects, num_stages, grid.num_chunks, by_keys=True, first=first)
        _add(tiles, grid, shape, rank, slices)
    return tiles


def _past_of(grid: Grid, mask: Mask, piece: Span) -> list[Rect]:
    """Return what a row of queries sees beside the tile of its owner's own keys."""
    if mask is Mask.CAUSAL and grid.layout == "contiguous":
        own = grid.own(grid.owner(piece.start))
        return [Rect(piece, Span(0, own.start))]
    end = piece.start if mask is Mask.CAUSAL else grid.num_chunks
    rank = grid.owner(grid.spans_at(piece.start, piece.start + 1)[0].start)
    rects: list[Rect] = []
    start = 0
    for hole in sorted(_pieces_of(grid, rank)):
        if hole.start < end:
            rects.append(Rect(piece, Span(start, hole.start)))
            start = hole.stop
    return [rect for rect in [*rects, Rect(piece, Span(start, end))] if len(rect.keys) > 0]


def _pieces_of(grid: Grid, rank: int) -> list[Span]:
    """Return the positions that a rank holds."""
    if grid.layout == "zigzag":
        return _own_halves(grid, rank)
    return [_piece(grid, rank, whole=True)]


def _piece(grid: Grid, index: int, *, whole: bool) -> Span:
    size = grid.chunks_per_rank if whole else grid.chunks_per_rank // 2
    return Span(index * size, (index + 1) * size)


def _own_halves(grid: Grid, rank: int) -> list[Span]:
    last = 2 * grid.world_size - 1
    return [_piece(grid, piece, whole=False) for piece in (rank, last - rank)]


def blocks(grid: Grid, shape: Shape, mask: Mask, num_stages: int, weights: Weights) -> Tiles:
    """Every rank computes a block of the grid of tiles, and the tile of its own chunks."""
    if mask is Mask.FULL:
        return _full_blocks(grid, shape, num_stages, weights)
    world_size, is_zigzag = grid.world_size, grid.layout == "zigzag"
    # What is near the diagonal falls into many small rectangles. Groups of ranks leave to each of
    # them its own rows there: next to what a rank of so many computes in all, that is little.
    group = 1 if is_zigzag else max(1, world_size // GROUP_WORLD)
    # The two pieces of a rank are far apart under zigzag.
    step = grid.chunks_per_rank // 2 if is_zigzag else grid.chunks_per_rank * group
    positions = [grid.spans_at(p, p + 1)[0].start for p in range(grid.num_chunks)]
    owners = np.array([grid.owner(chunk) for chunk in positions])
    aspects = ASPECTS if world_size <= MAX_ASPECTS_WORLD else ASPECTS[:1]
    found: list[tuple[int, list[int], list[Block]]] = []
    for aspect in dict.fromkeys(a * _balance_of(weights) for a in aspects):
        candidates = causal_blocks(grid.num_chunks, step, world_size, aspect)
        ranks, most = assign_blocks(candidates, owners, world_size, weights)
        found.append((most, ranks, candidates))
    _, ranks, chosen = min(found, key=lambda candidate: candidate[0])
    tiles = _own_tiles(grid, shape, mask, num_stages, by_halves=is_zigzag)
    # The cheaper side comes whole with the first stage, the dearer one bit by bit.
    by_keys = weights.key >= weights.query
    for rank, block in zip(ranks, chosen, strict=True):
        slices = _slice(_rects(block, step), num_stages, grid.num_chunks, by_keys=by_keys)
        own = grid.own(rank)
        near = Span(own.start // step * step, own.start)
        if group > 1 and len(near):
            slices[0].append(Rect(own, near))
        _add(tiles, grid, shape, rank, slices)
    return tiles


def _balance_of(weights: Weights) -> float:
    """Return the aspect of a block whose queries cost as much as its keys."""
    queries = weights.query + weights.query_home
    return queries / (weights.key + weights.key_home)


def _rects(block: Block, step: int) -> list[Rect]:
    """Return a block below the diagonal squares as rectangles: one, unless it touches them."""
    rects = []
    top = block.top
    while top < block.bottom:
        limit = top // step * step
        if limit >= block.right:
            rects.append(Rect(Span(top, block.bottom), Span(block.left, block.right)))
            break
        bottom = min(block.bottom, limit + step)
        rects.append(Rect(Span(top, bottom), Span(block.left, limit)))
        top = bottom
    return [rect for rect in rects if len(rect.keys) > 0]


def _full_blocks(grid: Grid, shape: Shape, num_stages: int, weights: Weights) -> Tiles:
    """Without a mask: rank (i, j) computes the queries of ranks (i, *) and the keys of (*, j)."""
    world_size = grid.world_size
    query, key = weights.query + weights.query_home, weights.key + weights.key_home
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    # n ranks share their queries, world_size / n their keys.
    num_rows = min(divisors, key=lambda n: (n - 1) * query + (world_size // n - 1) * key)
    tiles = _own_tiles(grid, shape, Mask.FULL, num_stages)
    by_keys = (world_size // num_rows - 1) * weights.key >= (num_rows - 1) * weights.query
    for rank in range(world_size):
        first = rank // num_rows * num_rows
        owners = {
            False: [r for r in range(first, first + num_rows) if r != rank],
            True: [r for r in range(rank % num_rows, world_size, num_rows) if r != rank],
        }
        own = grid.own(rank)
        cut, whole = owners[by_keys], (grid.own(r) for r in owners[not by_keys])
        # The own side of what is cut meets the others' whole side in the first stage.
        parts = [
            [own, *map(grid.own, part)] if not i else list(map(grid.own, part))
            for i, part in enumerate(_split(cut, num_stages))
        ]
        others = _merge(whole)
        everything = _merge([own, *others])
        for stage, part in enumerate(parts):
            foreign = _merge(span for span in part if span != own)
            pairs = [(foreign, everything)] + ([((own,), others)] if own in part else [])
            for cut_side, whole_side in pairs:
                if cut_side and whole_side:
                    queries, keys = (whole_side, cut_side) if by_keys else (cut_side, whole_side)
                    tiles[stage + 1].append(Tile(rank, queries, keys, shape.all_heads, Mask.FULL))
    return tiles


def heads(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
    """Every rank computes all of the sequence for its heads, some heads in each stage."""
    return _heads_of(grid, shape, mask, num_stages, grid.world_size)


def _heads_of(grid: Grid, shape: Shape, mask: Mask, num_stages: int, num_groups: int) -> Tiles:
    everything = grid.spans_at(0, grid.num_chunks)
    num_own = shape.num_heads // num_groups
    parts = max(n for n in range(1, num_stages + 1) if is_head_split(shape, num_groups * n))
    size = num_own // parts
    return [
        [
            Tile(rank, everything, everything, Span(start, start + size), mask)
            for rank in range(num_groups)
            for start in [rank * num_own + part * size]
        ]
        for part in range(parts)
    ]


def is_head_split(shape: Shape, num_parts: int) -> bool:
    """Whether the query heads fall into so many parts, each with whole KV heads or part of one."""
    if shape.num_heads % num_parts:
        return False
    size, group = shape.num_heads // num_parts, shape.num_heads // shape.num_kv_heads
    return size % group == 0 or group % size == 0


def heads_with(grid: Grid, shape: Shape, num_groups: int, assign: Callable[[Grid], Tiles]) -> Tiles:
    """Split the heads among each group of ranks, and everything else among the groups.

    Args:
        grid: contiguous.
        shape: of the attention.
        num_groups: parts of the heads, and ranks of a group; divides the world size.
        assign: another assignment, called on the grid of the groups.
    """
    groups = Grid(
        grid.world_size // num_groups,
        grid.chunks_per_rank * num_groups,
        grid.layout,
        grid.query_length,
        grid.key_length,
    )
    size = shape.num_heads // num_groups
    return [
        [
            Tile(
                tile.rank * num_groups + part,
                tile.queries,
                tile.keys,
                Span(part * size, (part + 1) * size),
                tile.mask,
            )
            for tile in stage
            for part in range(num_groups)
        ]
        for stage in assign(groups)
    ]


def _own_tiles(
    grid: Grid, shape: Shape, mask: Mask, num_stages: int, *, by_halves: bool = False
) -> Tiles:
    """Return stage 0 and as many empty stages as are to come."""
    half = grid.chunks_per_rank // 2
    tiles: Tiles = [[] for _ in range(num_stages + 1)]
    for rank in range(grid.world_size):
        own = grid.own(rank)
        middle = own.start + half
        spans = [Span(own.start, middle), Span(middle, own.stop)] if by_halves else [own]
        tiles[0] += [Tile(rank, (span,), (span,), shape.all_heads, mask) for span in spans]
    return tiles


def _add(
    tiles: Tiles, grid: Grid, shape: Shape, rank: int, slices: Sequence[Sequence[Rect]]
) -> None:
    """Add the rectangles of each stage as tiles, those of the same keys as one."""
    for stage, rects in enumerate(slices, 1):
        rows_of: dict[tuple[Span, ...], list[Span]] = {}
        for queries, keys in _keys_of_rows(grid, rects).items():
            rows_of.setdefault(keys, []).append(queries)
        for keys, rows_ in rows_of.items():
            spans = [span for row in rows_ for span in grid.spans_at(row.start, row.stop)]
            tiles[stage].append(Tile(rank, _merge(spans), keys, shape.all_heads, Mask.FULL))


def _keys_of_rows(grid: Grid, rects: Sequence[Rect]) -> dict[Span, tuple[Span, ...]]:
    """Return, for each row of rectangles, its keys as they are stored."""
    keys_of: dict[Span, list[Span]] = {}
    for rect in rects:
        keys_of.setdefault(rect.queries, []).extend(grid.spans_at(rect.keys.start, rect.keys.stop))
    return {queries: _merge(keys) for queries, keys in keys_of.items()}


def _slice(
    rects: Sequence[Rect],
    num_parts: int,
    num_chunks: int,
    *,
    by_keys: bool,
    first: int | None = None,
) -> list[list[Rect]]:
    """Cut rectangles along one axis into parts with as many pairs each.

    Args:
        rects: of one rank.
        num_parts: how many to make; some may be empty.
        num_chunks: length of the axis.
        by_keys: cut along the keys, else along the queries.
        first: where to begin: the axis is walked from there downward, and on from its end. None
            walks it upward.
    """
    axis = np.arange(num_chunks)
    if first is not None:
        axis = (first - 1 - axis) % num_chunks
    weight = np.zeros(num_chunks, dtype=np.int64)
    for rect in rects:
        along, across = (rect.keys, rect.queries) if by_keys else (rect.queries, rect.keys)
        weight[along.start : along.stop] += len(across)
    done = np.cumsum(weight[axis])
    total = int(done[-1])
    part_of = np.empty(num_chunks, dtype=np.int64)
    # A chunk belongs to the part in which its middle lies.
    middle = 2 * done - weight[axis]
    part_of[axis] = np.minimum(middle * num_parts // max(1, 2 * total), num_parts - 1)
    cuts = [0, *(np.flatnonzero(np.diff(part_of)) + 1).tolist(), num_chunks]
    parts: list[list[Rect]] = [[] for _ in range(num_parts)]
    for start, stop in pairwise(cuts):
        run = Span(start, stop)
        for rect in rects:
            inside = (rect.keys if by_keys else rect.queries).intersect(run)
            if inside is not None:
                cut = Rect(rect.queries, inside) if by_keys else Rect(inside, rect.keys)
                parts[int(part_of[start])].append(cut)
    return parts


def _split(items: Sequence[int], num_parts: int) -> list[list[int]]:
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(bounds)]


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort spans and join those that touch. Only for tiles without a mask: order is lost."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and merged[-1].stop == span.start:
            span = Span(merged.pop().start, span.stop)
        merged.append(span)
    return tuple(merged)
