"""What it costs that an eager region types what it computes: its first step, and later ones.

    python benchmarks/eager_region.py
    python benchmarks/eager_region.py --tokens 4096 --layers 8

Two processes on this machine, of one thread each; the first of them prints its CPU time. A step
is forward and backward of a small transformer. Steps with `check_sequence` on and off take turns,
so that both see the same machine; ratios are of medians of one run. "first" is the first step at a
place in the program, which is typed op by op; "later" are those behind it, whose calls were typed.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

import cp_inductor
from cp_inductor.sequence.eager import forget_judgements


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and compute token by token."""
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def step(model: nn.Module, x: Tensor, mesh: DeviceMesh, is_checked: bool) -> float:
    """Return the CPU seconds of a forward and a backward in a region."""
    model.zero_grad()
    with cp_inductor.config.patch(check_sequence=is_checked):
        dist.barrier()
        start = time.process_time()
        with cp_inductor.context_parallel(mesh):
            model(x).square().mean().backward()
        return time.process_time() - start


def run_rank(rank: int, args: argparse.Namespace, port: int) -> None:
    """Measure as one rank; rank 0 prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width, 4) for _ in range(args.layers)))
    x = torch.randn(1, args.tokens, args.width)
    spent: dict[str, list[float]] = {"off": [], "first": [], "later": []}
    step(model, x, mesh, False)  # plans, and what else is made once
    for _ in range(args.repetitions):
        spent["off"].append(step(model, x, mesh, False))
        forget_judgements()
        spent["first"].append(step(model, x, mesh, True))
        spent["later"].append(step(model, x, mesh, True))
    if rank == 0:
        show(args, {name: 1e3 * statistics.median(times) for name, times in spent.items()})
    dist.barrier()
    dist.destroy_process_group()


def show(args: argparse.Namespace, medians_ms: dict[str, float]) -> None:
    """Print a table, and JSON."""
    ratios = {name: took / medians_ms["off"] for name, took in medians_ms.items()}
    rows = [[name, f"{took:.1f}", f"{ratios[name]:.3f}"] for name, took in medians_ms.items()]
    print(tabulate(rows, ["check_sequence", "ms", "ratio"]))
    sizes = {name: getattr(args, name) for name in ("layers", "width", "tokens", "repetitions")}
    machine = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
    print(json.dumps({"ratios": ratios, "ms": medians_ms, **sizes, **machine}))


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--repetitions", type=int, default=30)
    args = parser.parse_args()
    mp.spawn(run_rank, (args, free_port()), nprocs=2)


if __name__ == "__main__":
    main()
