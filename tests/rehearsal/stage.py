"""The processes of a rehearsal: one that imports everything, and ranks that are forked from it.

    the caller ── spawn ── lead (TRITON_INTERPRET=1, imports) ─┬─ fork ── rank 0 ─┐
                                                               └─ fork ── rank 1 ─┴─ gloo

Ranks are processes, not threads, because what they do belongs to a process: Triton's interpreter
patches its language, a compile pretends a GPU, Dynamo has one state, process groups are global, and
Python computes on one core per process. A rank that crashes or hangs is ended with its world.

They are no children of the caller. Triton decides when it is imported whether its functions are
interpreted, and the caller may have imported it. Importing takes eight seconds, forking
milliseconds, so one process imports for all ranks, and for all rehearsals of one `Stage`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_inductor.errors import CPError

if TYPE_CHECKING:
    from tests.rehearsal.rank import Job, Played

# What the processes of a stage have in their environment.
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
LAST_LINES = 40  # that are shown of what a rank said before it died


class RehearsalFailed(CPError):
    """A rank has raised an error of its own, died, or taken longer than the deadline."""


class Stage:
    """A process that has imported everything, on which rehearsals are run one after the other.

    Use it as a context manager; afterwards its processes are gone.

    Args:
        is_warm: compile something before the ranks are forked, so that they need not fill the
            compiler's caches each for itself: half of the time of a small model, after ten seconds.
    """

    def __init__(self, *, is_warm: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            self._lead: Any = context.Process(target=_lead, args=(theirs, is_warm))
            self._lead.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._pipe.close()
        self._lead.join(10)
        if self._lead.is_alive():
            self._lead.terminate()
            self._lead.join()

    def run(self, job: Job, *, deadline_s: float) -> list[Played]:
        """Play every rank of a rehearsal.

        Args:
            job: what is rehearsed.
            deadline_s: for all ranks.

        Returns:
            What came out of each rank.

        Raises:
            RehearsalFailed: a rank has raised an error, died, or not ended in time.
        """
        try:
            text = pickle.dumps((job, deadline_s))
        except Exception as error:  # pickle raises many kinds
            raise RehearsalFailed(
                site="rehearse",
                expected="a model and arguments that other processes can be given",
                got=f"{type(error).__name__}: {error}",
                remedy="define the model's classes and functions in a module that can be imported,"
                " and not within a function",
            ) from None
        self._pipe.send_bytes(text)
        try:
            kind, *rest = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            kind, rest = "failed", [0, "the process that forks the ranks has died"]
        if kind == "failed":
            rank, what = rest
            raise RehearsalFailed(
                site=f"rehearse, rank {rank}",
                expected="a rank that runs to its end",
                got=what,
                remedy="read the traceback of the rank",
            )
        return list(rest[0])


def _lead(pipe: Connection, is_warm: bool) -> None:
    """Import everything; then fork the ranks of each job that comes."""
    import torch

    from tests.rehearsal.preload import fill_caches

    torch.set_num_threads(1)
    if is_warm:
        fill_caches()
    # A process that has threads cannot be forked safely.
    assert threading.active_count() == 1
    # Children have pages of their own only of what they write to, and collecting would write.
    gc.collect()
    gc.freeze()
    while True:
        try:
            text = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        with tempfile.TemporaryDirectory(prefix="cp_inductor_rehearsal_") as folder:
            try:
                job, deadline_s = pickle.loads(text)
                with _ranks(job, Path(folder)) as ranks:
                    ended = _collect(ranks, deadline_s)
                pipe.send_bytes(pickle.dumps(ended))  # no rank is left by then
            except BrokenPipeError:
                return
            except BaseException:
                pipe.send_bytes(pickle.dumps(("failed", 0, traceback.format_exc())))


@dataclass(frozen=True)
class _Rank:
    """A forked process.

    Attributes:
        process: of multiprocessing.
        pipe: from it.
        said: the file with its standard error.
    """

    process: Any
    pipe: Connection
    said: Path


@contextlib.contextmanager
def _ranks(job: Job, folder: Path) -> Iterator[Sequence[_Rank]]:
    """Fork the ranks of a job; at the end none is left."""
    context = multiprocessing.get_context("fork")
    ranks = []
    try:
        for rank in range(job.world_size):
            ours, theirs = context.Pipe(duplex=False)
            said = folder / f"said_by_{rank}"
            said.touch()
            args = (job, rank, folder, theirs, said)
            process = context.Process(target=_play, args=args)
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours, said))
        yield ranks
    finally:
        for one in ranks:
            one.process.kill()
            one.process.join()
            one.pipe.close()


def _collect(ranks: Sequence[_Rank], deadline_s: float) -> tuple[Any, ...]:
    """Wait until all ranks have ended, or the first has failed; return which, and the results."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + deadline_s
    number = {one.pipe: rank for rank, one in enumerate(ranks)}
    while len(results) < len(ranks):
        left = deadline - time.monotonic()
        pending = [one.pipe for rank, one in enumerate(ranks) if rank not in results]
        ready = wait(pending, max(left, 0))
        if not ready:
            missing = [rank for rank in range(len(ranks)) if rank not in results]
            return "failed", missing[0], f"ranks {missing} did not end within {deadline_s:.0f} s"
        for one in ready:
            assert isinstance(one, Connection)
            rank = number[one]
            kind, value = _received(one, ranks[rank])
            if kind == "failed":
                return "failed", rank, value
            results[rank] = value
    return "done", [results[rank] for rank in sorted(results)]


def _received(pipe: Connection, rank: _Rank) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
        return kind, value
    except (EOFError, OSError):
        rank.process.join(1)
        lines = rank.said.read_text(errors="replace").splitlines()[-LAST_LINES:]
        what = f"the process has died with exit code {rank.process.exitcode}"
        return "failed", "\n".join([what, *lines])


def _play(job: Job, rank: int, folder: Path, pipe: Connection, said: Path) -> None:
    """Be a rank: of the process group, until its result is sent."""
    import torch.distributed as dist

    from tests.rehearsal.rank import play

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends the ranks
    descriptor = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    try:
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=job.world_size,
            store=dist.FileStore(str(folder / "store"), job.world_size),
            timeout=timedelta(minutes=10),
        )
        result: tuple[str, Any] = ("done", play(job, Path(job.folder or folder)))
    except BaseException as error:
        result = ("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    # Without destructors: those of a process group wait for the other ranks.
    os._exit(0)
