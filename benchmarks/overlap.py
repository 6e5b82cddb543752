"""How much of the communication is exposed, on a link of a given rate, by schedule.

    python benchmarks/overlap.py --ranks 4 --rates 4gbit 1gbit 250mbit

A transformer is trained on gloo ranks that share a loopback with a token bucket in front. Four
programs of the same shapes take turns within each repetition: ours with `schedule` "none", "local"
and "global", compiled, and torch's own ring (`_templated_ring_attention`, all-to-all rotation, load
balancing on) through its functions, eager, with the CPU's flash kernel.

    compute     a step in which exchanges take no time: starts and waits return at once
    exchange    the starts and waits of a step one after the other, and no compute
    step        a step
    exposed     step - compute

Each is the median over repetitions of the slowest rank. `bound` is what a schedule may take: 1.05 x
max(compute, exchange) and the largest exchange. Prints a table and, as its last line, one JSON
object.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as upstream

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.slow_link import bytes_per_second, enter_namespace, set_rate

aten = torch.ops.aten

SCHEDULES = ("none", "local", "global")
TIMES = ("compute_s", "exchange_s", "step_s")


class Layer(nn.Module):
    """Attention and a gated MLP, before each a norm; what comes with x goes to `attend`."""

    def __init__(self, dim: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        y = self.norm_1(x)
        query, key, value = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = x + self.out(self.attend(query, key, value, *more).transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def attend_ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class UpstreamRing(torch.autograd.Function):
    """Torch's own ring, through its functions: its dispatcher does not know the CPU kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = upstream._templated_ring_attention(
            dist.group.WORLD, 2, kernel, query, key, value, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        saved = ctx.saved_tensors
        grads = upstream._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, grad_out, "grad_out", *saved, True, dropout_p=0.0
        )
        return grads[:3]


class Exchanges:
    """Collectives that take no time, and a record of which there were."""

    def __init__(self) -> None:
        self.started: list[tuple[Tensor, list[int], list[int]]] = []

    @contextmanager
    def free(self) -> Iterator[None]:
        """Let starts and waits return at once: kernels of the CPU stand before the composite."""
        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("all_to_all_single", self._start, "CPU")
        library.impl("wait_tensor", lambda tensor: tensor, "CPU")
        self.started.clear()
        try:
            yield
        finally:
            library._destroy()

    def _start(
        self, sent: Tensor, received: list[int], given: list[int], group_name: str
    ) -> Tensor:
        self.started.append((torch.empty_like(sent), list(received), list(given)))
        # Not what memory happens to hold: denormal numbers are slow.
        return sent.new_full((sum(received), *sent.shape[1:]), 0.01)

    def replay(self) -> None:
        """Make every exchange of the last free run, one after the other."""
        ops = torch.ops._c10d_functional
        for sent, received, given in self.started:
            name = dist.group.WORLD.group_name
            ops.wait_tensor(ops.all_to_all_single(sent, received, given, name))

    @property
    def largest_part(self) -> float:
        """The share of this rank's bytes that its largest exchange moves."""
        moved = [
            max(sum(received), sum(given)) * (sent[0].numel() if sent.ndim > 1 else 1)
            for sent, received, given in self.started
        ]
        return max(moved) / sum(moved)


