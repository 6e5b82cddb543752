"""Make tiles from rectangles: what the strategies share.

    rectangles of one rank      q[4:6] x kv[0:4], q[6:8] x kv[0:4]
      . slice_rects     cut across into stages with equally many pairs
      . add_rects       q[4:8] x kv[0:2] in stage 1, q[4:8] x kv[2:4] in stage 2

The tile of a rank's own queries and keys is in stage 0. It needs nothing from others, so it hides
the first exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from cp_inductor.plan.grid import Grid, Span, join_spans, lengths_of
from cp_inductor.plan.ir import Mask, Shape, Tile

# Tiles of all ranks, for each stage.
Tiles = list[list[Tile]]


@dataclass(frozen=True, slots=True)
class AssignedStage:
    """The tiles of one stage, without those that have no tokens.

    Attributes:
        index: of the stage.
        tiles: of the forward.
        backward_tiles: of the backward; the same, or others.
        reads: tiles whose queries and keys this stage's fetch must bring.
    """

    index: int
    tiles: list[Tile]
    backward_tiles: list[Tile]
    reads: list[Tile]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The tiles of all ranks, for each stage.

    Attributes:
        tiles: of the forward.
        backward: of the backward, as many stages, if they are others.
    """

    tiles: Tiles
    backward: Tiles | None = None

    @property
    def reads(self) -> Tiles:
        """For each stage, the tiles that read what its fetch brings."""
        if self.backward is None:
            return self.tiles
        return [[*now, *later] for now, later in zip(self.tiles, self.backward, strict=True)]

    def stages(self, grid: Grid) -> list[AssignedStage]:
        """Return the stages. Short sequences have tiles without tokens, which are left out."""
        is_short = any((lengths_of(grid, of_keys=of_keys) == 0).any() for of_keys in (False, True))

        def kept(tiles: Tiles) -> Tiles:
            if not is_short:
                return tiles
            return [[tile for tile in stage if has_tokens(grid, tile)] for stage in tiles]

        tiles = kept(self.tiles)
        later, reads = tiles, tiles
        if self.backward is not None:
            later, reads = kept(self.backward), kept(self.reads)
        stages = zip(tiles, later, reads, strict=True)
        return [AssignedStage(index, *stage) for index, stage in enumerate(stages)]


def has_tokens(grid: Grid, tile: Tile) -> bool:
    """Whether a tile has queries and keys; in short sequences some chunks are empty."""
    return any(grid.num_tokens(span, of_keys=False) for span in tile.queries) and any(
        grid.num_tokens(span, of_keys=True) for span in tile.keys
    )


@dataclass(frozen=True, slots=True)
class Rect:
    """Queries against keys; all pairs exist."""

    queries: Span
    keys: Span


def own_tiles(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
    """Return stage 0, the tiles of the ranks' own chunks, followed by empty stages."""
    owners = [(rank, (grid.own(rank),)) for rank in range(grid.world_size)]
    own = [Tile(rank, spans, spans, shape.all_heads, mask) for rank, spans in owners]
    return [own, *([] for _ in range(num_stages))]


def halve_own_tiles(grid: Grid, shape: Shape, assigned: Assignment) -> Assignment | None:
    """Move half of the heads of stage 0 behind all other stages, where they hide the last results.

    Returns:
        One stage more. None if stage 0 is not of own tiles, or is all there is, or has one KV head.
    """
    first, *others = assigned.tiles
    if not any(others) or shape.num_kv_heads < 2:
        return None
    for tile in first:
        own = grid.own(tile.rank)
        spans = [*tile.queries, *tile.keys]
        if tile.heads != shape.all_heads or any(span.intersect(own) != span for span in spans):
            return None
    group = shape.num_heads // shape.num_kv_heads
    middle = (shape.num_kv_heads + 1) // 2 * group
    halves = Span(0, middle), Span(middle, shape.num_heads)
    early, late = ([replace(tile, heads=half) for tile in first] for half in halves)
    backward = assigned.backward and [*assigned.backward, []]
    return Assignment([early, *others, late], backward)


def add_rects(tiles: Tiles, shape: Shape, rank: int, slices: Sequence[Sequence[Rect]]) -> None:
    """Add the rectangles of each stage as tiles; those with the same keys become one tile."""
    for stage, rects in enumerate(slices, 1):
        rows_of: dict[tuple[Span, ...], list[Span]] = {}
        for queries, keys in _keys_of_rows(rects).items():
            rows_of.setdefault(keys, []).append(queries)
        for keys, spans in rows_of.items():
            tiles[stage].append(Tile(rank, join_spans(spans), keys, shape.all_heads, Mask.FULL))


def _keys_of_rows(rects: Sequence[Rect]) -> dict[Span, tuple[Span, ...]]:
    """Return, for each row of rectangles, its keys."""
    keys_of: dict[Span, list[Span]] = {}
    for rect in rects:
        keys_of.setdefault(rect.queries, []).append(rect.keys)
    return {queries: join_spans(keys) for queries, keys in keys_of.items()}


def slice_rects(
    rects: Sequence[Rect],
    num_parts: int,
    num_chunks: int,
    *,
    by_keys: bool,
    first: int | None = None,
) -> list[list[Rect]]:
    """Cut rectangles along one axis into parts with equally many pairs.

    Args:
        rects: of one rank.
        num_parts: how many parts to make; some may be empty.
        num_chunks: length of the axis.
        by_keys: cut along the keys; otherwise along the queries.
        first: where to begin. The axis is walked downward from there, and then on from its end.
            None walks it upward.
    """
    axis = np.arange(num_chunks)
    if first is not None:
        axis = (first - 1 - axis) % num_chunks
    weight = np.zeros(num_chunks, dtype=np.int64)
    for rect in rects:
        along, across = (rect.keys, rect.queries) if by_keys else (rect.queries, rect.keys)
        weight[along.start : along.stop] += len(across)
    part_of = np.empty(num_chunks, dtype=np.int64)
    part_of[axis] = parts_of_equal_weight(weight[axis], num_parts)
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


def parts_of_equal_weight(weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the part of each item, so that runs of items have about equal weight.

    An item belongs to the part in which its middle lies. Parts may be empty.

    Args:
        weights: integers, in order.
        num_parts: how many parts there are.
    """
    done = np.cumsum(weights)
    total = int(done[-1]) if len(done) else 0
    middle = 2 * done - weights
    return np.minimum(middle * num_parts // max(1, 2 * total), num_parts - 1)


def is_head_split(shape: Shape, num_parts: int) -> bool:
    """Whether query heads split into this many parts, each with whole KV heads or part of one."""
    if shape.num_heads % num_parts:
        return False
    size, group = shape.num_heads // num_parts, shape.num_heads // shape.num_kv_heads
    return size % group == 0 or group % size == 0
