"""Every rank, or every rank of a group, computes all queries and keys of some heads.

heads           every rank has H / P heads                      (Ulysses)
heads4+blocks   groups of 4 ranks split the heads, and the groups split the rest as `blocks` does
"""

from __future__ import annotations

import numpy as np
from sympy import Expr, Integer, Max

from cp_inductor.plan.assign_masked import tiles_of_cells
from cp_inductor.plan.cost import KEYS, QUERIES, STATISTICS, G, P, S
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, Shape, Tile
from cp_inductor.plan.strategies.strategy import LAYOUTS, Strategy
from cp_inductor.plan.tiles import Tiles, is_head_split


def heads(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
    """Every rank computes the whole sequence for its heads, some heads in each stage."""
    everything = grid.spans_at(0, grid.num_chunks)
    return [
        [Tile(rank, everything, everything, heads_, mask) for rank, heads_ in enumerate(part)]
        for part in _parts(shape, grid.world_size, num_stages)
    ]


def _parts(shape: Shape, num_ranks: int, num_stages: int) -> list[list[Span]]:
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


def masked_heads(grid: Grid, shape: Shape, cells: np.ndarray, num_stages: int) -> Tiles:
    """Every rank computes the whole sequence for its heads, some heads in each stage."""
    rows = [
        (np.arange(own.start, own.stop), cells[own.start : own.stop])
        for own in map(grid.own, range(grid.world_size))
    ]
    return [
        [
            tile
            for rank, heads_ in enumerate(part)
            for chunks, own in rows
            for tile in tiles_of_cells(grid, rank, heads_, chunks, own, own)
        ]
        for part in _parts(shape, grid.world_size, num_stages)
    ]


def received(mask: Mask, layout: str) -> tuple[Expr, Expr]:
    """Return the bytes of the queries, keys and values of a rank's heads, from all other ranks."""
    del mask, layout
    others = P - 1
    # KV heads that several ranks share go to each of them.
    keys = Max(1 / G, 1 / P) * KEYS * others
    queries = QUERIES * others / P
    statistics = STATISTICS * others / P
    return 2 * queries + statistics + keys, 3 * queries + 2 * statistics + 2 * keys


HEADS = Strategy(
    name="heads",
    assign=heads,
    assign_masked=masked_heads,
    received=received,
    imbalance=lambda mask, layout: Integer(1),
    head_groups=lambda world_size: world_size,
    layouts_of_auto=LAYOUTS,
    min_chunks=1,
    has_own_tiles=False,
    moves_queries=True,
)


def in_groups(num_groups: int, rest: Strategy) -> Strategy:
    """Split the heads within each group of ranks, and everything else among the groups.

    Args:
        num_groups: into how many parts the heads are split, which is the number of ranks of a
            group; divides the world size.
        rest: the strategy of the groups, each of which acts as one rank.
    """

    def assign(grid: Grid, shape: Shape, mask: Mask, num_stages: int) -> Tiles:
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
            for stage in rest.assign(groups, shape, mask, num_stages)
        ]

    def received_in_groups(mask: Mask, layout: str) -> tuple[Expr, Expr]:
        # A group is one rank of the rest, with as many times the tokens and a part of the heads.
        kv_share = Max(1, num_groups / G)
        within = {P: Integer(num_groups), S: S * num_groups / P}
        forward, backward = (
            of_rest.subs({P: P / num_groups}) / num_groups * kv_share
            + gather.subs(within, simultaneous=True)
            for of_rest, gather in zip(
                rest.received(mask, layout), received(Mask.FULL, layout), strict=True
            )
        )
        return forward, backward

    return Strategy(
        name=f"heads{num_groups}+{rest.name}",
        assign=assign,
        assign_masked=None,
        received=received_in_groups,
        imbalance=lambda mask, layout: rest.imbalance(mask, layout).subs({P: P / num_groups}),
        num_stages=rest.num_stages,
        head_groups=lambda world_size: num_groups,
        layouts=("contiguous",),
        is_fine=rest.is_fine,
        min_chunks=rest.min_chunks,
        has_own_tiles=False,
        moves_queries=True,
    )
