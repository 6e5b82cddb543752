"""Tensor parallelism x context parallelism, on 4 ranks: heads on tp, the sequence on cp.

About 90 s of CPU: four ranks compile each case, as their plans differ.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import cp_inductor
from cp_inductor.plan import Recipe, backward_plan, forward_plan, resolve
from tests.support.combinations import (
    DIM,
    FORMS,
    HEADS,
    LENGTH,
    Row,
    assert_grads,
    assert_rewritten,
    averaged_grads,
    combination,
    combinations,
    compiled,
    layers_of,
    make_batch,
    make_mesh,
    make_model,
    mean_loss,
    shards_of,
    unsharded,
    whole,
)
from tests.support.comms import Counts
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tensor_parallel import parallelize


def check_training(form: str, style: str) -> None:
    mesh = make_mesh(2, 2, names=("cp", "tp"))
    # A second block is the first one's like: the style that changes nothing else has it.
    num_layers = layers_of(form) if style == "blocks" else 1
    kwargs = {"num_layers": num_layers, "is_tied": style == "tied"}
    loss, grads = unsharded(**kwargs)
    model = make_model(**kwargs)
    parallelize(model, mesh["tp"], style)
    run = compiled(model, form)
    with Counts():
        backward_of(run, mesh, style)
    if style == "tied":
        assert model.head.weight is model.tokens.weight
        assert model.head.weight.grad is model.tokens.weight.grad
    # The second batch finds the gradients of the first, and adds its own.
    counts = Counts()
    with counts:
        actual = backward_of(run, mesh, style)
    torch.testing.assert_close(actual, loss)
    assert_rewritten(form)
    twice = {name: 2 * grad for name, grad in grads.items()}
    assert_grads(averaged_grads(model, mesh["cp"]), twice)
    # Attention exchanges on cp.
    assert counts.exchanges() == num_layers * exchanges_of_an_attention(mesh)


def exchanges_of_an_attention(mesh: DeviceMesh) -> int:
    """Return how many the plan has, forward and backward, that is made of one of this model."""
    heads = HEADS // mesh["tp"].size()
    recipe = Recipe(mesh["cp"].size(), LENGTH, LENGTH, heads, heads, DIM // HEADS, 4, "causal")
    recipe = resolve(recipe, site="test")
    stages = (*forward_plan(recipe).stages, *backward_plan(recipe).stages)
    return sum(bool(stage.fetch) + bool(stage.home) for stage in stages)


def backward_of(run: Callable[..., Any], mesh: DeviceMesh, style: str) -> Tensor:
    """Run forward and backward; return the mean loss over the ranks of cp."""
    with shards_of(make_batch(), mesh) as (ids, positions, labels):
        logits = run(ids, positions)
        assert isinstance(logits, DTensor) == (style == "loss")
        with loss_parallel() if style == "loss" else nullcontext():
            loss = mean_loss(logits, labels)
            loss.backward()
    loss = whole(loss.detach())
    dist.all_reduce(loss, group=mesh["cp"].get_group())
    return loss / mesh["cp"].size()


STYLES = {
    "tensor parallelism: heads and MLP on tp": Row(settings={"style": "blocks"}),
    "tensor parallelism, embedding and head tied": Row(settings={"style": "tied"}),
    "tensor parallelism with Megatron's sequence parallelism": Row(settings={"style": "sequence"}),
    "tensor parallelism, vocabulary on tp (loss_parallel)": Row(settings={"style": "loss"}),
}


@combinations(STYLES)
def test_tensor_parallel(row: str, form: str) -> None:
    run_ranks(4, check_training, form, STYLES[row].settings["style"])


@combination("tensor parallelism, inference", *FORMS)
@on_ranks(4)
def test_inference(form: str) -> None:
    mesh = make_mesh(2, 2, names=("cp", "tp"))
    ids, positions, _ = make_batch()
    expected = make_model()(ids, positions).detach()
    model = make_model().eval()
    parallelize(model, mesh["tp"], "blocks")
    run = compiled(model, form)
    with torch.inference_mode(), shards_of(make_batch(), mesh) as (ids, positions, _):
        logits = run(ids, positions)
        (logits,) = cp_inductor.context_parallel_unshard(mesh["cp"], [logits], [1])
    assert_rewritten(form)
    torch.testing.assert_close(logits, expected)
