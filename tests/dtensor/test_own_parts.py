"""This rank's part of a replicated tensor: right on every rank, and the same code on all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx.experimental.proxy_tensor import make_fx

from cp_inductor.dtensor.rules.own_parts import parts_as_data
from cp_inductor.ops.first_of_part import FIRST_OF_PART
from tests.support.packed import in_documents
from tests.support.ranks import fake_rank, run_ranks, world_mesh


def loss_of(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, labels: Tensor, scale: Tensor
) -> Tensor:
    """A loss whose labels are whole, of logits that are scaled by position."""
    logits = in_documents(q, k, v, documents).transpose(1, 2).flatten(2)
    positions = torch.arange(logits.shape[1], dtype=logits.dtype, device=logits.device)
    logits = logits * scale + positions[None, :, None].cos()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# --- Parts ------------------------------------------------------------------------------------


def take_part(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    sharded: DTensor = whole.redistribute(mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(dim)])
    return sharded.to_local()


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("shape", "dim", "is_data"),
    [
        ((12,), 0, True),
        ((3, 8, 5), 1, True),
        ((2, 3, 4), 2, True),
        ((0, 4), 0, False),
        # Parts that differ in length, or none for the last.
        ((11,), 0, False),
        ((3, 2), 1, False),
    ],
)
def test_parts_are_those_of_dtensor(
    rank: int, shape: tuple[int, ...], dim: int, is_data: bool
) -> None:
    tensor = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    with fake_rank(rank, 4):
        mesh = init_device_mesh("cpu", (4,))
        expected = take_part(tensor, mesh, dim)
        with parts_as_data():
            assert torch.equal(take_part(tensor, mesh, dim), expected)  # eager code is DTensor's
            traced = make_fx(lambda t: take_part(t, mesh, dim))(tensor)
        found = traced(tensor)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert bool(traced.graph.find_nodes(op="call_function", target=FIRST_OF_PART)) == is_data


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mesh_in_another_order_than_its_group(rank: int) -> None:
    tensor = torch.arange(8)
    with fake_rank(rank, 2):
        mesh = DeviceMesh("cpu", [1, 0])
        with parts_as_data():
            traced = make_fx(partial(take_part, mesh=mesh, dim=0))(tensor)
        assert torch.equal(traced(tensor), tensor.chunk(2)[1 - rank])
    assert not traced.graph.find_nodes(op="call_function", target=FIRST_OF_PART)


# --- Graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "length"),
    [
        (2, 48),
        pytest.param(3, 47, marks=pytest.mark.long),
        pytest.param(4, 36, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients(world_size: int, length: int) -> None:
    for worst in run_ranks(world_size, _train, length):
        assert worst < 1e-12


def _train(length: int) -> float:
    """Return how far losses and gradients are from those of one process, over two steps."""
    mesh = world_mesh()
    compiled = torch.compile(loss_of, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    worst = 0.0
    for step in range(2):
        torch.manual_seed(step)
        tokens = [torch.randn(1, n, length, 8, dtype=torch.float64) for n in (4, 2, 2)]
        documents = torch.randint(0, 2, (1, length)).cumsum(-1)
        labels = torch.randint(0, 32, (1, length))
        scale = torch.randn(1, length, 1, dtype=torch.float64)
        wholes = [t.clone().requires_grad_() for t in (*tokens, scale)]
        expected = loss_of(*wholes[:3], documents, labels, wholes[3])
        expected.backward()
        shards = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in tokens]
        replicated = distribute_tensor(scale, mesh, [Replicate()]).requires_grad_()
        with implicit_replication():
            loss: Any = compiled(*shards, documents, labels, replicated)
            loss.backward()
        results = [loss, *[t.grad for t in (*shards, replicated)]]
        gradients = [expected, *[t.grad for t in wholes]]
        for result, right in zip(results, gradients, strict=True):
            found = result.full_tensor() if isinstance(result, DTensor) else result
            worst = max(worst, (found - right).abs().max().item())
    return worst
