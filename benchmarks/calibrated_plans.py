"""The plan that is chosen for the measured machine, beside every other one, on local gloo ranks.

    python benchmarks/calibrated_plans.py --ranks 2 4 --tokens 1024 8192 32768

The machine is measured first, by the same processes. Then causal attention in float32 runs forward
and backward, compiled (with --eager: not), by each strategy in turn, a thread for each rank; and
"gathered", which gathers keys and values by a functional collective, and attends with the mask of
its rank's rows.

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
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from cp_inductor import Machine, calibrate
from cp_inductor.ops.attention import attention
from cp_inductor.plan.planner import Recipe, resolve, weigh

HEAD_DIM = 64
GATHERED = "gathered"


def of_rank(rank: int, size: int, args: argparse.Namespace, folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = args.caches or folder
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store{size}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    machine = calibrate(mesh)
    rows = {}
    for tokens in args.tokens:
        rows[tokens] = measure(tokens, mesh, machine, args)
        if not rank:
            print(size, tokens, rows[tokens], file=sys.stderr, flush=True)
    if not rank:
        found = {"machine": machine.format(), "rows": rows}
        Path(folder, f"found{size}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    tokens: int, mesh: DeviceMesh, machine: Machine, args: argparse.Namespace
) -> dict[str, Any]:
    """Run each strategy in turn; return its row by name, of which "auto" is the first."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), mesh.get_group()
    heads, kv_heads = args.heads
    recipe = Recipe(size, tokens, tokens, heads, kv_heads, HEAD_DIM, 4, "causal")
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
    shapes = [(1, num, tokens // size, HEAD_DIM) for num in (heads, kv_heads, kv_heads)]
    qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
    last = torch.arange(rank * (tokens // size), (rank + 1) * (tokens // size))
    mask = torch.arange(tokens)[None] <= last[:, None]

    def gather(query: Tensor, *key_value: Tensor) -> Tensor:
        key, value = (
            all_gather_tensor_autograd(one.movedim(2, 0).contiguous(), 0, group).movedim(0, 2)
            for one in key_value
        )
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def runner(one: Recipe) -> Callable[..., Tensor]:
        def eager(*qkv: Tensor) -> Tensor:
            how = (one.format(), rank, None, "flash_cpu", group.group_name, 0.0, False)
            return attention(*qkv, [], *how)[0]

        def attend(*qkv: Tensor) -> Tensor:
            return scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

        options = {"mesh": mesh, "machine": machine.format(), "strategy": one.strategy}
        options["stages"] = one.stages
        if args.eager:
            return eager
        return torch.compile(attend, backend="cp_inductor", fullgraph=True, options=options)

    run: dict[str, Callable[..., Tensor]] = {name: runner(one) for name, one in recipes.items()}
    run[GATHERED] = gather if args.eager else torch.compile(gather, dynamic=False)

    def step(one: str) -> tuple[float, float]:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        out = run[one](*qkv)
        torch.autograd.grad(out, qkv, torch.ones_like(out))
        return time.perf_counter() - start, time.process_time() - cpu

    repetitions = max(2, min(args.repetitions, args.repetitions * 1024 // tokens))
    steps = []
    for _ in range(repetitions + 1):
        steps.append({name: step(name) for name in run})
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, steps[1:])
    rows: dict[str, Any] = {}
    for name in (*recipes, GATHERED):
        times = [max(ranks[name][0] for ranks in each) for each in zip(*gathered, strict=True)]
        cpu = [sum(ranks[name][1] for ranks in each) for each in zip(*gathered, strict=True)]
        auto = [max(ranks["auto"][0] for ranks in each) for each in zip(*gathered, strict=True)]
        rows[name] = {
            "step": median(t / a for t, a in zip(times, auto, strict=True)),
            "seconds": median(times),
            "cpu_s": median(cpu),
            "repetitions": repetitions,
        }
        if name != GATHERED:
            trial = trials[chosen.strategy if name == "auto" else name]
            rows[name]["predicted_s"] = trial.seconds
    rows["auto"]["chosen"] = chosen.strategy
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--heads", type=int, nargs=2, default=[8, 4], help="and KV heads")
    parser.add_argument("--eager", action="store_true", help="interpret plans, do not compile")
    parser.add_argument("--caches", metavar="PATH", help="keep compiled graphs in this folder")
    parser.add_argument("--repetitions", type=int, default=20, help="of 1024 tokens; 2 or more")
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
            *(row.get(column) for column in columns),
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
        "cp_inductor": version("cp_inductor"),
        "load_before": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    print(json.dumps({"about": about, "found": found}))


if __name__ == "__main__":
    main()
