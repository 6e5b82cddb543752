"""Caches of keys and values: a prefill over a sharded sequence fills them with shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import UnsupportedPlacement
from cp_inductor.dtensor.rules.single_ops import complete_single_ops
from tests.support import models
from tests.support.combinations import whole
from tests.support.ranks import on_ranks, world_mesh


@pytest.mark.slow
@on_ranks(2)
def test_a_prefill_fills_a_cache_of_shards() -> None:
    """`model(input_ids, labels=...)` with all defaults, of which a cache is one."""
    transformers = pytest.importorskip("transformers")
    mesh, model = world_mesh(), models.make("Llama").double()
    ids = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    cp_inductor.parallelize(model, mesh)
    compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True)
    shards = distribute_tensor(ids, mesh, [Shard(1)])
    with implicit_replication():
        result = compiled(input_ids=shards, labels=shards)
        result.loss.backward()
    assert (whole(result.loss) - expected.loss).abs() < 1e-5
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(whole(parameter.grad), gradient)
    for layer, other in zip(
        result.past_key_values.layers, expected.past_key_values.layers, strict=True
    ):
        for actual, wanted in ((layer.keys, other.keys), (layer.values, other.values)):
            assert actual.placements == (Shard(2),)
            torch.testing.assert_close(whole(actual), wanted)

    fixed = transformers.StaticCache(config=model.config, max_cache_len=40)
    refused = pytest.raises(UnsupportedPlacement, match="use a cache that grows")
    with implicit_replication(), torch.no_grad(), refused:
        compiled(input_ids=shards, past_key_values=fixed)


def test_cat_with_empty_tensors(mesh: DeviceMesh) -> None:
    complete_single_ops()
    shards = distribute_tensor(torch.arange(24.0).view(2, 3, 4), mesh, [Shard(1)])
    with implicit_replication():
        alone = torch.cat([torch.empty(0), shards], dim=-2)
        twice = torch.cat([torch.empty(0), shards, torch.empty(0), shards], dim=0)
    assert (alone.placements, alone.shape) == ((Shard(1),), (2, 3, 4))
    assert alone.to_local().equal(shards.to_local())
    assert alone.to_local().data_ptr() != shards.to_local().data_ptr()
    assert (twice.placements, twice.shape) == ((Shard(1),), (4, 3, 4))


@on_ranks(3)
def test_ranks_branch_alike() -> None:
    mesh = world_mesh()
    cp_inductor.parallelize(torch.nn.Linear(2, 2), mesh)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :2] = 0
    shards = distribute_tensor(mask, mesh, [Shard(1)])
    conditions = [(shards == 1).all(), shards.bool().all(), (shards == 1).all(-1).all()]
    assert not any(bool(condition) for condition in conditions)
    for _ in range(2):
        assert (shards == 0).any()
        assert (shards == 0).any().item() is True
        assert not (shards == 2).any()
        assert distribute_tensor(torch.tensor([True]), mesh, [Shard(0)])  # on the first rank
        assert distribute_tensor(torch.tensor(True), mesh, [Replicate()])
    assert int(shards.sum()) == int(mask.sum())  # of which a tensor may be made


@on_ranks(2)
def test_ranks_draw_what_the_first_draws() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    cp_inductor.parallelize(torch.nn.Linear(2, 2), mesh)
    torch.manual_seed(rank)
    parts = torch.full((6, 50), 0.02)
    expected = torch.multinomial(parts, 3, generator=torch.Generator().manual_seed(0))
    whole = distribute_tensor(parts, mesh, [Replicate()])
    drawn = torch.multinomial(whole, 3)
    assert torch.equal(drawn.to_local(), expected)
    own = torch.Generator().manual_seed(rank)
    own_drawn = torch.multinomial(whole, 3, generator=own).to_local()
    assert torch.equal(own_drawn, expected) == (rank == 0)
