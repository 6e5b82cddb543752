"""Batches that the workers of a data loader plan, for the process that trains."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.data import DataLoader

from cp_inductor import PreparingCollator, reset
from cp_inductor.plan.batch_tables import RankTables
from cp_inductor.run import plan_store
from cp_inductor.run.batch_ops import forget_plans
from cp_inductor.run.plan_store import PlanStore
from tests.ranks import fake_rank, run_ranks
from tests.test_batch_calls import draw_documents, in_documents, largest_error, make_mesh

LENGTH = 24


def only(samples: list[Tensor]) -> dict[str, Tensor]:
    (documents,) = samples
    return {"documents": documents}


def draw_batches(count: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [draw_documents(LENGTH) for _ in range(count)]


def counted() -> tuple[int, int, int]:
    """Return how many plans this process made, took of workers, and made ahead, since the last."""
    found = counters["cp_inductor"]
    names = ("batches_planned", "plans_of_workers", "plans_prepared")
    made = found["batches_planned"], found["plans_of_workers"], found["plans_prepared"]
    for name in names:
        found.pop(name, None)
    return made


def attend(mesh: DeviceMesh, documents: Tensor) -> None:
    """Compute, on a rank whose peers are not there, something that is not looked at."""
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    like = torch.zeros(1, 2, LENGTH, 8)
    shards = [distribute_tensor(like, mesh, [Shard(2)]) for _ in range(3)]
    with torch.no_grad(), implicit_replication():
        # The peers would not send their part of a sharded table.
        compiled(*shards, distribute_tensor(documents, mesh, [Replicate()]))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_loader_are_planned_in_its_workers(num_workers: int) -> None:
    reset()
    batches = draw_batches(4)
    loader = DataLoader(
        batches,  # type: ignore[arg-type]
        collate_fn=PreparingCollator(only),
        num_workers=num_workers,
        multiprocessing_context=get_context("forkserver") if num_workers else None,
    )
    with fake_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        counted()
        attend(mesh, torch.zeros(1, LENGTH, dtype=torch.int64))
        assert counted() == (1, 0, 0)
        for batch in loader:
            attend(mesh, batch["documents"])
        # Without workers, this process plans, and ahead of the graph.
        assert counted() == ((0, 4, 0) if num_workers else (4, 0, 4))
    reset()


@pytest.mark.slow
def test_what_a_worker_planned_is_right() -> None:
    for errors, made in run_ranks(3, _use_plans_of_workers):
        assert max(errors) < 1e-12
        assert made == [(1, 0, 0), (1, 0, 0), (0, 1, 0), (1, 0, 0)]


def _use_plans_of_workers() -> tuple[list[float], list[tuple[int, int, int]]]:
    reset()
    mesh, collator = make_mesh(), PreparingCollator(only)
    compiled = torch.compile(in_documents, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    errors, made = [], []
    first, second, third = draw_batches(3)
    errors.append(largest_error(compiled, mesh, first))
    made.append(counted())
    # As if in a worker, which has the collator of the process that forked it, or a copy.
    collator.store.user, user = None, collator.store.user
    collator([second])
    collator([draw_documents(LENGTH - 1)])
    collator.store.user = user
    made.append(counted())
    assert len([*collator.store.folder.glob("*.npz")]) == 1
    for documents in (second, third):
        forget_plans()  # those that this process made for the worker
        errors.append(largest_error(compiled, mesh, documents))
        made.append(counted())
    assert not [*collator.store.folder.glob("*.npz")]
    return errors, made


def tables_of(number: int) -> RankTables:
    return RankTables(np.arange(number), np.arange(7))


def test_a_plan_is_taken_once(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    assert store.take("a") is None
    store.put("a", tables_of(3))
    store.put("b", tables_of(4))
    found = store.take("a")
    assert found is not None
    np.testing.assert_array_equal(found.sizes, np.arange(3))
    np.testing.assert_array_equal(found.numbers, np.arange(7))
    assert store.take("a") is None
    assert store.take("b") is not None


def test_plans_that_nobody_takes_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_store, "NUM_WAITING", 3)
    store = PlanStore(tmp_path)
    for number in range(9):
        store.put(str(number), tables_of(number))
    assert len([*tmp_path.iterdir()]) == 3
    assert store.take("8") is not None


def test_a_file_that_is_no_plan_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"half of a")
    assert PlanStore(tmp_path).take("a") is None


def test_what_cannot_be_pickled_is_not_published(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    assert store.known() == []
    store.publish([(1, 2), lambda: None])
    assert store.known() == [(1, 2)]
