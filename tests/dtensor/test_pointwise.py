"""Ops that compute elements alone, on DTensors: angles and complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cp_inductor.backend  # noqa: F401  registers the rules
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_complex_numbers_stay_sharded(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    first, second = torch.rand(2, 7, 4), torch.rand(2, 7, 4)
    sharded = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in (first, second)]
    for op in (torch.polar, torch.complex):
        made = op(*sharded)
        assert made.placements == (Shard(1),)
        torch.testing.assert_close(made.full_tensor(), op(first, second), rtol=0, atol=0)
    # What is broadcast has other dims: (7, 4) sharded along 0 is beside (2, 7, 4) sharded along 1.
    whole = second[0]
    narrow = distribute_tensor(whole, mesh, [Shard(0)])
    made = torch.polar(sharded[0], narrow)
    assert isinstance(made, DTensor)
    torch.testing.assert_close(made.full_tensor(), torch.polar(first, whole), rtol=0, atol=0)
    both = torch.polar(sharded[0], distribute_tensor(second, mesh, [Replicate()]))
    torch.testing.assert_close(both.full_tensor(), torch.polar(first, second), rtol=0, atol=0)
