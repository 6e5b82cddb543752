"""What `benchmarks/lower_bound.py` says that some rank must receive: no plan receives less."""

from __future__ import annotations

import math
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lower_bound import _least_slope, lower_bound
from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.plan import Plan, plan_attention
from cp_inductor.plan.strategies import TABLE


def received_bytes(plan: Plan) -> int:
    both = (plan, plan.backward())
    return max(sum(one.bytes_received(r) for one in both) for r in range(plan.grid.world_size))


@pytest.mark.parametrize(
    "mask",
    ["causal", "full", "k<=q and q-k<70", "q//32==k//32", "k<=q+30", "(k<=q)&(t0(b,k)==t0(b,q))"],
)
def test_no_plan_receives_less(mask: str) -> None:
    closest = math.inf
    for strategy, world_size, (num_heads, num_kv_heads), keep in product(
        TABLE, (2, 3, 8), ((8, 8), (16, 4), (8, 1)), (0, 99)
    ):
        try:
            plan = plan_attention(
                seq_len=512 * world_size - 3,
                world_size=world_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=64,
                mask=mask,
                strategy=strategy,
                stages=2,
                keep=keep,
            )
        except UnsupportedStrategy:
            continue
        received = received_bytes(plan)
        for splits_heads in {True, strategy.startswith("heads")}:
            bound = lower_bound(
                plan.shape,
                world_size,
                plan.grid.query_length,
                plan.rule or plan.mask.value,
                most_pairs=max(map(plan.num_pairs_of, range(world_size))),
                is_kept=plan.num_kept > 0,
                splits_heads=splits_heads,
            )
            assert bound <= received, (plan.shape, strategy, keep)
            closest = min(closest, received / bound if bound else math.inf)
    assert closest < 2 or mask not in ("causal", "full")


def reach_of(queries: Any, keys: Any, own: int, length: int, *, is_causal: bool) -> Any:
    """The most pairs of so many foreign queries and keys, beside a rank's own square."""
    both = np.maximum(2 * own + queries + keys - length, own)
    lost = (both * (both - 1) - own * (own - 1)) // 2 if is_causal else 0
    return own * (queries + keys) + queries * keys - lost


def least_slope_by_trying(
    query: float, key: float, own: int, length: int, most: float, *, is_causal: bool
) -> float:
    """The least bytes per pair of all numbers of queries and keys."""
    queries, keys = np.meshgrid(np.arange(length - own + 1), np.arange(length - own + 1))
    reach = np.minimum(reach_of(queries, keys, own, length, is_causal=is_causal), most)
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.where(reach > 0, (query * queries + key * keys) / reach, np.inf)
    return float(slopes.min())


@given(
    query=st.integers(1, 60),
    key=st.integers(1, 60),
    own=st.integers(0, 40),
    others=st.integers(1, 200),
    part=st.floats(0.001, 1.5),
    is_causal=st.booleans(),
    num_ranges=st.sampled_from([8, 1 << 14]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_least_cost_of_a_pair(
    query: int, key: int, own: int, others: int, part: float, is_causal: bool, num_ranges: int
) -> None:
    """Numbers of queries may be fractions in the bound, so it may be less, but never more."""
    length = own + others
    most = part * length**2
    with patch("benchmarks.lower_bound._NUM_KEYS", num_ranges):
        least = _least_slope(query, key, own, length, most, is_causal=is_causal)
    tried = least_slope_by_trying(query, key, own, length, most, is_causal=is_causal)
    assert least <= tried * (1 + 1e-9)
    if num_ranges > others:
        # One query more or less, of so many.
        assert least >= tried * (1 - 2 / math.sqrt(min(most, length)) - 0.01)
