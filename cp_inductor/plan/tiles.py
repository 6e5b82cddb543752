"""The tiles of all ranks and stages, before a plan is made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_inductor.plan.grid import Grid, Span, lengths_of
from cp_inductor.plan.ir import Shape, Tile

# Tiles of all ranks, for each stage.
Tiles = list[list[Tile]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The tiles of all ranks, for each stage.

    Attributes:
        tiles: of the forward.
        later: those of the backward, if they are others; as many stages.
    """

    tiles: Tiles
    later: Tiles

    @property
    def reads(self) -> Tiles:
        """For each stage, the tiles that read what its fetch brings."""
        return [[*now, *later] for now, later in zip(self.tiles, self.later, strict=True)]

    def with_tokens(self, grid: Grid) -> tuple[Tiles, Tiles]:
        """Return the tiles and those of the backward, without those of short sequences' ends."""
        if all(lengths_of(grid, of_keys=of_keys).all() for of_keys in (False, True)):
            return self.tiles, self.later

        def kept(tiles: Tiles) -> Tiles:
            return [[tile for tile in stage if has_tokens(grid, tile)] for stage in tiles]

        return kept(self.tiles), kept(self.later)


def has_tokens(grid: Grid, tile: Tile) -> bool:
    """Whether a tile has queries and keys; in short sequences some chunks are empty."""
    return any(grid.num_tokens(span, of_keys=False) for span in tile.queries) and any(
        grid.num_tokens(span, of_keys=True) for span in tile.keys
    )


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
    return Assignment([early, *others, late], [*assigned.later, []])


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
