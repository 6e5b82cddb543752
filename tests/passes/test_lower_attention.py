"""The lowered graphs: a golden for two ranks, counts and order for more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import fx

from cp_inductor.graph.collectives import START, WAIT
from cp_inductor.passes.nodes import EXCHANGE_KEY
from cp_inductor.passes.verify_graph import verify_graph
from cp_inductor.tiles.kernel_table import TILE_OPS
from tests.support.graphs import attend_causal, disagreements, format_graph, lowered_graphs
from tests.support.ranks import fake_mesh
from tests.support.reference import make_qkv
from tests.support.traced_step import count

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


def test_inference_leaves_out_the_lse() -> None:
    gm = lower_on(1, 2, needs_grad=False, seq_len=3)["inference"]
    assert count(gm, (START,)) == 1
    assert count(gm, (torch.ops.aten.log.default,)) == 0


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


# What `disagreements` says of ranks; tests/plan/test_strategies.py asks it.


def splits(sends: list[int], receives: list[int]) -> dict[str, Any]:
    return {"what": ["all_to_all"], "sends": sends, "receives": receives}


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
