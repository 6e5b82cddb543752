"""What tiles under masks cost on the CPU, next to plain causal attention.

    python benchmarks/masked_tiles.py
    python benchmarks/masked_tiles.py --dtype bfloat16 --heads 16 --repeat 5 --only documents

The tiles of all ranks are computed one rank after the other in this process, forward and backward,
block tables included. Messages and the sums over tiles are not part of the time. Ratios are to the
same under a causal mask, of which the runs alternate with those of the masks.

    time     over the time of causal attention of the same length
    busiest  the same of the rank that takes longest, over that of causal attention
    pairs    pairs that exist, over those of causal attention
    blocks   blocks of 128 x 128 that are computed, over those that hold a pair; nothing if no tile
             is under a mask, because the plan has cut them all at its borders
    tables   part of the time that goes into block tables; the layers of a compiled model share them

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.mask.rule import Rule
from cp_inductor.plan import Mask, Plan, Recipe, Span, Tile, forward_plan, resolve
from cp_inductor.tiles.aten_kernels import FlashCPU
from cp_inductor.tiles.block_tables import BLOCK
from cp_inductor.tiles.dims import Tokens
from cp_inductor.tiles.kernels import Kernel, Partial, TileCall
from cp_inductor.tiles.masked_tiles import MaskedCPU
from cp_inductor.tiles.tile_masks import TileMasks

DOCUMENTS = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"


@dataclass(frozen=True)
class Case:
    """A rule, the length of the whole sequence, and what draws its table (B, S)."""

    rule: str
    length: int
    draw: Callable[[int], Tensor] | None = None


def documents(mean: int) -> Callable[[int], Tensor]:
    """Return what numbers documents of such a mean length, the borders drawn evenly."""

    def draw(length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        borders = torch.randperm(length - 1, generator=generator)[: length // mean - 1] + 1
        is_first = torch.zeros(1, length, dtype=torch.int64)
        is_first[0, borders] = 1
        return is_first.cumsum(-1)

    return draw


def padding(length: int) -> Tensor:
    return (torch.arange(length)[None] < length * 5 // 8).long()


def cases(scale: int) -> dict[str, Case]:
    short, long, width = 8192 // scale, 32768 // scale, 1024 // scale
    return {
        "documents of 512 in 8k": Case(DOCUMENTS, short, documents(512 // scale)),
        "documents of 2k in 32k": Case(DOCUMENTS, long, documents(2048 // scale)),
        "window of 1k": Case(f"(k-q<=0)&(q-k-{width - 1}<=0)", short),
        "prefix of 1k": Case(f"(k-q<=0)|(k-{width - 1}<=0)", short),
        "padding of 3/8": Case("(k-q<=0)&Ne(t0(b,k),0)", short, padding),
        "ALiBi": Case("k-q<=0;(k-q)*x0(h)", short),
    }


@dataclass
class Work:
    """The tiles of all ranks, and their tensors."""

    plan: Plan
    tokens: Tokens
    rule: Rule
    tables: tuple[Tensor, ...]
    tensors: dict[str, Tensor]
    table_s: float = 0.0
    rank_s: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Compute everything; return the seconds."""
        self.rank_s, self.table_s = [], 0.0
        for rank in range(self.plan.grid.world_size):
            start = time.perf_counter()
            self.run_rank(rank)
            self.rank_s.append(time.perf_counter() - start)
        return sum(self.rank_s)

    def run_rank(self, rank: int) -> None:
        own = self.plan.grid.own(rank)
        masks = TileMasks(self.rule, self.tokens, own, self.tables, self.tensors["query"])
        for stage in self.plan.program(rank):
            for tile in stage.tiles:
                call = self.call_of(tile)
                out, lse = self.kernel_of(masks, tile).forward(call)
                # As in a plan: a graph of its own, which makes its own tables.
                kernel = self.kernel_of(masks, tile)
                rows = self.cut("grad_out", tile.queries, tile.heads, of_keys=False)
                kernel.backward(call, rows, Partial(out, lse))

    def kernel_of(self, masks: TileMasks, tile: Tile) -> Kernel:
        if tile.mask is not Mask.PARTIAL and not self.rule.bias:
            return FlashCPU()
        start = time.perf_counter()
        kernel = MaskedCPU(masks.rule, masks.indices(tile))
        self.table_s += time.perf_counter() - start
        return kernel

    def call_of(self, tile: Tile) -> TileCall:
        kv_heads = self.plan.shape.kv_heads(tile.heads)
        key, value = (
            self.cut(name, tile.keys, kv_heads, of_keys=True) for name in ("key", "value")
        )
        query = self.cut("query", tile.queries, tile.heads, of_keys=False)
        return TileCall(query, key, value, tile.mask is Mask.CAUSAL)

    def cut(self, name: str, spans: tuple[Span, ...], heads: Span, *, of_keys: bool) -> Tensor:
        ranges = [self.tokens.range_of(span, of_keys=of_keys) for span in spans]
        parts = [self.tensors[name][:, :, int(start) : int(stop)] for start, stop in ranges]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return whole[:, heads.start : heads.stop]


