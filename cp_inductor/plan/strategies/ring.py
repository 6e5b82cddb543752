"""The neighbour ring, and the all-gather in one exchange: queries stay with their owners."""

from __future__ import annotations

from cp_inductor.plan.grid import Grid
from cp_inductor.plan.ir import Mask, Payload, Shape, Tile, Transfer
from cp_inductor.plan.strategies.rows import own_rows
from cp_inductor.plan.strategies.strategy import Pairs, Strategy
from cp_inductor.plan.tiles import Tiles


def ring(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """The neighbour ring: stage i has the tile of own queries and the keys of rank - i.

    Under a rule, own rows.
    """
    if not isinstance(pairs, Mask):
        return own_rows(grid, shape, pairs, num_stages)
    tiles: Tiles = [[] for _ in range(grid.world_size)]
    for rank in range(grid.world_size):
        own = (grid.own(rank),)
        tiles[0].append(Tile(rank, own, own, shape.all_heads, pairs))
        for step in range(1, grid.world_size):
            if pairs is Mask.FULL or step <= rank:
                keys = (grid.own((rank - step) % grid.world_size),)
                tiles[step].append(Tile(rank, own, keys, shape.all_heads, Mask.FULL))
    return tiles


def fetch_from_neighbours(grid: Grid, shape: Shape, tiles: Tiles) -> list[tuple[Transfer, ...]]:
    """Fetch keys from the neighbour, which had them one stage before."""
    heads = shape.kv_heads(shape.all_heads)
    fetches: list[tuple[Transfer, ...]] = [()]
    for stage in tiles[1:]:
        fetch = [
            Transfer(Payload.KEY_VALUE, tile.keys[0], heads, before, tile.rank)
            for tile in stage
            for before in [(tile.rank - 1) % grid.world_size]
            if grid.num_tokens(tile.keys[0], of_keys=True)
        ]
        fetches.append(tuple(sorted(fetch, key=lambda t: (t.source, t.destination))))
    return fetches


RING = Strategy(
    name="ring",
    assign=ring,
    fetch=fetch_from_neighbours,
    num_stages=lambda world_size, mask: None if mask is Mask.PARTIAL else max(1, world_size - 1),
    is_of_auto=False,
    min_chunks=1,
)

ALLGATHER = Strategy(
    name="allgather",
    assign=own_rows,
    num_stages=lambda world_size, mask: 1,
    is_groupable=True,
)
