"""Worlds of ranks on one device: exchanges staged through the host, pretended, or by NCCL.

    staged      P processes share the device; every collective goes through host memory and gloo,
                because NCCL refuses two ranks on one device
    pretended   one process is one rank of P; what arrives is what was foretold, or noise
    nccl        P processes, if this NCCL lets them share a device

`run_rows` runs the rows of a stage in the processes of a world. A row that fails, or that takes too
long, ends these processes; the next rows get new ones. So no row can take the rest with it.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_inductor  # noqa: F401  registers the backends where the package is not installed

# Functional collectives of one tensor: each returns a new one.
COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
# A rank that waits longer for others has lost them.
EXCHANGE_TIMEOUT = datetime.timedelta(seconds=150)
POLL_S = 0.1
LAST_LINES = 12


@dataclass(frozen=True)
class World:
    """Where a row runs.

    Attributes:
        kind: "staged", "pretended" or "nccl".
        size: number of ranks of the job.
        ranks: those that are played, each by a process.
        device: "cuda" or "cpu".
    """

    kind: str
    size: int
    ranks: tuple[int, ...]
    device: str


# Runs one row on one rank: run(row, mesh) -> what to record.
Run = Callable[[Any, DeviceMesh], dict[str, Any]]
Outcome = list[dict[str, Any]] | str


def run_rows(
    world: World, run: Run, rows: Sequence[Any], *, row_s: float, until: float
) -> Iterator[tuple[Any, Outcome]]:
    """Yield each row with the results of all ranks, or with the error that ended it.

    Args:
        world: where rows run.
        run: an importable function.
        rows: picklable.
        row_s: seconds that one row may take.
        until: of time.monotonic(); no row is waited for any longer.
    """
    left = list(rows)
    while left and time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="gpu-campaign-") as folder:
            processes = _start(world, run, left, folder)
            try:
                for number, row in enumerate(tuple(left)):
                    limit = min(until, time.monotonic() + row_s)
                    outcome = _await(processes, Path(folder), number, world, limit)
                    left.remove(row)
                    yield row, outcome
                    if isinstance(outcome, str):
                        break
            finally:
                for process in processes:
                    process.kill()
                    process.join()


def _start(world: World, run: Run, rows: Sequence[Any], folder: str) -> list[Any]:
    # Forked from one that has imported everything, and has not touched the device.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_stages", "transformers.models.llama"])
    processes = [
        context.Process(target=_be_rank, args=(world, rank, run, rows, folder))
        for rank in world.ranks
    ]
    for process in processes:
        process.start()
    return processes


def _await(
    processes: Sequence[Any], folder: Path, number: int, world: World, limit: float
) -> Outcome:
    """Wait for a row's results of all ranks; return them, or why there are none."""
    files = [folder / f"{number}.{rank}.json" for rank in world.ranks]
    while not all(file.exists() for file in files):
        errors = [folder / f"{number}.{rank}.error" for rank in world.ranks]
        said = [error.read_text() for error in errors if error.exists()]
        if said:
            return said[0]
        for process in processes:
            if process.exitcode:
                return f"a process ended with {_exit_name(process.exitcode)}"
        if time.monotonic() > limit:
            return "out of time"
        time.sleep(POLL_S)
    return [json.loads(file.read_text()) for file in files]


def _exit_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _be_rank(world: World, rank: int, run: Run, rows: Sequence[Any], folder: str) -> None:
    """Be a process: run all rows, and leave the result of each in a file."""
    torch.set_num_threads(1)
    if world.device == "cuda":
        torch.cuda.set_device(0)
    with _WORLDS[world.kind](world, rank, folder) as mesh:
        for number, row in enumerate(rows):
            try:
                found = json.dumps(run(row, mesh))
            except BaseException:
                lines = traceback.format_exc().splitlines()[-LAST_LINES:]
                _write(Path(folder, f"{number}.{rank}.error"), "\n".join(lines))
                # Do not meet the others again, who may wait in an exchange of this row.
                os._exit(1)
            _write(Path(folder, f"{number}.{rank}.json"), found)
            torch._dynamo.reset()


def _write(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text)
    aside.rename(path)


@contextmanager
def staged_world(world: World, rank: int, folder: str) -> Iterator[DeviceMesh]:
    """Be one of the ranks that share the device."""
    store = dist.FileStore(f"{folder}/store", world.size)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world.size, store=store, timeout=EXCHANGE_TIMEOUT
    )
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        if world.device == "cuda":
            for name in COLLECTIVES:
                library.impl(name, _staged(name), "CUDA")
        yield init_device_mesh(world.device, (world.size,), mesh_dim_names=("cp",))
    dist.barrier()
    dist.destroy_process_group()


def _staged(name: str) -> Callable[..., Tensor]:
    op = getattr(torch.ops._c10d_functional, name).default
    wait = torch.ops._c10d_functional.wait_tensor.default

    def exchange(outgoing: Tensor, *args: Any) -> Tensor:
        arrived: Tensor = wait(op(outgoing.cpu(), *args))
        return arrived.to(outgoing.device)

    return exchange


@contextmanager
def pretended_world(world: World, rank: int, folder: str) -> Iterator[DeviceMesh]:
    """Be one rank whose exchanges bring noise at once.

    The fake process group moves nothing: what arrives would be whatever the memory held, and a
    kernel's speed depends on its data through the power they draw.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    noise: dict[object, Tensor] = {}

    def exchange(outgoing: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
        shape = (sum(receives), *outgoing.shape[1:])
        if (shape, outgoing.dtype) not in noise:
            noise[shape, outgoing.dtype] = torch.randn_like(outgoing.new_empty(shape))
        return noise[shape, outgoing.dtype].clone()

    dist.init_process_group("fake", rank=rank, world_size=world.size, store=FakeStore())
    try:
        with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
            library.impl("all_to_all_single", exchange, world.device.upper())
            yield init_device_mesh(world.device, (world.size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


@contextmanager
def nccl_world(world: World, rank: int, folder: str) -> Iterator[DeviceMesh]:
    """Be one of the ranks that share the device by NCCL's own leave (2.30 and later)."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    store = dist.FileStore(f"{folder}/store", world.size)
    backend = "nccl" if world.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=rank, world_size=world.size, store=store, timeout=EXCHANGE_TIMEOUT
    )
    yield init_device_mesh(world.device, (world.size,), mesh_dim_names=("cp",))
    dist.barrier()
    dist.destroy_process_group()


_WORLDS = {"staged": staged_world, "pretended": pretended_world, "nccl": nccl_world}
