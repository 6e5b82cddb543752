"""Sums, products and extremes that accumulate along a sharded dim, beside those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor.dtensor.rules import register_rules
from tests.support.ranks import on_ranks

OPS = (torch.cumsum, torch.logcumsumexp, torch.cumprod)


def check_extremes(mesh: DeviceMesh, whole: Tensor) -> None:
    """Values and indices, also of equal elements, and of what is not a number."""
    whole[0, :, 2] = whole[0, :, 2].round()
    for op in (torch.cummax, torch.cummin):
        leaf = whole.clone().requires_grad_()
        shards = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        expected, results = op(leaf, 1), op(shards, 1)
        for one, other in zip(results, expected, strict=True):
            assert one.placements == (Shard(1),)
            torch.testing.assert_close(one.full_tensor(), other, equal_nan=True)
        weights = torch.rand_like(whole)
        (expected[0] * weights).nansum().backward()
        with implicit_replication():
            (results[0].full_tensor() * weights).nansum().backward()
        torch.testing.assert_close(shards.grad.full_tensor(), leaf.grad)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4, 9, 11])
@on_ranks(3)
def test_accumulating_along_a_sharded_dim(length: int) -> None:
    register_rules()
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(length)).double()
    whole[1, length // 2, 1] = float("nan")
    for op in OPS:
        expected_leaf = whole.clone().requires_grad_()
        shards = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        with CommDebugMode() as counted:
            results = op(shards, 1)
        assert counted.get_total_counts() == 1, op
        expected = op(expected_leaf, 1)
        assert results.placements == (Shard(1),)
        torch.testing.assert_close(results.full_tensor(), expected, equal_nan=True)
        with implicit_replication():  # for what torch's formulas make
            results.full_tensor().nansum().backward()
        expected.nansum().backward()
        torch.testing.assert_close(shards.grad.full_tensor(), expected_leaf.grad, equal_nan=True)
    check_extremes(mesh, whole)
    numbers = torch.randint(5, (2, length), generator=torch.Generator().manual_seed(length))
    for value in (numbers, numbers > 2):
        total = distribute_tensor(value, mesh, [Shard(1)]).cumsum(-1)
        assert total.full_tensor().equal(value.cumsum(-1))
        other = distribute_tensor(value, mesh, [Shard(1)]).cumsum(0, dtype=torch.int32)
        assert other.full_tensor().equal(value.cumsum(0, dtype=torch.int32))
        copies = distribute_tensor(value, mesh, [Replicate()]).cumsum(1)
        assert copies.full_tensor().equal(value.cumsum(1))
