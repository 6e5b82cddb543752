"""Two-dimensional: each rank computes a block of the grid of tiles.

    keys ->     0 1 2 3 4 5 6 7
    queries 0   .
            1   a .                     . the diagonal stays with its owners
            2   a a .                   a ... h blocks of as many ranks
            3   a a b .
            4   c c d d .
            5   c c d d e .
            6   f f g g e e .
            7   f f g g h h h .

The part below the diagonal is cut in two along its longer side, and each half again, until there
are P blocks with equally many pairs. For a block of a x b chunks, a rank fetches a + b chunks; for
a row with as many pairs it would fetch a b. So traffic per rank grows with the square root of the
number of ranks.

Blocks are assigned so that the rank that receives most receives as little as possible, counting
what it fetches and the results sent home to it. Everything is computed in integers, because all
ranks must find the same assignment.

Communication-avoiding attention: Attention2D (arXiv 2503.15758), Mesh-Attention (2512.20968).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from cp_inductor.kept import lru_cache
from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import Area, Strategy, Tiles, Work, stage_areas
from cp_inductor.plan.ir import Prices

# How much longer than high a block is made. Each is tried, and the one that moves least is taken.
# Without a rule this multiplies the aspect at which both sides cost as many bytes. The last two are
# inverse to each other, but for rounding.
ASPECTS = (1.0, 1.3, 0.77)
ASPECTS_UNDER_RULES = (1.0, 1.6, 0.62)
# Beyond so many ranks one is as good as another, and planning takes its time.
MAX_ASPECTS_WORLD = 256
# From here on the exact search for the smallest maximum takes longer than the plan is worth.
MAX_EXACT_ASSIGNMENT = 256
# Beyond, the sum of costs to this power is made least, which follows its largest terms. Costs are
# rounded to so many steps, because the fewer there are, the sooner the search ends.
STEEPNESS = 8
NUM_STEPS = 256


def blocks(work: Work, num_stages: int) -> Tiles:
    """Every rank computes a block of the grid of tiles, and the tile of its own chunks."""
    if work.cells.all():
        return _full_blocks(work, num_stages)
    query, key = Prices.of(work.shape)
    # The cheaper side comes whole with the first stage, the dearer one bit by bit.
    by_keys = key.fetch >= query.fetch
    return stage_areas(work, _search(work), num_stages, by_keys=by_keys)


def _full_blocks(work: Work, num_stages: int) -> Tiles:
    """Without a mask: rank (i, j) computes the queries of ranks (i, *) and the keys of (*, j)."""
    world_size, (query, key) = work.grid.world_size, Prices.of(work.shape)
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    # n ranks share their queries, world_size / n their keys.
    num_rows = min(divisors, key=lambda n: (n - 1) * query.both + (world_size // n - 1) * key.both)
    owners, together = work.owners, work.grid.chunks_per_rank
    areas = []
    for rank in range(world_size):
        order = np.argsort(owners != rank, kind="stable")  # its own chunks come first
        is_row, is_column = owners // num_rows == rank // num_rows, (owners - rank) % num_rows == 0
        areas.append((order[is_row[order]], order[is_column[order]]))
    by_keys = (world_size // num_rows - 1) * key.fetch >= (num_rows - 1) * query.fetch
    return stage_areas(work, areas, num_stages, by_keys=by_keys, together=together)


@lru_cache(maxsize=16)
def _search(work: Work) -> list[Area]:
    """Cut what is not on the diagonal into blocks with equally many pairs, one for each rank."""
    world_size, num_chunks, owners = work.grid.world_size, work.grid.num_chunks, work.owners
    chunks, prices = np.arange(num_chunks), Prices.of(work.shape)
    is_far = work.far(chunks, chunks) != Cell.EMPTY
    before = np.zeros((num_chunks + 1, num_chunks + 1), dtype=np.int32)
    is_far.cumsum(0, dtype=np.int32).cumsum(1, out=before[1:, 1:])
    ratio = prices.queries.both / prices.keys.both
    under_rule = bool((work.cells == Cell.PARTIAL).any())
    aspects = ASPECTS_UNDER_RULES if under_rule else [aspect * ratio for aspect in ASPECTS]
    num_tried = len(aspects) if world_size <= MAX_ASPECTS_WORLD else 1
    whole = Block(0, num_chunks, 0, num_chunks)
    candidates = [cut_blocks(whole, before, world_size, aspect) for aspect in aspects[:num_tried]]
    assigned = [(*assign_blocks(b, owners, prices), b) for b in candidates]
    ranks, _, chosen = min(assigned, key=lambda trial: trial[1])
    areas: list[Area] = [(owners[:0], owners[:0])] * world_size
    for rank, block in zip(ranks, chosen, strict=True):
        keys = work.chunks_before(rank) if under_rule else chunks
        keys = keys[(keys >= block.left) & (keys < block.right)]
        areas[rank] = np.arange(block.top, block.bottom), keys
    return areas


class Block(NamedTuple):
    """Queries [top, bottom) against those keys in [left, right) that are in their past."""

    top: int
    bottom: int
    left: int
    right: int


def cut_blocks(block: Block, before: np.ndarray, num_blocks: int, aspect: float) -> list[Block]:
    """Cut the pairs of a block into blocks with equally many pairs.

    Args:
        before: (rows + 1, columns + 1), the number of pairs before each row and column.
        num_blocks: how many to make, at least 1; some are empty where there are few pairs.
        aspect: how much longer than high a block is to be, 1.0 for squares.
    """
    part = before[block.top : block.bottom + 1, block.left : block.right + 1]
    rows, columns = np.diff(part[:, -1] - part[:, 0]), np.diff(part[-1] - part[0])
    if not rows.any():
        return [Block(0, 0, 0, 0)] * num_blocks
    # Rows and columns at the borders that hold no pairs are dropped.
    (top, bottom), (left, right) = (np.flatnonzero(n)[[0, -1]].tolist() for n in (rows, columns))
    block = Block(
        block.top + top, block.top + bottom + 1, block.left + left, block.left + right + 1
    )
    if num_blocks == 1:
        return [block]
    first = num_blocks // 2
    height, width = block.bottom - block.top, block.right - block.left
    is_tall = height * aspect >= width
    # Where the first part has the share of its blocks, as well as may be.
    pairs = np.cumsum(np.trim_zeros(rows if is_tall else columns))
    at = int(np.argmin(np.abs(pairs * num_blocks - pairs[-1] * first))) + 1
    if is_tall:
        halves = block._replace(bottom=block.top + at), block._replace(top=block.top + at)
    else:
        halves = block._replace(right=block.left + at), block._replace(left=block.left + at)
    return [
        *cut_blocks(halves[0], before, first, aspect),
        *cut_blocks(halves[1], before, num_blocks - first, aspect),
    ]


def assign_blocks(blocks: list[Block], owners: np.ndarray, prices: Prices) -> tuple[list[int], int]:
    """Assign a block to every rank so that the most that any rank receives is least.

    Returns:
        The rank of each block, and what the rank that receives most receives.
    """
    cost, world_size = _received(blocks, owners, prices), len(blocks)
    if world_size <= MAX_EXACT_ASSIGNMENT:
        cost_bound = _smallest_maximum(cost)
        # The assignment within the bound that moves least in all.
        cost = np.where(cost <= cost_bound, cost, cost_bound * world_size + cost)
        ranks = linear_sum_assignment(cost)[1]
    else:
        steep = (cost / max(1, cost.max())) ** STEEPNESS
        ranks = linear_sum_assignment(np.round(steep * NUM_STEPS).astype(np.int64))[1]
    chosen = cost[np.arange(world_size), ranks]
    return [int(rank) for rank in ranks], int(chosen.max())


def _received(blocks: list[Block], owners: np.ndarray, prices: Prices) -> np.ndarray:
    """Return what a rank (column) receives if it computes a block (row)."""
    counts = np.zeros((owners.size + 1, len(blocks)), dtype=np.int64)
    counts[np.arange(owners.size) + 1, owners] = 1
    before = counts.cumsum(0)
    top, bottom, left, right = np.array(blocks).T
    queries, keys = before[bottom] - before[top], before[right] - before[left]
    query, key = prices
    fetched = queries.sum(1) * query.fetch + keys.sum(1) * key.fetch
    home = queries.sum(0) * query.home + keys.sum(0) * key.home
    saved = queries * query.both + keys * key.both
    return fetched[:, None] + home[None, :] - saved


def _smallest_maximum(cost: np.ndarray) -> int:
    """Return the least bound under which every row can have its own column."""

    def is_enough(bound: int) -> bool:
        columns = maximum_bipartite_matching(csr_array(cost <= bound), perm_type="column")
        return bool((columns >= 0).all())

    bounds = np.unique(cost).tolist()
    return int(bounds[bisect_left(bounds[:-1], True, key=is_enough)])


BLOCKS = Strategy("blocks", blocks, is_groupable=True, fine=1, moves_queries=True)
