"""Lengths that change from call to call: one graph for all that divide by the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.ranks import run_ranks
from tests.test_batches import full, make_batch, make_model

EVEN = (96, 180, 48, 120, 306)
UNEVEN = (97, 181, 49, 115, 301)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size", "backend", "lengths", "num_graphs"),
    [
        ("llama", 2, "cp_aot_eager", EVEN, 1),
        ("llama", 3, "cp_aot_eager", UNEVEN, 2),
    ],
)
def test_a_model_over_many_lengths(
    name: str, world_size: int, backend: str, lengths: tuple[int, ...], num_graphs: int
) -> None:
    for graphs in run_ranks(world_size, _train, name, backend, lengths):
        assert graphs == num_graphs


def _train(name: str, backend: str, lengths: tuple[int, ...]) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, reference = make_model(name), make_model(name)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for step, length in enumerate(lengths):
        batch = make_batch(step, length)
        expected = reference(**batch, use_cache=False)
        expected.loss.backward()
        sharded = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in batch.items()}
        with implicit_replication():
            result: Any = compiled(**sharded, use_cache=False)
            result.loss.backward()
        assert result.logits.placements == (Shard(1),)
        torch.testing.assert_close(full(result.loss), expected.loss, rtol=1e-6, atol=0)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-6, atol=1e-9)
            p.grad = q.grad = None
    return int(counters["stats"]["unique_graphs"])
