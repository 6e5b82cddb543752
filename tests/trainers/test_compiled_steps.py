"""Whole training steps compiled: forward, backward and optimizer in one function.

Dynamo breaks the graph at `loss.backward()`. So a graph of ours is differentiated, and its backward
compiled, while Dynamo looks at every function that Python calls.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support.combinations import (
    AOT,
    Row,
    assert_rewritten,
    combinations,
    compiled,
    make_batch,
    make_mesh,
    make_model,
    mean_loss,
    shards_of,
    whole,
)
from tests.support.ranks import on_ranks
from tests.support.reference import assert_within, make_qkv

# float64, of losses and weights of about 1 after a few steps; sums of two ranks are rounded apart.
TOLERANCE = 1e-12

BATCHES = [make_batch(2, 14, seed=seed) for seed in (1, 2, 3)]


def make_step(
    model: nn.Module, sum_gradients: Callable[[nn.Module], None] = lambda model: None
) -> Callable[..., Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model(ids, positions), labels)
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        return loss.detach()

    return step


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train_dtensors(model: nn.Module, mesh: DeviceMesh, form: str) -> list[Tensor]:
    step = compiled(make_step(cp_inductor.parallelize(model, mesh)), form)
    losses = []
    with implicit_replication():
        for batch in BATCHES:
            sharded = (distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in batch)
            losses.append(whole(step(*sharded)))
    return losses


def train_region(model: nn.Module, mesh: DeviceMesh, form: str) -> list[Tensor]:
    step = compiled(make_step(model, average_gradients), form)
    losses = []
    for batch in BATCHES:
        with shards_of(batch, mesh) as shards:
            loss = step(*shards)
        dist.all_reduce(loss)
        losses.append(loss / mesh.size())
    return losses


WAYS = {
    "a compiled step of DTensors: forward, backward and optimizer": Row(
        settings={"train": train_dtensors}
    ),
    "a compiled step in context_parallel: forward, backward and optimizer": Row(
        settings={"train": train_region}
    ),
}


@combinations(WAYS)
@on_ranks(2)
def test_steps(row: str, form: str) -> None:
    mesh = make_mesh(dist.get_world_size(), names=("cp",))
    expected, model = (make_model(num_layers=1).double() for _ in range(2))
    step = make_step(expected)
    losses = [step(*batch) for batch in BATCHES]
    actual = WAYS[row].settings["train"](model, mesh, form)
    torch.testing.assert_close(torch.stack(actual), torch.stack(losses), rtol=0, atol=TOLERANCE)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_within(whole(one.detach()), other.detach(), TOLERANCE, is_relative=False)
    assert_rewritten(form)
    callback_handler.clear()  # which raises where a compile is pending


@pytest.mark.slow
@on_ranks(2)
def test_callbacks_of_the_user_are_the_only_ones() -> None:
    """A callback that Dynamo would trace, because a backward is compiled where Dynamo looks on.

    torch (2.13) holds a lock meanwhile that the trace of the callback needs as well.
    """
    mesh = make_mesh(2, names=("cp",))
    query = distribute_tensor(make_qkv(10)[0].requires_grad_(), mesh, [Shard(2)])
    calls = []

    def note(_: object) -> None:
        calls.append(torch.ones(2).sum())

    @torch.compile(backend=AOT)
    def step(query: Tensor) -> None:
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    callback_handler.register_start_callback(note)
    try:
        step(query)
        assert len(calls) > 1
        assert callback_handler.start_callbacks == [note]
        assert callback_handler.end_callbacks == []
    finally:
        callback_handler.remove_start_callback(note)
