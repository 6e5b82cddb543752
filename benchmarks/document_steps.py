"""A training step on packed documents: plans made once per batch beside plans made when compiling.

    python benchmarks/document_steps.py                    4 ranks of 4096 tokens, short documents
    python benchmarks/document_steps.py --rate 1gbit       behind a link of 1 Gbit/s
    python benchmarks/document_steps.py --beside ../old    and beside another checkout

Both compiled functions take the same batches in turn, in one run. Every batch has other documents.
The other checkout takes the same batches before and after them, in processes of its own.

plan         "static": made when compiling; "runtime": made for each batch; "beside": whatever the
             other checkout does by default
step s       median and greatest, of the slowest rank
blocks       blocks of 128 x 128 that all ranks computed, per step and layer, forward
graphs       compiled, for all batches
planning ms  per batch, on the host

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from benchmarks.packed import KINDS, pack
from benchmarks.slow_link import enter_namespace, set_rate

ROOT = Path(__file__).parents[1]
HEAD_DIM = 64
PLANS = ("static", "runtime")
BESIDE = ("beside",)


class Model(nn.Module):
    """Layers of attention within documents, each with a residual."""

    def __init__(self, layers: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM]
        dim = heads * HEAD_DIM
        self.project = nn.ModuleList(nn.Linear(dim, sum(self.sizes)) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        mask = place[:, None] >= place
        mask = mask & (documents[:, None, :, None] == documents[:, None, None])
        for project, out in zip(self.project, self.out, strict=True):
            parts = project(F.rms_norm(x, x.shape[-1:])).split(self.sizes, -1)
            query, key, value = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in parts)
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=True
            )
            x = x + out(attended.transpose(1, 2).flatten(2))
        return x


def documents_of(kind: str, length: int, seed: int, scale: float) -> Tensor:
    """Return document numbers (1, length)."""
    lengths = torch.from_numpy(pack(kind, length, seed, scale))
    return torch.arange(len(lengths)).repeat_interleave(lengths)[None]


def run_rank(rank: int, folder: str, args: argparse.Namespace, results: Any) -> None:
    """Measure on one rank; rank 0 reports."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), args.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=store)
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model(args.layers, *args.heads)
    plans = BESIDE if args.is_beside else PLANS
    step_of = {plan: make_step(model, args, plan) for plan in plans}
    length = args.tokens * args.ranks
    x = distribute_tensor(torch.randn(1, length, args.heads[0] * HEAD_DIM), mesh, [Shard(1)])
    seconds: dict[str, list[float]] = {plan: [] for plan in plans}
    rows = {plan: dict.fromkeys(("blocks", "graphs", "planning_us"), 0) for plan in plans}
    for number in range(args.steps + 1):
        documents = distribute_tensor(
            documents_of(args.documents, length, number, args.scale), mesh, [Shard(1)]
        )
        if number == 1 and rank == 0 and args.rate:
            set_rate(args.rate)
        for plan in plans:
            before = counted()
            dist.barrier()
            started = time.perf_counter()
            step_of[plan](x, documents)
            dist.barrier()
            if number:  # the first compiles
                seconds[plan].append(time.perf_counter() - started)
            for name, value in counted().items():
                rows[plan][name] += value - before[name]
    blocks = torch.tensor([rows[plan]["blocks"] for plan in plans])
    dist.all_reduce(blocks)
    if rank == 0:
        results.put(
            [
                {
                    "plan": plan,
                    "step_s": statistics.median(seconds[plan]),
                    "greatest_s": max(seconds[plan]),
                    "blocks": int(total) / (args.steps + 1) / args.layers,
                    "graphs": rows[plan]["graphs"],
                    "planning_ms": rows[plan]["planning_us"] / 1e3 / (args.steps + 1),
                }
                for plan, total in zip(plans, blocks, strict=True)
            ]
        )
    dist.destroy_process_group()


def counted() -> dict[str, int]:
    """Return what torch and this library have counted until now."""
    ours = counters["cp_inductor"]
    return {
        "blocks": ours["blocks_computed"],
        "graphs": counters["stats"]["unique_graphs"],
        "planning_us": ours["planning_us"],
    }


def make_step(model: nn.Module, args: argparse.Namespace, plan: str) -> Callable[..., None]:
    """Return what runs forward and backward, with plans made at a time."""

    def forward(x: Tensor, documents: Tensor) -> Tensor:
        return model(x, documents)

    options: dict[str, Any] = {} if args.is_beside else {"plan": plan}
    compiled = torch.compile(
        forward, backend=args.backend, fullgraph=True, dynamic=False, options=options
    )

    def step(x: Tensor, documents: Tensor) -> None:
        with implicit_replication():
            compiled(x, documents).to_local().sum().backward()
        model.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of one rank")
    parser.add_argument("--heads", type=int, nargs=2, default=[8, 8], help="of queries and of keys")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--documents", choices=[*KINDS], default="short")
    parser.add_argument("--scale", type=float, default=1.0, help="of the documents' lengths")
    parser.add_argument("--backend", default="cp_aot_eager", help="or cp_inductor")
    parser.add_argument("--rate", help="of the link that all ranks share, such as 1gbit")
    parser.add_argument("--beside", metavar="PATH", help="of another checkout of this repository")
    parser.add_argument("--is-beside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rate and not args.is_beside:
        enter_namespace()
    before = measure_beside(args) if args.beside else []
    rows = measure(args)
    if args.is_beside:
        print(json.dumps(rows))
        return
    rows += before + (measure_beside(args) if args.beside else [])
    print(
        f"torch {torch.__version__}, cp_inductor {version('cp-inductor')},"
        f" Python {platform.python_version()}, {args.ranks} gloo ranks of {args.tokens} tokens,"
        f" {args.layers} layers, heads {args.heads[0]}:{args.heads[1]} of {HEAD_DIM}, float32,"
        f" {args.documents} documents, lengths x {args.scale:g}, {args.backend},"
        f" link {args.rate or 'not limited'}"
    )
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"))
    # The faster of the two runs of the other checkout.
    seconds = {row["plan"]: row["step_s"] for row in sorted(rows, key=lambda row: -row["step_s"])}
    ratios = {plan: seconds[plan] / seconds["runtime"] for plan in seconds if plan != "runtime"}
    for plan, ratio in ratios.items():
        print(f"steps with plans made for each batch are {ratio:.2f} times as fast as {plan} ones")
    print(json.dumps({"arguments": vars(args), "rows": rows, "ratios": ratios}))


def measure_beside(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the library as it is in another checkout, with the benchmark as it is here."""
    given = [f"--ranks={args.ranks}", f"--tokens={args.tokens}", f"--layers={args.layers}"]
    given += [f"--steps={args.steps}", f"--documents={args.documents}", f"--scale={args.scale}"]
    given += ["--heads", *map(str, args.heads), f"--backend={args.backend}", "--is-beside"]
    given += [f"--rate={args.rate}"] if args.rate else []
    with tempfile.TemporaryDirectory() as folder:
        for package in ("cp_inductor", "passes"):
            (Path(folder) / package).symlink_to((Path(args.beside) / package).resolve())
        # What is measured, first; the benchmarks are those of this checkout.
        path = os.pathsep.join([folder, str(ROOT)])
        done = subprocess.run(
            [sys.executable, __file__, *given],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in processes of their own."""
    if args.rate:
        set_rate(None)  # until all is compiled
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, folder, args, results))
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
        rows: list[dict[str, Any]] = results.get()
        for process in ranks:
            process.join()
    return rows


if __name__ == "__main__":
    main()
