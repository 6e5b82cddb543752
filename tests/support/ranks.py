"""Run functions on several gloo ranks: processes that live as long as the test session.

    results = run_ranks(3, function, *args)      # function(*args) on ranks 0, 1, 2 -> [r0, r1, r2]

    @on_ranks(3)                                 # a test whose body runs on ranks 0, 1, 2

Importing torch costs seconds, starting a process does, too; a process group costs milliseconds. So
the processes are forked from one that has imported everything, tests/support/preload.py, and they
are kept, and each call gets a fresh process group. A rank that fails takes its call down with the
traceback; ranks that hang are killed after a deadline, and the next call starts new ones.

One process plays a single rank of any world size with `fake_rank`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from cp_inductor.trust.agreement import forget_agreements

# So much of what a rank said is shown if it ends.
LAST_LINES = 60

# Long enough for four ranks that compile while others use the machine.
DEADLINE_S = 600


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Call an importable function on every rank of a new gloo group; return their results."""
    if any(not worker.process.is_alive() for worker in _workers):
        stop_workers()  # somebody ended one since the last call
    workers = [_worker(index) for index in range(world_size)]
    store = os.path.join(_folder_of_stores(), f"store-{next(_numbers)}")
    for rank, worker in enumerate(workers):
        worker.pipe.send((rank, world_size, store, function, args))
    return _collect(workers, deadline_s)


def on_ranks(
    world_size: int | str, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make of a function of one rank the test that calls it on all ranks of a new gloo group.

    Args:
        world_size: the number of ranks, or the name of the argument that says it.
        deadline_s: of `run_ranks`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(**arguments: Any) -> None:
            size = arguments[world_size] if isinstance(world_size, str) else world_size
            run_ranks(size, _call_wrapped, test, arguments, deadline_s=deadline_s)

        return test

    return decorate


def _call_wrapped(test: Any, arguments: dict[str, Any]) -> None:
    test.__wrapped__(**arguments)


@dataclass(frozen=True)
class Worker:
    """A process that plays a rank, a pipe to it, and the file of its standard error."""

    process: Any
    pipe: Connection
    errors: Path

    @property
    def last_words(self) -> str:
        """What the process said last in its call: why it aborted, if it did."""
        lines = self.errors.read_text(errors="replace").splitlines(keepends=True)
        return "".join(lines[-LAST_LINES:])

    def death(self) -> str:
        """Say how the process ended."""
        return f"the process died with exit code {self.process.exitcode}\n{self.last_words}"

    def whereabouts(self) -> str:
        """Let the process write where each of its threads stands, and return that."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.last_words


def _collect(workers: list[Worker], deadline_s: float) -> list[Any]:
    results, failures = {}, {}
    deadline = time.monotonic() + deadline_s
    # Once a rank has failed the others may wait for it in a collective for ever.
    while len(results) + len(failures) < len(workers) and time.monotonic() < deadline:
        for rank, worker in enumerate(workers):
            if rank in results or rank in failures:
                continue
            if worker.pipe.poll(0.01):
                try:
                    is_ok, value = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join(1)
                    is_ok, value = False, worker.death()
                (results if is_ok else failures)[rank] = value
                if not is_ok:
                    deadline = min(deadline, time.monotonic() + 5)
            elif not worker.process.is_alive():
                failures[rank] = worker.death()
                deadline = min(deadline, time.monotonic() + 5)
    missing = [rank for rank in range(len(workers)) if rank not in results | failures]
    # A rank that failed while the group was made counts it, and would name the next one otherwise
    # than the others do: they would wait for each other for ever.
    hung = [] if failures else [f"rank {rank}: {workers[rank].whereabouts()}" for rank in missing]
    if missing or failures:
        for worker in workers:
            sys.stderr.write(worker.last_words)
        stop_workers()
    if failures:
        raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
    if missing:
        said = [f"ranks {missing} did not finish within {deadline_s} s: a hang", *hung]
        raise RankError("\n".join(said))
    return [results[rank] for rank in range(len(workers))]


@cache
def _folder_of_stores() -> str:
    """Return a folder that is there until all ranks have ended.

    Its store writes once more when a rank leaves the group, after it has said its result. If the
    folder goes in that moment, the destructor `FileStore::~FileStore` of torch 2.13 waits 300 s for
    it, throws, and so ends the process with SIGABRT.
    """
    folder = tempfile.mkdtemp(prefix="cp_inductor_stores_")

    def remove() -> None:
        stop_workers()
        shutil.rmtree(folder, ignore_errors=True)

    # Unlike atexit's, this is called in processes of multiprocessing as well.
    multiprocessing.util.Finalize(None, remove, exitpriority=0)
    return folder


_numbers = itertools.count()
_workers: list[Worker] = []
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.preload"])


def _worker(index: int) -> Worker:
    while len(_workers) <= index:
        ours, theirs = _processes.Pipe()
        errors = Path(_folder_of_stores(), f"errors-{next(_numbers)}")
        errors.touch()
        process = _processes.Process(target=_serve, args=(theirs, errors), daemon=True)
        process.start()
        _workers.append(Worker(process, ours, errors))
    return _workers[index]


def stop_workers() -> None:
    for worker in _workers:
        worker.pipe.close()
        worker.process.kill()
        worker.process.join()
    _workers.clear()


def _serve(pipe: Connection, errors: Path) -> None:
    torch.set_num_threads(1)
    # What this process and C++ in it say, such as why it aborts; the traceback is Python's.
    said = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    while True:
        try:
            rank, world_size, store, function, args = pipe.recv()
        except (EOFError, OSError):
            return
        os.ftruncate(said, 0)
        try:
            dist.init_process_group(
                "gloo", rank=rank, world_size=world_size, store=dist.FileStore(store, world_size)
            )
            # A rank that leaves before another is connected would close what that one connects to.
            dist.barrier()
            torch.manual_seed(0)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_compiles()
            forget_groups()


def forget_groups() -> None:
    """Let go of process groups that are gone.

    What is left of a model or a compile, such as hooks and guards, refers to groups and to meshes;
    a group that they refer to keeps its threads, and ours that asks its store: some tens of them
    take the machine from everybody.
    """
    forget_agreements()
    gc.collect()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh and hasattr(mesh, "_pg_registry"):
            mesh._pg_registry.clear()
    gc.freeze()  # what is left now is not looked over again


def forget_compiles() -> None:
    """Begin as a fresh process does.

    DTensor's caches hold meshes of process groups that are gone: equal to those of this one, but
    not the same objects, which AOTAutograd in torch 2.13 tells apart.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _clear_sharding_prop_cache()
    # After a compiled call that raised, transformers 5 collects outputs where nobody looks.
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None:
        capturing._active_collector.reset(None)


def world_mesh() -> DeviceMesh:
    """Return the mesh of all ranks, along its only axis, cp."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


@contextlib.contextmanager
def fake_mesh(rank: int, world_size: int) -> Iterator[DeviceMesh]:
    """Be one rank as `fake_rank` says, of a mesh whose only axis is cp."""
    with fake_rank(rank, world_size):
        yield world_mesh()


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    forget_compiles()
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
