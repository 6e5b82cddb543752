"""Batches that a thread plans while those before them are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor import prepared, reset
from cp_inductor.batches.plans import HashedTables, copy_numbers, numbers_of, pin
from tests.support.packed import draw_documents, in_documents, largest_error, make_batch, make_model
from tests.support.ranks import on_ranks, world_mesh


@pytest.mark.slow
@on_ranks(2)
def test_a_loader_is_prepared_while_its_batches_are_used() -> None:
    reset()  # other tests were here before, in this process, and their attentions are remembered
    mesh = world_mesh()
    # The graph may break, as it may by default; it does not.
    compiled = torch.compile(make_model("qwen3"), backend="cp_aot_eager", dynamic=False)

    def forward(batch: dict[str, Tensor]) -> None:
        sharded = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in batch.items()}
        with torch.no_grad(), implicit_replication():
            compiled(**sharded, use_cache=False)

    forward(make_batch(0, 97))
    before = counters["cp_inductor"].copy()
    batches = [make_batch(step, 97) for step in (1, 2, 3)]
    seen = []
    for batch in prepared(batches):
        while counters["cp_inductor"]["batches_planned"] == before["batches_planned"]:
            time.sleep(0.001)  # it is planned before it comes
        forward(batch)
        seen.append(batch)
    assert all(one is other for one, other in zip(seen, batches, strict=True))
    planned = counters["cp_inductor"]["batches_planned"] - before["batches_planned"]
    assert planned == 3, "each batch has one plan"
    assert counters["stats"]["unique_graphs"] == 1


def test_what_fails_in_a_loader_fails_where_it_is_used() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        yield make_batch(0, 8)
        raise LookupError("no more")

    ahead = prepared(batches())
    assert next(ahead)["input_ids"].shape == (1, 8)
    with pytest.raises(LookupError, match="no more"):
        next(ahead)
    assert list(prepared([])) == []


def of_whole_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    whole = documents.full_tensor() if isinstance(documents, DTensor) else documents
    return in_documents(query, key, value, whole)


def of_random_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    return in_documents(query, key, value, documents + torch.randint_like(documents, 1))


@pytest.mark.slow
@on_ranks(2)
def test_what_is_prepared_is_a_function_of_the_batch() -> None:
    mesh, batch = world_mesh(), {"documents": draw_documents(24)}
    reset()  # other tests were here before, in this process
    compiled = torch.compile(of_whole_documents, backend="cp_aot_eager", fullgraph=True)
    largest_error(compiled, mesh, batch["documents"])
    batch = {"documents": draw_documents(24) + 7}
    assert _plans_made_ahead(batch) == 1
    planned = counters["cp_inductor"]["batches_planned"]
    assert largest_error(compiled, mesh, batch["documents"]) < 1e-12
    assert counters["cp_inductor"]["batches_planned"] == planned, "the plan is found"
    for other in (draw_documents(25), draw_documents(24).int()):
        assert _plans_made_ahead({"documents": other}) == 0
    reset()
    compiled = torch.compile(of_random_documents, backend="cp_aot_eager", fullgraph=True)
    largest_error(compiled, mesh, batch["documents"])
    state = torch.get_rng_state()
    assert _plans_made_ahead(batch) == 0
    assert torch.equal(state, torch.get_rng_state())


def test_what_goes_to_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned once, and what is pinned is what is copied; played on the CPU."""
    tables = HashedTables.of([torch.arange(256)[None] // 50])
    found = numbers_of(tables, "Eq(t0(b,q),t0(b,k))", 1, (256, 256), (2, 2), 1, 2, 0, "")
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


def _plans_made_ahead(batch: dict[str, Tensor]) -> int:
    before = counters["cp_inductor"]["plans_prepared"]
    assert list(prepared([batch])) == [batch]
    return counters["cp_inductor"]["plans_prepared"] - before
