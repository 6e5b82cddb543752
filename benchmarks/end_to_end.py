"""Tokens per second of training, sharded over ranks, against one process with as many threads.

    python benchmarks/end_to_end.py --ranks 2

The model and the text are those of `examples/train_text.py`; compiled on both sides, the sharded
one by "cp_inductor", the whole one by "inductor". The two take turns within each repetition, so
that one has the machine while the other waits.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.train_text import GPT, Shape, draw_batch, read_text, shard_batch, shard_model

WHOLE, SHARDED = "one process", "sharded"


def make_step(args: argparse.Namespace, *, is_sharded: bool) -> Callable[[int], None]:
    """Return a function that makes one step of training."""
    shape = Shape(args.layers, args.dim, args.heads, args.kv_heads, args.seq_len)
    torch.manual_seed(0)
    model = GPT(shape)
    text = read_text()
    if is_sharded:
        mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
        compiled = shard_model(model, mesh, "cp_inductor")
    else:
        compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)

    def step(number: int) -> None:
        batch = draw_batch(text, args.batch_size, args.seq_len, number)
        pair = (batch[:, :-1], batch[:, 1:])
        ids, labels = shard_batch(batch, mesh) if is_sharded else pair
        optimizer.zero_grad()
        compiled(ids, labels).backward()
        optimizer.step()

    return step


def process_main(
    rank: int | None, folder: str, args: argparse.Namespace, turn: Any, results: Any
) -> None:
    """Be a rank, or the process that holds all."""
    is_sharded = rank is not None
    torch.set_num_threads(1 if is_sharded else args.ranks)
    if is_sharded:
        store = dist.FileStore(os.path.join(folder, "store"), args.ranks)
        dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=store)
    step = make_step(args, is_sharded=is_sharded)
    times: list[float] = []
    for repetition in range(args.repetitions + 1):
        for is_ours in (False, True):
            turn.wait()
            if is_ours is is_sharded:
                start = time.perf_counter()
                for number in range(args.steps):
                    step(number)
                times.append(time.perf_counter() - start)
        if repetition == 0:
            times.clear()  # it compiled
    turn.wait()
    if not rank:
        results.put((SHARDED if is_sharded else WHOLE, times))
    if is_sharded:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="per repetition")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    turn, results = context.Barrier(args.ranks + 1), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=process_main, args=(rank, folder, args, turn, results))
            for rank in (None, *range(args.ranks))
        ]
        for process in processes:
            process.start()
        times = dict(results.get() for _ in range(2))
        for process in processes:
            process.join()
    tokens = args.steps * args.batch_size * args.seq_len
    speeds = {name: [tokens / seconds for seconds in runs] for name, runs in times.items()}
    ratios = [ours / whole for ours, whole in zip(speeds[SHARDED], speeds[WHOLE], strict=True)]
    table = [[name, median(speeds[name])] for name in (WHOLE, SHARDED)]
    print(tabulate(table, headers=("", "tokens/s"), floatfmt=".0f"))
    print(f"sharded over one process, median of pairs: {median(ratios):.2f}")
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    row = {"tokens_per_s": {n: median(s) for n, s in speeds.items()}, "ratio": median(ratios)}
    print(json.dumps({"benchmark": "end_to_end", **vars(args), **versions, **row}))


if __name__ == "__main__":
    main()
