"""Activation checkpointing x context parallelism: what is computed, and fetched, again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import cp_inductor
from cp_inductor import config
from cp_inductor.graph.collectives import START
from cp_inductor.plan import Recipe, resolve
from tests.support import combinations as cases
from tests.support.comms import Counts
from tests.support.graphs import lowered_graphs
from tests.support.ranks import fake_rank, on_ranks, run_ranks
from tests.support.reference import assert_within, make_qkv

OURS = torch.ops.cp_inductor.attention.default
CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def policy(saved: Any, recomputed: Any, context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    if op is saved:
        return CheckpointPolicy.MUST_SAVE
    if op is recomputed:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(saved: Any = None, recomputed: Any = None) -> dict[str, Any]:
    decide = partial(policy, saved, recomputed)
    return {"context_fn": partial(create_selective_checkpoint_contexts, decide)}


# Whole models


@config.patch(strategy="allgather")  # one exchange forward, two backward
def check_checkpointed(form: str, saved: str | None) -> None:
    mesh = cases.make_mesh(dist.get_world_size() // 2, 2)
    kwargs = {} if saved is None else selective({"ours": OURS, "kernel": CPU_KERNEL}[saved])
    num_layers = cases.layers_of(form)
    _, grads = cases.unsharded(num_layers=num_layers)
    model = cases.make_model(num_layers=num_layers)
    cases.checkpoint_layers(model, **kwargs)
    run = cases.compiled(model, form, fullgraph=True)
    with Counts():
        cases.train_step(run, mesh)
    cases.assert_rewritten(form)
    cases.assert_grads(cases.averaged_grads(model, mesh["dp", "cp"]._flatten("all")), grads)
    forward, backward = Counts(), Counts()
    with cases.shards_of(cases.make_batch(), mesh) as (ids, positions, labels):
        with forward:
            loss = cases.mean_loss(run(ids, positions), labels)
        with backward:
            loss.backward()
    # In eager there is no op of ours that a policy could name.
    is_saved = saved == "kernel" or (saved == "ours" and form != cases.EAGER)
    assert forward.exchanges() == num_layers
    assert backward.exchanges() == (2 if is_saved else 3) * num_layers


# To a compiler, the second half of a batch is as the first one.
RANKS = {cases.EAGER: 4, cases.AOT: 2, cases.COMPILED: 2}


@cases.combination("activation checkpointing of every block", *cases.FORMS)
def test_checkpoint(form: str) -> None:
    run_ranks(RANKS[form], check_checkpointed, form, None)


@cases.combination("selective checkpointing, attention saved", *cases.FORMS)
def test_selective_checkpoint(form: str) -> None:
    # Which op is named makes no other model: tests of graphs below name both.
    for saved in {
        cases.EAGER: ("ours", "kernel"),
        cases.AOT: ("ours",),
        cases.COMPILED: ("kernel",),
    }[form]:
        run_ranks(RANKS[form], check_checkpointed, form, saved)


@cases.combination(
    "a memory budget for activations", *cases.FORMS[1:], eager="Only a compiler has it."
)
@on_ranks(2)
def test_memory_budget(form: str) -> None:
    for budget in (0.0,) if form == cases.COMPILED else (0.0, 0.5):
        mesh, model = cases.make_mesh(2, names=("cp",)), cases.make_model()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            cases.train_step(cases.compiled(model, form, fullgraph=True), mesh)
        cases.assert_rewritten(form)
        cases.assert_grads(cases.averaged_grads(model, mesh), cases.unsharded()[1])


# What is in the graphs


@pytest.fixture
def inputs() -> Iterator[list[Tensor]]:
    with fake_rank(1, 2), config.patch(strategy="allgather"):
        mesh = cases.make_mesh(2, names=("cp",))
        yield [
            distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_()
            for tensor in make_qkv(8)[:3]
        ]


def num_starts(inputs: list[Tensor], policy: dict[str, Any] | None, **flags: Any) -> list[int]:
    """Count exchanges of the forward and of the backward of one attention, perhaps checkpointed."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Something to compute again, so that the attention is not all there is.
        return F.scaled_dot_product_attention(query.sin(), key.sin(), value, is_causal=True)

    def model(*tensors: Tensor) -> Tensor:
        if policy is None:
            return attend(*tensors).cos()
        return checkpoint(attend, *tensors, use_reentrant=False, **policy).cos()

    torch._dynamo.reset()
    with config.patch(**flags):
        graphs = lowered_graphs(model, *inputs)
    return [
        sum(node.target is START for node in graphs[kind].graph.nodes)
        for kind in ("forward", "backward")
    ]


