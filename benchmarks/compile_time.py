"""What compiling costs: seconds and nodes by number of layers and ranks, against plain Inductor.

    python benchmarks/compile_time.py --layers 4 16 --ranks 1 2 8 64 1024
    python benchmarks/compile_time.py --packed --ranks 8 1024      plans of batches
    python benchmarks/compile_time.py --packed --ranks 4 --together 4 --layers 1

Each figure is a fresh process with cold caches that compiles forward and backward of a transformer
for the CPU, C++ compiler included, as one rank under a fake process group; nothing is run. One rank
is plain Inductor, backend "inductor", on the same local model. With --together, so many processes
start at once with one empty cache, as the first ranks, or as plain Inductor; the last one counts,
and each runs once what it compiled or loaded (nothing arrives from others). The phases are ours
(capture: find, plan and replace; lower; schedule), the C++ compiler, and all else (Dynamo,
AOTAutograd, Inductor). CPU seconds are those of all processes and their compilers.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PHASES = ("capture", "lower", "schedule", "c++", "all else")


class Packed(nn.Module):
    """The same layers, in which documents attend to themselves alone."""

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        from benchmarks.overlap import Layer

        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, heads, attend_under) for _ in range(layers))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        same = documents[:, None, :, None] == documents[:, None, None]
        mask = (place[:, None] >= place) & same
        for layer in self.layers:
            x = layer(x, mask)
        return x


def attend_under(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def compile_once(
    args: argparse.Namespace, layers: int, world_size: int, rank: int
) -> dict[str, Any]:
    """Compile in this process, whose caches are cold."""
    from torch._inductor.graph import GraphLowering
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.experimental import implicit_replication

    import cp_inductor.backend.captured as backend
    from benchmarks.overlap import Layer, attend_ours
    from cp_inductor.passes import pipeline
    from tests.support.graphs import _pretend_boxed
    from tests.support.ranks import fake_rank

    seconds = dict.fromkeys(PHASES, 0.0)
    nodes = 0

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*positional, **named)
            finally:
                seconds[phase] += time.perf_counter() - start

        return call

    load = GraphLowering._compile_to_module_lines

    def counted(self: GraphLowering, code: Any) -> Any:
        nonlocal nodes
        nodes += len(self.module.graph.nodes)
        return load(self, code)

    def compile_only(self: GraphLowering) -> SimpleNamespace:
        code, _ = self.codegen()
        self._compile_to_module_lines(code)
        call = lambda given: _pretend_boxed(self.module, given)  # noqa: E731
        return SimpleNamespace(call=call, runner=None, __file__="never_run.py")

    model: nn.Module
    if args.packed:
        model = Packed(layers, args.dim, args.heads)
    else:
        model = nn.Sequential(*(Layer(args.dim, args.heads, attend_ours) for _ in range(layers)))
    x = torch.randn(1, args.tokens, args.dim, requires_grad=True)
    patches = [
        mock.patch.object(backend, "capture", timed("capture", backend.capture)),
        mock.patch.object(pipeline, "lower_attention", timed("lower", pipeline.lower_attention)),
        mock.patch.object(
            pipeline, "schedule_exchange", timed("schedule", pipeline.schedule_exchange)
        ),
        mock.patch.object(GraphLowering, "_compile_to_module_lines", timed("c++", counted)),
    ]
    if args.together == 1:
        patches.append(mock.patch.object(GraphLowering, "compile_to_module", compile_only))
    with ExitStack() as around:
        around.enter_context(fake_rank(rank, world_size))
        for patch in patches:
            around.enter_context(patch)
        if world_size == 1:
            compiled = torch.compile(model, fullgraph=True)
        else:
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
            options = {"strategy": args.strategy}
            if not args.packed:
                options["mesh"] = mesh
            compiled = torch.compile(model, backend="cp_inductor", fullgraph=True, options=options)
        inputs = [x]
        if args.packed:
            documents = torch.arange(args.tokens * world_size)[None] // 100
            inputs.append(documents)
            if world_size > 1:
                shard = DTensor.from_local(x.detach(), mesh, [Shard(1)], run_check=False)
                whole = DTensor.from_local(documents, mesh, [Replicate()], run_check=False)
                inputs = [shard.requires_grad_(), whole]
        start, cpu = time.perf_counter(), sum(os.times()[:4])
        with implicit_replication():
            compiled(*inputs).sum().backward()
        total, cpu = time.perf_counter() - start, sum(os.times()[:4]) - cpu
    seconds["all else"] = total - sum(seconds.values())
    return {"total_s": total, "cpu_s": cpu, "nodes": nodes, "phases_s": seconds}


def measure(args: argparse.Namespace, layers: int, world_size: int) -> dict[str, Any]:
    """Compile in fresh processes."""
    command = [sys.executable, __file__, "--one", str(layers), str(world_size)]
    options = ["--packed"] if args.packed else []
    for name in ("tokens", "dim", "heads", "strategy", "together"):
        options += [f"--{name}", str(getattr(args, name))]
    ranks = [world_size // 2] if args.together == 1 else [*range(args.together)]
    if world_size == 1:
        ranks = [0] * args.together
    with tempfile.TemporaryDirectory() as folder:
        # Inductor keeps the header that it compiles once in the default folder, below TMPDIR.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TMPDIR": folder}
        running = [
            subprocess.Popen(
                [*command, str(rank), *options],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]
        printed = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, printed, strict=True):
        if process.returncode:
            sys.exit(errors)
    rows: list[dict[str, Any]] = [json.loads(output.splitlines()[-1]) for output, _ in printed]
    last = max(rows, key=lambda row: row["total_s"])
    cpu = sum(row["cpu_s"] for row in rows)
    return {"layers": layers, "ranks": world_size, **last, "cpu_s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 64, 1024])
    parser.add_argument("--tokens", type=int, default=512, help="per rank")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--packed", action="store_true", help="documents: planned for each batch")
    parser.add_argument("--together", type=int, default=1, help="processes on one cold cache")
    parser.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(compile_once(args, *args.one)))
        return
    # One rank, always: the others are compared with it.
    counts = sorted({1, *args.ranks})
    rows = [measure(args, layers, ranks) for layers in args.layers for ranks in counts]
    table = []
    for row in rows:
        plain = next(r for r in rows if r["layers"] == row["layers"] and r["ranks"] == 1)
        ratios = [row[name] / plain[name] for name in ("total_s", "cpu_s")]
        costs = (row["total_s"], ratios[0], row["cpu_s"], ratios[1])
        phases = [row["phases_s"][phase] for phase in PHASES]
        table.append([row["layers"], row["ranks"], row["nodes"], *costs, *phases])
    headers = ("layers", "ranks", "nodes", "seconds", "x plain", "CPU s", "x plain", *PHASES)
    print(tabulate(table, headers=headers, floatfmt=".2f"))
    arguments = {name: value for name, value in vars(args).items() if name != "one"}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"benchmark": "compile_time", **arguments, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
