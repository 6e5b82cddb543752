"""Activation checkpointing x context parallelism: what is computed, and fetched, again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from cp_inductor import config
from cp_inductor.graph.collectives import START
from cp_inductor.plan import Recipe, resolve
from tests.support.combinations import (
    AOT,
    COMPILED,
    EAGER,
    FORMS,
    assert_grads,
    assert_rewritten,
    averaged_grads,
    checkpoint_layers,
    combination,
    compiled,
    layers_of,
    make_batch,
    make_mesh,
    make_model,
    mean_loss,
    shards_of,
    train_step,
    unsharded,
)
from tests.support.comms import Counts
from tests.support.graphs import lowered_graphs
from tests.support.ranks import fake_rank, on_ranks, run_ranks
from tests.support.reference import make_qkv

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
    mesh = make_mesh(dist.get_world_size() // 2, 2)
    kwargs = {} if saved is None else selective({"ours": OURS, "kernel": CPU_KERNEL}[saved])
    num_layers = layers_of(form)
    _, grads = unsharded(num_layers=num_layers)
    model = make_model(num_layers=num_layers)
    checkpoint_layers(model, **kwargs)
    run = compiled(model, form, fullgraph=True)
    with Counts():
        train_step(run, mesh)
    assert_rewritten(form)
    assert_grads(averaged_grads(model, mesh["dp", "cp"]._flatten("all")), grads)
    forward, backward = Counts(), Counts()
    with shards_of(make_batch(), mesh) as (ids, positions, labels):
        with forward:
            loss = mean_loss(run(ids, positions), labels)
        with backward:
            loss.backward()
    # In eager there is no op of ours that a policy could name.
    is_saved = saved == "kernel" or (saved == "ours" and form != EAGER)
    assert forward.exchanges() == num_layers
    assert backward.exchanges() == (2 if is_saved else 3) * num_layers


# To a compiler, the second half of a batch is as the first one.
RANKS = {EAGER: 4, AOT: 2, COMPILED: 2}


@combination("activation checkpointing of every block", *FORMS)
def test_checkpoint(form: str) -> None:
    run_ranks(RANKS[form], check_checkpointed, form, None)


@combination("selective checkpointing, attention saved", *FORMS)
def test_selective_checkpoint(form: str) -> None:
    # Which op is named makes no other model: tests of graphs below name both.
    for saved in {EAGER: ("ours", "kernel"), AOT: ("ours",), COMPILED: ("kernel",)}[form]:
        run_ranks(RANKS[form], check_checkpointed, form, saved)


@combination("a memory budget for activations", *FORMS[1:], eager="Only a compiler has it.")
@on_ranks(2)
def test_memory_budget(form: str) -> None:
    for budget in (0.0,) if form == COMPILED else (0.0, 0.5):
        mesh, model = make_mesh(2, names=("cp",)), make_model()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            train_step(compiled(model, form, fullgraph=True), mesh)
        assert_rewritten(form)
        assert_grads(averaged_grads(model, mesh), unsharded()[1])


# What is in the graphs


@pytest.fixture
def inputs() -> Iterator[list[Tensor]]:
    with fake_rank(1, 2), config.patch(strategy="allgather"):
        mesh = make_mesh(2, names=("cp",))
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