AGAIN: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    (selective(OURS), False),
    (selective(CPU_KERNEL), False),
    (selective(None, OURS), True),
    (selective(None, CPU_KERNEL), True),
    (selective(CPU_KERNEL, OURS), True),  # the policy of the op has the last word
]


def test_what_is_computed_again_is_fetched_again(inputs: list[Tensor]) -> None:
    forward, backward = num_starts(inputs, None)
    for policy, is_again in AGAIN:
        assert num_starts(inputs, policy) == [forward, backward + forward * is_again], policy


def test_what_is_kept_is_not_fetched_again(inputs: list[Tensor]) -> None:
    """All that the forward fetched is saved: its exchange is run once, however it is saved."""
    keep = {"keep_bytes": 1 << 20}
    forward, backward = num_starts(inputs, None)
    kept = [forward, backward - forward]
    assert num_starts(inputs, None, **keep) == num_starts(inputs, selective(OURS), **keep) == kept
    # Computed again it is fetched once, for itself and for the backward.
    assert num_starts(inputs, {}, **keep) == [forward, backward]


def test_flops_are_those_of_the_plan(inputs: list[Tensor]) -> None:
    """A memory budget would take an op without a formula for one that costs nothing."""
    batch, heads, head_dim, length = 2, 4, 20, 4
    how: dict[str, Any] = {"strategy": "allgather", "stages": 1, "chunks": 2}
    recipe = Recipe(2, 2 * length, 2 * length, heads, heads, head_dim, 4, "causal", **how)
    arguments = (resolve(recipe, site="test").format(), 1, None, "flash_cpu", "0", 0.0, False)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        query = torch.rand(batch, heads, length, head_dim, requires_grad=True)
        out, *_ = torch.ops.cp_inductor.attention(query, query, query, [], *arguments)
        forward = counter.get_total_flops()
        out.sum().backward()
    # The second rank has all keys of the first, and half of its own.
    pairs = batch * heads * (length * length + length * (length + 1) // 2)
    assert forward == 4 * head_dim * pairs
    assert counter.get_total_flops() == forward * 3.5


# --- Whole training steps compiled: forward, backward and optimizer in one function.

# float64, of losses and weights of about 1 after a few steps; sums of two ranks are rounded apart.
TOLERANCE = 1e-12

BATCHES = [cases.make_batch(2, 14, seed=seed) for seed in (1, 2, 3)]


def make_step(
    model: nn.Module, sum_gradients: Callable[[nn.Module], None] = lambda model: None
) -> Callable[..., Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cases.mean_loss(model(ids, positions), labels)
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
    step = cases.compiled(make_step(cp_inductor.parallelize(model, mesh)), form)
    losses = []
    with implicit_replication():
        for batch in BATCHES:
            sharded = (distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in batch)
            losses.append(cases.whole(step(*sharded)))
    return losses


def train_region(model: nn.Module, mesh: DeviceMesh, form: str) -> list[Tensor]:
    step = cases.compiled(make_step(model, average_gradients), form)
    losses = []
    for batch in BATCHES:
        with cases.shards_of(batch, mesh) as shards:
            loss = step(*shards)
        dist.all_reduce(loss)
        losses.append(loss / mesh.size())
    return losses


WAYS = {
    "a compiled step of DTensors: forward, backward and optimizer": cases.Row(
        settings={"train": train_dtensors}
    ),
    "a compiled step in context_parallel: forward, backward and optimizer": cases.Row(
        settings={"train": train_region}
    ),
}


@cases.combinations(WAYS)
@on_ranks(2)
def test_steps(row: str, form: str) -> None:
    mesh = cases.make_mesh(dist.get_world_size(), names=("cp",))
    expected, model = (cases.make_model(num_layers=1).double() for _ in range(2))
    step = make_step(expected)
    losses = [step(*batch) for batch in BATCHES]
    actual = WAYS[row].settings["train"](model, mesh, form)
    torch.testing.assert_close(torch.stack(actual), torch.stack(losses), rtol=0, atol=TOLERANCE)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_within(cases.whole(one.detach()), other.detach(), TOLERANCE, is_relative=False)
    cases.assert_rewritten(form)
    callback_handler.clear()  # which raises where a compile is pending


@pytest.mark.slow
@on_ranks(2)
def test_callbacks_of_the_user_are_the_only_ones() -> None:
    """A callback that Dynamo would trace, because a backward is compiled where Dynamo looks on.

    torch (2.13) holds a lock meanwhile that the trace of the callback needs as well.
    """
    mesh = cases.make_mesh(2, names=("cp",))
    query = distribute_tensor(make_qkv(10)[0].requires_grad_(), mesh, [Shard(2)])
    calls = []

    def note(_: object) -> None:
        calls.append(torch.ones(2).sum())

    @torch.compile(backend=cases.AOT)
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
