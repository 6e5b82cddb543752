"""Groups of answers that share a prompt: prefix trees beside rows that repeat the prompt.

    python benchmarks/prefix_trees.py plan                   what is computed; 8 ranks
    python benchmarks/prefix_trees.py steps --ranks 2        the time of a training step
    python benchmarks/prefix_trees.py many --ranks 2         1,000 random batches on one graph

Answers are half to one and a half times as long as their mean, drawn at random. Plans are of rows
that `pad_packed` has filled up; everything is compared with the tokens of the tree alone.

tokens       of the tree; then how many times as many there are in rows that repeat the prompt, one
             behind the other (packed), and padded to the longest (padded)
pairs        the same of pairs of queries and keys, which attention computes
blocks       of 128 x 128, that all ranks compute over those that hold pairs
balance      the busiest rank's blocks over the mean
received     by the rank that receives most, forward and backward, in u (one rank's keys and values
             in bfloat16; 32 query heads, 8 key heads of 128)
planning ms  processor time of one thread
step s       forward and backward of some layers, median of the slowest rank: of the tree, and of
             the same answers packed; once per graph they are compiled
graphs       compiled after the first batch; `many` also counts batches planned by loader workers

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.data import DataLoader

import cp_inductor
from cp_inductor.batches.trees import pad_tables
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BLOCK, plan_batch
from cp_inductor.plan.grid import shard_lengths

RULE = "(k-q<=0)&(q-t0(b,k)+1<=0)"
HEADS, HEAD_DIM, ITEMSIZE, STAGES = (32, 8), 128, 2, 2
DIM = 256  # of `steps` and `many`, in heads of 64


def answers_of(group: int, mean: int, seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    return [max(1, int(n)) for n in draw.integers(mean // 2, mean + mean // 2 + 1, group)]


def tree_of(prompt: int, answers: list[int]) -> Any:
    return ([0] * prompt, [[0] * length for length in answers])


def ends_of(trees: list[Any]) -> Tensor:
    """Return where each token's branch ends, (1, S)."""
    return cp_inductor.pack_prefix_trees(trees)["attention_mask"][:, 0, 0]


