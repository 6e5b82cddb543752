"""A lower bound on what a plan receives: bytes that some rank must receive."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cp_inductor.mask.language import without_tables
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.ir import Shape


def lower_bound(
    shape: Shape,
    world_size: int,
    length: int,
    rule: str,
    *,
    most_pairs: float = 0.0,
    is_kept: bool = False,
) -> float:
    """Return bytes that some rank must receive, forward and backward, whatever the plan.

    This holds for contiguous shards of T tokens, unsplit heads, and no rank with more than
    ``most_pairs``. A rank that works with X foreign queries and Y foreign keys reaches (T + X)(T +
    Y) pairs. Some pairs of its own square do not exist: T^2 / 2 under a causal mask. The mean rank
    receives c_q X + c_k Y bytes, if each foreign token also counts what its owner gets back. The
    least such sum for an area A = (T + X)(T + Y) is f(A) = 2 sqrt(c_q c_k A) - (c_q + c_k) T. f is
    concave from where it is zero. So the mean is least if each rank does either as much as needs
    nothing from others, or as much as it may: it lies on the chord between the two.

    If a rule reads run-time tables, all pairs that may exist count, because a plan that does not
    know the tables computes them.

    Args:
        shape: of the attention.
        world_size: number of ranks.
        length: of the sequence, of queries as of keys.
        rule: which pairs exist; see `cp_inductor.mask.rule`.
        most_pairs: of the busiest rank, for one head; the mean, if that is less.
        is_kept: what the forward fetched is kept for the backward.
    """
    row = shape.head_dim * shape.itemsize
    # q, q with the gradient of out, two results; k and v twice, and their gradients.
    queries = ((4 if is_kept else 5) * row + 3 * max(4, shape.itemsize)) * shape.num_heads
    keys = (4 if is_kept else 6) * row * shape.num_kv_heads
    queries, keys = queries * shape.batch, keys * shape.batch
    tokens = -(-length // world_size)
    pairs, missing = _count_pairs(rule, world_size, length)
    mean = pairs / world_size
    most = max(most_pairs, mean)
    alone = ((queries + keys) * tokens) ** 2 / (4 * queries * keys) - missing
    if mean <= alone:
        return 0.0
    bound = 2 * (queries * keys * (most + missing)) ** 0.5 - (queries + keys) * tokens
    return float(bound * (mean - alone) / (most - alone))


# Boxes along a side in which pairs are counted.
_NUM_BOXES = 512


@lru_cache(maxsize=64)
def _count_pairs(rule: str, world_size: int, length: int) -> tuple[int, int]:
    """Count pairs of one head.

    Returns:
        A lower bound of the pairs that exist, and of those that are missing in any rank's own
            square.
    """
    allowed = without_tables(Rule.parse(rule).allowed)
    shard = -(-length // world_size)
    # No box is of two ranks.
    size = max(1, shard // max(1, _NUM_BOXES // world_size))
    starts = [
        at
        for first in range(0, length, shard)
        for at in range(first, min(first + shard, length), size)
    ]
    stops = [*starts[1:], length]
    edges = np.array(starts, dtype=float), np.array(stops) - 1.0
    cells = Rule(allowed).cells(edges, edges)
    sizes = np.array(stops) - np.array(starts)
    area = np.outer(sizes, sizes)
    triangle = np.where(cells == Cell.CAUSAL, (area + sizes[:, None]) // 2, 0)
    pairs = int(np.where(cells == Cell.FULL, area, triangle).sum())
    absent = np.where(cells == Cell.EMPTY, area, 0) + np.where(triangle, area - triangle, 0)
    owners = np.array(starts) // shard
    missing = [int(absent[np.ix_(owners == r, owners == r)].sum()) for r in range(world_size)]
    return pairs, min(missing)
