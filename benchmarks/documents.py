"""Batches of packed documents: what is planned for each batch, and what that saves.

    python benchmarks/documents.py plan                        8 ranks of 16384 tokens, 64 as well
    python benchmarks/documents.py plan --ranks 8 --tokens 4096 --seeds 20

For batches of documents whose lengths are drawn at random, in u (one rank's keys and values
in bfloat16):

pairs           pairs that exist, over those of a causal attention
blocks          blocks of 128 x 128 that ranks compute, over those that hold pairs
balance         the busiest rank's blocks over the mean; of all seeds the mean, and the worst
received        by the rank that receives most, forward and backward; mean and worst of all seeds
over ranks      the mean of all ranks, and of all seeds
static          the same of the plan that is made when compiling, which knows no documents
static, blocks  of the same without splitting heads
Magi            MagiAttention's, for one causal document of 4096 tokens per rank; other lengths of
                documents were not measured. It splits heads; see magi_attention.json
planning ms     processor time of one thread, mean and worst

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import os

# Read when numpy is imported: planning is measured on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import platform
import time
from functools import lru_cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

import cp_inductor
from benchmarks.packed import KINDS, pack
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BLOCK, BatchPlan, plan_batch

DOCUMENTS = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"
MAGI = json.loads((Path(__file__).parent / "magi_attention.json").read_text())["received"]
HEAD_DIM, ITEMSIZE, STAGES = 128, 2, 2


def needed_blocks(lengths: np.ndarray) -> int:
    """Count blocks that hold pairs: of two blocks, at most one document has tokens in both."""
    ends = np.cumsum(lengths)
    spanned = (ends - 1) // BLOCK - (ends - lengths) // BLOCK + 1
    return int((spanned * (spanned - 1) // 2).sum() + -(-int(ends[-1]) // BLOCK))


def plan_of(numbers: np.ndarray, world_size: int, heads: tuple[int, int]) -> BatchPlan:
    tokens = [numbers.shape[1] // world_size] * world_size
    return plan_batch(
        Rule.parse(DOCUMENTS),
        {0: numbers},
        batch=1,
        query_lengths=tokens,
        key_lengths=tokens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        stages=STAGES,
    )


@lru_cache
def static(world_size: int, length: int, heads: tuple[int, int], strategy: str) -> float:
    """Return what the worst rank receives under a plan that knows no documents, in u."""
    plan = cp_inductor.plan_attention(
        seq_len=length,
        world_size=world_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=HEAD_DIM,
        mask=DOCUMENTS,
        strategy=strategy,
    )
    backward = plan.backward()
    received = [plan.bytes_received(r) + backward.bytes_received(r) for r in range(world_size)]
    return max(received) / unit(length // world_size, heads)


def unit(tokens: int, heads: tuple[int, int]) -> int:
    return 2 * tokens * heads[1] * HEAD_DIM * ITEMSIZE


def measure(
    kind: str, world_size: int, tokens: int, heads: tuple[int, int], seeds: int
) -> dict[str, Any]:
    length = world_size * tokens
    pairs, blocks, balance, received, means, seconds = [], [], [], [], [], []
    for seed in range(seeds):
        lengths = pack(kind, length, seed)
        numbers = np.repeat(np.arange(len(lengths)), lengths)[None]
        if not seed:
            plan_of(numbers, world_size, heads)  # sympy remembers the rule
        start = time.process_time()
        plan = plan_of(numbers, world_size, heads)
        seconds.append(time.process_time() - start)
        of_ranks = [
            plan.bytes_received(
                rank,
                num_heads=heads[0],
                num_kv_heads=heads[1],
                head_dim=HEAD_DIM,
                itemsize=ITEMSIZE,
            )
            / unit(tokens, heads)
            for rank in range(world_size)
        ]
        pairs.append(float((lengths * (lengths + 1)).sum() / (length * (length + 1))))
        blocks.append(plan.num_blocks / needed_blocks(lengths))
        balance.append(plan.balance)
        received.append(max(of_ranks))
        means.append(float(np.mean(of_ranks)))
    name = f"{heads[0]}:{heads[1]}"
    return {
        "ranks": world_size,
        "tokens": tokens,
        "documents": kind,
        "heads": name,
        "pairs": float(np.mean(pairs)),
        "blocks": max(blocks),
        "balance": float(np.mean(balance)),
        "balance, worst": max(balance),
        "received": float(np.mean(received)),
        "received, worst": max(received),
        "over ranks": float(np.mean(means)),
        "static": static(world_size, length, heads, "auto"),
        "static, blocks": static(world_size, length, heads, "blocks"),
        "Magi": MAGI.get(name, {}).get(str(world_size)),
        "planning ms": 1e3 * float(np.mean(seconds)),
        "planning ms, worst": 1e3 * max(seconds),
    }


def measure_plans(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for world_size, tokens, kind in product(args.ranks, args.tokens, args.documents):
        for heads in args.heads:
            num_heads, _, num_kv_heads = heads.partition(":")
            seeds = args.seeds if world_size <= 16 else max(1, args.seeds // 4)
            seeds = 1 if kind == "one" else seeds
            of_heads = int(num_heads), int(num_kv_heads)
            rows.append(measure(kind, world_size, tokens, of_heads, seeds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["plan"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="of one rank")
    parser.add_argument("--documents", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument(
        "--heads", nargs="+", default=["32:8", "8:8"], help="query heads : KV heads"
    )
    parser.add_argument("--seeds", type=int, default=20, help="batches; a quarter above 16 ranks")
    args = parser.parse_args()
    rows = measure_plans(args)
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github", missingval="-"))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "cp_inductor": version("cp_inductor"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "arguments": vars(args),
        "rows": rows,
    }
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main()
