"""Every rank, or every rank of a group, computes all queries and keys of some heads.

heads                every rank has H / P heads                      (Ulysses)
heads4+blocks        groups of 4 ranks split the heads, and the groups split the rest as `blocks`
                     does
heads_own            as `heads`, but each rank computes the tile of its own chunks for all heads
heads_own_forward    so in the forward; the backward is that of `heads`
heads4_own+blocks    groups of 4 ranks split the heads; the groups split the rest as `blocks` does

    rank 1 of 4     keys ->  0 1 2 3        o  its own tile, for all heads: needs no exchange, and
                  queries 0  .                 so hides the first one
                    of    1  h o            h  the rest, for its heads alone
                   ranks  2  h h .          .  other ranks' own tiles
                          3  h h h .

With own tiles, work is exactly balanced under a causal mask. The first rank's queries and the last
rank's keys never travel. Heads that do not divide are split among smaller groups, as `shares_of`
says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import numpy as np

from cp_inductor.kept import lru_cache
from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import (
    Pairs,
    Tiles,
    is_head_split,
    own_chunks,
    parts_of_equal_weight,
    tiles_of_cells,
    tiles_of_owners,
)
from cp_inductor.plan.grid import Grid, Span, owners_of
from cp_inductor.plan.ir import Shape, Tile
from cp_inductor.plan.strategies.blocks import BLOCKS
from cp_inductor.plan.strategies.strategy import Strategy


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
    num_own, num_parts = shape.num_heads // num_ranks, num_parts_of(shape, num_ranks, num_stages)
    size = num_own // num_parts
    return [
        [
            Span(start, start + size)
            for rank in range(num_ranks)
            for start in [rank * num_own + part * size]
        ]
        for part in range(num_parts)
    ]


def num_parts_of(shape: Shape, num_ranks: int, num_stages: int) -> int:
    """Return in how many parts the heads of a rank, or node, come, so that one hides the next."""
    return max(n for n in range(1, num_stages + 1) if is_head_split(shape, num_ranks * n))


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
        return replace(shape, num_heads=len(self.heads), num_kv_heads=num_kv_heads)

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
    num_chunks = grid.chunks_per_rank * num_ranks
    return replace(grid, world_size=grid.world_size // num_ranks, chunks_per_rank=num_chunks)


def in_groups(num_groups: int, rest: Strategy) -> Strategy:
    """Split the heads within each group of ranks, and everything else among the groups.

    A group has `num_groups` ranks, which divides the world size, and acts as one rank of `rest`.
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


def heads_own(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int, num_groups: int) -> Tiles:
    """Every rank computes its own tile, and other ranks' rows for its heads.

    There are at most `num_stages` after the first. The largest groups have `num_groups` ranks.
    """
    owners = range(grid.world_size)
    tiles: Tiles = [[*tiles_of_owners(grid, shape, pairs)], *([] for _ in range(num_stages))]
    for share in shares_of(shape, grid.world_size, num_groups):
        within = share.shape_within(shape)
        size = share.num_groups
        groups = groups_of(grid, size)
        if groups.world_size > 1:
            between = BLOCKS.assign(groups, within, pairs, num_stages)
            tiles = [
                [*done, *share.split(more)]
                for done, more in zip(tiles, [[], *between[1:]], strict=True)
            ]
            parts, slices = parts_of(within, size, 1), [[*owners]]
        else:
            parts = parts_of(within, size, num_stages)
            num_slices = num_stages // len(parts)
            slice_of = parts_of_equal_weight(_weights(grid, pairs), num_slices)
            slices = [np.flatnonzero(slice_of == index).tolist() for index in range(num_slices)]
        stages = [(some, part) for some in slices for part in parts]
        for stage, (some, part) in enumerate(stages, 1):
            for owner in some:
                first = owner // size * size
                row = _row(grid, shape, pairs, owner, size)
                tiles[stage] += [
                    tile.at(rank, Span(start + span.start, start + span.stop))
                    for start in [share.heads.start]
                    for rank, span in enumerate(part, first)
                    for tile in row
                ]
    return tiles


def _weights(grid: Grid, pairs: Pairs) -> np.ndarray:
    """Return the cells of each rank's row that are not its own, by which rows go to stages."""
    ranks = owners_of(grid)
    is_far = (pairs.cells != Cell.EMPTY) & (ranks[:, None] != ranks)
    return is_far.sum(1).reshape(grid.world_size, -1).sum(1)


@lru_cache(maxsize=1024)
def _row(grid: Grid, shape: Shape, pairs: Pairs, owner: int, size: int) -> list[Tile]:
    """Return the tiles of an owner's queries and the keys of the others of its group."""
    rows, owners = own_chunks(grid, owner), owners_of(grid)
    columns = np.flatnonzero((owners // size == owner // size) & (owners != owner))
    part = pairs.cells[np.ix_(rows, columns)]
    return tiles_of_cells(grid, owner, shape.all_heads, rows, columns, part)


def own_in_groups(num_groups: int) -> Strategy:
    """Split the heads within each group of ranks, and what is left among the groups by blocks."""
    return _strategy(f"heads{num_groups}_own+blocks", lambda world_size: num_groups, num_groups)


def _strategy(name: str, groups: Callable[[int], int], fine: int) -> Strategy:
    return Strategy(
        name=name,
        assign=lambda grid, shape, pairs, num_stages: heads_own(
            grid, shape, pairs, num_stages, groups(grid.world_size)
        ),
        splits=lambda shape, world_size: can_split(shape, world_size, groups(world_size)),
        fine=fine,
        moves_queries=True,
    )


HEADS_OWN = _strategy("heads_own", lambda world_size: world_size, 1)


# The backward computes own tiles by heads, too: so it reads nothing but what the forward fetched,
# which therefore takes the place of the shard's q, k and v.
HEADS_OWN_FORWARD = replace(
    HEADS_OWN,
    name="heads_own_forward",
    assign=lambda grid, shape, pairs, num_stages: heads_own(
        *(grid, shape, pairs),
        num_stages=len(parts_of(shape, grid.world_size, num_stages)),
        num_groups=grid.world_size,
    ),
    # That of `heads`, whose first stage is fed by the forward's second one.
    assign_backward=lambda grid, shape, pairs, num_stages: [
        [],
        *heads(grid, shape, pairs, num_stages),
    ],
    splits=is_head_split,
    free_keep=lambda shape, num_stages: num_stages + 2,  # and own tiles, first and last
)
