"""One attention on the CPU by every strategy, beside what `auto` takes for the measured machine.

    python benchmarks/machine_cpu.py --ranks 2 4 --tokens 1024 8192 32768
    python benchmarks/machine_cpu.py --backend cp_aot_eager          without a C++ compiler

Causal, float32, forward and backward, on local gloo ranks of one thread each, which first measure
the machine by `calibrate`. The systems take turns.

    measured    auto for the measured machine; "default" is auto for the default one
    gathered    K and V are gathered by a functional collective, and attended with a mask
    predicted   ms of a step, on the measured machine
    least       ms of the slowest rank, the least of the repetitions; the ratio is to "measured"
    cpu         ms that all ranks compute for, the least of the repetitions; the ratio likewise

Where ranks share cores and these move the data, cpu over cores is the time of a step, and what else
the machine does changes it little. Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

import cp_inductor
from cp_inductor.plan import plan_attention

STRATEGIES = ("heads", "heads_own", "blocks", "rows", "allgather")
AUTO = {"measured": "calibrated", "default": ""}


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def gathered(args: argparse.Namespace, tokens: int) -> Callable[[], object]:
    """Attend with the rows of this rank to all keys."""
    import torch.distributed._functional_collectives as collectives

    rows = torch.arange(tokens).chunk(dist.get_world_size())[dist.get_rank()]
    mask = torch.arange(tokens) <= rows[:, None]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (
            collectives.all_gather_tensor_autograd(each, 2, dist.group.WORLD)
            for each in (key, value)
        )
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    backend = "aot_eager" if args.backend == "cp_aot_eager" else "inductor"
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)
    return partial(step, compiled, inputs(args, len(rows)))


def ours(args: argparse.Namespace, tokens: int, **options: Any) -> Callable[[], object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    compiled = torch.compile(
        attend, backend=args.backend, fullgraph=True, dynamic=False, options=options
    )
    local = inputs(args, tokens // dist.get_world_size())
    return partial(step, compiled, [DTensor.from_local(each, mesh, [Shard(2)]) for each in local])


def inputs(args: argparse.Namespace, tokens: int) -> list[Tensor]:
    shape = (1, args.heads, tokens, args.head_dim)
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def step(compiled: Callable[..., Tensor], given: list[Tensor]) -> None:
    out = compiled(*given)
    torch.autograd.grad(out, given, torch.ones_like(out))


def rank_main(rank: int, args: argparse.Namespace, world_size: int, folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/caches"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    from torch.distributed.device_mesh import init_device_mesh

    machine = cp_inductor.calibrate(init_device_mesh("cpu", (world_size,)))
    rows = []
    for tokens in args.tokens:
        torch.compiler.reset()  # it compiles one function a few times only
        rows += rows_of(args, machine, world_size, tokens)
        if rank == 0:
            print(json.dumps(rows[-len(AUTO) - len(STRATEGIES) - 1 :]), file=sys.stderr, flush=True)
    if rank == 0:
        found = {"machine": machine.format(), "rows": rows}
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rows_of(
    args: argparse.Namespace, machine: cp_inductor.Machine, world_size: int, tokens: int
) -> list[dict[str, Any]]:
    runs: dict[str, Callable[[], object]] = {}
    predicted: dict[str, dict[str, Any]] = {"gathered": {}}
    for name in (*AUTO, *STRATEGIES):
        strategy = "auto" if name in AUTO else name
        priced = AUTO.get(name, "calibrated")
        plan = plan_attention(
            seq_len=tokens,
            world_size=world_size,
            num_heads=args.heads,
            head_dim=args.head_dim,
            itemsize=4,
            strategy=strategy,
            machine=machine if priced else None,
        )
        both = plan, plan.backward()
        seconds = sum(one.simulate(machine).total_s for one in both)
        text = f"{plan.strategy}, {len(plan.stages)} stages"
        predicted[name] = {"plan": text, "predicted_ms": 1e3 * seconds}
        runs[name] = ours(args, tokens, strategy=strategy, machine=priced)
    runs["gathered"] = gathered(args, tokens)
    for run in runs.values():
        run()  # compiles
    times: dict[str, list[Tensor]] = {name: [] for name in runs}
    for _ in range(args.repetitions):
        for name, run in runs.items():
            dist.barrier()
            wall, cpu = perf_counter(), process_time()
            run()
            times[name].append(torch.tensor([perf_counter() - wall, process_time() - cpu]))
    rows = []
    for name, found in times.items():
        every = torch.stack(found)
        gathered_times = [torch.empty_like(every) for _ in range(world_size)]
        dist.all_gather(gathered_times, every)
        ranks = 1e3 * torch.stack(gathered_times)  # (P, repetitions, 2)
        rows.append(
            {
                "ranks": world_size,
                "tokens": tokens,
                "system": name,
                **predicted[name],
                "least_ms": ranks[..., 0].amax(0).min().item(),
                "cpu_ms": ranks[..., 1].sum(0).min().item(),
            }
        )
    for row in rows:
        row["ratio"] = row["least_ms"] / rows[0]["least_ms"]
        row["cpu_ratio"] = row["cpu_ms"] / rows[0]["cpu_ms"]
    return rows


def main() -> None:
    from tabulate import tabulate

    args = parse_args()
    found = []
    for world_size in args.ranks:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            torch.multiprocessing.spawn(rank_main, (args, world_size, folder), world_size)
            found.append(json.loads(Path(folder, "found").read_text()))
    measured = ("least_ms", "ratio", "cpu_ms", "cpu_ratio")
    columns = ("ranks", "tokens", "system", "plan", "predicted_ms", *measured)
    table = [[row.get(name) for name in columns] for one in found for row in one["rows"]]
    formats = ("", "", "", "", ".1f", ".1f", ".2f", ".1f", ".2f")
    headers = ("ranks", "tokens", "", "plan", "predicted", "least", "ratio", "cpu", "ratio")
    print(tabulate(table, headers=headers, floatfmt=formats, missingval="-"))
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }
    print(json.dumps({"benchmark": "machine_cpu", **vars(args), **about, "worlds": found}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--backend", default="cp_inductor", choices=("cp_inductor", "cp_aot_eager"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
