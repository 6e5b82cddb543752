"""Partial results combined: the same as over all keys, in every dtype, whatever each has seen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cp_inductor.tiles.combine import MAX_COMBINED, combine, sum_grads
from cp_inductor.tiles.kernels import Partial
from tests.support.reference import assert_close, attend, make_qkv


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


def test_combine_of_rows_that_never_saw_a_key_is_zero() -> None:
    partials, _ = partials_of([2, 2], torch.float32)
    for partial in partials:
        partial.lse[1] = -float("inf")
    out, lse = combine(partials)
    assert out[1].eq(0).all() and lse[1].eq(-float("inf")).all()
    assert out[0].isfinite().all()


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
