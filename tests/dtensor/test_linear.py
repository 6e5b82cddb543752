"""Linear layers that keep batch and sequence apart, for a torch whose DTensor cannot join them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cp_inductor
from cp_inductor.dtensor.rules import linear
from tests.support.ranks import run_ranks
from tests.support.reference import assert_close, shard


def check(has_bias: bool, length: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    layer = nn.Linear(6, 4, bias=has_bias)
    x, grad_out = torch.randn(2, length, 6), torch.randn(2, length, 4)
    reference = copy.deepcopy(layer).double()
    expected = reference(leaf := x.double().requires_grad_())
    expected.backward(grad_out.double())
    model = cp_inductor.distribute(nn.Sequential(layer), mesh)
    layer.__class__ = linear.LinearOfBatches  # which `distribute` does on torch 2.11 and 2.12
    sharded = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    out = model(sharded)
    assert out.placements == (Shard(1),)
    out.backward(distribute_tensor(grad_out, mesh, [Shard(1)]))
    assert_close(out.to_local(), shard(expected, rank, world_size, 1), torch.float32)
    assert_close(sharded.grad.to_local(), shard(leaf.grad, rank, world_size, 1), torch.float32)
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        grad = ours.grad.redistribute(placements=[Replicate()]).to_local()
        assert_close(grad, theirs.grad, torch.float32)


@pytest.mark.parametrize("has_bias", [True, False])
def test_numbers_at_even_and_uneven_lengths(has_bias: bool) -> None:
    for length in (6, 7):
        run_ranks(3, check, has_bias, length)


def test_which_layers_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers as they are, and none where DTensor needs no help."""

    class Other(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(2, 2), Other(2, 2)])
    monkeypatch.setattr(linear, "flattens_shards", lambda: True)
    linear.let_linear_layers_take_batches(model)
    assert [type(module) for module in model] == [nn.Linear, Other]
    monkeypatch.setattr(linear, "flattens_shards", lambda: False)
    linear.let_linear_layers_take_batches(model)
    assert [type(module) for module in model] == [linear.LinearOfBatches, Other]
    assert type(pickle.loads(pickle.dumps(model[0]))) is linear.LinearOfBatches
    x = torch.randn(2, 3, 2)
    assert torch.equal(model[0](x), torch.nn.functional.linear(x, model[0].weight, model[0].bias))
