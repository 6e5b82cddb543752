"""The passes for lists of graph passes, over a training step that make_fx traced."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.fx.experimental.proxy_tensor import make_fx

from cp_inductor.backend.graph_passes import lower_attention, schedule_exchange
from cp_inductor.errors import InvalidArgument
from cp_inductor.graph.collectives import STARTS, WAIT
from cp_inductor.passes.lower_attention import EXPANSIONS
from tests.support.graphs import attend_causal
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import (
    assert_all_close,
    attend_with_grads,
    make_qkv,
    on_mesh,
    with_grads,
)
from tests.support.traced_step import assert_sums, count, trace_step

pytestmark = pytest.mark.slow


def distances(gm: fx.GraphModule) -> list[int]:
    nodes = list(gm.graph.nodes)
    return [
        nodes.index(user) - index
        for index, node in enumerate(nodes)
        for user in node.users
        if node.target in STARTS and user.target is WAIT
    ]


@on_ranks(2)
def test_a_step_of_both_directions() -> None:
    """The graph of a list of passes computes on shards what the step does on one process."""
    gm, shard, weights, expected = trace_step()
    assert count(gm, EXPANSIONS) == 4  # forward and backward of two layers
    assert count(gm, STARTS) == 0
    for run_pass in (lower_attention, schedule_exchange):
        result = run_pass(gm, (shard, weights))
        assert result is gm
    assert count(gm, EXPANSIONS) == 0
    assert count(gm, STARTS) == count(gm, (WAIT,)) > 0
    found = gm(shard, weights)
    assert_sums(found, expected)

    order = [node.name for node in gm.graph.nodes]
    schedule_exchange(lower_attention(gm))
    assert [node.name for node in gm.graph.nodes] == order  # a second run changes nothing

    # In "none" every start stands before its wait; the global schedule has moved compute between.
    distance = distances(gm)
    schedule_exchange(gm, schedule="none")
    assert sum(distances(gm)) < sum(distance)
    assert torch.equal(gm(shard, weights)[1], found[1])


def test_a_graph_without_attention_stays_as_it_is() -> None:
    gm = make_fx(lambda x: x.sin() + 1)(torch.ones(3))
    before = gm.code
    assert schedule_exchange(lower_attention(gm)) is gm
    assert gm.code == before


def test_an_unknown_option_is_refused() -> None:
    gm = make_fx(lambda x: x + 1)(torch.ones(3))
    run_pass = functools.partial(schedule_exchange, budget=3)
    with pytest.raises(InvalidArgument, match=r"got budget; see docs/options\.md"):
        run_pass(gm, ())


@on_ranks(2)
def test_the_bisector_leaves_out_passes() -> None:
    """Without any pass that can be spared the numbers are the same, forward and backward."""
    from torch._inductor import compiler_bisector
    from torch._inductor.compiler_bisector import CompilerBisector

    wanted = {"BACKEND": "cp_inductor", "SUBSYSTEM": "passes", "MAX": "0"}
    names = {f"TORCH_BISECT_{name}": value for name, value in wanted.items()}
    whole = make_qkv(10, batch=1, num_heads=2, head_dim=8, dtype=torch.float64)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompilerBisector, "bisection_enabled", True)
        patch.setattr(compiler_bisector, "get_env_val", names.get)
        compiled = torch.compile(attend_causal, backend="cp_inductor")
        found = with_grads(compiled, on_mesh(whole, world_mesh(), Shard(2)))
    left_out = CompilerBisector.get_system_counter("passes", increment=False)
    assert left_out >= 5  # block masks once; order, labels, and pins in each direction
    assert_all_close(found, attend_with_grads(*whole, is_causal=True), torch.float64)
