"""Estimate the cost of a strategy without a plan, in closed form in the number of ranks.

The planner chooses strategy and stages by it. All chunks are taken to hold equally many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import sympy
from sympy import Integer, Max, Rational

from cp_inductor.plan.cost import ALPHA, BETA, RATE, SYMBOLS, B, Cost, D, H, N, P, S
from cp_inductor.plan.ir import Mask
from cp_inductor.plan.strategies import parse_strategy


@lru_cache(maxsize=64)
def estimate(strategy: str, mask: Mask, layout: str, *, is_training: bool) -> Cost:
    """Return the cost of a strategy for any number of ranks.

    For ring, allgather, zigzag rows and heads, the bytes are those of their plans. Plans of blocks
    are found by search, so their bytes are those of square blocks of average size, plus a fifth for
    the rank that is worst off.
    """
    row = parse_strategy(strategy)
    forward, backward = row.received(mask, layout)
    received = forward + backward if is_training else forward
    half = Rational(1, 2) if mask is Mask.CAUSAL else Integer(1)
    num_matmuls = 7 if is_training else 2
    flops = half * 2 * num_matmuls * B * H * D * S**2 / P
    flops = flops * row.imbalance(mask, layout)
    own = half * 2 * num_matmuls * B * H * D * (S / P) ** 2 if row.has_own_tiles else Integer(0)
    compute, first_tiles = flops / RATE, own / RATE
    exchange = received / BETA
    exposed = Max(0, exchange / N - first_tiles)
    seconds = Max(compute, exchange) + exposed + N * ALPHA * (2 if is_training else 1)
    return Cost(flops, received, received / N * 2, seconds)


@lru_cache(maxsize=64)
def seconds_of(
    strategy: str, mask: Mask, layout: str, *, is_training: bool
) -> Callable[..., float]:
    """Return the estimated seconds as a function of the values of `SYMBOLS`, in their order."""
    cost = estimate(strategy, mask, layout, is_training=is_training)
    function: Callable[..., float] = sympy.lambdify(SYMBOLS, cost.seconds, modules="math")
    return function
