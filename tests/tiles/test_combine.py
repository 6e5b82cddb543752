"""Partial results combined: the same as over all keys, in every dtype, whatever each has seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cp_inductor.tiles.combine import MAX_COMBINED, combine
from cp_inductor.tiles.kernels import Partial
from tests.support.reference import assert_close, attend, lse_in_float64, make_qkv


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
