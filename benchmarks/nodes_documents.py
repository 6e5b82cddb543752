"""Plans of batches of packed documents over nodes: what crosses between nodes.

    python benchmarks/nodes_documents.py                       8 nodes of 8 ranks
    python benchmarks/nodes_documents.py --nodes 64x8 8x72     numbers of nodes, and ranks of one

For batches of documents whose lengths are drawn at random, in u (one rank's keys and values in
bfloat16), under plans for ranks that are all alike ("flat") and for nodes:

between      received from other nodes by the rank that receives most, forward and backward; what is
             fetched, and results once for each rank that sends them; mean and worst of all seeds
inside       the same of what is received from ranks of the node
balance      the busiest rank's blocks over the mean, worst of all seeds
ms           processor time of planning, one thread, mean of all seeds

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
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.documents import DOCUMENTS, HEAD_DIM, ITEMSIZE, STAGES, unit
from benchmarks.packed import KINDS, pack
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_nodes import Nodes

HEADS = (32, 8)
ROW, STATISTIC = HEAD_DIM * ITEMSIZE, 4


def received(plan: BatchPlan, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each rank receives from other nodes, and from ranks of its own."""
    heads, kv_heads = (num // plan.num_groups for num in HEADS)
    totals = np.zeros((2, plan.world_size))
    query = heads * (3 * ROW + 2 * STATISTIC), heads * (2 * ROW + STATISTIC)
    key = kv_heads * 4 * ROW, kv_heads * 2 * ROW
    sides = (plan.queries, plan.query_stages, query), (plan.keys, plan.key_stages, key)
    for chunks, stages, (fetched, home) in sides:
        rank, chunk = np.nonzero(stages > 0)
        owner = chunks.rank[chunk]
        is_inside = (rank // size == owner // size).astype(int)
        for to, of_token in ((rank, fetched), (owner, home)):
            np.add.at(totals, (is_inside, to), chunks.length[chunk] * of_token)
    return totals[0], totals[1]


def measure(num_nodes: int, size: int, tokens: int, kind: str, args: Any) -> dict[str, Any]:
    world_size = num_nodes * size
    row: dict[str, Any] = {"nodes": f"{num_nodes} x {size}", "tokens": tokens, "documents": kind}
    for name, nodes in (("flat", None), ("nodes", Nodes(size, args.price))):
        found = []
        for seed in range(args.seeds):
            lengths = pack(kind, world_size * tokens, seed)
            numbers = np.repeat(np.arange(len(lengths)), lengths)[None]
            start = time.process_time()
            plan = plan_batch(
                Rule.parse(DOCUMENTS),
                {0: numbers},
                batch=1,
                query_lengths=[tokens] * world_size,
                key_lengths=[tokens] * world_size,
                num_heads=HEADS[0],
                num_kv_heads=HEADS[1],
                stages=STAGES,
                nodes=nodes,
            )
            seconds = time.process_time() - start
            between, inside = (of.max() / unit(tokens, HEADS) for of in received(plan, size))
            found.append((between, inside, plan.balance, 1e3 * seconds))
        columns = np.array(found)
        row[f"{name} between"], row[f"{name} inside"], _, row[f"{name} ms"] = columns.mean(0)
        row[f"{name} between, worst"], _, row[f"{name} balance"], _ = columns.max(0)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="+", default=["8x8"], help="nodes x ranks of one")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of one rank")
    parser.add_argument("--documents", nargs="+", choices=[*KINDS], default=["short", "8k", "long"])
    parser.add_argument("--price", type=int, default=8, help="of a byte between nodes")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    worlds = [tuple(int(number) for number in text.split("x")) for text in args.nodes]
    rows = [measure(*of, args) for of in product_of(worlds, args)]
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"))
    about = {"date": time.strftime("%Y-%m-%d"), "cp_inductor": version("cp_inductor")}
    about |= {"numpy": np.__version__, "python": platform.python_version()}
    print("\n" + json.dumps({**about, "arguments": vars(args), "rows": rows}))


def product_of(worlds: list[Any], args: Any) -> list[tuple[int, int, int, str]]:
    return [(*world, *rest) for world, *rest in product(worlds, args.tokens, args.documents)]


if __name__ == "__main__":
    main()
