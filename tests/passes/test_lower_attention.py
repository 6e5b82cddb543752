"""The lowered graphs: a golden for two ranks, counts and order for more."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import fx

from cp_inductor.graph.collectives import START, WAIT
from cp_inductor.ops.attention import attention
from cp_inductor.passes import lower_attention as lowering
from cp_inductor.passes.lower_attention import lower_attention
from cp_inductor.passes.nodes import BYTES_KEY, EXCHANGE_KEY
from cp_inductor.passes.pin_order import META_KEY, number_nodes, pin_order
from cp_inductor.passes.verify_graph import verify_graph
from cp_inductor.plan import Mask, Recipe, resolve
from cp_inductor.plan.strategies import TABLE
from cp_inductor.tiles.tile_ops import TILE_OPS
from cp_inductor.torch_private.tracing import fakes_of_shapes, trace_fake
from tests.support.graphs import (
    attend_causal,
    attend_full,
    collectives_of,
    disagreements,
    format_graph,
    lowered_graphs,
)
from tests.support.ranks import fake_mesh
from tests.support.reference import make_qkv

pytestmark = pytest.mark.usefixtures("ring")


def lower_on(
    rank: int, world_size: int, *, needs_grad: bool = True, **shape: Any
) -> dict[str, fx.GraphModule]:
    with fake_mesh(rank, world_size) as mesh:
        tensors = [tensor.requires_grad_(needs_grad) for tensor in make_qkv(**shape)[:3]]
        # The order of the plan, as lowering emits it; what the schedule makes of it has its tests.
        options = {"mesh": mesh, "schedule": "local"}
        return lowered_graphs(attend_causal, *tensors, options=options)


class TestGolden(TestCase):
    """The first of two ranks, causal: it gives its block and computes one tile."""

    def test_rank_0_forward(self) -> None:
        shape = {"seq_len": 4, "batch": 1, "num_heads": 2, "head_dim": 8}
        self.assertExpectedInline(
            format_graph(lower_on(0, 2, dtype=torch.bfloat16, **shape)["forward"].graph),
            """\
primals_1: input (1, 2, 4, 8)
primals_2: input (1, 2, 4, 8)
primals_3: input (1, 2, 4, 8)
permute = aten.permute.default(primals_2, [2, 0, 1, 3])
permute_1 = aten.permute.default(primals_3, [2, 0, 1, 3])
cat = aten.cat.default([permute, permute_1], 2)
view = aten.reshape.default(cat, [4, 1, 32])
view_1 = aten.reshape.default(view, [-1])
all_to_all_single = _c10d_functional.all_to_all_single.default(view_1, [0, 0], [0, 128], 0)
_scaled_dot_product_flash_attention_for_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default(primals_1, primals_2, primals_3, 0.0, True)
getitem_2 = getitem(_scaled_dot_product_flash_attention_for_cpu, 0)
getitem_3 = getitem(_scaled_dot_product_flash_attention_for_cpu, 1)
wait_tensor = _c10d_functional.wait_tensor.default(all_to_all_single)
detach = aten.detach.default(getitem_2)
detach_1 = aten.detach.default(getitem_3)
detach_2 = aten.detach.default(detach)
detach_3 = aten.detach.default(detach_1)
return (getitem_2, primals_1, primals_2, primals_3, detach_2, detach_3)""",
        )


def count(gm: fx.GraphModule, *targets: object) -> int:
    return sum(node.target in targets for node in gm.graph.nodes)


def tile_masks(gm: fx.GraphModule) -> list[Mask]:
    tiles = [node for node in gm.graph.nodes if node.target in TILE_OPS]
    return [Mask.CAUSAL if True in tile.args else Mask.FULL for tile in tiles]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_bytes_are_those_of_all_batch_entries(kind: str) -> None:
    one, three = (
        [
            node.meta[BYTES_KEY]
            for node in lower_on(1, 2, seq_len=4, batch=batch)[kind].graph.nodes
            if node.target is START
        ]
        for batch in (1, 3)
    )
    assert one and min(one) > 0 and three == [3 * num_bytes for num_bytes in one]


def test_inference_leaves_out_the_lse() -> None:
    gm = lower_on(1, 2, needs_grad=False, seq_len=3)["inference"]
    assert count(gm, START) == 1
    assert count(gm, torch.ops.aten.log.default) == 0


def test_one_rank_needs_no_collective() -> None:
    graphs = lower_on(0, 1, seq_len=3)
    for gm in graphs.values():
        assert count(gm, START, WAIT) == 0
        assert tile_masks(gm) == [Mask.CAUSAL]


def test_partials_beyond_eight_are_combined_in_groups() -> None:
    gm = lower_on(11, 12, needs_grad=False, seq_len=2)["inference"]
    # 12 partials: eight, then the result of those with the last four; nobody reads the lse of all.
    exp, log = torch.ops.aten.exp.default, torch.ops.aten.log.default
    steps = [node.target for node in gm.graph.nodes if node.target in (exp, log)]
    assert steps == [exp] * 8 + [log] + [exp] * 5


def test_keys_that_lie_apart_are_put_together_once_for_all_tiles() -> None:
    """The first rank sends no queries, so that its keys lie apart from those of the others."""
    with fake_mesh(3, 8) as mesh:
        tensors = make_qkv(seq_len=4, num_heads=8)[:3]
        options = {"mesh": mesh, "schedule": "local", "strategy": "heads_own"}
        (graph,) = (
            gm.graph for gm in lowered_graphs(attend_causal, *tensors, options=options).values()
        )
    sources = []
    for tile in graph.nodes:
        if tile.target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            of_tile = []
            for node in tile.args[1:3]:
                while node.target is torch.ops.aten.slice.Tensor:
                    node = node.args[0]
                of_tile.append(node)
            sources.append(of_tile)
    cats = {node for pair in sources for node in pair if node.target is torch.ops.aten.cat.default}
    read = [pair for pair in sources if cats.intersection(pair)]
    assert len(read) >= 2
    assert len(cats) == 1
    assert all(key is value for key, value in read)


def test_attentions_alike_are_traced_once() -> None:
    """Two of four are alike; one is not causal, and one has the same tensor as query and key."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        first = attend_causal(query, key, value)
        again = attend_causal(query.sin(), key, value.cos())
        return first + again + attend_full(query, key, value) + attend_causal(key, key, value)

    traces = mock.patch.object(lowering, "trace_fake", side_effect=lowering.trace_fake)
    with fake_mesh(1, 3) as mesh, traces as trace:
        graphs = lowered_graphs(attend, *make_qkv(seq_len=6)[:3], options={"mesh": mesh})
    assert trace.call_count == 3
    (graph,) = (gm.graph for gm in graphs.values())
    waits = graph.find_nodes(op="call_function", target=WAIT)
    # Each copy is of its own line of the model.
    assert len({wait.meta["stack_trace"] for wait in waits}) == 4
    alike = [
        [str(node.target) for node in graph.nodes if line in node.meta.get("stack_trace", "")]
        for line in ("first = ", "again = ")
    ]
    assert [op for op in alike[1] if op not in ("aten.sin.default", "aten.cos.default")] == alike[0]


