"""The passes for lists of graph passes, over a training step that make_fx traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as attend

import cp_inductor
from cp_inductor.backend.graph_passes import lower_attention, schedule_exchange
from cp_inductor.errors import InvalidArgument
from cp_inductor.graph.collectives import STARTS, WAIT
from cp_inductor.passes.lower_attention import EXPANSIONS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

HEADS, DIM = 2, 8


def step(tokens: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Two layers of attention, their loss, and the gradients of their weights."""
    hidden = tokens
    for weight in weights:
        parts = (hidden @ weight).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        out = attend(*parts, is_causal=True)
        hidden = hidden + out.transpose(1, 2).flatten(-2)
    loss = hidden.square().sum()
    return loss, *torch.autograd.grad(loss, weights)


def inputs(ranks: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    width = HEADS * DIM
    tokens = torch.randn(2, 8 * ranks, width, generator=generator)
    weights = [torch.randn(width, 3 * width, generator=generator) / 4 for _ in range(2)]
    return tokens, [weight.requires_grad_() for weight in weights]


def count(gm: fx.GraphModule, targets: Any) -> int:
    return sum(node.target in targets for node in gm.graph.nodes)


def compile_by_passes() -> None:
    """The graph of a list of passes computes on shards what the step does on one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    tokens, weights = inputs(ranks)
    expected = step(tokens, weights)
    shard = tokens.chunk(ranks, dim=1)[rank].contiguous()
    with cp_inductor.context_parallel(mesh):
        gm = make_fx(step, tracing_mode="fake")(shard, weights)
    assert count(gm, EXPANSIONS) == 4  # forward and backward of two layers
    assert count(gm, STARTS) == 0
    for run_pass in (lower_attention, schedule_exchange):
        result = run_pass(gm, (shard, weights))
        assert result is gm
    assert count(gm, EXPANSIONS) == 0
    assert count(gm, STARTS) == count(gm, (WAIT,)) > 0
    found = gm(shard, weights)
    for actual, right in zip(found, expected, strict=True):
        total = actual.detach().clone()
        dist.all_reduce(total)
        assert (total - right).abs().max() <= 1e-5 * right.abs().max()

    order = [node.name for node in gm.graph.nodes]
    schedule_exchange(lower_attention(gm))
    assert [node.name for node in gm.graph.nodes] == order  # a second run changes nothing

    # In "none" every start stands before its wait; the global schedule has moved compute between.
    distance = distances(gm)
    schedule_exchange(gm, schedule="none")
    assert sum(distances(gm)) < sum(distance)
    assert torch.equal(gm(shard, weights)[1], found[1])


def distances(gm: fx.GraphModule) -> list[int]:
    nodes = list(gm.graph.nodes)
    return [
        nodes.index(user) - index
        for index, node in enumerate(nodes)
        for user in node.users
        if node.target in STARTS and user.target is WAIT
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_step_of_both_directions(ranks: int) -> None:
    run_ranks(ranks, compile_by_passes)


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
