"""Scheduled graphs: the same on all ranks where it matters, and the same numbers on real ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.graph.collectives import START, WAIT, is_start
from cp_inductor.passes.nodes import BYTES_KEY
from cp_inductor.passes.schedule_exchange import schedule_exchange
from tests.support.combinations import assert_beside
from tests.support.graphs import Layer, lowered_graphs
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.reference import shard

SLOW: Mapping[str, Any] = {"link_bytes_per_s": 1e6, "device_flops_per_s": 1e10}
SLOWEST = PlanOptions("auto", 0, 0, link_bytes_per_s=1.0, device_flops_per_s=1e9)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer(32, 4, 2, 8, 96) for _ in range(2))).to(dtype)


def graphs_of(
    rank: int, world_size: int, model: nn.Module | None = None, **options: Any
) -> dict[str, fx.GraphModule]:
    with fake_mesh(rank, world_size) as mesh:
        x = torch.randn(2, 24, 32, requires_grad=True)
        options = {"mesh": mesh, **SLOW, **options}
        return lowered_graphs(model or make_model(), x, options=options)


def starts_of(gm: fx.GraphModule) -> list[tuple[str, int]]:
    """What is started, in order, in words that all ranks share."""
    return [
        (str(node.target), node.meta.get(BYTES_KEY, 0)) for node in gm.graph.nodes if is_start(node)
    ]


class Sharded(nn.Module):
    """Weights gathered before use, as data parallelism would; attention; a reduction behind."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(8, 32))
        self.layer = Layer(32, 4, 2, 8, 96)

    def forward(self, x: Tensor) -> Tensor:
        weight = funcol.all_gather_tensor_autograd(self.shard, 0, dist.group.WORLD)
        return self.layer(x) @ weight


@pytest.mark.slow
def test_collectives_of_others_keep_their_place_and_are_hidden_too() -> None:
    seen = []
    for rank, schedule in itertools.product(range(4), ("local", "global")):
        graphs = graphs_of(rank, 4, Sharded(), strategy="ring", schedule=schedule)
        seen.append({kind: starts_of(gm) for kind, gm in graphs.items()})
    assert all(starts == seen[0] for starts in seen)
    assert any("all_gather" in target for target, _ in seen[0]["forward"])
    assert any("reduce_scatter" in target for target, _ in seen[0]["backward"])
    nodes = list(graphs["forward"].graph.nodes)
    gather = next(node for node in nodes if is_start(node) and node.target is not START)
    (wait,) = gather.users
    # It is waited for where the product with it is, behind all of the attention.
    last = max(nodes.index(node) for node in nodes if node.target is START)
    assert nodes.index(gather) < last < nodes.index(wait)


@pytest.mark.slow
def test_peak_memory_is_counted_and_kept() -> None:
    for budget in (0, 5_000, -1):
        counters.clear()
        graphs_of(2, 4, strategy="ring", memory_budget_bytes=budget)
        seen = counters["cp_inductor"]
        for kind in ("forward", "backward"):
            allowed = seen[f"{kind}_memory_budget_bytes"]
            assert allowed == budget or (budget < 0 and allowed > 0)
            assert seen[f"{kind}_peak_bytes"] > 0
            unscheduled = seen[f"{kind}_peak_bytes_unscheduled"]
            assert seen[f"{kind}_peak_bytes"] <= unscheduled + allowed


def graph_of_calls() -> tuple[fx.Graph, Tensor, Callable[..., fx.Node]]:
    """Return an empty graph, a matrix, and what adds a call to the graph that returns one."""
    graph = fx.GraphModule({}, fx.Graph()).graph
    with torch._subclasses.FakeTensorMode():
        value = torch.empty(64, 64)

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    return graph, value, call


def test_random_numbers_and_writes_keep_their_order() -> None:
    graph, value, call = graph_of_calls()
    x = graph.placeholder("x")
    x.meta["val"] = value
    aten = torch.ops.aten
    start = call(START, x, [1], [1], "0")
    wait = call(WAIT, start)
    used = call(aten.mm.default, wait, x)
    first = call(aten.rand_like.default, x)
    free = call(aten.mm.default, x, x)
    written = call(aten.copy_.default, x, used)
    second = call(aten.rand_like.default, x)
    after = call(aten.mm.default, x, x)
    graph.output((used, first, free, written, second, after))
    schedule_exchange(graph, "forward", SLOWEST)
    names = [node.name for node in graph.nodes]
    assert names.index(free.name) < names.index(wait.name)  # it was pulled into the flight
    order = [node.name for node in (first, written, second, after)]
    assert sorted(order, key=names.index) == order


def test_what_another_graph_started_is_not_read_before_its_wait() -> None:
    """What arrives in `x` was started elsewhere: the place of the wait says when it is there."""
    graph, value, call = graph_of_calls()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = value
    mm = torch.ops.aten.mm.default
    used = call(mm, call(WAIT, call(START, y, [1], [1], "0")), y)
    arrived = call(WAIT, x)
    read, free = call(mm, x, x), call(mm, y, y)
    graph.output((used, arrived, read, free))
    schedule_exchange(graph, "forward", SLOWEST)
    names = [node.name for node in graph.nodes]
    assert names.index(arrived.name) < names.index(read.name)


# (strategy, schedule, memory budget in bytes)
CASES = (
    *(("blocks", *how) for how in (("none", -1), ("local", -1), ("global", -1))),
    *((strategy, "global", 1 << 30) for strategy in ("ring", "blocks", "heads")),
)


@pytest.mark.long
@on_ranks(2)
def test_numerics() -> None:
    mesh = world_mesh()
    torch.manual_seed(2)
    whole, weights = torch.randn(2, 2, 12 * mesh.size(), 32, dtype=torch.float64)
    reference, leaf = make_model(torch.float64), whole.clone().requires_grad_()
    expected = reference(leaf)
    expected.backward(weights)
    cut = partial(shard, rank=mesh.get_rank(), world_size=mesh.size(), dim=1)
    for strategy, schedule, budget in CASES:
        torch._dynamo.reset()
        model = make_model(torch.float64)
        options = {"strategy": strategy, "schedule": schedule, "memory_budget_bytes": budget}
        options |= {"mesh": mesh, **SLOW}
        compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True, options=options)
        local = cut(whole).clone().requires_grad_()
        out = compiled(local)
        (out * cut(weights)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        results = (out, cut(expected)), (local.grad, cut(leaf.grad))
        assert_beside(model, reference, *results, tolerance=1e-12, least=1.0)