def test_lowered_nodes_carry_values_and_source_lines() -> None:
    gm = lower_on(1, 2, seq_len=3)["forward"]
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta.get("val") is not None, node
        if node.target in TILE_OPS or node.target in (START, WAIT):
            assert "graphs.py" in node.meta["stack_trace"]


# verify_graph: each rule is broken once.


def test_verify_sees_a_start_that_is_not_waited_for() -> None:
    gm = lower_on(0, 2, seq_len=3)["forward"]
    wait = next(node for node in gm.graph.nodes if node.target is WAIT)
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    with pytest.raises(AssertionError, match="is read by"):
        verify_graph(gm)


def test_verify_sees_what_was_not_lowered() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.cp_inductor.attention.default))
    with pytest.raises(AssertionError, match="was not lowered"):
        verify_graph(fx.GraphModule({}, graph))


def test_verify_sees_a_start_that_is_missing_or_out_of_order() -> None:
    gm = lower_on(0, 3, seq_len=3)["forward"]
    first, second = (node for node in gm.graph.nodes if node.target is START)
    first.meta[EXCHANGE_KEY], second.meta[EXCHANGE_KEY] = (2, 2), (1, 2)
    with pytest.raises(AssertionError, match="start 2 of 2 stands before the one ahead of it"):
        verify_graph(gm)
    first.meta[EXCHANGE_KEY] = second.meta[EXCHANGE_KEY] = (1, 2)
    with pytest.raises(AssertionError, match=r"only \[\(1, 2\), \(1, 2\)\] stand"):
        verify_graph(gm)


def test_a_graph_says_whose_it_is() -> None:
    """Who is in a group, and whether there is one, is not asked: the op says the rank."""
    assert not dist.is_initialized()
    recipe = resolve(Recipe(3, 24, 24, 2, 2, 8, 4, "causal", strategy="ring"), site="a test")
    fakes = fakes_of_shapes([((1, 2, 8, 8), torch.float32)] * 3)
    tiles = []
    for rank in range(3):
        how = (recipe.format(), rank, None, "flash_cpu", "nobody's", 0.0, False)
        gm = trace_fake(lambda *qkv, how=how: attention(*qkv, [], *how)[0], fakes, {})
        assert lower_attention(gm, decompositions={}) == 1
        verify_graph(gm)
        tiles.append(sum(node.target in TILE_OPS for node in gm.graph.nodes))
    assert tiles == [1, 2, 3]


# What ranks start: as many collectives, of the same kinds, and each sends what another receives.


