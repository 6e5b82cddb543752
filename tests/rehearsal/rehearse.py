"""Rehearse a model: run the GPU programs of all ranks on the CPU, together, before there is a GPU.

report = rehearse(Job(model, (ids,), world_size=4, placement=Shard(1)))

model . torch.compile(backend="cp_inductor") . code for cuda:sm_90 of rank 0, 1, 2, 3
  Triton kernels            Triton's interpreter
  exchanges                 real, between four processes
  flash, matmul             plain implementations, which check what the kernels ask for
  autograd, optimizers      as ever
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from cp_inductor.inspect.compile_for import check_triton
from tests.rehearsal.rank import Job, play
from tests.rehearsal.report import RehearsalReport
from tests.support.ranks import RankError, _processes, run_ranks

DEADLINE_S = 1800.0

COMMAND = """Rehearse a model that a function makes; print the report.

    python -m tests.rehearsal model.py:build --world-size 4
    python -m tests.rehearsal package.module:build --world-size 2 --target cuda:h200

`build(mesh)` returns (model, args), optionally followed by kwargs and options; args are DTensors.
The exit code is 0 if nothing was found and all numbers are near those of one process.
"""


@contextmanager
def open_stage() -> Iterator[Executor]:
    """Yield a process for `on_stage`: ranks that it starts have Triton's interpreter.

    Triton decides when it is imported whether its functions are interpreted, and the caller may
    have imported it.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as stage:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            stage.submit(os.getpid).result()  # now it is started
        yield stage


def on_stage(stage: Executor, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Do what `run_ranks` does, on ranks of a stage."""
    return pickle.loads(stage.submit(_run, world_size, function, args).result())


def _run(world_size: int, function: Callable[..., Any], args: Any) -> bytes:
    _processes.set_forkserver_preload(["tests.support.preload", "tests.rehearsal.rank"])
    results = run_ranks(world_size, function, *args, deadline_s=DEADLINE_S)
    return pickle.dumps(results)  # tensors, too: the ranks may be gone when they are read


def rehearse(job: Job, *, stage: Executor | None = None) -> RehearsalReport:
    """Compile every rank's program for a GPU, and run all of them on the CPU, forward and backward.

    Each rank is a process. It calls ``torch.compile(model, backend="cp_inductor")``, which here
    generates code for the GPU, as `cross_compile` does, and runs it under Triton's interpreter.
    Use small shapes: a few hundred tokens take seconds. Every access of a kernel is checked. What
    the job holds must be importable.

    Args:
        job: what is to be rehearsed.
        stage: whose processes play the ranks; by default one for this rehearsal alone.

    Raises:
        RankError: a rank has raised an error, such as a CPError, died, or not ended in time.
    """
    check_triton()
    if stage is None:
        with open_stage() as new:
            return rehearse(job, stage=new)
    with tempfile.TemporaryDirectory(prefix="cp_inductor_rehearsal_") as folder:
        played = on_stage(stage, job.world_size, play, job, Path(job.folder or folder))
    ranks, (results, *_) = zip(*played, strict=True)
    return RehearsalReport(job.target, ranks, *results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=COMMAND)
    parser.add_argument("model", help="module:function or file.py:function")
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--target", default="cuda:sm_90", help="cuda:sm_90, cuda:h200, ...")
    args = parser.parse_args(arguments)
    try:
        job = Job(named=args.model, world_size=args.world_size, target=args.target)
        report = rehearse(job)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    print(report)
    return 0 if report.is_fine else 1
