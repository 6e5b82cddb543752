"""How many Triton kernels one attention is, beside flash calls and collectives, and what they move.

    python benchmarks/kernel_count.py
    python benchmarks/kernel_count.py --ranks 8 1024 --strategies auto blocks --kernels

One causal attention (32 heads of 128, 4096 tokens per rank, bfloat16) is cross-compiled for CUDA,
forward and backward, for one rank of each world, without a GPU. Counted in the generated code:
launches of Triton kernels; what they read and write, in MB; flash calls; exchanges; and the time
that the bytes take at 4 TB/s, forward and backward together. --kernels lists every launch.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.support: reads generated code

from cp_inductor import cross_compile
from tests.support.graphs import attend_causal
from tests.support.kernel_traffic import traffic_of
from tests.support.wrapper import Wrapper

BYTES_PER_S = 4e12


def measure(args: argparse.Namespace, strategy: str, world_size: int) -> dict[str, Any]:
    """Count the kernels of one attention."""
    shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, args.heads, args.tokens, args.head_dim, **shape)
    key = torch.empty(1, args.kv_heads, args.tokens, args.head_dim, **shape)
    rank = min(args.rank, world_size - 1) if args.rank >= 0 else world_size * 3 // 8
    start = time.perf_counter()
    compiled = cross_compile(
        attend_causal,
        (query, key, key),
        world_size=world_size,
        rank=rank,
        options={"strategy": strategy},
    )
    row: dict[str, Any] = {"strategy": strategy, "ranks": world_size, "rank": rank}
    moved = 0
    for kind, code in compiled.code.items():
        launches, wrapper = traffic_of(code), Wrapper.read(code)
        if args.kernels:
            for launch in launches:
                print(kind, launch)
        moved += sum(launch.moved for launch in launches)
        row |= {
            f"{kind} kernels": len(launches),
            f"{kind} MB": round(sum(launch.moved for launch in launches) / 1e6),
            f"{kind} tiles": len(wrapper.of("tile")),
            f"{kind} exchanges": len(wrapper.of("start")),
        }
    row["ms"] = round(1e3 * moved / BYTES_PER_S, 3)
    row["compile s"] = round(time.perf_counter() - start, 1)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--rank", type=int, default=-1, help="default: three eighths of the world")
    parser.add_argument("--strategies", nargs="+", default=["auto", "heads", "blocks", "ring"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    rows = [measure(args, strategy, n) for n in args.ranks for strategy in args.strategies]
    print(tabulate(rows, headers="keys"))
    context = {"torch": torch.__version__, "date": str(date.today()), "args": vars(args)}
    print(json.dumps({**context, "rows": rows}))


if __name__ == "__main__":
    main()
