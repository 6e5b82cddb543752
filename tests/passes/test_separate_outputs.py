"""Outputs of a graph that are parts of other outputs, or equal to them: each has its own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cp_inductor import parallelize
from cp_inductor.passes.complete_outputs import complete_outputs
from tests.support.graphs import codes_of_pass
from tests.support.ranks import on_ranks, world_mesh


def tokens_and_first(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x.sin()
    return tokens, tokens[:, 0], tokens.transpose(1, 2)


@on_ranks(2)
def test_views_of_other_outputs() -> None:
    mesh = world_mesh()
    whole = torch.randn(2, 7, 4, dtype=torch.float64).requires_grad_()
    leaf = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    compiled = torch.compile(tokens_and_first, backend="cp_aot_eager", fullgraph=True)
    found, expected = compiled(leaf), tokens_and_first(whole)
    for actual, wanted in zip(found, expected, strict=True):
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(actual.full_tensor(), wanted)
    sum(out.square().sum() for out in found).backward()  # type: ignore[union-attr]
    sum(out.square().sum() for out in expected).backward()  # type: ignore[union-attr]
    assert isinstance(leaf.grad, DTensor)
    torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)
    with torch.no_grad():
        for actual, wanted in zip(compiled(leaf), expected, strict=True):
            torch.testing.assert_close(actual.full_tensor(), wanted)


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> str:
    """Return the code of a graph after the pass."""
    _, once, twice = codes_of_pass(complete_outputs, function, *inputs)
    assert once == twice
    return once


def test_plain_tensors_are_left_alone() -> None:
    assert "clone" not in graph_of(tokens_and_first, torch.randn(2, 7, 4))


@on_ranks(2)
def test_a_view_that_shares_with_nobody_is_left_alone() -> None:
    mesh = world_mesh()
    leaf = distribute_tensor(torch.randn(2, 7, 4), mesh, [Shard(1)]).requires_grad_()
    assert "clone" not in graph_of(lambda x: x.sin().transpose(1, 2), leaf)
    assert graph_of(tokens_and_first, leaf).count(".clone()") == 2


class Parallel(nn.Module):
    """Two branches side by side, as in Phi: their biases and last weights have equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = (x + self.one(x) + self.other(x)).sin().sum()
        first, second = (x.full_tensor() if isinstance(x, DTensor) else x.clone() for _ in "ab")
        return loss, first, second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "length"), [("cp_aot_eager", 8), ("cp_aot_eager", 9), ("cp_inductor", 9)]
)
@on_ranks(2)
def test_equal_results_of_collectives(backend: str, length: int) -> None:
    torch.manual_seed(0)
    model, x = Parallel().double(), torch.randn(1, length, 4, dtype=torch.float64)
    model(x)[0].backward()
    expected = {name: 2 * one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    parallelize(model, world_mesh(), seq_dims={"x": 1})
    step = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):  # the second is added in place
        loss, first, second = step(x)
        loss.backward()
        first.zero_()
        assert second.equal(x)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
