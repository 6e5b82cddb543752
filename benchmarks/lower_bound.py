"""A lower bound on what a plan receives: bytes that some rank must receive, whatever the plan."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import sympy
from sympy import And, Not, Or
from sympy.logic.boolalg import Boolean

from cp_inductor.mask.language import tables_of
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.plan.ir import Shape


def lower_bound(
    shape: Shape,
    world_size: int,
    length: int,
    rule: str,
    *,
    most_pairs: float = 0.0,
    is_kept: bool = False,
    splits_heads: bool = False,
) -> float:
    """Return bytes that some rank must receive, forward and backward, whatever the plan.

    This holds for contiguous shards, if no rank computes more than ``most_pairs``.

    A rank that works with X foreign queries and Y foreign keys of a head causes c_q X + c_k Y
    bytes, its own and those that it sends back to the owners. All of them are received by someone,
    so the mean over ranks is a bound. With t tokens of its own, the rank reaches at most

        reach(X, Y) = t (X + Y) + X Y

    pairs beside those of its own square. Under a causal mask, of x = t + X queries and y = t + Y
    keys out of S tokens, m (m - 1) / 2 pairs do not exist, where m = x + y - S: fewest are missing
    if the queries are the last x tokens, and the keys the first y. If those are more than the
    t (t - 1) / 2 that are missing in its own square, the difference is beyond reach.

    Someone must compute the pairs whose query and key have different owners. The rank that computes
    most pairs computes L = most_pairs - own of these, because its own square costs nothing. So each
    of these pairs costs at least

        slope = min over X and Y of (c_q X + c_k Y) / min(reach(X, Y), L)

    and the mean rank pays this for each of its share. Query heads of one KV head share the keys,
    and so c_k of a query head is the KV head's, divided by their number. It is best if all of them
    use equally many queries, because reach is concave in X.

    A plan that does not split heads has the same X and Y in all heads. A plan that splits heads
    may spend all of a rank's work on the query heads of one KV head, of which it may then reach G
    times L pairs.

    If a rule reads run-time tables, all pairs that may exist count, because a plan that does not
    know the tables computes them.

    Args:
        shape: of the attention.
        world_size: number of ranks.
        length: of the sequence, of queries as of keys.
        rule: which pairs exist; see `cp_inductor.mask.rule`.
        most_pairs: of the busiest rank, averaged over heads; the mean of ranks, if that is less.
        is_kept: what the forward fetched is kept for the backward.
        splits_heads: the bound is over plans that may split heads, at will.
    """
    row = shape.head_dim * shape.itemsize
    # q, q with the gradient of out, two results; k and v twice, and their gradients.
    query = (4 if is_kept else 5) * row + 3 * max(4, shape.itemsize)
    key = (4 if is_kept else 6) * row * shape.num_kv_heads / shape.num_heads
    foreign, own, mean = _count_pairs(rule, world_size, length)
    most = max(most_pairs, mean) - own
    most *= shape.num_kv_heads if splits_heads else 1
    slope = min(
        _least_slope(query, key, tokens, length, most, is_causal=rule == "causal")
        for tokens in set(shard_lengths(length, world_size))
    )
    bound = shape.batch * shape.num_heads * slope * foreign / world_size
    return bound * (1 - _ROUNDING)


# Numbers of keys that are tried. Because of these steps, the bound is less than it could be, by
# about ln(length) / 16384 of it at most.
_NUM_KEYS = 1 << 14


def _least_slope(
    query: float, key: float, own: int, length: int, most: float, *, is_causal: bool
) -> float:
    """Return a lower bound of the bytes that a pair costs, at best.

    Numbers of keys are tried in ranges, the bytes at the start of each and the reach at its end.
    The bytes are linear in the number X of queries, and the reach is concave. So the least quotient
    is where the reach has a kink, or the quotient's derivative is zero, or at an end.

    Args:
        query, key: bytes of a foreign query, and of a foreign key.
        own: tokens that the rank holds.
        length: of the sequence.
        most: pairs beyond which it needs none.
        is_causal: whether pairs are beyond reach by a causal mask.
    """
    others = length - own
    if not others or most <= 0:
        return 0.0
    starts = np.unique(np.geomspace(1, others, _NUM_KEYS).astype(np.int64))
    first = np.concatenate([[0], starts]).astype(float)
    last = np.concatenate([[0], starts[1:] - 1, [others]]).astype(float)
    paid = key * first
    # Up to `kink` queries, nothing that the rank could use is beyond reach.
    kink = others - last if is_causal else np.full_like(last, others)
    at_kink = own * (kink + last) + kink * last

    def reach(queries: np.ndarray) -> np.ndarray:
        late = np.maximum(queries - kink, 0)  # (m (m - 1) - t (t - 1)) / 2, where m = t + late
        lost = late * (late + 2 * own - 1) / 2 if is_causal else 0.0
        return own * (queries + last) + queries * last - np.maximum(lost, 0)

    with np.errstate(divide="ignore", invalid="ignore"):
        tried = [np.zeros_like(last), kink, np.full_like(last, others)]
        tried.append((most - own * last) / (own + last))
        if is_causal:
            # Beyond the kink, reach = at_kink + (last + 1/2) late - late^2 / 2. A rank without
            # tokens has its kink one query later.
            gain, spent = last + 0.5, paid + query * kink
            tried.append(kink + gain - np.sqrt(gain**2 - 2 * (most - at_kink)))
            root = np.sqrt(spent**2 - 2 * query * (query * at_kink - spent * gain))
            tried += [kink + (root - spent) / query, kink + 1]
        queries = np.clip(np.nan_to_num(tried, nan=0.0, posinf=0.0, neginf=0.0), 0, others)
        reached = np.minimum([reach(row) for row in queries], most)
        slopes = np.where(reached > 0, (query * queries + paid) / reached, np.inf)
    return float(slopes.min())


# Pairs are counted in so many boxes along a side.
_NUM_BOXES = 512
# The sums in float64 are off by less than this share.
_ROUNDING = 1e-9


@lru_cache(maxsize=64)
def _count_pairs(rule: str, world_size: int, length: int) -> tuple[int, int, float]:
    """Count pairs of one head: lower bounds of those that exist.

    Returns:
        Pairs of which query and key have different owners; the pairs of the rank whose own square
            has fewest; the mean of ranks.
    """
    if rule in ("full", "causal"):
        lengths = [length, *shard_lengths(length, world_size)]
        total, *own = [n * n if rule == "full" else n * (n + 1) // 2 for n in lengths]
        return total - sum(own), min(own), total / world_size
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
    pairs = np.where(cells == Cell.FULL, area, triangle)
    owners = np.array(starts) // shard
    own = [int(pairs[np.ix_(owners == r, owners == r)].sum()) for r in range(world_size)]
    total = int(pairs.sum())
    return total - sum(own), min(own), total / world_size


def without_tables(allowed: Boolean, *, otherwise: bool = True) -> Boolean:
    """Return the condition under which a pair exists for at least some values of the tables.

    Args:
        allowed: a condition, which may read tables.
        otherwise: replaces a relation that reads a table; flipped under a negation.
    """
    if isinstance(allowed, Not):
        return Not(without_tables(allowed.args[0], otherwise=not otherwise))
    if isinstance(allowed, (And, Or)):
        return allowed.func(*(without_tables(p, otherwise=otherwise) for p in allowed.args))
    return sympy.sympify(otherwise) if tables_of(allowed) else allowed
