"""Caches of keys and values: a prefill over a sharded sequence fills them with shards."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import UnsupportedPlacement
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
