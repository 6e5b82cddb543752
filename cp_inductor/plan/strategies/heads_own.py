"""Every rank computes the tile of its own chunks for all heads, and the rest by heads.

    rank 1 of 4     keys ->  0 1 2 3        o  its own tile, for all heads: needs no exchange, and
                  queries 0  .                 so hides the first one
                    of    1  h o            h  the rest, for its heads alone
                   ranks  2  h h .          .  other ranks' own tiles
                          3  h h h .

heads_own            all ranks split the heads
heads_own_forward    so in the forward; the backward is that of `heads`
heads4_own+blocks    groups of 4 ranks split the heads; the groups split the rest as `blocks` does

Work is exactly balanced under a causal mask. The first rank's queries and the last rank's keys
never travel. Heads that do not divide are split among smaller groups, as `shares_of` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cp_inductor.kept import lru_cache
from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import Pairs, own_chunks, tiles_of_cells, tiles_of_owners
from cp_inductor.plan.grid import Grid, Span, owners_of
from cp_inductor.plan.ir import Shape, Tile
from cp_inductor.plan.strategies.blocks import BLOCKS
from cp_inductor.plan.strategies.heads import can_split, groups_of, heads, parts_of, shares_of
from cp_inductor.plan.strategies.strategy import Strategy
from cp_inductor.plan.tiles import Tiles, is_head_split, parts_of_equal_weight


def heads_own(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int, num_groups: int) -> Tiles:
    """Every rank computes its own tile, and other ranks' rows for its heads.

    Args:
        grid, shape, pairs: of the attention.
        num_stages: the most stages after the first.
        num_groups: the number of ranks of the largest groups.
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
    """Split the heads within each group of ranks, and what is left among the groups by blocks.

    Args:
        num_groups: the number of ranks of a group; divides the world size.
    """
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
