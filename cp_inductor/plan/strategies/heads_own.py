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

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_masked import tiles_of_cells
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, Shape, Tile
from cp_inductor.plan.strategies.blocks import BLOCKS
from cp_inductor.plan.strategies.heads import (
    can_split,
    groups_of,
    heads,
    masked_heads,
    parts_of,
    shares_of,
)
from cp_inductor.plan.strategies.strategy import Strategy
from cp_inductor.plan.tiles import Tiles, is_head_split, own_tiles, parts_of_equal_weight

# (rank, heads, owner, ranks) -> tiles of a rank: the queries of the owner, and the keys of a run of
# ranks without the owner.
Row = Callable[[int, Span, int, Span], list[Tile]]


def _assign(
    grid: Grid,
    shape: Shape,
    own: list[Tile],
    row: Row,
    blocks: Callable[[Grid, Shape], Tiles],
    weights: Sequence[int],
    num_stages: int,
    num_groups: int,
) -> Tiles:
    """Assign everything but the ranks' own tiles.

    Args:
        grid, shape: of the attention.
        own: stage 0.
        row: makes the tiles of a row.
        blocks: assigns what lies between groups of ranks.
        weights: of each rank's row, by which rows are dealt out to stages.
        num_stages: the most stages after the first.
        num_groups: the number of ranks of the largest groups.
    """
    tiles: Tiles = [own, *([] for _ in range(num_stages))]
    for share in shares_of(shape, grid.world_size, num_groups):
        within = share.shape_within(shape)
        size = share.num_groups
        groups = groups_of(grid, size)
        if groups.world_size > 1:
            tiles = [
                [*done, *share.split(found)]
                for done, found in zip(tiles, [[], *blocks(groups, within)[1:]], strict=True)
            ]
            parts, slices = parts_of(within, size, 1), [list(range(grid.world_size))]
        else:
            parts = parts_of(within, size, num_stages)
            slices = _slices(weights, num_stages // len(parts))
        stages = [(owners, part) for owners in slices for part in parts]
        for stage, (owners, part) in enumerate(stages, 1):
            for owner in owners:
                group, _ = divmod(owner, size)
                ranks = Span(group * size, (group + 1) * size)
                for member, of_member in enumerate(part):
                    first = share.heads.start
                    its_heads = Span(first + of_member.start, first + of_member.stop)
                    tiles[stage] += row(ranks.start + member, its_heads, owner, ranks)
    return tiles


def _slices(weights: Sequence[int], num_slices: int) -> list[list[int]]:
    """Cut rows into runs of about equal weight; some may be empty."""
    slice_of = parts_of_equal_weight(np.array(weights), num_slices)
    return [np.flatnonzero(slice_of == index).tolist() for index in range(num_slices)]


def _of_ranks(grid: Grid, ranks: Span) -> Span:
    """Return the chunks of a run of ranks."""
    return Span(grid.own(ranks.start).start, grid.own(ranks.stop - 1).stop)


def heads_own(grid: Grid, shape: Shape, mask: Mask, num_stages: int, num_groups: int) -> Tiles:
    """Every rank computes its own tile, and other ranks' rows for its heads."""

    def row(rank: int, heads: Span, owner: int, ranks: Span) -> list[Tile]:
        area, own = _of_ranks(grid, ranks), grid.own(owner)
        seen = [Span(area.start, own.start)]
        if mask is Mask.FULL:
            seen.append(Span(own.stop, area.stop))
        keys = tuple(span for span in seen if len(span) > 0)
        return [Tile(rank, (own,), keys, heads, Mask.FULL)] if keys else []

    return _assign(
        grid,
        shape,
        own_tiles(grid, shape, mask, 0)[0],
        row,
        lambda groups, within: BLOCKS.assign(groups, within, mask, num_stages),
        [rank if mask is Mask.CAUSAL else 1 for rank in range(grid.world_size)],
        num_stages,
        num_groups,
    )


def masked_heads_own(
    grid: Grid, shape: Shape, cells: np.ndarray, num_stages: int, num_groups: int
) -> Tiles:
    """The same under a rule: every rank computes the cells of its own chunks for all heads."""
    blocks = BLOCKS.assign_masked
    assert blocks is not None

    def tiles_of(rank: int, heads: Span, owner: int, columns: np.ndarray) -> list[Tile]:
        own = grid.own(owner)
        rows, everything = np.arange(own.start, own.stop), cells[own.start : own.stop]
        part = np.where(columns[None], everything, Cell.EMPTY)
        return tiles_of_cells(grid, rank, heads, rows, part, everything)

    def within(span: Span) -> np.ndarray:
        chunks = np.arange(grid.num_chunks)
        return (chunks >= span.start) & (chunks < span.stop)

    def row(rank: int, heads: Span, owner: int, ranks: Span) -> list[Tile]:
        columns = within(_of_ranks(grid, ranks)) & ~within(grid.own(owner))
        return tiles_of(rank, heads, owner, columns)

    own = [
        tile
        for rank in range(grid.world_size)
        for tile in tiles_of(rank, shape.all_heads, rank, within(grid.own(rank)))
    ]
    weights = (cells != Cell.EMPTY).sum(1).reshape(grid.world_size, -1).sum(1).tolist()
    return _assign(
        grid,
        shape,
        own,
        row,
        lambda groups, within: blocks(groups, within, cells, num_stages),
        weights,
        num_stages,
        num_groups,
    )


def own_in_groups(num_groups: int) -> Strategy:
    """Split the heads within each group of ranks, and what is left among the groups by blocks.

    Args:
        num_groups: the number of ranks of a group; divides the world size.
    """
    return _strategy(f"heads{num_groups}_own+blocks", lambda world_size: num_groups)


def _strategy(name: str, groups: Callable[[int], int]) -> Strategy:
    return Strategy(
        name=name,
        assign=lambda grid, shape, mask, num_stages: heads_own(
            grid, shape, mask, num_stages, groups(grid.world_size)
        ),
        assign_masked=lambda grid, shape, cells, num_stages: masked_heads_own(
            grid, shape, cells, num_stages, groups(grid.world_size)
        ),
        splits=lambda shape, world_size: can_split(shape, world_size, groups(world_size)),
        is_fine=True,
        moves_queries=True,
    )


HEADS_OWN = _strategy("heads_own", lambda world_size: world_size)


def _num_parts(grid: Grid, shape: Shape, num_stages: int) -> int:
    return len(parts_of(shape, grid.world_size, num_stages))


def _backward_by_heads(grid: Grid, shape: Shape, mask: Mask | np.ndarray, num_stages: int) -> Tiles:
    """The backward of `heads`, whose first stage is fed by the forward's second one."""
    if isinstance(mask, Mask):
        return [[], *heads(grid, shape, mask, num_stages)]
    return [[], *masked_heads(grid, shape, mask, num_stages)]


# The backward computes own tiles by heads, too: so it reads nothing but what the forward fetched,
# which therefore takes the place of the shard's q, k and v.
HEADS_OWN_FORWARD = replace(
    HEADS_OWN,
    name="heads_own_forward",
    assign=lambda grid, shape, mask, num_stages: heads_own(
        grid, shape, mask, _num_parts(grid, shape, num_stages), grid.world_size
    ),
    assign_masked=lambda grid, shape, cells, num_stages: masked_heads_own(
        grid, shape, cells, _num_parts(grid, shape, num_stages), grid.world_size
    ),
    assign_backward=_backward_by_heads,
    splits=is_head_split,
    free_keep=lambda shape, num_stages: num_stages + 2,  # and own tiles, first and last
)
