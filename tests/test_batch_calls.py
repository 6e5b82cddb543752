"""Plans of batches over calls that differ: other lengths, other batches than those prepared."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.ranks import run_ranks


def in_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    place = torch.arange(query.shape[2], device=query.device)
    mask = (documents[:, None, :, None] == documents[:, None, None]) & (place[:, None] >= place)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def draw_documents(length: int) -> Tensor:
    return (torch.rand(1, length) < 0.1).cumsum(-1)


def largest_error(compiled, mesh: DeviceMesh, documents: Tensor) -> float:  # type: ignore[no-untyped-def]
    """Return how far output and gradients are from those of one process, in float64."""
    length = documents.shape[1]
    whole = [torch.randn(1, 2, length, 8).double() for _ in range(4)]
    leaves = [one.clone().requires_grad_() for one in whole[:3]]
    expected = in_documents(*leaves, documents)
    expected.backward(whole[3])
    *shards, grad_out = (distribute_tensor(one, mesh, [Shard(2)]) for one in whole)
    for one in shards:
        one.requires_grad_()
    table = distribute_tensor(documents, mesh, [Shard(1)])
    with implicit_replication():
        out = compiled(*shards, table)
    out.backward(grad_out)
    pairs = [
        (out, expected),
        *((one.grad, leaf.grad) for one, leaf in zip(shards, leaves, strict=True)),
    ]
    return max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)


# --- Lengths ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_lengths_that_change_from_call_to_call() -> None:
    for errors, num_graphs in run_ranks(2, _change_lengths):
        assert max(errors) < 1e-12, errors
        assert num_graphs == 3


def _change_lengths() -> tuple[list[float], int]:
    mesh = make_mesh()
    # From the second length on, Dynamo traces lengths as symbols, by default.
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    errors = [largest_error(compiled, mesh, draw_documents(length)) for length in (24, 16, 7)]
    return errors, counters["cp_inductor"]["sites_planned_at_run_time"]
