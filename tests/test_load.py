"""Large worlds, long sequences, and many attentions in a graph: time does not explode.

Bounds are on counts and on ratios with a wide margin, so that a busy machine does not fail them.
"""

from __future__ import annotations

import gc
import time
import tracemalloc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
from cp_inductor.plan import Recipe, backward_plan, forward_plan, resolve
from cp_inductor.run.batch_ops import numbers_of
from tests.ranks import fake_rank

pytestmark = [pytest.mark.slow, pytest.mark.long]


def recipe_of(length: int, world_size: int = 8) -> Recipe:
    recipe = Recipe(
        world_size=world_size,
        query_length=length,
        key_length=length,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        itemsize=2,
        rule="causal",
    )
    return resolve(recipe, site="load")


def plan(length: int, world_size: int = 8) -> None:
    recipe = recipe_of(length, world_size)
    for made in (forward_plan(recipe), backward_plan(recipe)):
        assert made.stages


def test_ten_million_tokens_cost_no_more_than_a_thousand_times_fewer() -> None:
    """Plans count chunks: of the length nothing depends but the size of a chunk."""
    seconds = []
    for length in (10_240, 10_485_760):
        cp_inductor.reset()
        start = time.process_time()
        plan(length)
        seconds.append(time.process_time() - start)
    assert seconds[1] <= 10 * seconds[0] + 1, seconds


def test_plans_of_64_ranks_are_made() -> None:
    plan(64 * 1024, world_size=64)


def plan_a_batch(seed: int) -> None:
    documents = torch.randint(40, (1, 512), generator=torch.Generator().manual_seed(seed))
    rule = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"
    numbers_of([documents.sort().values], rule, 1, (512, 512), (4, 2), 1, 4, seed % 4)


def test_memory_of_a_day_of_batches_is_that_of_its_first_hour() -> None:
    """Plans are kept for the last batches, not for all."""
    cp_inductor.reset()
    tracemalloc.start()
    try:
        held = []
        for seed in range(240):
            plan_a_batch(seed)
            if seed in (59, 239):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] <= 1.1 * held[0] + 100_000, held
    assert len(cp_inductor.batch_plans()) <= 16


def attend_often(query: Tensor, key: Tensor, value: Tensor, count: int) -> Tensor:
    for _ in range(count):
        query = F.scaled_dot_product_attention(query, key, value)
    return query


def compile_attentions(world_size: int, count: int) -> float:
    """Compile a graph of so many attentions, and its backward, on one rank; return CPU seconds.

    Not causal ones: the fake group refuses a rank that sends nothing and receives.
    """
    with fake_rank(world_size - 1, world_size):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
        tensors = [torch.rand(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
        compiled = torch.compile(
            attend_often, backend="cp_aot_eager", fullgraph=True, options={"mesh": mesh}
        )
        start = time.process_time()
        compiled(*tensors, count).sum().backward()
        seconds = time.process_time() - start
        assert counters["cp_inductor"]["sites_rewritten"] == count
        return seconds


def test_200_attentions_in_a_graph() -> None:
    """Ten times as many take about ten times as long: not a hundred times."""
    compile_attentions(2, 1)  # what is imported, and warm
    few, many = compile_attentions(2, 20), compile_attentions(2, 200)
    assert many <= 40 * few, (few, many)


def test_a_rank_of_64() -> None:
    compile_attentions(64, 1)
