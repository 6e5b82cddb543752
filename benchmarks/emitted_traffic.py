"""Bytes that an attention moves, counted from its collectives: `python traffic.py --emitted`.

Not from plans but from what is emitted: the functions that lowering traces run on fake tensors
under a fake process group, and a dispatch mode adds up the splits of every all_to_all. Torch's own
ring (`_templated_ring_attention`, all-to-all rotation, load balancing on) runs the same way, under
the same mode.

Beside it: a bound that no plan with balanced work and unsplit heads can go below; how balanced the
work is (busiest rank over mean); how long planning takes; and the nodes of the lowered forward
graph, of the largest of three ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.experimental._context_parallel import _attention as upstream
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.support.ranks: a fake process group

from benchmarks.lower_bound import lower_bound
from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.plan import Recipe, backward_plan, forward_plan, resolve
from cp_inductor.run.attention import Attention
from cp_inductor.run.executor import run_backward, run_forward
from cp_inductor.torch_private.tracing import trace_fake
from tests.support.ranks import fake_rank

aten = torch.ops.aten
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default

STRATEGIES = ("blocks", "heads", "auto")


class ReceivedBytes(TorchDispatchMode):
    """Add up what every all_to_all brings from other ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.total = rank, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is EXCHANGE:
            buffer, received, _, _ = args
            row = buffer[0].numel() if buffer.ndim > 1 else 1
            foreign = sum(received) - received[self.rank]
            self.total += foreign * row * buffer.element_size()
        return func(*args, **(kwargs or {}))


def shapes_of(recipe: Recipe) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokens = recipe.query_length // recipe.world_size
    return (
        (1, recipe.num_heads, tokens, recipe.head_dim),
        (1, recipe.num_kv_heads, tokens, recipe.head_dim),
    )


@contextmanager
def fakes(recipe: Recipe) -> Iterator[list[Tensor]]:
    query, key = shapes_of(recipe)
    with FakeTensorMode():
        yield [torch.empty(s, dtype=torch.bfloat16) for s in (query, key, key)]


def received_bytes(recipe: Recipe) -> int:
    """What the rank that receives most by plan receives by its emitted collectives."""
    ranks = range(recipe.world_size)
    plans = (forward_plan(recipe), backward_plan(recipe))
    rank = max(ranks, key=lambda rank: sum(plan.bytes_received(rank) for plan in plans))

    def run(query: Tensor, key: Tensor, value: Tensor) -> None:
        this = Attention(recipe, rank, None, "flash_cpu", dist.group.WORLD.group_name)
        out, lse, *kept = run_forward(this, query, key, value)
        run_backward(this, torch.empty_like(out), query, key, value, out, lse, *kept)

    return count(run, rank, recipe)


def upstream_received_bytes(recipe: Recipe) -> int:
    """What a rank receives in torch's own ring."""
    is_causal = recipe.rule == "causal"

    def run(query: Tensor, key: Tensor, value: Tensor) -> None:
        group = dist.group.WORLD
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        options = upstream._cp_options
        with (
            patch.object(options, "rotate_method", upstream._RotateMethod.ALL_TO_ALL),
            patch.object(options, "enable_load_balance", is_causal),
        ):
            out, lse = upstream._templated_ring_attention(
                group, 2, forward, query, key, value, is_causal=is_causal, dropout_p=0.0
            )
            upstream._templated_ring_attention_backward(
                group,
                2,
                backward,
                torch.empty_like(out),
                "grad_out",
                query,
                key,
                value,
                out,
                lse,
                is_causal,
                dropout_p=0.0,
            )

    return count(run, recipe.world_size - 1, recipe)


def count(run: Callable[..., None], rank: int, recipe: Recipe) -> int:
    with fake_rank(rank, recipe.world_size), fakes(recipe) as tensors:
        counter = ReceivedBytes(rank)
        with counter, torch.no_grad():
            run(*tensors)
    return counter.total


def num_nodes(recipe: Recipe) -> int:
    """Nodes of the lowered forward graph: the most of the first, a middle and the last rank."""
    most = 0
    for rank in sorted({0, recipe.world_size // 2, recipe.world_size - 1}):
        with fake_rank(rank, recipe.world_size), fakes(recipe) as tensors:
            this = Attention(recipe, rank, None, "flash_cpu", dist.group.WORLD.group_name)
            graph = trace_fake(lambda *t, this=this: run_forward(this, *t), tensors, {}).graph
            graph.eliminate_dead_code()
            most = max(most, len(graph.nodes))
    return most


def measure(base: Recipe, unit: int) -> dict[str, Any]:
    """What one world moves, by strategy, in units of so many bytes."""
    world_size = base.world_size
    row: dict[str, Any] = {"ranks": world_size}
    if world_size <= 64:
        row["torch's ring"] = upstream_received_bytes(base) / unit
    for strategy in STRATEGIES:
        try:
            recipe = resolve(replace(base, strategy=strategy), site=strategy)
        except UnsupportedStrategy:
            continue
        if world_size > 64 and strategy == "heads":  # slow
            continue
        row[strategy] = received_bytes(recipe) / unit
        if strategy == "auto":
            row["chosen"] = recipe.strategy
    blocks = resolve(replace(base, strategy="blocks"), site="blocks")
    bound = lower_bound(blocks.shape, world_size, blocks.query_length, blocks.rule)
    row["bound"] = bound / unit
    row["blocks / bound"] = row["blocks"] / row["bound"]
    forward_plan.cache_clear()
    start = time.perf_counter()
    plan = forward_plan(blocks)
    row["planning s"] = time.perf_counter() - start
    row["balance"] = plan.balance
    row["nodes"] = num_nodes(blocks)
    return row
