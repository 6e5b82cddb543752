"""Attentions under every plan, mask and dtype against float64: a table of them, and random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from cp_inductor.plan.strategies import TABLE
from cp_inductor.tiles import masked_tiles
from tests.support.random_attention import (
    MASKS,
    PLAIN,
    Whole,
    an_attention,
    attend_exactly,
    attend_sharded,
    blocks_of,
    check,
    check_plans,
    make_whole,
    plan_of,
)

NUM_SEEDS, AT_ONCE = 80, 10  # of which about half have a plan


# What differs between them: who computes what, how often it is exchanged, and what is kept.
PLANS: tuple[dict[str, Any], ...] = (
    {"strategy": "auto"},
    {"strategy": "ring"},
    {"strategy": "allgather"},
    {"strategy": "rows", "stages": 1},
    {"strategy": "rows", "stages": 3, "keep": 2},
    {"strategy": "blocks", "stages": 1},
    {"strategy": "blocks", "stages": 2, "keep": 1},
    {"strategy": "blocks", "stages": 5, "chunks": 6},
    {"strategy": "heads", "stages": 1},
    {"strategy": "heads", "stages": 2, "keep": 1},
    {"strategy": "heads2+blocks", "stages": 2},
    {"strategy": "heads_own", "stages": 2, "late": 1},
    {"strategy": "heads_own", "stages": 1, "keep": 9},
    {"strategy": "heads_own_forward", "stages": 2},
    {"strategy": "heads2_own+blocks", "stages": 2, "late": 1},
)
PLANS_UNDER_MASKS: tuple[dict[str, Any], ...] = (
    {"strategy": "auto"},
    {"strategy": "allgather"},
    {"strategy": "rows", "stages": 2, "chunks": 4, "keep": 1},
    {"strategy": "blocks", "stages": 2, "chunks": 6, "keep": 1},
    {"strategy": "blocks", "stages": 1, "chunks": 16},
    {"strategy": "heads", "stages": 1, "chunks": 4},
)
assert {plan["strategy"] for plan in PLANS} >= TABLE.keys(), "a strategy is computed nowhere here"

FULL, HALF = {"mask": "full"}, {"dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "float64": {},
    "bfloat16": HALF,
    "float16": {"dtype": "float16"},
    "bfloat16 full": {**HALF, **FULL},
    "mqa bfloat16": {**HALF, "num_kv_heads": 1},
    "cross, more keys": {"dtype": "float32", "kv_len": 72, **FULL},
    "cross, fewer keys, gqa": {"seq_len": 67, "kv_len": 10, "num_kv_heads": 2, **FULL},
    # On 4 ranks, the neighbour of rank 0 has none, and hands on what passes.
    "three tokens": {"seq_len": 3, "dtype": "float32", **FULL},
    "fewer tokens than ranks": {"seq_len": 1},
    "batch 1, head dim 80": {"batch": 1, "head_dim": 80, "dtype": "float32"},
    "scale": {"scale": 0.3, "dtype": "float32"},
    "dropout": {"dropout_p": 0.3, "num_kv_heads": 2},
    "dropout, full": {"dropout_p": 0.3, "num_heads": 6, "num_kv_heads": 6, "seq_len": 29, **FULL},
    "not contiguous": {"strides": ("tokens before heads",) * 4, "num_kv_heads": 2},
    "long, prime": {"seq_len": 1021, "head_dim": 33, "batch": 1, "num_kv_heads": 2, **HALF},
    "long, prime, full": {"seq_len": 1021, "kv_len": 523, "batch": 1, "dtype": "float32", **FULL},
}
OF_131 = {"seq_len": 131}
CASES_UNDER_MASKS: dict[str, dict[str, Any]] = {
    **{name: {**OF_131, "mask": name} for name in MASKS if name not in ("full", "causal")},
    "window, long": {"mask": "window", "seq_len": 521, "batch": 1},
    "both sides, gqa": {**OF_131, "mask": "both sides", "num_kv_heads": 2},
    "prefix, float32": {**OF_131, "mask": "prefix", "dtype": "float32"},
    "two documents, mqa": {**OF_131, "mask": "two documents", "num_kv_heads": 1},
    "documents, bfloat16": {**OF_131, "mask": "documents", **HALF},
    "causal table, bfloat16": {**OF_131, "mask": "causal table", **HALF},
    "nothing, float32": {**OF_131, "mask": "nothing", "dtype": "float32"},
    "window, dropout, bfloat16": {"mask": "window", "dropout_p": 0.3, "num_kv_heads": 2, **HALF},
    "padding, few keys": {"mask": "padding", "seq_len": 67, "kv_len": 19},
    "causal, more keys": {"mask": "causal", "seq_len": 67, "kv_len": 99},
    "causal, fewer keys": {"mask": "causal", "seq_len": 67, "kv_len": 19},
    "window, fewer tokens than ranks": {"mask": "window", "seq_len": 2},
}


# In turns on three numbers of ranks; random ones have all.
ON_WORLDS = [
    (name, (3, 4, 2)[number % 3]) for number, name in enumerate([*CASES, *CASES_UNDER_MASKS])
]


@pytest.mark.parametrize(("name", "world_size"), ON_WORLDS)
def test_against_float64(name: str, world_size: int) -> None:
    sizes = {"batch": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 20, "seq_len": 21}
    sizes |= {**CASES, **CASES_UNDER_MASKS}[name]
    sizes = {"kv_len": sizes["seq_len"], **sizes, "world_size": world_size}
    check_plans(replace(PLAIN, **sizes), PLANS if name in CASES else PLANS_UNDER_MASKS)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, AT_ONCE))
def test_random_attentions(first: int) -> None:
    kinds = [check(an_attention(seed)) for seed in range(first, first + AT_ONCE)]
    assert set(kinds) != {"refused"}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("scale", [0.0, -0.3, -30.0])
def test_a_scale_that_is_not_positive(scale: float, dtype: str) -> None:
    """The kernel of the CPU masks before it scales: -inf times 0 is NaN, times less is +inf."""
    for mask in ("causal", "full", "window"):
        check(replace(PLAIN, scale=scale, dtype=dtype, mask=mask))


def test_a_sum_over_parts_of_a_tile_is_not_rounded_before_it_is_all() -> None:
    """256 + 1 is 256 in bfloat16, and 257 + 1 is 258: rank 0 has the first two, rank 1 the last."""
    case = replace(
        PLAIN, dtype="bfloat16", num_heads=1, seq_len=8, kv_len=8, inputs="zeros", mask="bias"
    )
    whole = make_whole(case)
    assert whole.table is not None
    *inputs, grad_out = whole.inputs
    grad_out = grad_out.clone()
    grad_out[:, :, 0], grad_out[:, :, 1], grad_out[:, :, 7] = 256.0, 1.0, 1.0
    nothing = torch.zeros_like(whole.table)
    whole = Whole((*inputs, grad_out), nothing, whole.allowed, torch.zeros_like(whole.bias))
    with blocks_of(1), mock.patch.object(masked_tiles, "MAX_BIAS", 1):
        (*_, dv, _), _ = attend_sharded(case, whole, plan_of(case))
    assert dv is not None
    assert dv.eq(258 / 8).all(), dv


def test_tiles_in_plain_operations_are_not_rounded() -> None:
    """Where no kernel serves, as for a bias with a gradient, all is rounded once, at the end."""
    case = replace(PLAIN, dtype="bfloat16", mask="learned bias")
    whole = make_whole(case)
    exact, *_ = attend_exactly(case, whole).results
    outs = [out for out, *_ in attend_sharded(case, whole, plan_of(case)) if out is not None]
    # float32 is next to the middle of two such numbers now and then.
    assert torch.cat(outs, 2).eq(exact.bfloat16()).double().mean() > 0.99


@pytest.mark.parametrize(("num_nodes", "ranks", "rest"), [(2, 2, "blocks"), (3, 2, "rows")])
def test_ranks_that_pass_on_inputs_and_results(num_nodes: int, ranks: int, rest: str) -> None:
    kinds = set()
    for seed in range(100, 116):
        case = replace(
            an_attention(seed),
            world_size=num_nodes * ranks,
            strategy=f"nodes{num_nodes}+{rest}",
            num_heads=num_nodes * 2,
            num_kv_heads=num_nodes if seed % 3 else 1,
            late=0,
        )
        kinds.add(check(case))
    assert len(kinds - {"refused"}) > 4


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 10])
def test_random_attentions_in_small_blocks(first: int) -> None:
    """Tiles of many blocks, as those of long sequences are."""
    names = [name for name in MASKS if name not in ("full", "causal")]
    with blocks_of(16):
        kinds = [
            check(
                replace(an_attention(seed), mask=names[seed % len(names)], seq_len=101, kv_len=101)
            )
            for seed in range(first, first + 10)
        ]
    assert set(kinds) != {"refused"}
