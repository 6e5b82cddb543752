"""Plans of batches over calls that differ: other lengths, and layers that are alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from cp_inductor import batch_plans, reset
from tests.support.packed import difference, draw_documents, in_documents, largest_error
from tests.support.ranks import run_ranks, world_mesh

# --- Lengths ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_lengths_that_change_from_call_to_call() -> None:
    for errors, num_graphs in run_ranks(2, _change_lengths):
        assert max(errors) < 1e-12, errors
        assert num_graphs == 3


def _change_lengths() -> tuple[list[float], int]:
    mesh = world_mesh()
    # From the second length on, Dynamo traces lengths as symbols, by default.
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    errors = [largest_error(compiled, mesh, draw_documents(length)) for length in (24, 16, 7)]
    return errors, counters["cp_inductor"]["sites_planned_at_run_time"]


# --- Layers that are alike --------------------------------------------------------------------


def three_layers(query: Tensor, key: Tensor, value: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Attend thrice by one rule: the first and the last in the same documents."""
    first = in_documents(query, key, value, one)
    second = in_documents(query.sin(), key, value.cos(), other)
    return first + second + in_documents(query.cos(), key.sin(), value, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["cp_aot_eager", pytest.param("cp_inductor", marks=pytest.mark.long)]
)
def test_layers_alike_in_other_documents(backend: str) -> None:
    for error, num_planned in run_ranks(2, _attend_in_layers, backend):
        assert error < 1e-12
        assert num_planned == 2, "layers in the same documents share a plan"


def _attend_in_layers(backend: str) -> tuple[float, int]:
    reset()
    mesh, length = world_mesh(), 301
    torch.manual_seed(4)
    whole = [torch.randn(2, heads, length, 8).double() for heads in (4, 2, 2, 4)]
    documents = [torch.cat([draw_documents(length) for _ in range(2)]) for _ in range(2)]
    compiled = torch.compile(three_layers, backend=backend, fullgraph=True)
    before = counters["cp_inductor"]["batches_planned"]
    error = difference(three_layers, compiled, whole, documents, mesh, of_tables=[Replicate()])
    return error, counters["cp_inductor"]["batches_planned"] - before


# --- Heads on other ranks ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads", [(8, 4), *(pytest.param((n, 4), marks=pytest.mark.long) for n in (4, 16))]
)
def test_beside_tensor_parallelism(heads: tuple[int, int]) -> None:
    """Groups are of the heads that a rank has, which are fewer than the attention has."""
    for error, num_groups in run_ranks(4, _attend_beside_tp, heads):
        assert error < 1e-12
        assert num_groups == 2


def _attend_beside_tp(heads: tuple[int, int]) -> tuple[float, int]:
    mesh, length = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), 301
    torch.manual_seed(1)
    num_heads = (heads[0], heads[1], heads[1], heads[0])
    whole = [torch.randn(2, n, length, 8).double() for n in num_heads]
    documents = torch.cat([draw_documents(length), draw_documents(length) * 3])
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True)
    placements, of_tables = [Shard(2), Shard(1)], [Replicate()] * 2
    error = difference(in_documents, compiled, whole, [documents], mesh, placements, of_tables)
    return error, batch_plans()[-1].num_groups
