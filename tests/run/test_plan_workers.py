"""Batches that the workers of a data loader plan, for the process that trains."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import signal
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.data import DataLoader

from cp_inductor import PreparingCollator, reset
from cp_inductor.batches import plan_store
from cp_inductor.batches.plan_store import PlanStore
from cp_inductor.batches.plans import forget_plans
from cp_inductor.folders import make_folder
from cp_inductor.graph.program import Program, WrittenCall, from_json, to_json
from cp_inductor.plan.batch_tables import RankTables
from tests.support.packed import draw_documents, in_documents, largest_error
from tests.support.processes import run_python
from tests.support.ranks import _processes, fake_mesh, run_ranks, world_mesh

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
    with fake_mesh(1, 2) as mesh:
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
    mesh, collator = world_mesh(), PreparingCollator(only)
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
    store = PlanStore(private(tmp_path))
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
    store = PlanStore(private(tmp_path))
    for number in range(9):
        store.put(str(number), tables_of(number))
    assert len([*tmp_path.iterdir()]) == 3
    assert store.take("8") is not None


# --- Folders that are gone, full, or somebody else's --------------------------------------------


def private(folder: Path) -> Path:
    folder.chmod(0o700)
    return folder


def test_what_was_published_is_json(tmp_path: Path) -> None:
    store = PlanStore(private(tmp_path))
    assert store.known() is None
    store.publish([(1, "two"), None])
    assert store.known() == [[1, "two"], None]
    assert json.loads((tmp_path / "known").read_text()) == [[1, "two"], None]
    (tmp_path / "known").write_bytes(pickle.dumps([1]))
    assert store.known() is None


def arrays_of(folder: Path, **arrays: Any) -> bytes:
    np.savez(folder / "made", **arrays)
    data = (folder / "made.npz").read_bytes()
    (folder / "made.npz").unlink()
    return data


def test_files_that_are_no_plans_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PlanStore(private(tmp_path))
    numbers = np.arange(40)
    whole = arrays_of(tmp_path, sizes=numbers, numbers=numbers)
    damaged = [
        *(whole[:size] for size in (0, 1, 4, 22, len(whole) // 2, len(whole) - 1)),
        b"PK\x03\x04junk",
        whole.replace(numbers.tobytes()[:80], bytes(80)),
        arrays_of(tmp_path, sizes=numbers),
        arrays_of(tmp_path, sizes=numbers, numbers=np.array([1.5])),
        arrays_of(tmp_path, sizes=numbers, numbers=numbers.reshape(4, 10)),
        arrays_of(tmp_path, sizes=numbers, numbers=np.array([object()])),
    ]
    with caplog.at_level(logging.DEBUG, "cp_inductor"):
        for data in damaged:
            (tmp_path / "a.npz").write_bytes(data)
            assert store.take("a") is None
            assert not [*tmp_path.iterdir()]
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, *[logging.DEBUG] * (len(damaged) - 1)]
    (tmp_path / "a.npz").write_bytes(whole)
    assert store.take("a") is not None
    (tmp_path / "a.npz").mkdir()
    assert store.take("a") is None


def use(folder: Path) -> list[Any]:
    """Use a folder in all ways that there are; nothing is raised."""
    store = PlanStore(folder)
    store.publish([1])
    store.put("b", tables_of(3))
    return [store.known(), store.take("a"), store.take("b")]


def test_a_folder_that_others_may_reach_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(0o700)
    PlanStore(theirs).put("a", tables_of(3))
    (tmp_path / "link").symlink_to(theirs)
    theirs.chmod(0o750)
    assert use(theirs) == [None, None, None]
    assert f"{theirs} is not this user's alone" in caplog.text
    if os.geteuid() == 0:
        os.chown(private(theirs), 65534, 65534)
        assert use(theirs) == [None, None, None]
        os.chown(theirs, 0, 0)
    assert use(private(tmp_path / "link")) == [None, None, None]
    assert [path.name for path in theirs.iterdir()] == ["a.npz"]
    (theirs / "known").symlink_to(theirs / "a.npz")
    (theirs / "c.npz").symlink_to(theirs / "a.npz")
    assert PlanStore(theirs).known() is None and PlanStore(theirs).take("c") is None
    assert PlanStore(theirs).take("a") is not None


def test_a_folder_that_is_gone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert use(tmp_path / "gone") == [None, None, None]
    monkeypatch.setattr(plan_store, "make_folder", _disk_is_full)
    assert "plans are not shared" in caplog.text
    store = PlanStore()
    store.put("a", tables_of(3))
    assert store.take("a") is None and store.known() is None


def _disk_is_full(*args: object, **kwargs: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_no_part_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = PlanStore(private(tmp_path))
    monkeypatch.setattr(np, "savez", _half_of_a_plan)
    store.put("a", tables_of(3))
    assert not [*tmp_path.iterdir()]
    assert "No space left on device" in caplog.text


def _half_of_a_plan(file: BinaryIO, **arrays: object) -> NoReturn:
    file.write(b"half")
    _disk_is_full()


# --- Folders go with their processes -----------------------------------------------------------


def _make_a_folder(place: Path, pipe: Connection, end: str) -> None:
    os.environ["TMPDIR"] = str(place)
    tempfile.tempdir = None
    pipe.send([str(PreparingCollator(only).store.folder), str(make_folder("cp_inductor_others_"))])
    if end == "is killed":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def test_folders_of_processes_that_were_killed_go_with_the_next(tmp_path: Path) -> None:
    for end, num_left in (("ends", 0), ("is killed", 2), ("is killed", 2), ("ends", 0)):
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=_make_a_folder, args=(tmp_path, theirs, end))
        process.start()
        folders = [Path(name) for name in ours.recv()]
        process.join()
        assert process.exitcode == (0 if end == "ends" else -signal.SIGTERM)
        assert len(folders) == 2 and all(folder.parent == tmp_path for folder in folders)
        assert len([*tmp_path.iterdir()]) == num_left


def test_folders_in_use_stay(tmp_path: Path) -> None:
    folders = [make_folder("kind_", tmp_path) for _ in range(3)]
    assert all(folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    (tmp_path / "kind_of_another_user").mkdir(0o755)
    (tmp_path / "kind_abandoned").mkdir(0o700)
    (tmp_path / "kind_of_file").touch()
    make_folder("kind_", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 6 and "kind_abandoned" not in names


def test_the_folder_goes_with_a_process_that_ends(tmp_path: Path) -> None:
    program = "import cp_inductor; print(cp_inductor.PreparingCollator(print).store.folder)"
    assert Path(run_python("-c", program, TMPDIR=str(tmp_path)).strip()).parent == tmp_path
    assert not [*tmp_path.iterdir()]


# --- Programs ----------------------------------------------------------------------------------


def test_programs_say_what_they_compute_as_json() -> None:
    positions = Tensor([[0, 1, 2, 0, 1]]).long()
    program = Program(
        [
            ("torch.diff", [{"value": [0]}], {"dim": -1}),
            ("operator.ne", [{"value": [1]}, 1], {}),
            (".cumsum", [{"value": [2]}, -1], {"dtype": {"dtype": ["int32"]}}),
        ],
        [3, 2],
    )
    program = from_json(json.loads(json.dumps(to_json(program))))
    numbers, starts = program(positions)
    assert numbers.dtype == torch.int32
    assert numbers.tolist() == [[0, 0, 1, 1]] and starts.tolist() == [[False, False, True, False]]


@pytest.mark.parametrize(
    "call",
    [
        ("os.system", ["true"], {}),
        ("torch.load", ["file"], {}),
        ("operator.call", [{"value": [0]}], {}),
        (".__reduce__", [{"value": [0]}], {}),
        ("._typed_storage", [{"value": [0]}], {}),
        (".format", ["{0.__class__}", {"value": [0]}], {}),
        ("torch.rand", [[2]], {}),
        ("torch.add", [{"value": [0]}, {"dtype": ["load"]}], {}),
    ],
)
def test_programs_call_nothing_but_functions_of_tensors(call: WrittenCall) -> None:
    with pytest.raises((KeyError, AttributeError, TypeError, RuntimeError)):
        Program([call], [1])(torch.zeros(2))