def needed_blocks(ends: np.ndarray) -> int:
    """Count blocks that hold pairs: those of a key reach down to the end of its branch."""
    edges = np.arange(0, len(ends), BLOCK)
    last = np.maximum.reduceat(ends, edges) - 1
    return int((last // BLOCK - np.arange(len(edges)) + 1).sum())


def plan(ranks: int, group: int, prompt: int, answer: int, seed: int) -> dict[str, Any]:
    answers = answers_of(group, answer, seed)
    batch = cp_inductor.pack_prefix_trees([tree_of(prompt, answers)])
    ends = batch["attention_mask"][0, 0, 0].numpy()
    filled = cp_inductor.pad_packed(batch)["attention_mask"][:, 0, 0].numpy()
    length = len(ends)
    rows = np.array(answers) + prompt
    pairs = int((ends - np.arange(length)).sum())
    tokens = shard_lengths(filled.shape[1], ranks)
    started = time.process_time()
    found = plan_batch(
        Rule.parse(RULE),
        {0: filled},
        batch=1,
        query_lengths=tokens,
        key_lengths=tokens,
        num_heads=HEADS[0],
        num_kv_heads=HEADS[1],
        stages=STAGES,
    )
    spent = time.process_time() - started
    sizes = {"num_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim": HEAD_DIM}
    received = max(found.bytes_received(r, **sizes, itemsize=ITEMSIZE) for r in range(ranks))
    padded = group * int(rows.max())
    return {
        "group": group,
        "prompt": prompt,
        "answer": answer,
        "tokens": length,
        "packed": int(rows.sum()) / length,
        "padded": padded / length,
        "pairs": pairs,
        "pairs, packed": float((rows * (rows + 1) // 2).sum()) / pairs,
        "pairs, padded": padded * (int(rows.max()) + 1) / 2 / pairs,
        "blocks": found.num_blocks / needed_blocks(ends),
        "balance": found.balance,
        "received": received / (2 * tokens[0] * HEADS[1] * HEAD_DIM * ITEMSIZE),
        "planning ms": 1e3 * spent,
    }


class Model(nn.Module):
    """Layers of attention over a tree, each with a residual."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(layers))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        mask = (place <= place[:, None]) & (place[:, None] < ends[:, None, None, :])
        for project in self.project:
            parts = project(F.rms_norm(x, x.shape[-1:])).chunk(3, -1)
            query, key, value = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in parts)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + out.transpose(1, 2).flatten(2)
        return x


def begin(rank: int, ranks: int, store: str) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


def compile_model(layers: int, mesh: Any, backend: str) -> Any:
    model = cp_inductor.distribute(Model(layers), mesh)
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def run_step(compiled: Any, ends: Tensor, mesh: Any) -> float:
    x = distribute_tensor(torch.randn(1, ends.shape[1], DIM), mesh, [Shard(1)])
    placed = distribute_tensor(ends, mesh, [Shard(1)])
    dist.barrier()
    started = time.perf_counter()
    with implicit_replication():
        compiled(x, placed).sum().backward()
    taken = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def steps(rank: int, store: str, args: argparse.Namespace, results: Any) -> None:
    mesh = begin(rank, args.ranks, store)
    compiled = compile_model(args.layers, mesh, args.backend)
    answers = answers_of(args.group, args.answer, 0)
    repeated = [[0] * (args.prompt + length) for length in answers]
    rows = {"tree": ends_of([tree_of(args.prompt, answers)]), "packed": ends_of(repeated)}
    taken = {
        name: [run_step(compiled, ends, mesh) for _ in range(args.repetitions + 1)][1:]
        for name, ends in rows.items()
    }
    found = {name: statistics.median(of_row) for name, of_row in taken.items()}
    results[rank] = {
        "ranks": args.ranks,
        "group": args.group,
        "prompt": args.prompt,
        "answer": args.answer,
        "tokens": rows["tree"].shape[1],
        "tokens, packed": rows["packed"].shape[1],
        "step s": found["tree"],
        "step s, packed": found["packed"],
        "times": found["packed"] / found["tree"],
    }
    dist.destroy_process_group()


class Drawn(torch.utils.data.Dataset[Any]):
    """Trees that are others in each batch, and the same in whatever process draws them."""

    def __init__(self, num: int, length: int) -> None:
        self.num, self.length = num, length

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Tensor:
        draw = np.random.default_rng(index)
        trees, left = [], self.length
        while left > 8:
            prompt = int(draw.integers(1, left - 1))
            mean = max(1, int(draw.integers(1, left - prompt + 1)) // 4)
            group = int(draw.integers(1, 6))
            tree = tree_of(prompt, answers_of(group, mean, index))
            stored = ends_of([tree]).shape[1]
            if stored > left:
                continue
            trees.append(tree)
            left -= stored
        ends = ends_of(trees)
        tables = torch.stack([ends, ends])[None]
        return pad_tables(tables.transpose(1, 2), self.length - ends.shape[1])[0, 0, 0]


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    return {"ends": torch.stack(rows)}


def many(rank: int, store: str, args: argparse.Namespace, results: Any) -> None:
    mesh = begin(rank, args.ranks, store)
    compiled = compile_model(args.layers, mesh, args.backend)
    # Ranks have other numbers of workers, so that no two of them get a batch from the same one.
    loader = DataLoader(
        Drawn(args.batches, args.tokens),
        batch_size=1,
        collate_fn=cp_inductor.PreparingCollator(collate),
        num_workers=rank % 3,
        multiprocessing_context="fork" if rank % 3 else None,
    )
    graphs, balances, blocks, needed = 0, [], 0.0, 0
    for index, batch in enumerate(loader):
        run_step(compiled, batch["ends"], mesh)
        graphs = graphs or counters["stats"]["unique_graphs"]
        if rank == 0:
            made = cp_inductor.batch_plans()[-1]
            balances.append(made.balance)
            blocks += made.num_blocks
            needed += needed_blocks(batch["ends"][0].numpy())
        if rank == 0 and index % 100 == 99:
            print(index + 1, flush=True)
    found = counters["cp_inductor"]
    results[rank] = {
        "ranks": args.ranks,
        "batches": args.batches,
        "tokens": args.tokens,
        "graphs": counters["stats"]["unique_graphs"] - graphs,
        "plans of workers": found["plans_of_workers"],
        **({"blocks": blocks / needed, "balance": statistics.mean(balances)} if not rank else {}),
    }
    dist.destroy_process_group()


def run_on_ranks(function: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(  # type: ignore[no-untyped-call]
            function, (os.path.join(folder, "store"), args, results), args.ranks
        )
        return [results[rank] for rank in range(args.ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plan", "steps", "many"))
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192, 32768, 65536])
    parser.add_argument("--answers", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--backend", default="cp_inductor")
    args = parser.parse_args()
    args.ranks = args.ranks or (8 if args.what == "plan" else 2)
    if args.what == "plan":
        combined = product(args.groups, args.prompts, args.answers)
        rows = [plan(args.ranks, *one, seed=0) for one in combined]
    elif args.what == "steps":
        rows = run_on_ranks(steps, args)[:1]
    else:
        rows = run_on_ranks(many, args)
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3g"))
    versions = {name: version(name) for name in ("torch", "numpy")}
    print(
        json.dumps(
            {
                "arguments": vars(args),
                "python": platform.python_version(),
                **versions,
                "cp_inductor": cp_inductor.__version__,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
