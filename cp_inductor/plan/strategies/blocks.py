"""Two-dimensional: each rank computes a block of the grid of tiles; see `plan.block_search`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from cp_inductor.kept import lru_cache
from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_masked import stage_cells
from cp_inductor.plan.block_search import (
    Block,
    Weights,
    assign_blocks,
    causal_blocks,
    cut_blocks,
)
from cp_inductor.plan.grid import Grid, Span, join_spans, lengths_of
from cp_inductor.plan.ir import Mask, Payload, Shape, Tile, bytes_per_row
from cp_inductor.plan.strategies.strategy import Pairs, Strategy
from cp_inductor.plan.tiles import Rect, Tiles, add_rects, own_tiles, slice_rects

# How much longer than high a block is made. Each is tried, and the one that moves least is taken.
# Without a mask this multiplies the aspect at which both sides cost as many bytes. The last two are
# inverse to each other, but for rounding.
ASPECTS = (1.0, 1.3, 0.77)
MASKED_ASPECTS = (1.0, 1.6, 0.62)


# Beyond so many ranks one is as good as another, and planning takes its time.
MAX_ASPECTS_WORLD = 256


# From twice as many ranks on, groups of world_size / GROUP_WORLD ranks share the diagonal's border.
GROUP_WORLD = 256


def blocks(grid: Grid, shape: Shape, pairs: Pairs, num_stages: int) -> Tiles:
    """Every rank computes a block of the grid of tiles, and the tile of its own chunks."""
    if not isinstance(pairs, Mask):
        return _masked_blocks(grid, shape, pairs, num_stages)
    weights = weights_of(shape)
    if pairs is Mask.FULL:
        return _full_blocks(grid, shape, num_stages, weights)
    group, step = _steps(grid)
    ranks, chosen = _search(grid, shape)
    tiles = own_tiles(grid, shape, pairs, num_stages)
    # The cheaper side comes whole with the first stage, the dearer one bit by bit.
    by_keys = weights.key >= weights.query
    for rank, block in zip(ranks, chosen, strict=True):
        slices = slice_rects(_rects(block, step), num_stages, grid.num_chunks, by_keys=by_keys)
        own = grid.own(rank)
        near = Span(own.start // step * step, own.start)
        if group > 1 and len(near):
            slices[0].append(Rect(own, near))
        add_rects(tiles, shape, rank, slices)
    return tiles


def _steps(grid: Grid) -> tuple[int, int]:
    """Return how many ranks share the border of the diagonal, and the chunks of its squares."""
    # What is near the diagonal falls into many small rectangles. Groups of ranks leave to each of
    # them its own rows there: next to what a rank of so many computes in all, that is little.
    group = max(1, grid.world_size // GROUP_WORLD)
    return group, grid.chunks_per_rank * group


@lru_cache(maxsize=16)
def _search(grid: Grid, shape: Shape) -> tuple[list[int], list[Block]]:
    """Cut what is below the diagonal into blocks, and return them with the rank of each."""
    weights, world_size = weights_of(shape), grid.world_size
    _, step = _steps(grid)
    owners = np.arange(grid.num_chunks) // grid.chunks_per_rank
    aspects = ASPECTS if world_size <= MAX_ASPECTS_WORLD else ASPECTS[:1]
    candidates = [
        causal_blocks(grid.num_chunks, step, world_size, aspect)
        for aspect in dict.fromkeys(a * _balance_of(weights) for a in aspects)
    ]
    return _best_blocks(candidates, owners, world_size, weights)


def _best_blocks(
    candidates: Iterable[list[Block]], owners: np.ndarray, world_size: int, weights: Weights
) -> tuple[list[int], list[Block]]:
    """Return the blocks that move least at most, and the rank of each."""
    assigned = [(*assign_blocks(b, owners, world_size, weights), b) for b in candidates]
    ranks, _, blocks = min(assigned, key=lambda one: one[1])
    return ranks, blocks


def _balance_of(weights: Weights) -> float:
    """Return the aspect of a block whose queries cost as many bytes as its keys."""
    queries = weights.query + weights.query_home
    return queries / (weights.key + weights.key_home)


def _rects(block: Block, step: int) -> list[Rect]:
    """Return a block below the diagonal squares as rectangles: one, unless it touches them."""
    rects = []
    top = block.top
    while top < block.bottom:
        limit = top // step * step
        if limit >= block.right:
            rects.append(Rect(Span(top, block.bottom), Span(block.left, block.right)))
            break
        bottom = min(block.bottom, limit + step)
        rects.append(Rect(Span(top, bottom), Span(block.left, limit)))
        top = bottom
    return [rect for rect in rects if len(rect.keys) > 0]


def _full_blocks(grid: Grid, shape: Shape, num_stages: int, weights: Weights) -> Tiles:
    """Without a mask: rank (i, j) computes the queries of ranks (i, *) and the keys of (*, j)."""
    world_size = grid.world_size
    query, key = weights.query + weights.query_home, weights.key + weights.key_home
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    # n ranks share their queries, world_size / n their keys.
    num_rows = min(divisors, key=lambda n: (n - 1) * query + (world_size // n - 1) * key)
    tiles = own_tiles(grid, shape, Mask.FULL, num_stages)
    by_keys = (world_size // num_rows - 1) * weights.key >= (num_rows - 1) * weights.query
    for rank in range(world_size):
        first = rank // num_rows * num_rows
        owners = {
            False: [r for r in range(first, first + num_rows) if r != rank],
            True: [r for r in range(rank % num_rows, world_size, num_rows) if r != rank],
        }
        own = grid.own(rank)
        cut, whole = owners[by_keys], (grid.own(r) for r in owners[not by_keys])
        # The own side of what is cut meets the others' whole side in the first stage.
        parts = [
            [own, *map(grid.own, part)] if not i else list(map(grid.own, part))
            for i, part in enumerate(_split(cut, num_stages))
        ]
        others = join_spans(whole)
        everything = join_spans([own, *others])
        for stage, part in enumerate(parts):
            foreign = join_spans(span for span in part if span != own)
            pairs = [(foreign, everything)] + ([((own,), others)] if own in part else [])
            for cut_side, whole_side in pairs:
                if cut_side and whole_side:
                    queries, keys = (whole_side, cut_side) if by_keys else (cut_side, whole_side)
                    tiles[stage + 1].append(Tile(rank, queries, keys, shape.all_heads, Mask.FULL))
    return tiles


def _split(items: Sequence[int], num_parts: int) -> list[list[int]]:
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(bounds)]


def _masked_blocks(grid: Grid, shape: Shape, cells: np.ndarray, num_stages: int) -> Tiles:
    """Every rank computes the cells of its own chunks, and a block of the others.

    All blocks have equally many pairs, so ranks are balanced except for their own cells.
    """
    weights = weights_of(shape)
    world_size, num_chunks = grid.world_size, grid.num_chunks
    owners = np.arange(num_chunks) // grid.chunks_per_rank
    pairs = np.outer(lengths_of(grid, of_keys=False), lengths_of(grid, of_keys=True))
    pairs = pairs * (cells != Cell.EMPTY)
    pairs[owners[:, None] == owners[None]] = 0
    candidates = [cut_blocks(pairs, world_size, aspect) for aspect in MASKED_ASPECTS]
    ranks, chosen = _best_blocks(candidates, owners, world_size, weights)
    assigned = np.broadcast_to(owners[:, None], cells.shape).copy()
    for rank, block in zip(ranks, chosen, strict=True):
        area = np.s_[block.top : block.bottom, block.left : block.right]
        assigned[area] = np.where(pairs[area] > 0, rank, assigned[area])
    return stage_cells(
        grid, shape, cells, assigned, num_stages, by_keys=weights.key >= weights.query
    )


def weights_of(shape: Shape) -> Weights:
    """Return bytes per token and batch entry, if nothing is kept."""

    def of(heads: int, *payloads: Payload) -> int:
        return heads * sum(bytes_per_row(payload, shape) for payload in payloads)

    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    return Weights(
        query=of(num_heads, Payload.QUERY, Payload.QUERY_GRAD_OUT),
        key=of(num_kv_heads, Payload.KEY_VALUE, Payload.KEY_VALUE),
        query_home=of(num_heads, Payload.PARTIAL, Payload.QUERY_GRAD),
        key_home=of(num_kv_heads, Payload.KEY_VALUE_GRAD),
    )


BLOCKS = Strategy(
    name="blocks",
    assign=blocks,
    is_groupable=True,
    is_fine=True,
    moves_queries=True,
)
