"""What estimates say against what ranks measure: peak memory and seconds of a step, on the CPU.

    python benchmarks/estimates.py
    python benchmarks/estimates.py --ranks 4 --tokens 16384 --layers 6

Gloo ranks train a small transformer through the backend. The peak of a step is what the kernel says
that the process held most (VmHWM, reset before the step), besides what it held before it. Seconds
are CPU seconds of a rank's step, because ranks share the machine's cores. The estimate is of the
same model and world, at speeds that are measured in the same run, in CPU seconds as well: of a
linear layer and of an attention, forward and backward, of a copy, and of exchanges.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

sys.path.insert(0, str(Path(__file__).parents[1]))

import cp_inductor
from cp_inductor.plan.ir import NUM_MATMULS
from tests.support.ranks import run_ranks

MIB = 2**20
HEADS, VOCABULARY = 8, 1024


class Layer(nn.Module):
    """Norm, attention, norm, gated MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, 3 * dim, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(F.rms_norm(x, x.shape[-1:])).chunk(3, -1)
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = F.rms_norm(x, x.shape[-1:])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A language model and its loss."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    assert found is not None
    return 1024 * int(found[1])


def cpu_seconds(function: Callable[[], Any], times: int = 3) -> float:
    """Return the fewest CPU seconds of a few calls."""
    measured = []
    for _ in range(times):
        start = time.process_time()
        function()
        measured.append(time.process_time() - start)
    return min(measured)


def machine_of(args: argparse.Namespace) -> str:
    """Measure what this machine reaches, in operations and bytes per CPU second."""
    torch.set_num_threads(1)
    rows, dim = args.tokens // args.ranks, args.dim
    x, w = torch.randn(rows, dim), torch.randn(dim, 3 * dim)
    heads = [torch.randn(1, HEADS, rows, dim // HEADS, requires_grad=True) for _ in range(3)]
    large, few = torch.randn(2**24), torch.randn(args.ranks)
    some = torch.randn(args.ranks * 2**20)

    def multiply() -> None:
        y = x @ w
        _ = y @ w.t(), x.t() @ y

    def exchange(given: Tensor) -> None:
        dist.all_to_all_single(torch.empty_like(given), given.clone())

    def attend() -> None:
        out = F.scaled_dot_product_attention(*heads)
        torch.autograd.grad(out, heads, torch.ones_like(out))

    device = cp_inductor.Device(
        flops_per_s=2 * sum(NUM_MATMULS.values()) * rows**2 * dim / cpu_seconds(attend),
        matmul_flops_per_s=18 * rows * dim**2 / cpu_seconds(multiply),
        bytes_per_s=8 * large.numel() / cpu_seconds(lambda: large + 1),
        hidden=0.0,  # whatever runs beside it, CPU seconds are spent
        name="cpu",
    )
    latency_s = cpu_seconds(lambda: exchange(few), 20)
    moved = some.nbytes * (args.ranks - 1) / args.ranks
    rate = moved / (cpu_seconds(lambda: exchange(some)) - latency_s)
    return cp_inductor.Machine((cp_inductor.Level(0, rate, latency_s, "tcp"),), device).format()


def train(args: argparse.Namespace, machine: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = cp_inductor.parallelize(Model(args.dim, args.layers), mesh)
    ids = torch.randint(VOCABULARY, (1, args.tokens))
    shard = distribute_tensor(ids, mesh, [Shard(1)])
    compiled = torch.compile(
        model,
        backend=args.backend,
        fullgraph=True,
        dynamic=False,
        options={"machine": machine},
    )

    def step() -> None:
        with implicit_replication():
            compiled(shard).backward()

    step()
    peaks, seconds = [], []
    for _ in range(2):
        model.zero_grad()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before, start = memory("VmRSS"), time.process_time()
        step()
        seconds.append(time.process_time() - start)
        peaks.append(memory("VmHWM") - before)
    weights = sum(p.to_local().nbytes for p in model.parameters())
    return {"peak": weights + min(peaks), "seconds": min(seconds)}


def estimated(args: argparse.Namespace, machine: str) -> cp_inductor.Estimate:
    with torch.device("meta"):
        model = Model(args.dim, args.layers)

    def tokens(mesh: DeviceMesh) -> tuple[Tensor]:
        ids = torch.zeros(1, args.tokens, dtype=torch.int64)
        return (distribute_tensor(ids, mesh, [Shard(1)]),)

    return cp_inductor.estimate(
        model,
        tokens,
        mesh_shape=(args.ranks,),
        target="cpu",
        optimizer_states=0,
        options={"machine": machine},
    )


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--backend", default="cp_inductor")
    args = parser.parse_args()
    # Memory that is freed goes back at once, so that what a process holds is what it uses.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    from benchmarks import estimates as this  # by a name that ranks can import

    machine = run_ranks(args.ranks, this.machine_of, args)[args.ranks // 2]
    ranks = run_ranks(args.ranks, this.train, args, machine)
    middle = ranks[args.ranks // 2]
    found = estimated(args, machine)
    seconds = found.seconds - found.parts_s["optimizer"]
    rows = [
        ["peak, MiB", middle["peak"] / MIB, found.peak_bytes / MIB],
        ["CPU seconds", middle["seconds"], seconds],
    ]
    for row in rows:
        row.append(f"{row[2] / row[1] - 1:+.1%}")
    print(tabulate(rows, headers=("", "measured", "estimated", "difference"), tablefmt="github"))
    about = {"date": str(date.today()), "torch": torch.__version__, "machine": platform.machine()}
    result = {
        "speeds": machine,
        "ranks": ranks,
        "memory": dict(found.memory),
        "parts_s": dict(found.parts_s),
    }
    print(json.dumps(about | {"arguments": vars(args)} | result))


if __name__ == "__main__":
    main()
