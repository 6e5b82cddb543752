"""Every rank, or every rank of a group, computes all queries and keys of some heads.

heads           every rank has H / P heads                      (Ulysses)
heads4+blocks   groups of 4 ranks split the heads, and the groups split the rest as `blocks` does
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from cp_inductor.kept import lru_cache
from cp_inductor.plan.assign_cells import Pairs, tiles_of_cells
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Shape, Tile
from cp_inductor.plan.strategies.strategy import Strategy
from cp_inductor.plan.tiles import Tiles, is_head_split


def heads(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Every rank computes the whole sequence for its heads, some heads in each stage."""
    tiles = _tiles_of_all(grid, shape, pairs)
    return [
        [tile.at(rank, own) for rank, own in enumerate(part) for tile in tiles]
        for part in parts_of(shape, grid.world_size, num_stages)
    ]


@lru_cache(maxsize=4)
def _tiles_of_all(grid: Grid, shape: Shape, pairs: Pairs) -> list[Tile]:
    chunks = np.arange(grid.num_chunks)
    return tiles_of_cells(grid, 0, shape.all_heads, chunks, chunks, pairs.cells)


def parts_of(shape: Shape, num_ranks: int, num_stages: int) -> list[list[Span]]:
    """Return the heads of each rank in each stage; in fewer stages if they do not divide."""
    num_own = shape.num_heads // num_ranks
    num_parts = max(n for n in range(1, num_stages + 1) if is_head_split(shape, num_ranks * n))
    size = num_own // num_parts
    return [
        [
            Span(start, start + size)
            for rank in range(num_ranks)
            for start in [rank * num_own + part * size]
        ]
        for part in range(num_parts)
    ]


HEADS = Strategy(
    name="heads",
    assign=heads,
    splits=is_head_split,
    free_keep=lambda shape, num_stages: num_stages,
    min_chunks=1,
    moves_queries=True,
)


@dataclass(frozen=True, slots=True)
class Share:
    """Query heads that groups of ranks split evenly.

    Attributes:
        heads: the query heads.
        num_groups: into how many parts they are split, which is the number of ranks of a group.
    """

    heads: Span
    num_groups: int

    def shape_within(self, shape: Shape) -> Shape:
        """Return the shape of an attention that has these heads only."""
        num_kv_heads = len(shape.kv_heads(self.heads))
        return Shape(shape.batch, len(self.heads), num_kv_heads, shape.head_dim, shape.itemsize)

    def split(self, tiles: Iterable[Tile]) -> list[Tile]:
        """Split the tiles of groups, which have these heads only, among the ranks of each group."""
        size = len(self.heads) // self.num_groups
        starts = range(self.heads.start, self.heads.stop, size)
        return [
            tile.at(tile.rank * self.num_groups + part, Span(start, start + size))
            for tile in tiles
            for part, start in enumerate(starts)
        ]


def shares_of(shape: Shape, world_size: int, num_groups: int) -> list[Share]:
    """Split the heads into shares, the first of them for groups of `num_groups` ranks.

    KV heads that do not divide by them are split among smaller groups: of 8 heads on 6 ranks, all
    ranks split 6, and groups of 2 ranks split the other 2.
    """
    if is_head_split(shape, num_groups):
        return [Share(shape.all_heads, num_groups)]
    size = shape.num_heads // shape.num_kv_heads
    shares: list[Share] = []
    start = 0
    while start < shape.num_kv_heads:
        left = shape.num_kv_heads - start
        num_groups = max(n for n in range(1, min(num_groups, left) + 1) if world_size % n == 0)
        stop = start + left // num_groups * num_groups
        shares.append(Share(Span(start * size, stop * size), num_groups))
        start = stop
    return shares


def can_split(shape: Shape, world_size: int, num_groups: int) -> bool:
    """Whether each rank of a group gets whole KV heads, or all of them an even part of one."""
    if world_size % num_groups:
        return False
    return is_head_split(shape, num_groups) or shape.num_kv_heads >= num_groups


def groups_of(grid: Grid, num_ranks: int) -> Grid:
    """Return the grid in which each group of so many ranks is one rank; it has the same chunks."""
    return Grid(
        grid.world_size // num_ranks,
        grid.chunks_per_rank * num_ranks,
        grid.query_length,
        grid.key_length,
    )


def in_groups(num_groups: int, rest: Strategy) -> Strategy:
    """Split the heads within each group of ranks, and everything else among the groups.

    Args:
        num_groups: into how many parts the heads are split, which is the number of ranks of a
            group; divides the world size.
        rest: the strategy of the groups, each of which acts as one rank.
    """

    def assign(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
        of_shares = []
        for share in shares_of(shape, grid.world_size, num_groups):
            groups, within = groups_of(grid, share.num_groups), share.shape_within(shape)
            of_shares.append(map(share.split, rest.assign(groups, within, pairs, num_stages)))
        return [[*chain(*stages)] for stages in zip_longest(*of_shares, fillvalue=())]

    return Strategy(
        name=f"heads{num_groups}+{rest.name}",
        assign=assign,
        splits=lambda shape, world_size: can_split(shape, world_size, num_groups),
        num_stages=rest.num_stages,
        is_grouped=True,
        fine=num_groups * rest.fine,
        min_chunks=rest.min_chunks,
        moves_queries=True,
    )