def make_work(rule: str, length: int, table: Tensor | None, args: argparse.Namespace) -> Work:
    dtype = getattr(torch, args.dtype)
    recipe = Recipe(
        world_size=args.ranks,
        query_length=length,
        key_length=length,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        itemsize=dtype.itemsize,
        rule=Rule.parse(rule).format(),
        strategy=args.strategy,
    )
    plan = forward_plan(resolve(recipe, site="benchmark"))
    tokens = Tokens(plan.grid, length // args.ranks, length // args.ranks)
    heads = {"query": args.heads, "key": args.kv_heads, "value": args.kv_heads}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(1, length, num, args.head_dim, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        for name, num in {**heads, "grad_out": args.heads}.items()
    }
    tables = () if table is None else (table,)
    return Work(plan, tokens, Rule.parse(rule), tables, tensors)


def measure(name: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    table = case.draw(case.length) if case.draw else None
    if "x0" in case.rule:
        table = 2.0 ** -torch.arange(1.0, args.heads + 1)
    work = make_work(case.rule, case.length, table, args)
    causal = make_work("causal", case.length, None, args)
    before = counters["cp_inductor"]["blocks_computed"]
    work.run()
    computed = counters["cp_inductor"]["blocks_computed"] - before
    needed, pairs = count_needed(work)
    seconds, base = [], []
    ranks, base_ranks = [], []
    tables = []
    for _ in range(args.repeat):
        base.append(causal.run())
        base_ranks.append(max(causal.rank_s))
        seconds.append(work.run())
        ranks.append(max(work.rank_s))
        tables.append(work.table_s)
    best = seconds.index(min(seconds))
    return {
        "mask": name,
        "causal s": min(base),
        "time": min(seconds) / min(base),
        "busiest": min(ranks) / min(base_ranks),
        "pairs": pairs / (case.length * (case.length + 1) / 2),
        "blocks": computed / needed if needed else None,
        "tables": tables[best] / seconds[best],
    }


def count_needed(work: Work) -> tuple[int, int]:
    """Return how many blocks of tiles under a mask hold a pair, and how many pairs all hold."""
    needed = pairs = 0
    for rank in range(work.plan.grid.world_size):
        own = work.plan.grid.own(rank)
        masks = TileMasks(work.rule, work.tokens, own, work.tables, work.tensors["query"])
        for tile in (tile for stage in work.plan.program(rank) for tile in stage.tiles):
            indices = masks.indices(tile)
            num_queries, num_keys = indices.geometry.num_queries, indices.geometry.num_keys
            share = len(tile.heads) / work.plan.shape.num_heads
            for start in range(0, num_queries, BLOCK):
                rows = slice(start, min(start + BLOCK, num_queries))
                allowed = indices.evaluate(work.rule.allowed, rows_of(rows))
                allowed = allowed[0, 0].expand(rows.stop - rows.start, num_keys)
                pairs += int(allowed.sum()) * share
                if tile.mask is Mask.PARTIAL or work.rule.bias:
                    needed += sum(bool(block.any()) for block in allowed.split(BLOCK, 1))
    return needed, pairs


def rows_of(rows: slice) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor if tensor.shape[2] == 1 else tensor[:, :, rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by it")
    parser.add_argument("--only", default="", help="masks whose name holds this")
    args = parser.parse_args()
    rows = [
        measure(name, case, args) for name, case in cases(args.scale).items() if args.only in name
    ]
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "arguments": vars(args),
        "rows": rows,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
