"""Plans of batches over calls that differ: other lengths, other batches than those prepared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor import batch_plans, prepare, reset
from cp_inductor.batches.plans import copy_numbers, numbers_of, pin
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


# --- Batches that are prepared ----------------------------------------------------------------


def of_whole_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    whole = documents.full_tensor() if isinstance(documents, DTensor) else documents
    return in_documents(query, key, value, whole)


def of_random_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    return in_documents(query, key, value, documents + torch.randint_like(documents, 1))


@pytest.mark.slow
def test_what_is_prepared_is_a_function_of_the_batch() -> None:
    for prepared in run_ranks(2, _prepare):
        # The batch itself; one of another length, of another dtype, and of another model.
        assert prepared == [1, 0, 0, 0]


def _prepare() -> list[int]:
    mesh, batch = world_mesh(), {"documents": draw_documents(24)}
    reset()  # other tests were here before, in this process
    compiled = torch.compile(of_whole_documents, backend="cp_aot_eager", fullgraph=True)
    largest_error(compiled, mesh, batch["documents"])
    batch = {"documents": draw_documents(24) + 7}
    found = [_plans_made_ahead(batch)]
    planned = counters["cp_inductor"]["batches_planned"]
    assert largest_error(compiled, mesh, batch["documents"]) < 1e-12
    assert counters["cp_inductor"]["batches_planned"] == planned, "the plan is found"
    found.append(_plans_made_ahead({"documents": draw_documents(25)}))
    found.append(_plans_made_ahead({"documents": draw_documents(24).int()}))
    reset()
    compiled = torch.compile(of_random_documents, backend="cp_aot_eager", fullgraph=True)
    largest_error(compiled, mesh, batch["documents"])
    state = torch.get_rng_state()
    found.append(_plans_made_ahead(batch))
    assert torch.equal(state, torch.get_rng_state())
    return found


def test_what_goes_to_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned once, and what is pinned is what is copied; played on the CPU."""
    tables = [torch.arange(256)[None] // 50]
    found = numbers_of(tables, "Eq(t0(b,q),t0(b,k))", 1, (256, 256), (2, 2), 1, 2, 0)
    pinned: list[Tensor] = []

    def pin_memory(self: Tensor) -> Tensor:
        pinned.append(self.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    pin(found)
    pin(found)
    assert len(pinned) == 1
    copied = copy_numbers(found, torch.device("cpu"))
    assert torch.equal(copied, torch.from_numpy(found.numbers))
    assert copied.data_ptr() != pinned[0].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_numbers_on_a_gpu() -> None:
    tables = [torch.arange(4096)[None] // 50]
    found = numbers_of(tables, "Eq(t0(b,q),t0(b,k))", 1, (4096, 4096), (2, 2), 1, 2, 0)
    pin(found)
    copied = copy_numbers(found, torch.device("cuda"))
    assert torch.equal(copied.cpu(), torch.from_numpy(found.numbers))


def _plans_made_ahead(batch: dict[str, Tensor]) -> int:
    before = counters["cp_inductor"]["plans_prepared"]
    prepare(batch)
    return counters["cp_inductor"]["plans_prepared"] - before
