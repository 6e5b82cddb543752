"""Start ranks again and again with one empty compile cache that they share; count the failures.

    python benchmarks/cold_start.py --count 50 --ranks 4
    python benchmarks/cold_start.py --count 50 --kill      ranks are killed while they compile
    python benchmarks/cold_start.py --count 50 --stock     and as many with torch's own backend

All ranks compile, train a step and compare with eager code. With --kill, all ranks are killed at a
random time before each start that counts, so that the cache has what they left half-written. With
--stock, each start is followed by one of as many ranks that compile the same block with Inductor
alone, each for its own tokens, on another empty cache; --kill kills them at the same time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

DEADLINE_S = 300
OURS, STOCK = "cp_inductor", "inductor"

# Imported once, by the process that ranks are forked from.
IMPORTED = (
    *("__main__", "cp_inductor.backend", "torch._inductor.compile_fx"),
    *("torch._inductor.codegen.cpp", "torch.utils.cpp_extension"),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).square().mean()


def train(rank: int, world_size: int, folder: str, store: str, backend: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "cache")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, store=dist.FileStore(store, world_size)
    )
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model, x = Model(), torch.randn(1, 8 * world_size, 32)
    shards = x.chunk(world_size, 1)
    if backend == STOCK:
        run = torch.compile(model, backend=STOCK, fullgraph=True)
        expected = torch.stack([model(shard) for shard in shards]).mean()
    else:
        run = torch.compile(model, backend=OURS, fullgraph=True, options={"mesh": mesh})
        expected = model(x)
    loss = run(shards[rank])
    loss.backward()
    dist.all_reduce(loss.detach_())
    torch.testing.assert_close(loss / world_size, expected.detach())
    dist.barrier()
    dist.destroy_process_group()


def serve(pipe: Connection, *args: Any) -> None:
    try:
        train(*args)
        pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())


def start(
    world_size: int, folder: str, backend: str, kill_after_s: float | None = None
) -> list[str]:
    """Start all ranks; return what went wrong on each, "" if nothing did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    store = tempfile.mktemp(dir=folder)
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        given = (theirs, rank, world_size, folder, store, backend)
        process = context.Process(target=serve, args=given)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        for process, _ in ranks:
            process.kill()
    told, deadline = [], time.monotonic() + DEADLINE_S
    for process, pipe in ranks:
        try:
            is_there = pipe.poll(max(0.0, deadline - time.monotonic()))
            told.append(pipe.recv() if is_there else "a hang")
        except EOFError:
            process.join()
            told.append(f"died with exit code {process.exitcode}")
        process.kill()
        process.join()
    return told


def start_cold(world_size: int, backend: str, kill_after_s: float | None) -> list[str]:
    """Start all ranks on an empty cache, or on one that killed ranks have left."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if kill_after_s is not None:
            start(world_size, folder, backend, kill_after_s)
        return start(world_size, folder, backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    num_failed = dict.fromkeys((OURS, STOCK) if given.stock else (OURS,), 0)
    for number in range(given.count):
        kill_after_s = draw.uniform(1, 12) if given.kill else None
        for backend in num_failed:
            told = start_cold(given.ranks, backend, kill_after_s)
            for rank, text in enumerate(told):
                if text:
                    print(f"{backend}, start {number}, rank {rank}: {text}", flush=True)
            num_failed[backend] += any(told)
        print(f"{number + 1} cold starts, failed: {num_failed}", file=sys.stderr, flush=True)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    after = ", each after ranks that were killed" if given.kill else ""
    for backend, failed in num_failed.items():
        print(
            f"{backend}: {given.count} cold starts of {given.ranks} ranks{after}: {failed} failed"
        )


if __name__ == "__main__":
    main()
