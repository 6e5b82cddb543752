"""Ranks, groups of ranks or nodes split the heads: `heads` (Ulysses) and all that builds on it.

    rank 1 of 4     keys ->  0 1 2 3        o  its own tile, for all heads: needs no exchange, and
                  queries 0  .                 so hides the first one
                    of    1  h o            h  the rest, for its heads alone
                   ranks  2  h h .          .  other ranks' own tiles
                          3  h h h .

With own tiles, work is exactly balanced under a causal mask. The first rank's queries and the last
rank's keys never travel. Heads that do not divide are split among smaller groups, as `shares_of`
says.

    nodes4+blocks on 8 ranks, 2 in each node: node n has a quarter of the heads

        inputs of piece c    their owner  ->  rank c of node n, where they enter  ->  who reads them
        results              back the same way, those of the ranks of a node as one

What moves crosses to a node once. The sequence is cut into as many pieces as a node has ranks. Of
its heads, all of a piece enters a node at the rank of that number, which computes the piece's own
tile with it. So as much crosses to each rank as its own shard, and the first ranks and the last
have as much to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product, zip_longest

import numpy as np

from cp_inductor.kept import lru_cache
from cp_inductor.plan.assign_cells import (
    Strategy,
    Tiles,
    Work,
    is_head_split,
    parts_of_equal_weight,
)
from cp_inductor.plan.grid import Span
from cp_inductor.plan.ir import Shape, Tile
from cp_inductor.plan.strategies.blocks import BLOCKS


def num_parts_of(shape: Shape, num_ranks: int, num_stages: int) -> int:
    """Return in how many parts the heads of a rank, or node, come, so that one hides the next."""
    return max(n for n in range(1, num_stages + 1) if is_head_split(shape, num_ranks * n))


def parts_of(heads: Span, num_ranks: int, num_parts: int = 1) -> list[list[Span]]:
    """Split heads among ranks, or nodes; return those of each rank in each part."""
    size = len(heads) // (num_ranks * num_parts)
    spans = [Span(start, start + size) for start in range(heads.start, heads.stop, size)]
    return [spans[part::num_parts] for part in range(num_parts)]


def _split(tiles: Iterable[Tile], heads: Span, num_ranks: int) -> list[Tile]:
    """Split the tiles of groups, which have these heads only, among the ranks of each group."""
    (parts,) = parts_of(heads, num_ranks)
    return [
        tile.at(tile.rank * num_ranks + number, part)
        for tile in tiles
        for number, part in enumerate(parts)
    ]


def _copies(tiles: Iterable[Tile], heads: Sequence[Span], num_ranks: int) -> list[Tile]:
    """Return tiles of `num_ranks` ranks for these and as many behind them, each with its heads."""
    return [
        tile.at(number * num_ranks + tile.rank, own)
        for number, own in enumerate(heads)
        for tile in tiles
    ]


def shares_of(shape: Shape, world_size: int, num_ranks: int) -> Iterator[tuple[Span, int]]:
    """Yield shares of the heads, and how many ranks a group that splits each has.

    KV heads that do not divide by them are split among smaller groups: of 8 heads on 6 ranks, all
    ranks split 6, and groups of 2 ranks split the other 2.
    """
    if is_head_split(shape, num_ranks):
        yield shape.all_heads, num_ranks
        return
    group, start = shape.num_heads // shape.num_kv_heads, 0
    while start < shape.num_kv_heads:
        left = shape.num_kv_heads - start
        num_ranks = max(n for n in range(1, min(num_ranks, left) + 1) if world_size % n == 0)
        stop = start + left // num_ranks * num_ranks
        yield Span(start * group, stop * group), num_ranks
        start = stop


def can_split(shape: Shape, world_size: int, num_groups: int) -> bool:
    """Whether each rank of a group gets whole KV heads, or all of them an even part of one."""
    is_split = is_head_split(shape, num_groups) or shape.num_kv_heads >= num_groups
    return is_split and world_size % num_groups == 0


@lru_cache(maxsize=16)
def groups_of(work: Work, num_ranks: int, heads: Span) -> Work:
    """Return the work of some heads in which each group of so many ranks is one rank."""
    grid, shape, num_chunks = work.grid, work.shape, work.grid.chunks_per_rank * num_ranks
    grid = replace(grid, world_size=grid.world_size // num_ranks, chunks_per_rank=num_chunks)
    shape = replace(shape, num_heads=len(heads), num_kv_heads=len(shape.kv_heads(heads)))
    return Work(grid, shape, work.cells)


def in_groups(num_groups: int, rest: Strategy) -> Strategy:
    """Split the heads within each group of ranks, and everything else among the groups.

    A group has `num_groups` ranks, which divides the world size, and acts as one rank of `rest`.
    """

    def assign(work: Work, num_stages: int) -> Tiles:
        shares = [
            [_split(stage, heads, size) for stage in rest.assign(groups, num_stages)]
            for heads, size in shares_of(work.shape, work.grid.world_size, num_groups)
            for groups in [groups_of(work, size, heads)]
        ]
        return [[*chain(*stages)] for stages in zip_longest(*shares, fillvalue=())]

    return replace(
        rest,
        name=f"heads{num_groups}+{rest.name}",
        assign=assign,
        splits=lambda shape, world_size: can_split(shape, world_size, num_groups),
        is_groupable=False,
        fine=num_groups * rest.fine,
        moves_queries=True,
    )


def own_in_groups(num_groups: int) -> Strategy:
    """Split the heads within each group of ranks, and what is left among the groups by blocks.

    Every rank computes its own tile for all heads. With 0, all ranks are one group.
    """
    return Strategy(
        name=f"heads{num_groups}_own+blocks" if num_groups else "heads_own",
        assign=lambda work, num_stages: heads_own(work, num_stages, num_groups),
        splits=lambda shape, ranks: can_split(shape, ranks, num_groups or ranks),
        fine=num_groups or 1,
        moves_queries=True,
    )


def heads_own(work: Work, num_stages: int, num_groups: int = 0) -> Tiles:
    """Every rank computes its own tile, and other ranks' rows for its heads.

    There are at most `num_stages` after the first. The largest groups have `num_groups` ranks; 0
    for all.
    """
    tiles: Tiles = [[*work.own_tiles], *([] for _ in range(num_stages))]
    world_size = work.grid.world_size
    chunks = np.arange(work.grid.num_chunks)
    weights = np.count_nonzero(work.far(chunks, chunks), axis=1).reshape(world_size, -1).sum(1)
    for heads, size in shares_of(work.shape, world_size, num_groups or world_size):
        groups, num_within = groups_of(work, size, heads), num_stages
        if size < world_size:
            for stage, more in zip(tiles[1:], BLOCKS.assign(groups, num_stages)[1:], strict=True):
                stage += _split(more, heads, size)
            num_within = 1
        parts = parts_of(heads, size, num_parts_of(groups.shape, size, num_within))
        num_slices = num_within // len(parts)
        slice_of = parts_of_equal_weight(weights, num_slices)
        sliced = product(range(num_slices), parts)  # there may be fewer than stages
        for stage, (number, part) in zip(tiles[1:], sliced, strict=False):
            for owner in np.flatnonzero(slice_of == number).tolist():
                stage += _copies(_row(work, owner, size), part, num_ranks=1)
    return tiles


@lru_cache(maxsize=1024)
def _row(work: Work, owner: int, size: int) -> list[Tile]:
    """Return the tiles of an owner's queries and the keys of the others of its group."""
    owners, group = work.owners, owner // size
    columns = np.flatnonzero((owners // size == group) & (owners != owner))
    return work.tiles(group * size, work.own_chunks(owner), columns)


def in_nodes(num_nodes: int, rest: Strategy) -> Strategy:
    """Split the heads among nodes, and everything else among the ranks of each.

    To the strategy of the rest, the ranks of a node hold the whole sequence for its heads.
    """

    def assign(work: Work, num_stages: int) -> Tiles:
        num_parts = num_parts_of(work.shape, num_nodes, num_stages)
        parts = parts_of(work.shape.all_heads, num_nodes, num_parts)
        node = groups_of(work, num_nodes, parts[0][0])
        own, *others = rest.assign(node, max(1, num_stages // num_parts))
        stages = [(own, part) for part in parts]
        stages += [(stage, part) for part in parts for stage in others]
        return [_copies(stage, part, node.grid.world_size) for stage, part in stages]

    return replace(
        rest,
        name=f"nodes{num_nodes}+{rest.name}",
        assign=assign,
        num_nodes=num_nodes,
        free_keep=lambda shape, num_stages: num_parts_of(shape, num_nodes, num_stages),
        splits=lambda shape, world_size: (
            world_size % num_nodes == 0
            and 1 < num_nodes < world_size
            and is_head_split(shape, num_nodes)
        ),
        is_groupable=False,
        fine=num_nodes * rest.fine,
        moves_queries=True,
    )


# Each rank computes the whole sequence for its heads, as a node of one rank would.
_WHOLE = Strategy("whole", lambda work, num_stages: [work.own_tiles])
HEADS = Strategy(
    name="heads",
    assign=lambda work, num_stages: in_nodes(work.grid.world_size, _WHOLE).assign(work, num_stages),
    splits=is_head_split,
    free_keep=lambda shape, num_stages: num_stages,
    min_chunks=1,
    moves_queries=True,
)

HEADS_OWN = own_in_groups(0)

# The backward computes own tiles by heads, too: so it reads nothing but what the forward fetched,
# which therefore takes the place of the shard's q, k and v.
HEADS_OWN_FORWARD = replace(
    HEADS_OWN,
    name="heads_own_forward",
    assign=lambda work, num_stages: heads_own(
        work, num_parts_of(work.shape, work.grid.world_size, num_stages)
    ),
    # That of `heads`, whose first stage is fed by the forward's second one.
    assign_backward=lambda work, num_stages: [[], *HEADS.assign(work, num_stages)],
    splits=is_head_split,
    free_keep=lambda shape, num_stages: num_stages + 2,  # and own tiles, first and last
)
