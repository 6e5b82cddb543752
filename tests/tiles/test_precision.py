"""No strategy is further off than one device where attention cancels: sinks, and one key of all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cp_inductor.tiles.combine import MAX_COMBINED, combine
from cp_inductor.tiles.kernels import Partial
from cp_inductor.tiles.stand_in import make_stand_in, make_words
from tests.support.precision import measure
from tests.support.reference import assert_close, attend, lse_in_float64, make_qkv

HALF = (torch.bfloat16, torch.float16)

# By how much more than one device may a strategy be off: the ratio of the root mean squares.
MOST = 1.25


@pytest.mark.parametrize(
    ("name", "dtype", "world_size"),
    [
        ("sink", "bfloat16", 3),
        ("sink", "float16", 2),
        ("each token itself", "bfloat16", 2),
        ("two of a gradient", "bfloat16", 3),
    ],
)
def test_gradients_that_cancel(name: str, dtype: str, world_size: int) -> None:
    """The truth is 0 or next to it: what is found is the rounding of float32."""
    for strategy, results in measure(name, dtype, world_size, 101).items():
        for result in ("dq", "dk"):
            assert results[result].rms <= MOST, (strategy, result, results[result])
            assert results[result].largest <= MOST, (strategy, result, results[result])


@pytest.mark.parametrize("name", ["one huge key", "sink of a model"])
def test_what_no_partial_rounds_is_as_of_one_device(name: str) -> None:
    """Split by heads, rows are whole, and out is made up on the rank that differentiates them."""
    (ratios,) = measure(name, "bfloat16", 3, 101, ["heads"]).values()
    for result, errors in ratios.items():
        assert errors.rms <= 1.05, (result, errors)


def make_rows(
    dtype: torch.dtype, head_dim: int, num_counting: int, scales: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return out and a gradient (1, 1, 64, D) with so many coordinates that are not 0."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (1, 1, 64, head_dim)
    out, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**scale
        for scale in scales
    )
    order = torch.rand(shape, generator=generator).argsort(-1)
    return out.to(dtype), torch.where(order < num_counting, grad, 0.0).to(dtype)


def assert_stands_in(out: Tensor, grad: Tensor, found: Tensor) -> None:
    """Compare inner products with the gradient: float32's rounding of a sum, in any order.

    In float16, also by half its smallest number, at the third largest coordinate.
    """
    out, grad, found = (tensor.double() for tensor in (out, grad, found))
    bound = 2.0**-21 * (out * grad).abs().sum(-1)
    if grad.shape[-1] > 2:
        bound += 2.0**-25 * grad.abs().topk(3).values[..., -1]
    assert found.isfinite().all()
    assert (((out - found) * grad).sum(-1).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@given(
    head_dim=st.integers(1, 130),
    num_counting=st.integers(0, 5) | st.just(130),
    scales=st.tuples(st.floats(-24, 12), st.floats(-24, 12)),
)
@settings(max_examples=60, deadline=None)
def test_a_stand_in_has_the_inner_products_of_out(
    dtype: torch.dtype, head_dim: int, num_counting: int, scales: tuple[float, float]
) -> None:
    out, grad = make_rows(dtype, head_dim, num_counting, scales)
    assert_stands_in(out, grad, make_stand_in(make_words(out, grad), grad))


@pytest.mark.parametrize("dtype", HALF)
def test_numbers_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    # Numbers in bfloat16 that float32 can still add up: one device overflows there, too.
    largest = torch.finfo(dtype).max / (1 if dtype is torch.float16 else 2**8)
    smallest = torch.finfo(dtype).smallest_normal
    for of_out, of_grad in ((largest, 1.0), (1.0, smallest), (smallest, 1.0), (largest, smallest)):
        out = torch.full((1, 1, 2, 64), of_out, dtype=dtype)
        grad = torch.full((1, 1, 2, 64), of_grad, dtype=dtype)
        grad[:, :, 1, ::2] *= -1
        assert_stands_in(out, grad, make_stand_in(make_words(out, grad), grad))


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_not_finite_does_not_become_so(dtype: torch.dtype) -> None:
    for value in (torch.inf, torch.nan):
        out, grad = make_rows(dtype, 8, 8, (0, 0))
        out[:, :, 3, 5] = value
        found = make_stand_in(make_words(out, grad), grad)
        assert found[:, :, 3].isfinite().logical_not().any()
        assert found[:, :, 4:].isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_counting", range(4))
def test_nan_stays_where_the_gradient_is_zero(dtype: torch.dtype, num_counting: int) -> None:
    out, grad = make_rows(dtype, 8, num_counting, (0, 0))
    out[:, :, 3] = torch.nan
    found = make_stand_in(make_words(out, grad), grad)
    assert (found * grad).sum(-1).isnan().equal((out * grad).sum(-1).isnan())


@pytest.mark.slow
def test_inductor_does_not_take_the_rounding_back() -> None:
    """It has casts there and back for nothing, and then nothing is left to be corrected."""
    out, grad = make_rows(torch.bfloat16, 64, 64, (0, 0))
    out[:, :, ::3], grad[:, :, ::4, 2:] = 1.0, 0.0
    words = make_words(out, grad)
    found = torch.compile(make_stand_in)(torch.compile(make_words)(out, grad), grad)
    assert_stands_in(out, grad, found)
    assert_stands_in(out, grad, make_stand_in(words, grad))
    # A gradient that the same kernel computes is not taken as it was before it was rounded.
    words = torch.compile(lambda out, grad: make_words(out, grad * 0.3))(out, grad)
    grad = grad * 0.3
    assert_stands_in(out, grad, make_stand_in(words, grad))


# --- Partial results combined: the same as over all keys, in every dtype, whatever each has seen.


def partials_of(num_keys: list[int], dtype: torch.dtype) -> tuple[list[Partial], Tensor]:
    """Partials over consecutive spans of keys, and attention over all of them."""
    query, key, value, _ = make_qkv(5, kv_len=sum(num_keys), dtype=dtype)
    partials = []
    for part_key, part_value in zip(key.split(num_keys, 2), value.split(num_keys, 2), strict=True):
        out = attend(query, part_key, part_value).to(dtype)
        lse = lse_in_float64(query, part_key, is_causal=False)
        partials.append(Partial(out, lse.to(torch.promote_types(dtype, torch.float32))))
    return partials, attend(query, key, value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_partials", [1, 2, MAX_COMBINED, MAX_COMBINED + 1, 3 * MAX_COMBINED])
def test_combine(num_partials: int, dtype: torch.dtype) -> None:
    partials, expected = partials_of([1 + i % 3 for i in range(num_partials)], dtype)
    out, lse = combine(partials)
    assert_close(out, expected, dtype)
    everything = torch.stack([partial.lse.double() for partial in partials]).logsumexp(0)
    assert (lse.double() - everything).abs().max() < 1e-5
