"""Nodes split the heads, and the ranks of a node split the rest. What moves crosses to a node once.

    nodes4+blocks on 8 ranks, 2 in each node: node n has a quarter of the heads

        inputs of piece c    their owner  ->  rank c of node n, where they enter  ->  who reads them
        results              back the same way, those of the ranks of a node as one

The sequence is cut into as many pieces as a node has ranks. Of its heads, all of a piece enters a
node at the rank of that number, which computes the piece's own tile with it. So as much crosses to
each rank as its own shard, and the first ranks and the last have as much to do.
"""

from __future__ import annotations

import numpy as np

from cp_inductor.plan.assign_cells import Pairs, Tiles, is_head_split
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Shape, Tile, Transfers
from cp_inductor.plan.strategies.heads import Share, groups_of, num_parts_of
from cp_inductor.plan.strategies.strategy import Strategy
from cp_inductor.plan.transfers import fetch_by_way


def in_nodes(num_nodes: int, rest: Strategy) -> Strategy:
    """Split the heads among nodes, and everything else among the ranks of each.

    To the strategy of the rest, the ranks of a node hold the whole sequence for its heads.
    """

    def assign(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
        num_parts = num_parts_of(shape, num_nodes, num_stages)
        num_heads = shape.num_heads // (num_nodes * num_parts)
        within = Share(Span(0, num_heads), 1).shape_within(shape)
        num_inside = max(1, num_stages // num_parts)
        own, *others = rest.assign(groups_of(grid, num_nodes), within, pairs, num_inside)

        def of_part(tiles: list[Tile], part: int) -> list[Tile]:
            return [
                tile.at(first + tile.rank, Span(start, start + num_heads))
                for node in range(num_nodes)
                for first in [node * (grid.world_size // num_nodes)]
                for start in [(node * num_parts + part) * num_heads]
                for tile in tiles
            ]

        parts = range(num_parts)
        first = [of_part(own, part) for part in parts]
        return first + [of_part(stage, part) for part in parts for stage in others]

    def fetch(grid: Grid, shape: Shape, tiles: Tiles) -> list[Transfers]:
        size = grid.world_size // num_nodes

        def entries(rank: np.ndarray, owner: np.ndarray) -> np.ndarray:
            """Return the rank of the node of a rank at which what an owner holds enters it."""
            return np.asarray(rank // size * size + owner // num_nodes)

        return fetch_by_way(grid, shape, tiles, entries)

    return Strategy(
        name=f"nodes{num_nodes}+{rest.name}",
        assign=assign,
        fetch=fetch,
        returns=True,
        num_stages=rest.num_stages,
        free_keep=lambda shape, num_stages: num_parts_of(shape, num_nodes, num_stages),
        splits=lambda shape, world_size: (
            world_size % num_nodes == 0
            and 1 < num_nodes < world_size
            and is_head_split(shape, num_nodes)
        ),
        is_grouped=True,
        fine=num_nodes * rest.fine,
        min_chunks=rest.min_chunks,
        moves_queries=True,
    )