class Program:
    """One way to train, and its times."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.exchanges = Exchanges()
        self.times: dict[str, list[float]] = {name: [] for name in TIMES}

    def step(self) -> None:
        self.x.grad = None
        self.model(self.x).square().mean().backward()

    def measure(self) -> None:
        with self.exchanges.free():
            self.times["compute_s"].append(timed(self.step))
        self.times["exchange_s"].append(timed(self.exchanges.replay))
        self.times["step_s"].append(timed(self.step))

    def result(self) -> dict[str, float]:
        row = {name: median(times) for name, times in self.times.items()}
        row["exposed_s"] = max(0.0, row["step_s"] - row["compute_s"])
        row["exposed_fraction"] = row["exposed_s"] / row["step_s"]
        stage = agreed(self.exchanges.largest_part) * row["exchange_s"]
        row["bound_s"] = 1.05 * max(row["compute_s"], row["exchange_s"]) + stage
        return row


def timed(function: Callable[[], None]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    function()
    return agreed(time.perf_counter() - start)


def agreed(number: float) -> float:
    largest = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def flops_per_second() -> float:
    """What a rank computes while all of them do."""
    a = torch.randn(512, 512)
    (a @ a).sum()
    runs = [timed(lambda: [a @ a for _ in range(10)] and None) for _ in range(5)]
    return 10 * 2 * 512**3 / median(runs)


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(dist.get_rank())
    flops = flops_per_second()

    def program(attend: Callable[..., Tensor], compile_model: Callable[..., Any]) -> Program:
        layers = [Layer(args.dim, args.heads, attend) for _ in range(args.layers)]
        x = torch.randn(1, args.tokens, args.dim, requires_grad=True)
        return Program(compile_model(nn.Sequential(*layers)), x)

    # All ranks share the link; what is planned for the slowest rate serves the faster ones.
    slowest = min(map(bytes_per_second, args.rates)) / args.ranks

    def ours(schedule: str) -> Program:
        options = {
            "mesh": mesh,
            "strategy": args.strategy,
            "stages": args.stages,
            "schedule": schedule,
            "link_bytes_per_s": slowest,
            "device_flops_per_s": flops,
        }
        compile_model = partial(
            torch.compile, backend=args.backend, fullgraph=True, options=options
        )
        return program(attend_ours, compile_model)

    programs = {schedule: ours(schedule) for schedule in args.schedules}
    programs["upstream"] = program(UpstreamRing.apply, lambda model: model)
    for name, each in programs.items():
        start = time.perf_counter()
        for _ in range(2):
            each.step()
        tell(f"{name}: compiled and run in {time.perf_counter() - start:.0f} s")
    rows = []
    for rate in args.rates:
        throttle(rate)
        for each in programs.values():
            each.times = {name: [] for name in TIMES}
        for _ in range(args.repetitions):
            for each in programs.values():
                each.measure()
        tell(f"{rate}: done")
        rows.append({"rate": rate, **{name: each.result() for name, each in programs.items()}})
    return rows


def tell(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, file=sys.stderr)


def throttle(rate: str | None) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        set_rate(rate)
    dist.barrier()


def rank_main(rank: int, folder: str, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.cache_size_limit = 64
    store = dist.FileStore(os.path.join(folder, "store"), args.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=store)
    options = upstream._cp_options
    with (
        patch.object(options, "rotate_method", upstream._RotateMethod.ALL_TO_ALL),
        patch.object(options, "enable_load_balance", True),
    ):
        rows = train(args)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rates", "--rate", nargs="+", default=["4gbit", "1gbit", "250mbit"])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--stages", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="per rank")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--backend", default="cp_inductor", choices=["cp_inductor", "cp_aot_eager"])
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    enter_namespace()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, folder, args, results))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        while results.empty() and all(process.exitcode in (None, 0) for process in ranks):
            time.sleep(0.1)
        if results.empty():
            for process in ranks:
                process.kill()
            sys.exit("a rank failed")
        rows = results.get()
        for process in ranks:
            process.join()
    report(args, rows)


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    columns = (*TIMES, "exposed_s", "exposed_fraction", "bound_s")
    table = [
        [row["rate"], name, *(row[name][column] for column in columns)]
        for row in rows
        for name in row
        if name != "rate"
    ]
    print(tabulate(table, headers=("rate", "schedule", *columns), floatfmt=".3f"))
    shapes = {name: value for name, value in vars(args).items() if name != "rates"}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"benchmark": "overlap", **shapes, **versions, "rates": rows}))


if __name__ == "__main__":
    main()
