"""Plans of batches of packed documents over nodes: what crosses between nodes.

    python benchmarks/nodes_documents.py                       8 nodes of 8 ranks
    python benchmarks/nodes_documents.py --nodes 64x8 8x72     numbers of nodes, and ranks of one

For batches of documents whose lengths are drawn at random, in u (one rank's keys and values in
bfloat16), under plans for ranks that are all alike ("flat") and for nodes:

between      received from other nodes by the rank that receives most, forward and backward; what is
             fetched, and results once for each rank that sends them; mean and worst of all seeds
inside       the same of what is received from ranks of the node
bound        some rank receives at least so much from other nodes in any plan with the balance of
             the one for nodes: see `least_home`; mean of all seeds
spread       the same bound, if results came home to the ranks of a node in equal shares, to be
             passed on inside
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
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack
from tabulate import tabulate

from benchmarks.documents import DOCUMENTS, HEAD_DIM, ITEMSIZE, STAGES, unit
from benchmarks.packed import KINDS, pack
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.plan.ir import (
    DESTINATION,
    IS_OF_KEYS,
    PAYLOAD,
    SOURCE,
    START,
    Prices,
    Transfers,
)

HEADS = (32, 8)
ROW, STATISTIC = HEAD_DIM * ITEMSIZE, 4


def received(plan: BatchPlan, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each rank receives from other nodes, and from ranks of its own."""
    heads, kv_heads = (num // plan.num_groups for num in HEADS)
    totals = np.zeros((2, plan.world_size))
    query = heads * (3 * ROW + 2 * STATISTIC), heads * (2 * ROW + STATISTIC)
    key = kv_heads * 4 * ROW, kv_heads * 2 * ROW
    columns = Transfers.joined(plan.fetches).columns
    for of_keys, chunks, (fetched, home) in (False, plan.queries, query), (True, plan.keys, key):
        of_side = columns[IS_OF_KEYS[columns[:, PAYLOAD]] == of_keys]
        owner, rank, chunk = of_side[:, [SOURCE, DESTINATION, START]].T
        is_inside = (rank // size == owner // size).astype(int)
        for to, of_token in ((rank, fetched), (owner, home)):
            np.add.at(totals, (is_inside, to), chunks.length[chunk] * of_token)
    return totals[0], totals[1]


def least_home(plan: BatchPlan, size: int) -> tuple[float, float]:
    """Return bounds on what comes home to some rank from other nodes, in u.

    A node computes at most the balance times its share. All cells above that, of queries that it
    stores, leave it. Results of each of their queries come home to its owner, and gradients of each
    of their keys that the node stores. Which cells leave is a linear program: a cell leaves at most
    as far as its query and its key do, and the rank to which most comes home gets as little as
    possible. A part of a cell stands for some of the heads.
    """
    share = float(plan.weight.sum()) / plan.world_size
    prices, unit_tokens = Prices.in_elements(*HEADS), plan.keys.length.sum() / plan.world_size
    node_of_cell = plan.queries.rank[plan.query] // size
    load = np.bincount(node_of_cell, plan.weight)
    bounds = [(0.0, 0.0)]
    for node in np.flatnonzero(load > plan.balance * share * size):
        of_node = np.flatnonzero((node_of_cell == node) & (plan.queries.group[plan.query] == 0))
        excess = (load[node] - plan.balance * share * size) / plan.num_groups
        rows, row = np.unique(plan.query[of_node], return_inverse=True)
        columns, column = np.unique(plan.key[of_node], return_inverse=True)
        owner = np.concatenate([plan.queries.rank[rows], plan.keys.rank[columns]]) - node * size
        cost = np.concatenate(
            [
                prices.queries.home * plan.queries.length[rows],
                prices.keys.home * plan.keys.length[columns],
            ]
        )
        cost = cost * plan.num_groups / unit_tokens
        is_inside = np.flatnonzero((owner >= 0) & (owner < size))
        # Variables: how far each cell leaves, and each line, and what comes home to some rank.
        num_cells, num_lines = len(of_node), len(owner)
        num, each = num_cells + num_lines + 1, np.arange(num_cells)
        limits = [
            _sparse([1, -1], [each, each], [each, num_cells + line], (num_cells, num))
            for line in (row, len(rows) + column)
        ]
        leaves = _sparse([-plan.weight[of_node]], [0 * each], [each], (1, num))
        both = []
        for of_rank, ranks in ((owner[is_inside], size), (0 * is_inside, 1)):
            parts = [cost[is_inside] * ranks / size, -1.0]
            at = [of_rank, np.arange(ranks)], [num_cells + is_inside, np.full(ranks, num - 1)]
            home = _sparse(parts, *at, (ranks, num))
            found = linprog(
                np.eye(1, num, num - 1)[0],
                vstack([*limits, leaves, home]).tocsr(),
                np.concatenate([np.zeros(2 * num_cells), [-excess], np.zeros(ranks)]),
                bounds=[(0, 1)] * (num - 1) + [(0, None)],
            )
            both.append(float(found.fun))
        bounds.append((both[0], both[1]))
    return max(one for one, _ in bounds), max(spread for _, spread in bounds)


def _sparse(
    values: list[Any], rows: list[np.ndarray], columns: list[np.ndarray], shape: tuple[int, int]
) -> coo_matrix:
    data = [np.broadcast_to(value, row.shape) for value, row in zip(values, rows, strict=True)]
    at = np.concatenate(rows), np.concatenate(columns)
    return coo_matrix((np.concatenate(data), at), shape=shape)


def measure(num_nodes: int, size: int, tokens: int, kind: str, args: Any) -> dict[str, Any]:
    world_size = num_nodes * size
    row: dict[str, Any] = {"nodes": f"{num_nodes} x {size}", "tokens": tokens, "documents": kind}
    for name, nodes in (("flat", None), ("nodes", Nodes(size, args.price))):
        found = []
        for seed in range(args.seeds):
            lengths = pack(kind, world_size * tokens, seed)
            numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
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
            bounds = least_home(plan, size) if nodes and args.bounds else (0.0, 0.0)
            found.append((between, inside, plan.balance, 1e3 * seconds, *bounds))
        columns = np.array(found)
        row[f"{name} between"], row[f"{name} inside"], _, row[f"{name} ms"], *bounds = columns.mean(
            0
        )
        row[f"{name} between, worst"], _, row[f"{name} balance"] = columns.max(0)[:3]
    if args.bounds:
        row["bound"], row["spread"] = bounds
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="+", default=["8x8"], help="nodes x ranks of one")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of one rank")
    parser.add_argument("--documents", nargs="+", choices=[*KINDS], default=["short", "8k", "long"])
    parser.add_argument("--price", type=int, default=8, help="of a byte between nodes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bounds", action="store_true", help="which may take minutes")
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
