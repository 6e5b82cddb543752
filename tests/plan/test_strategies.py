"""Every strategy compiled: DTensors and plain shards, lengths that do not divide."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._dynamo.utils import counters

import cp_inductor
from cp_inductor.graph.collectives import START, WAIT
from cp_inductor.plan import Recipe, backward_plan, forward_plan, resolve
from cp_inductor.schedule.overlap import Instruction, expose, measure, schedule
from cp_inductor.tiles.kernel_table import TILE_OPS
from tests.support.graphs import (
    attend_causal,
    attend_full,
    collectives_of,
    disagreements,
    lowered_graphs,
)
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.reference import (
    assert_shards_close,
    attend_with_grads,
    full,
    make_qkv,
    shard,
    with_grads,
)
from tests.support.traced_step import count

PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"strategy": "ring"},
    {"strategy": "allgather"},
    {"strategy": "rows", "stages": 2},
    {"strategy": "blocks", "stages": 2},
    {"strategy": "blocks", "stages": 3, "keep_bytes": 1 << 20},
    {"strategy": "heads", "stages": 2, "keep_bytes": 1 << 20},
    {"strategy": "heads_own_forward", "stages": 2},
    {"strategy": "heads_own", "stages": 2},
)
PLANS_OF_FOUR: tuple[dict[str, Any], ...] = (
    {"strategy": "heads2+blocks"},
    # What crosses to another node is passed on.
    {"machine": "2xcpu:tcp x 2:eth10", "strategy": "nodes2+blocks", "stages": 2},
)


def check(
    plan: dict[str, Any],
    backend: str,
    seq_len: int,
    *,
    is_distributed: bool,
    is_causal: bool = True,
    dtype: torch.dtype = torch.float32,
    kv_len: int | None = None,
) -> None:
    mesh, rank, world_size = world_mesh(), dist.get_rank(), dist.get_world_size()
    num_heads, num_kv_heads = (12, 12) if "heads" in plan.get("strategy", "") else (6, 2)
    sizes = {"batch": 1, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "kv_len": kv_len}
    whole = make_qkv(seq_len, **sizes, dtype=dtype)  # type: ignore[arg-type]
    expected = attend_with_grads(*whole, is_causal=is_causal)
    if is_distributed:
        options: dict[str, Any] = plan
        given = [cp_inductor.shard(t, mesh, 2) for t in whole]
    else:
        options = {**plan, "mesh": mesh, **({} if kv_len else {"seq_len": seq_len})}
        given = [shard(t, rank, world_size) for t in whole]
    torch._dynamo.reset()
    function = attend_causal if is_causal else attend_full
    run = torch.compile(function, backend=backend, fullgraph=True, options=options, dynamic=False)
    found = with_grads(run, given)
    assert_shards_close(found, expected, dtype, f"{plan} {seq_len}")
    # Nothing is added in the order of arrival: the same bits if some ranks come late.
    time.sleep(0.01 * rank)
    for one, again in zip(found, with_grads(run, given), strict=True):
        assert torch.equal(full(one), full(again)), f"{plan} {seq_len}"
    if not plan:
        with torch.no_grad():
            torch.testing.assert_close(run(*given[:3]), found[0])


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "is_distributed"), [(3, True), (4, False)])
@on_ranks("world_size")
def test_aot_eager(world_size: int, is_distributed: bool) -> None:
    how: dict[str, Any] = {"backend": "cp_aot_eager", "is_distributed": is_distributed}
    torch.use_deterministic_algorithms(not is_distributed)
    try:
        for index, plan in enumerate((*PLANS, *PLANS_OF_FOUR * (world_size == 4))):
            check(plan, seq_len=(1021, 1000)[index % 2], **how)
        check({"strategy": "blocks"}, seq_len=131, is_causal=False, **how)
        check({"strategy": "blocks"}, seq_len=2, **how)
        check({}, seq_len=24, kv_len=72, is_causal=False, **how)  # cross-attention
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(3)
def test_through_inductor(dtype: torch.dtype) -> None:
    plan = {"strategy": "blocks", "stages": 2, "keep_bytes": 20_000}
    check(plan, "cp_inductor", 1021, is_distributed=True, dtype=dtype)
    if dtype == torch.float32:
        check({"strategy": "heads"}, "cp_inductor", 1000, is_distributed=False)


@on_ranks(2)
def test_disabled_computes_the_same() -> None:
    with cp_inductor.config.patch(enabled=False):
        for is_distributed in (True, False):
            check({}, "cp_aot_eager", 10, is_distributed=is_distributed)
    assert "starts" not in counters["cp_inductor"]


# The graphs, of any rank


def lower_on(rank: int, world_size: int, tokens: int, **options: Any) -> dict[str, fx.GraphModule]:
    with fake_mesh(rank, world_size) as mesh:
        shape = {"batch": 1, "num_heads": 4, "num_kv_heads": 2, "dtype": torch.bfloat16}
        leaves = [t.requires_grad_() for t in make_qkv(tokens, **shape)[:3]]  # type: ignore[arg-type]
        return lowered_graphs(attend_causal, *leaves, options={"mesh": mesh, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        *("ring", "blocks", "heads"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                *("allgather", "rows", "heads_own", "heads_own_forward"),
                *("heads2_own+blocks", "nodes2+blocks"),
            )
        ),
    ],
)
def test_graphs_do_what_the_plan_says(strategy: str) -> None:
    """Exchanges in the same order on all ranks, each side of each split; tiles as planned."""
    world_size, tokens = 4, 512
    how: dict[str, Any] = {"strategy": strategy, "stages": 2}
    length = tokens * world_size
    recipe = resolve(Recipe(world_size, length, length, 4, 2, 20, 2, "causal", **how), site="test")
    plans = {"forward": forward_plan(recipe), "backward": backward_plan(recipe)}
    graphs = [lower_on(rank, world_size, tokens, **how) for rank in range(world_size)]
    for kind, plan in plans.items():
        of_rank = [graph[kind] for graph in graphs]
        num_exchanges = sum(bool(stage.fetch) + bool(stage.home) for stage in plan.stages)
        assert disagreements({rank: collectives_of(gm) for rank, gm in enumerate(of_rank)}) == []
        for rank, gm in enumerate(of_rank):
            starts = gm.graph.find_nodes(op="call_function", target=START)
            assert len(starts) == count(gm, (WAIT,)) == num_exchanges
            assert count(gm, TILE_OPS) == sum(len(stage.tiles) for stage in plan.program(rank))
            # A rank may send something to itself as well.
            received = 2 * sum(sum(start.args[1]) - start.args[1][rank] for start in starts)
            # Statistics are padded to whole rows of the head dim.
            assert plan.bytes_received(rank) <= received <= 1.25 * plan.bytes_received(rank)


# shard and unshard


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_shard_and_unshard(world_size: int) -> None:
    mesh, rank = world_mesh(), dist.get_rank()
    for length in (1, 2, 5, 12, 13):
        whole = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(length))
        whole.requires_grad_()
        sharded = cp_inductor.shard(whole, mesh)
        torch.testing.assert_close(sharded.to_local(), shard(whole, rank, world_size, 1))
        back = cp_inductor.unshard(sharded)
        torch.testing.assert_close(back, whole)
        weight = torch.arange(whole.numel()).view_as(whole).float()
        (grad,) = torch.autograd.grad((back * weight).sum(), whole)
        torch.testing.assert_close(grad, weight)


# --- The scheduler without graphs: what it keeps, on any program, and what it finds on small ones.

MS = 1e-3


@st.composite
def programs(draw: st.DrawFn) -> list[Instruction]:
    """Compute, views, exchanges, in any dependence on each other."""
    sizes = draw(st.lists(st.integers(0, 8), max_size=3))
    instructions = [Instruction(is_input=True, num_bytes=size) for size in sizes]
    open_starts: list[int] = []

    def sources(most: int) -> tuple[int, ...]:
        if not instructions:
            return ()
        # An exchange is read when it was waited for.
        readable = [i for i, instruction in enumerate(instructions) if not instruction.is_start]
        picked = draw(st.lists(st.sampled_from(readable), max_size=most)) if readable else []
        return tuple(sorted(set(picked)))

    def buffers_of(inputs: tuple[int, ...]) -> tuple[int, ...]:
        found: set[int] = set()
        for index in inputs:
            instruction = instructions[index]
            if instruction.waits_for is not None:
                found.add(instruction.waits_for)
            elif instruction.is_view:
                found |= set(buffers_of(instruction.inputs))
            else:
                found.add(index)
        return tuple(sorted(found))

    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["compute", "compute", "view", "start", "wait", "size"]))
        inputs = sources(3)
        seconds = draw(st.sampled_from([0.0, 1.0, 2.0, 5.0])) * MS
        num_bytes = draw(st.integers(0, 8))
        is_kept = draw(st.booleans())
        if kind == "wait" and open_starts:
            start = open_starts.pop(draw(st.integers(0, len(open_starts) - 1)))
            instructions.append(Instruction((start,), waits_for=start, reads=(start,)))
        elif kind == "size" and open_starts:
            # How many rows will arrive is asked before they are waited for.
            instructions.append(Instruction((draw(st.sampled_from(open_starts)),), is_view=True))
        elif kind == "view" and inputs:
            instructions.append(Instruction(inputs, is_view=True))
        else:
            is_start = kind == "start"
            reads = buffers_of(inputs)
            open_starts += [len(instructions)] * is_start
            instructions.append(
                Instruction(
                    inputs,
                    seconds,
                    is_start=is_start,
                    num_bytes=num_bytes,
                    reads=reads,
                    is_kept=is_kept,
                )
            )
    for start in open_starts:
        instructions.append(Instruction((start,), waits_for=start, reads=(start,)))
    return instructions


def peak_bytes(instructions: list[Instruction], order: list[int]) -> int:
    """Count what is alive the slow way: a buffer is, from its maker to its last reader."""
    place = {index: at for at, index in enumerate(order)}
    last = {index: place[index] for index in order}
    for index in order:
        for source in instructions[index].reads:
            last[source] = max(last[source], place[index])
    return max(
        sum(
            instructions[index].num_bytes
            for index in order
            if place[index] <= at and (at <= last[index] or instructions[index].is_kept)
        )
        for at in range(len(order))
    )


@pytest.mark.slow
@given(programs(), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_what_any_schedule_keeps(instructions: list[Instruction], budget: int) -> None:
    exposed, order = expose(instructions), schedule(instructions, budget)
    compute = sum(instruction.seconds for instruction in instructions if not instruction.is_start)
    exchange = sum(instruction.seconds for instruction in instructions if instruction.is_start)
    for result in (exposed, order):
        assert sorted(result) == list(range(len(instructions)))
        place = {index: at for at, index in enumerate(result)}
        assert all(
            place[s] < place[i]
            for i, instruction in enumerate(instructions)
            for s in instruction.inputs
        )
        inputs = [index for index, instruction in enumerate(instructions) if instruction.is_input]
        assert result[: len(inputs)] == inputs
        starts = [index for index in result if instructions[index].is_start]
        assert starts == sorted(starts)
        measured = measure(instructions, result)
        assert measured.peak_bytes == peak_bytes(instructions, result)
        assert max(compute, exchange) - 1e-9 <= measured.seconds <= compute + exchange + 1e-9
        assert measured.exposed_s == pytest.approx(measured.seconds - compute)
    before, after = measure(instructions, exposed), measure(instructions, order)
    assert after.seconds <= before.seconds + 1e-9
    assert after.peak_bytes <= before.peak_bytes + budget
