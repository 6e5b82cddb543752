"""The op pair on gloo ranks against float64 attention: every rank, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.ops.attention import attention
from cp_inductor.plan import Recipe, resolve
from cp_inductor.plan.strategies import TABLE
from cp_inductor.tiles.combine import MAX_COMBINED, combine, sum_grads
from cp_inductor.tiles.kernels import Partial
from tests.support.ranks import run_ranks
from tests.support.reference import (
    assert_close,
    assert_shards_close,
    attend,
    attend_with_grads,
    make_qkv,
    shard,
)


@dataclass(frozen=True)
class Case:
    """One attention. Lengths are of the whole sequence, of 7 tokens per rank if not given."""

    name: str
    seq_len: int | None = None
    kv_len: int | None = None
    is_causal: bool = True
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    is_transposed: bool = False
    shape: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("causal"),
    Case("full", is_causal=False),
    Case("float64", dtype=torch.float64),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("float16", dtype=torch.float16),
    Case("bfloat16 full", dtype=torch.bfloat16, is_causal=False),
    Case("gqa", shape={"num_kv_heads": 2}),
    Case("mqa bfloat16", dtype=torch.bfloat16, shape={"num_kv_heads": 1}),
    Case("cross, more keys", 21, 72, is_causal=False),
    Case("cross, fewer keys, gqa", 67, 10, is_causal=False, shape={"num_kv_heads": 2}),
    Case("fewer tokens than ranks", 1),
    Case("three tokens", 3),
    Case("batch 1, head dim 80", shape={"batch": 1, "head_dim": 80}),
    Case("scale", scale=0.3),
    Case("not contiguous", is_transposed=True, shape={"num_kv_heads": 2}),
    Case("long", 1000, shape={"batch": 1, "head_dim": 33, "num_kv_heads": 2}),
    Case("long, prime", 1021, shape={"batch": 1, "num_kv_heads": 2}),
    Case("long, prime, bfloat16", 1021, dtype=torch.bfloat16, shape={"batch": 1}),
    Case("long, prime, full", 1021, 523, is_causal=False, shape={"batch": 1}),
)

# What differs between them: who computes what, how often it is exchanged, and what is kept.
PLANS = (
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
assert {plan["strategy"] for plan in PLANS} >= TABLE.keys(), "a strategy is computed nowhere here"


def run_cases() -> None:
    failures = []
    for case in CASES:
        seq_len = case.seq_len or 7 * dist.get_world_size()
        whole = make_qkv(seq_len, kv_len=case.kv_len, dtype=case.dtype, **case.shape)
        expected = attend_with_grads(*whole, is_causal=case.is_causal, scale=case.scale)
        for plan in PLANS:
            try:
                run_plan(case, plan, whole, expected)
            except UnsupportedStrategy:
                assert plan["strategy"].startswith("heads"), case.name
            except AssertionError as error:
                failures.append(f"{case.name}, {plan}: {error}")
    assert not failures, "\n".join(failures)


def run_plan(
    case: Case,
    plan: dict[str, Any],
    whole: tuple[Tensor, ...],
    expected: tuple[Tensor, ...],
) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    *leaves, grad_out = (piece_of(tensor, case) for tensor in whole)
    for leaf in leaves:
        leaf.requires_grad_()
    recipe = Recipe(
        world_size=world_size,
        query_length=whole[0].shape[2],
        key_length=whole[1].shape[2],
        num_heads=whole[0].shape[1],
        num_kv_heads=whole[1].shape[1],
        head_dim=whole[0].shape[3],
        itemsize=case.dtype.itemsize,
        rule="causal" if case.is_causal else "full",
        **plan,
    )
    recipe = resolve(recipe, site=case.name)
    group_name = dist.group.WORLD.group_name
    how = (recipe.format(), rank, case.scale, "flash_cpu", group_name, 0.0, False)
    out, _, *kept = attention(*leaves, [], *how)
    assert not any(tensor.requires_grad for tensor in kept)
    assert len(kept) <= recipe.keep
    grads = torch.autograd.grad(out, leaves, grad_out)
    assert_shards_close((out.detach(), *grads), expected, case.dtype)


def piece_of(tensor: Tensor, case: Case) -> Tensor:
    piece = shard(tensor, dist.get_rank(), dist.get_world_size())
    if case.is_transposed:  # (B, S, H, D) in memory, as projections leave it
        return piece.transpose(1, 2).contiguous().transpose(1, 2)
    return piece.contiguous()


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_against_float64(world_size: int) -> None:
    run_ranks(world_size, run_cases)


def partials_of(num_keys: list[int], dtype: torch.dtype) -> tuple[list[Partial], Tensor]:
    """Partials over consecutive spans of keys, and attention over all of them."""
    query, key, value, _ = make_qkv(5, kv_len=sum(num_keys), dtype=dtype)
    partials = []
    for part_key, part_value in zip(key.split(num_keys, 2), value.split(num_keys, 2), strict=True):
        scores = query.double() @ part_key.double().mT * query.shape[-1] ** -0.5
        out = attend(query, part_key, part_value).to(dtype)
        lse_dtype = torch.promote_types(dtype, torch.float32)
        partials.append(Partial(out, scores.logsumexp(-1).to(lse_dtype)))
    return partials, attend(query, key, value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_partials", [1, 2, MAX_COMBINED, MAX_COMBINED + 1, 3 * MAX_COMBINED])
def test_combine(num_partials: int, dtype: torch.dtype) -> None:
    partials, expected = partials_of([1 + i % 3 for i in range(num_partials)], dtype)
    out, lse = combine(partials)
    assert_close(out, expected, dtype)
    everything = torch.stack([partial.lse.double() for partial in partials]).logsumexp(0)
    assert (lse.double() - everything).abs().max() < 1e-5


@pytest.mark.parametrize("num_partials", [2, MAX_COMBINED + 3])
def test_combine_skips_rows_that_saw_no_key(num_partials: int) -> None:
    partials, _ = partials_of([2] * num_partials, torch.float32)
    blind = partials[1]
    blind.lse[0] = -float("inf")
    blind.out[0] = 7.0
    rest = [partial for index, partial in enumerate(partials) if index != 1]
    out, lse = combine(partials)
    torch.testing.assert_close(out[0], combine(rest).out[0])
    torch.testing.assert_close(lse[0], combine(rest).lse[0])


def test_combine_of_rows_that_never_saw_a_key_is_zero() -> None:
    partials, _ = partials_of([2, 2], torch.float32)
    for partial in partials:
        partial.lse[1] = -float("inf")
    out, lse = combine(partials)
    assert out[1].eq(0).all() and lse[1].eq(-float("inf")).all()
    assert out[0].isfinite().all()


def test_combine_does_not_overflow() -> None:
    partials, _ = partials_of([2, 2], torch.float32)
    far = [Partial(partial.out, partial.lse + 1e4) for partial in partials]
    exact = combine([Partial(partial.out.double(), partial.lse.double()) for partial in far])
    assert_close(combine(far).out, exact.out, torch.float32)


@given(
    num_keys=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    blind=st.sets(st.integers(0, 19)),
    offset=st.floats(-50, 50),
)
@settings(max_examples=60, deadline=None)
def test_any_split_of_the_keys_combines_to_the_same(
    num_keys: list[int], blind: set[int], offset: float
) -> None:
    partials, expected = partials_of(num_keys, torch.float64)
    # Tiles of no keys at all may stand anywhere, and a common offset of all scores cancels.
    empty = Partial(torch.zeros_like(partials[0].out), torch.full_like(partials[0].lse, -math.inf))
    moved = [Partial(out, lse + offset) for out, lse in partials]
    for place in sorted(blind):
        moved.insert(min(place, len(moved)), empty)
    out, lse = combine(moved)
    assert_close(out, expected, torch.float64)
    whole = torch.stack([partial.lse for partial in partials]).logsumexp(0)
    torch.testing.assert_close(lse, whole + offset)


def test_sum_grads_sums_in_float32() -> None:
    # In bfloat16, 256 + 1 = 256: a running sum in the input dtype would lose every one.
    grads = [torch.tensor([256.0]).bfloat16(), *[torch.tensor([1.0]).bfloat16()] * 8]
    assert sum_grads(grads).item() == 264
