"""What `benchmarks/lower_bound.py` says that some rank must receive: no plan receives less."""

from __future__ import annotations

import math
from itertools import product

import pytest

from benchmarks.lower_bound import lower_bound
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
