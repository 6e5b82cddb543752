"""What it costs to generate the code of one rank of many, without a GPU and without the ranks.

    python benchmarks/cross_compile.py
    python benchmarks/cross_compile.py --ranks 8 1024 --target cuda:b200 --kernels

One attention layer (projections, causal attention, output; bfloat16) is cross-compiled, forward and
backward, each case in a process of its own: seconds from the call to the code, imports left out;
peak memory of the whole process; nodes of the lowered graphs; generated kernels; and with --kernels
what compiling all of these to machine code takes.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from cp_inductor import cross_compile


class Layer(nn.Module):
    """Grouped-query attention with its projections."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.head_dim = head_dim
        self.qkv = nn.Linear(self.sizes[0], sum(self.sizes), bias=False)
        self.out = nn.Linear(self.sizes[0], self.sizes[0], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self.sizes, -1)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def measure(args: argparse.Namespace, world_size: int, rank: int) -> dict[str, Any]:
    """Cross-compile in this process."""
    with torch.device("meta"):
        layer = Layer(args.heads, args.kv_heads, args.head_dim).bfloat16()
        x = torch.empty(1, args.tokens, args.heads * args.head_dim, dtype=torch.bfloat16)
    start = time.perf_counter()
    compiled = cross_compile(
        layer,
        (x,),
        world_size=world_size,
        rank=rank,
        target=args.target,
        options={"strategy": args.strategy},
    )
    row: dict[str, Any] = {
        "ranks": world_size,
        "rank": rank,
        "seconds": round(time.perf_counter() - start, 1),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    for kind, gm in compiled.graphs.items():
        row[f"{kind} nodes"] = len(gm.graph.nodes)
        row[f"{kind} kernels"] = compiled.code[kind].count("async_compile.triton(")
    if args.kernels:
        start = time.perf_counter()
        row["machine codes"] = len(compiled.compile_kernels())
        row["their seconds"] = round(time.perf_counter() - start, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 1024])
    parser.add_argument("--rank", type=int, help="one past the middle, if not given")
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernels", action="store_true", help="compile the kernels too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args, args.ranks[0], args.rank)))
        return
    rows = []
    for world_size in args.ranks:
        rank = world_size // 2 + 5 if args.rank is None else args.rank
        rank = min(rank, world_size - 1)
        own = ["--here", "--ranks", str(world_size), "--rank", str(rank)]
        # The last of an option wins: these follow what was given.
        command = [sys.executable, __file__, *sys.argv[1:], *own]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(tabulate(rows, headers="keys", tablefmt="github"))
    about = {"date": str(date.today()), "torch": torch.__version__, "machine": platform.machine()}
    arguments = {name: value for name, value in vars(args).items() if name != "here"}
    print(json.dumps(about | {"arguments": arguments, "rows": rows}))


if __name__ == "__main__":
    main()
