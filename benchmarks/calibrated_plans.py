"""The plan that is chosen for the measured machine, beside every other one, on local gloo ranks.

    python benchmarks/calibrated_plans.py --ranks 2 4 --tokens 1024 8192 32768

The machine is measured first, by the same processes. Then causal attention in float32 runs forward
and backward, eager, by each strategy in turn, one thread for each rank.

step       time of the slowest rank over that of `auto`, in the same repetition; the median
cpu        CPU seconds of all ranks, the median: what others do on the machine hardly changes it
predicted  seconds, by the price that `auto` chooses by

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from cp_inductor import Machine, calibrate
from cp_inductor.ops.attention import attention
from cp_inductor.plan.planner import Recipe, resolve, weigh

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64


def of_rank(rank: int, size: int, args: argparse.Namespace, folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store{size}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    machine = calibrate(mesh)
    rows = {n: measure(n, mesh.get_group(), machine, args) for n in args.tokens}
    if not rank:
        found = {"machine": machine.format(), "rows": rows}
        Path(folder, f"found{size}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    tokens: int, group: dist.ProcessGroup, machine: Machine, args: argparse.Namespace
) -> dict[str, Any]:
    """Run each strategy in turn; return its row by name, of which "auto" is the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    recipe = Recipe(size, tokens, tokens, HEADS, KV_HEADS, HEAD_DIM, 4, "causal")
    chosen = resolve(recipe, site="auto", machine=machine)
    trials: dict[str, Any] = {}
    for trial in weigh(recipe, machine):
        known = trials.setdefault(trial.recipe.strategy, trial)
        if trial.seconds < known.seconds:
            trials[trial.recipe.strategy] = trial
    # Each as it is priced best, with what `resolve` adds to a recipe whose strategy is named.
    recipes = {"auto": chosen} | {
        name: resolve(replace(recipe, strategy=name), site=name, machine=machine) for name in trials
    }
    torch.manual_seed(rank)
    shapes = [(1, heads, tokens // size, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def step(one: Recipe) -> tuple[float, float]:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        how = (one.format(), rank, None, "flash_cpu", group.group_name, 0.0, False)
        out = attention(*qkv, [], *how)[0]
        torch.autograd.grad(out, qkv, torch.ones_like(out))
        return time.perf_counter() - start, time.process_time() - cpu

    repetitions = max(3, min(args.repetitions, args.repetitions * 1024 // tokens))
    steps = []
    for _ in range(repetitions + 1):
        steps.append({name: step(one) for name, one in recipes.items()})
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, steps[1:])
    rows: dict[str, Any] = {}
    for name in recipes:
        times = [max(ranks[name][0] for ranks in each) for each in zip(*gathered, strict=True)]
        cpu = [sum(ranks[name][1] for ranks in each) for each in zip(*gathered, strict=True)]
        auto = [max(ranks["auto"][0] for ranks in each) for each in zip(*gathered, strict=True)]
        rows[name] = {
            "step": median(t / a for t, a in zip(times, auto, strict=True)),
            "seconds": median(times),
            "cpu_s": median(cpu),
            "predicted_s": trials[chosen.strategy if name == "auto" else name].seconds,
            "repetitions": repetitions,
        }
    rows["auto"]["chosen"] = chosen.strategy
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repetitions", type=int, default=20, help="of 1024 tokens; 3 or more")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in args.ranks:
            torch.multiprocessing.spawn(of_rank, (size, args, folder), size)
            found[size] = json.loads(Path(folder, f"found{size}").read_text())
    columns = ("step", "seconds", "cpu_s", "predicted_s", "repetitions")
    table = [
        (
            size,
            tokens,
            f"{name} {row.get('chosen', '')}".strip(),
            *(row[column] for column in columns),
        )
        for size, of_size in found.items()
        for tokens, rows in of_size["rows"].items()
        for name, row in rows.items()
    ]
    for size, of_size in found.items():
        print(f"{size} ranks: {of_size['machine']}")
    head = ["ranks", "tokens", "strategy", "step", "seconds", "cpu s", "predicted s", "repetitions"]
    print(tabulate(table, head, "github", floatfmt=".3g"))
    about = {
        "date": str(date.today()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_before": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    print(json.dumps({"about": about, "found": found}))


if __name__ == "__main__":
    main()
