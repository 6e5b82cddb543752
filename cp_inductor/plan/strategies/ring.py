"""The neighbour ring, and the all-gather in one exchange: queries stay with their owners."""

from __future__ import annotations

import numpy as np

from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import Pairs
from cp_inductor.plan.grid import Grid
from cp_inductor.plan.ir import Mask, Payload, Shape, Tile, Transfer, Transfers
from cp_inductor.plan.strategies.rows import ROWS, own_rows
from cp_inductor.plan.strategies.strategy import Strategy
from cp_inductor.plan.tiles import Tiles

# A cell of which all pairs exist, or half of them, is a tile of that mask.
_MASKS = {Cell.FULL: Mask.FULL, Cell.CAUSAL: Mask.CAUSAL}


def ring(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """The neighbour ring: stage i has the tile of own queries and the keys of rank - i."""
    own = [(grid.own(rank),) for rank in range(grid.world_size)]
    first = [spans[0].start for spans in own]
    of_ranks = pairs.cells[np.ix_(first, first)].tolist()
    return [
        [
            Tile(rank, own[rank], own[rank - step], shape.all_heads, _MASKS[row[rank - step]])
            for rank, row in enumerate(of_ranks)
            if row[rank - step]
        ]
        for step in range(grid.world_size)
    ]


def fetch_from_neighbours(grid: Grid, shape: Shape, tiles: Tiles) -> list[Transfers]:
    """Fetch keys from the neighbour, which had them one stage before."""
    heads = shape.kv_heads(shape.all_heads)
    return [
        Transfers.of(
            Transfer(Payload.KEY_VALUE, tile.keys[0], heads, before, tile.rank)
            for tile in stage * bool(index)
            for before in [(tile.rank - 1) % grid.world_size]
            if grid.num_tokens(tile.keys[0], of_keys=True)
        ).sorted()
        for index, stage in enumerate(tiles)
    ]


RING = Strategy(
    name="ring",
    assign=ring,
    fetch=fetch_from_neighbours,
    under_rules=ROWS,
    num_stages=lambda world_size, mask: max(1, world_size - 1),
    is_of_auto=False,
    min_chunks=1,
)

ALLGATHER = Strategy(
    name="allgather",
    assign=own_rows,
    num_stages=lambda world_size, mask: 1,
    is_groupable=True,
)
