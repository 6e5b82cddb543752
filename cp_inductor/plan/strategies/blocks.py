"""Two-dimensional: each rank computes a block of the grid of tiles; see `plan.block_search`."""

from __future__ import annotations

import numpy as np

from cp_inductor.kept import lru_cache
from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import Area, Pairs, chunks_before, stage_areas
from cp_inductor.plan.block_search import assign_blocks, cut_blocks
from cp_inductor.plan.grid import Grid, owners_of
from cp_inductor.plan.ir import Prices, Shape
from cp_inductor.plan.strategies.strategy import Strategy
from cp_inductor.plan.tiles import Tiles

# How much longer than high a block is made. Each is tried, and the one that moves least is taken.
# Without a rule this multiplies the aspect at which both sides cost as many bytes. The last two are
# inverse to each other, but for rounding.
ASPECTS = (1.0, 1.3, 0.77)
ASPECTS_UNDER_RULES = (1.0, 1.6, 0.62)
# Beyond so many ranks one is as good as another, and planning takes its time.
MAX_ASPECTS_WORLD = 256


def blocks(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Every rank computes a block of the grid of tiles, and the tile of its own chunks."""
    if pairs.cells.all():
        return _full_blocks(grid, shape, pairs, num_stages)
    prices = Prices.of(shape)
    areas = _search(grid, prices, pairs)
    # The cheaper side comes whole with the first stage, the dearer one bit by bit.
    by_keys = prices.key_in >= prices.query_in
    return stage_areas(grid, shape, pairs, areas, num_stages, by_keys=by_keys)


def _full_blocks(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Without a mask: rank (i, j) computes the queries of ranks (i, *) and the keys of (*, j)."""
    world_size, prices = grid.world_size, Prices.of(shape)
    query, key = prices.query_in + prices.query_home, prices.key_in + prices.key_home
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    # n ranks share their queries, world_size / n their keys.
    num_rows = min(divisors, key=lambda n: (n - 1) * query + (world_size // n - 1) * key)
    owners = owners_of(grid)
    areas = []
    for rank in range(world_size):
        order = np.argsort(owners != rank, kind="stable")  # its own chunks come first
        is_row, is_column = owners // num_rows == rank // num_rows, (owners - rank) % num_rows == 0
        areas.append((order[is_row[order]], order[is_column[order]]))
    by_keys = (world_size // num_rows - 1) * prices.key_in >= (num_rows - 1) * prices.query_in
    return stage_areas(
        *(grid, shape, pairs, areas, num_stages), by_keys=by_keys, together=grid.chunks_per_rank
    )


@lru_cache(maxsize=16)
def _search(grid: Grid, prices: Prices, pairs: Pairs) -> list[Area]:
    """Cut what is not on the diagonal into blocks with equally many pairs, one for each rank."""
    world_size, num_chunks = grid.world_size, grid.num_chunks
    owners = owners_of(grid)
    is_far = (pairs.cells != Cell.EMPTY) & (owners[:, None] != owners)
    before = np.zeros((num_chunks + 1, num_chunks + 1), dtype=np.int32)
    is_far.cumsum(0, dtype=np.int32).cumsum(1, out=before[1:, 1:])
    ratio = (prices.query_in + prices.query_home) / (prices.key_in + prices.key_home)
    aspects = tuple(aspect * ratio for aspect in ASPECTS)
    under_rule = bool((pairs.cells == Cell.PARTIAL).any())
    if under_rule:
        aspects = ASPECTS_UNDER_RULES
    num_tried = len(aspects) if world_size <= MAX_ASPECTS_WORLD else 1
    candidates = [cut_blocks(before, world_size, aspect) for aspect in aspects[:num_tried]]
    assigned = [(*assign_blocks(b, owners, world_size, prices), b) for b in candidates]
    ranks, _, chosen = min(assigned, key=lambda one: one[1])
    areas: list[Area] = [(owners[:0], owners[:0])] * world_size
    for rank, block in zip(ranks, chosen, strict=True):
        keys = chunks_before(grid, rank) if under_rule else np.arange(num_chunks)
        keys = keys[(keys >= block.left) & (keys < block.right)]
        areas[rank] = np.arange(block.top, block.bottom), keys
    return areas


BLOCKS = Strategy(
    name="blocks",
    assign=blocks,
    is_groupable=True,
    fine=1,
    moves_queries=True,
)