@pytest.mark.parametrize("strategy", [*TABLE, "heads2+rows", "nodes2+blocks"])
def test_ranks_start_the_same_collectives(strategy: str) -> None:
    world_size, programs = 4, dict[str, dict[int, list[dict[str, Any]]]]()
    for rank in range(world_size):
        with fake_mesh(rank, world_size) as mesh:
            shards = [t.requires_grad_() for t in make_qkv(seq_len=5, num_heads=4)[:3]]
            options = {"mesh": mesh, "strategy": strategy}
            graphs = lowered_graphs(attend_causal, *shards, options=options)
        torch._dynamo.reset()
        for kind in ("forward", "backward"):
            programs.setdefault(kind, {})[rank] = collectives_of(graphs[kind])
    for of_ranks in programs.values():
        assert of_ranks[0] and disagreements(of_ranks) == []


def splits(sends: list[int], receives: list[int], name: str = "all_to_all") -> dict[str, Any]:
    return {"what": [name], "sends": sends, "receives": receives}


def test_collectives_that_differ_are_found() -> None:
    first, second = splits([0, 3], [0, 2]), splits([2, 0], [3, 0])
    reduce = {"what": ["all_reduce"]}
    assert disagreements({0: [first, reduce], 1: [second, reduce]}) == []
    assert disagreements({0: [first], 1: [splits([2, 0], [4, 0])]}) == [
        "collective 0: rank 0 sends 3 to rank 1, which receives 4"
    ]
    assert disagreements({0: [first, reduce], 1: [reduce, second]}) == [
        "collective 0 of ranks: {0: ['all_to_all'], 1: ['all_reduce']}",
        "collective 1 of ranks: {0: ['all_reduce'], 1: ['all_to_all']}",
    ]
    assert disagreements({0: [first], 1: []}) == ["collectives of ranks: {0: 1, 1: 0}"]


# pin_order: the chain follows the numbers, whatever the graph's order has become.


def pinned_pairs(graph: fx.Graph) -> set[str]:
    """What pin_order makes dependent on what, as `earlier < later`."""
    pin_order(graph)
    chained = [node for node in graph.nodes if str(node.target) == "control_deps"]
    return {f"{earlier.name} < {node.name}" for node in chained for earlier in node.args[0]}


def three_collectives() -> tuple[fx.Graph, list[fx.Node]]:
    gm = fx.GraphModule({}, fx.Graph())
    graph = gm.graph
    x = graph.placeholder("x")
    waits = []
    for name in ("first", "second"):
        start = graph.create_node("call_function", START, (x, [1], [1], "0"), name=f"start_{name}")
        waits.append(graph.create_node("call_function", WAIT, (start,), name=f"wait_{name}"))
    tile_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    tile = graph.create_node("call_function", tile_op, (x, x, x), name="tile")
    graph.output((*waits, tile))
    return graph, list(graph.nodes)


def test_pinned_by_number() -> None:
    graph, _ = three_collectives()
    number_nodes(graph)
    # A pass of Inductor's that moves nodes in between must not matter.
    nodes = {node.name: node for node in graph.nodes}
    nodes["x"].append(nodes["tile"])
    order = ["start_first", "wait_first", "start_second", "wait_second", "tile"]
    pairs = pinned_pairs(graph)
    assert {f"{a} < {b}" for a, b in pairwise(order)} <= pairs
    assert pairs <= {f"{a} < {b}" for a, b in combinations(order, 2)}


def test_collectives_made_since_stay_behind_their_neighbour() -> None:
    graph, nodes = three_collectives()
    number_nodes(graph)
    by_name = {node.name: node for node in nodes}
    with graph.inserting_after(by_name["wait_first"]):
        graph.create_node("call_function", START, (by_name["x"], [1], [1], "0"), name="bucket")
    pairs = pinned_pairs(graph)
    assert "wait_first < bucket" in pairs
    assert "bucket < start_second" in pairs


def test_exchanges_are_pinned_on_ranks_without_tiles() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(START, (x, [1], [1], "0"))
    graph.output(graph.call_function(WAIT, (start,)))
    number_nodes(graph)
    assert [node.meta.get(META_KEY) for node in graph.nodes] == [None, 0, 1, None]


def test_compute_is_pinned_in_flight_alone_and_only_while_it_is_as_it_was() -> None:
    graph = fx.GraphModule({}, fx.Graph()).graph
    x = graph.placeholder("x")
    mm = torch.ops.aten.mm.default
    before = graph.call_function(mm, (x, x))
    start = graph.call_function(START, (before, [1], [1], "0"))
    first = graph.call_function(mm, (x, x))
    second = graph.call_function(mm, (x, x))
    wait = graph.call_function(WAIT, (start,))
    graph.output((wait, graph.call_function(torch.ops.aten.add.Tensor, (first, second))))
    number_nodes(graph)
    assert META_KEY not in before.meta
    assert [node.meta[META_KEY] for node in (start, first, second, wait)] == [0, 1, 2, 3]
    # As if a rewrite had made one node of the first and the sum.
    first.args = (second, x)
    second.append(first)
    pairs = pinned_pairs(graph)
    assert "all_to_all_single_default < mm_default_2" in pairs
    assert not any("mm_default_1" in pair for pair in pairs)
