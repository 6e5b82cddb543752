"""Data, tensor and pipeline parallelism x context parallelism, on 4 ranks.

More than 90 s of CPU where it is a long case's turn: four ranks compile each case, as their plans
differ, and buckets of DDP show only in models of several blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._attention import (
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
)
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import cp_inductor
from cp_inductor.plan import Recipe, backward_plan, forward_plan, resolve
from tests.support import combinations as cases
from tests.support.comms import Counts
from tests.support.graphs import Attention
from tests.support.ranks import on_ranks, run_ranks
from tests.support.reference import check_shards, make_qkv, shard
from tests.support.tensor_parallel import parallelize

# --- Replicated weights: DDP, and what Inductor makes of it.

ALL_REDUCE = torch.ops.c10d.allreduce_


@cases.combination("DDP over (dp, cp), its graph splitter on", *cases.FORMS)
@on_ranks(4)
def test_ddp(form: str) -> None:
    mesh = cases.make_mesh(2, 2)
    loss, grads = cases.unsharded()
    group = mesh["dp", "cp"]._flatten("data").get_group()
    # Small buckets: the graph splitter cuts the model before, between and behind the blocks.
    model = DistributedDataParallel(cases.make_model(), process_group=group, bucket_cap_mb=0.02)
    run = cases.compiled(model, form)
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024), Counts():
        actual = cases.train_step(run, mesh)
    torch.testing.assert_close(actual, loss)
    cases.assert_rewritten(form)
    cases.assert_grads(cases.grads_of(model), grads)
    if form != cases.EAGER:
        assert counters["aot_autograd"]["total"] > 1, "the graph was not split"
        assert counters["cp_inductor"]["sites_rewritten"] == cases.NUM_LAYERS
    counts = Counts()
    with counts:
        cases.train_step(run, mesh)
    assert counts.exchanges() >= 2 * cases.NUM_LAYERS
    # One is that of the loss.
    assert counts.get_comm_counts()[ALL_REDUCE] > 2
    # The second batch found the gradients of the first, which were averages.
    cases.assert_grads(cases.grads_of(model), {name: 2 * grad for name, grad in grads.items()})


@cases.combination("DDP over cp, tensor parallelism over tp", cases.EAGER, cases.AOT)
@on_ranks(4)
def test_ddp_and_tensor_parallel(form: str) -> None:
    """What DDP reduces on cp are the local parts of weights that are sharded on tp."""
    mesh = cases.make_mesh(2, 2, names=("cp", "tp"))
    loss, grads = cases.unsharded()
    model = cases.make_model()
    parallelize(model, mesh["tp"], "blocks")
    placements = {
        name: parameter.placements
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }
    # Given a mesh of others, it takes the DTensors apart, and puts them together in the forward.
    wrapped = DistributedDataParallel(model, device_mesh=mesh["cp"])
    # Behind the first forward those are no parameters of the modules any more.
    parameters = {
        cases.plain_name(name): parameter for name, parameter in wrapped.named_parameters()
    }
    run = cases.compiled(wrapped, form)
    # torch's hooks leave the DTensors of the first forward in place, and compiled code would go
    # through their graph, which is freed by then, a second time (2.13).
    for times in (1, 2) if form == cases.EAGER else (1,):
        torch.testing.assert_close(cases.train_step(run, mesh), loss)
        found = {
            name: cases.whole(DTensor.from_local(parameter.grad, mesh["tp"], placements[name]))
            if name in placements
            else parameter.grad
            for name, parameter in parameters.items()
        }
        cases.assert_grads(found, {name: times * grad for name, grad in grads.items()})
    cases.assert_rewritten(form)


# Compiled autograd: one graph for the whole backward, in which gradients are reduced.


@cases.combination(
    "replicate over (dp, cp), compiled autograd", cases.AOT, cases.COMPILED, eager=cases.NOTHING
)
@on_ranks(2)
def test_compiled_autograd(form: str) -> None:
    mesh = cases.make_mesh(1, 2)
    loss, grads = cases.unsharded(num_layers=1)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = replicate(
            cases.make_model(num_layers=1), device_mesh=mesh["dp", "cp"]._flatten("data")
        )
        run = cases.compiled(model, form)
        with compiled_autograd._enable(partial(cases.compiled, form=form, fullgraph=True)):
            actual = cases.train_step(run, mesh)
    torch.testing.assert_close(actual, loss)
    cases.assert_rewritten(form)
    cases.assert_grads(cases.grads_of(model), grads)


# --- Heads on tp, the sequence on cp.


def exchanges_of_an_attention(mesh: DeviceMesh) -> int:
    """Return how many the plan has, forward and backward, that is made of one of this model."""
    heads = cases.HEADS // mesh["tp"].size()
    recipe = Recipe(
        mesh["cp"].size(),
        cases.LENGTH,
        cases.LENGTH,
        heads,
        heads,
        cases.DIM // cases.HEADS,
        4,
        "causal",
    )
    recipe = resolve(recipe, site="test")
    stages = (*forward_plan(recipe).stages, *backward_plan(recipe).stages)
    return sum(bool(stage.fetch) + bool(stage.home) for stage in stages)


def backward_of(run: Callable[..., Any], mesh: DeviceMesh, style: str) -> Tensor:
    """Run forward and backward; return the mean loss over the ranks of cp."""
    with cases.shards_of(cases.make_batch(), mesh) as (ids, positions, labels):
        logits = run(ids, positions)
        assert isinstance(logits, DTensor) == (style == "loss")
        with loss_parallel() if style == "loss" else nullcontext():
            loss = cases.mean_loss(logits, labels)
            loss.backward()
    loss = cases.whole(loss.detach())
    dist.all_reduce(loss, group=mesh["cp"].get_group())
    return loss / mesh["cp"].size()


STYLES = {
    "tensor parallelism: heads and MLP on tp": cases.Row(settings={"style": "blocks"}),
    "tensor parallelism, embedding and head tied": cases.Row(settings={"style": "tied"}),
    "tensor parallelism with Megatron's sequence parallelism": cases.Row(
        settings={"style": "sequence"}
    ),
    "tensor parallelism, vocabulary on tp (loss_parallel)": cases.Row(settings={"style": "loss"}),
}


@cases.combinations(STYLES)
@on_ranks(4)
def test_tensor_parallel(row: str, form: str) -> None:
    mesh, style = cases.make_mesh(2, 2, names=("cp", "tp")), STYLES[row].settings["style"]
    # A second block is the first one's like: the style that changes nothing else has it.
    num_layers = cases.layers_of(form) if style == "blocks" else 1
    kwargs = {"num_layers": num_layers, "is_tied": style == "tied"}
    loss, grads = cases.unsharded(**kwargs)
    model = cases.make_model(**kwargs)
    parallelize(model, mesh["tp"], style)
    run = cases.compiled(model, form)
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
    cases.assert_rewritten(form)
    twice = {name: 2 * grad for name, grad in grads.items()}
    cases.assert_grads(cases.averaged_grads(model, mesh["cp"]), twice)
    # Attention exchanges on cp.
    assert counts.exchanges() == num_layers * exchanges_of_an_attention(mesh)


@cases.combination("tensor parallelism, inference", *cases.FORMS)
@on_ranks(4)
def test_inference(form: str) -> None:
    mesh = cases.make_mesh(2, 2, names=("cp", "tp"))
    ids, positions, _ = cases.make_batch()
    expected = cases.make_model()(ids, positions).detach()
    model = cases.make_model().eval()
    parallelize(model, mesh["tp"], "blocks")
    run = cases.compiled(model, form)
    with torch.inference_mode(), cases.shards_of(cases.make_batch(), mesh) as (ids, positions, _):
        logits = run(ids, positions)
        (logits,) = cp_inductor.context_parallel_unshard(mesh["cp"], [logits], [1])
    cases.assert_rewritten(form)
    torch.testing.assert_close(logits, expected)


# --- Two stages of two shards each.

NUM_MICROBATCHES = 2


class First(nn.Module):
    def __init__(self, model: cases.Decoder) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.layers = nn.ModuleDict({"0": model.layers[0]})

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.layers["0"](self.tokens(ids) + self.positions(positions))


class Last(nn.Module):
    def __init__(self, model: cases.Decoder) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": model.layers[1]})
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers["1"](x)))


class Received(nn.Module):
    """A stage whose inputs came from another rank."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Tensor) -> Tensor:
        with cp_inductor.per_rank():
            return self.part(*inputs)


def run_stage(
    run: nn.Module, mesh: DeviceMesh, schedule: type[ScheduleGPipe | Schedule1F1B], batch: Any
) -> Tensor | None:
    """Run one step of this rank's stage; return the mean loss if it is the last stage."""
    place, pp = mesh["pp"].get_local_rank(), mesh["pp"]
    stage = PipelineStage(run, place, 2, torch.device("cpu"), group=pp.get_group())
    pipeline = schedule(stage, NUM_MICROBATCHES, loss_fn=cases.mean_loss)
    ids, positions, labels = batch
    losses: list[Tensor] = []
    if place == 0:
        pipeline.step(ids, positions)
        return None
    pipeline.step(target=labels, losses=losses)
    assert len(losses) == NUM_MICROBATCHES < cases.BATCH
    return torch.stack(losses).mean().detach()


@cases.combination("pipeline of two stages, GPipe and 1F1B", *cases.FORMS)
@on_ranks(4)
def test_pipeline(form: str) -> None:
    for schedule in (ScheduleGPipe, Schedule1F1B):
        mesh = cases.make_mesh(2, 2, names=("pp", "cp"))
        loss, grads = cases.unsharded()
        part = (First, Last)[mesh["pp"].get_local_rank()](cases.make_model())
        # What a stage receives, the region has not seen made: the program says that it is shards.
        run = cases.compiled(Received(part), form, fullgraph=True)
        with cases.shards_of(cases.make_batch(), mesh) as batch:
            actual = run_stage(run, mesh, schedule, batch)
        cases.assert_rewritten(form)
        if actual is not None:
            dist.all_reduce(actual, group=mesh["cp"].get_group())
            torch.testing.assert_close(actual / 2, loss)
        actual_grads = cases.averaged_grads(part, mesh["cp"])
        cases.assert_grads(actual_grads, {name: grads[name] for name in actual_grads})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["eager", pytest.param("cp_aot_eager", marks=pytest.mark.long)])
@on_ranks(4)
def test_parallelized_stages(form: str) -> None:
    """Stages that hand on whole activations, each of which its ranks cut."""
    mesh = cases.make_mesh(2, 2, names=("pp", "cp"))
    loss, grads = cases.unsharded()
    part = (First, Last)[mesh["pp"].get_local_rank()](cases.make_model())
    cp_inductor.parallelize(part, mesh["cp"], outputs="whole", seq_dims={"x": 1})
    actual = run_stage(cases.compiled(part, form), mesh, Schedule1F1B, cases.make_batch())
    if actual is not None:
        torch.testing.assert_close(actual, loss)
    cases.assert_grads(
        cases.grads_of(part), {name: grads[name] for name, _ in part.named_parameters()}
    )


# --- Modules that are told to attend over shards: our parallel style, and torch's own.


class Layers(nn.Module):
    """A layer of torch's own, and an attention with a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)
        self.project = nn.Linear(32, 96)
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        query, key, value = self.project(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
        return x + self.inner(query, key, value).transpose(1, 2).flatten(2)


def check_style(form: str, length: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = cases.make_mesh(world_size, names=("cp",))
    x = torch.rand(2, length, 32)
    reference = Layers()
    expected = reference(x)
    expected.sum().backward()
    style = cp_inductor.ContextParallel(seq_len=length)
    plan = {"encoder.self_attn": style, "inner": style}
    model = copy.deepcopy(parallelize_module(Layers(), mesh, plan))
    assert isinstance(model.encoder.self_attn, nn.MultiheadAttention)
    piece = shard(x, rank, world_size, 1)
    out = cases.compiled(model, form, fullgraph=True)(piece)
    out.sum().backward()
    torch.testing.assert_close(out, shard(expected, rank, world_size, 1))
    for name, grad in cases.averaged_grads(model, mesh).items():
        torch.testing.assert_close(
            world_size * grad, cases.grads_of(reference)[name], rtol=1e-4, atol=1e-5
        )
    if form == cases.COMPILED:
        return  # which code runs in inference is seen before C++ is made of it
    # In inference, torch has a fast path for this layer that would go past the style.
    with torch.no_grad():
        out = cases.compiled(model.eval(), form, fullgraph=True)(piece)
    torch.testing.assert_close(out, shard(expected, rank, world_size, 1))


@cases.combination("ContextParallel() on modules", *cases.FORMS)
def test_style(form: str) -> None:
    # Ranks of one length share what they compile; what tiles they have cp_aot_eager shows.
    worlds = {cases.EAGER: [(3, 12), (3, 11)], cases.AOT: [(3, 11)], cases.COMPILED: [(2, 12)]}
    for world_size, length in worlds[form]:
        run_ranks(world_size, check_style, form, length)


@cases.combination("torch's own style _ContextParallel, the backend exchanged", *cases.FORMS)
@on_ranks(2)
def test_style_of_torch(form: str) -> None:
    mesh = cases.make_mesh(2, names=("cp",))
    kind = _ContextParallel.AttentionType.SDPA
    inner = parallelize_module(Attention(), mesh, _ContextParallel(2, kind))
    # What torch has the models it prepares call; of its handlers there is none for the CPU.
    _enable_context_parallel_dispatcher()
    try:
        check_shards(cases.compiled(inner, form), make_qkv(10), is_causal=True)
    finally:
        _disable_context_parallel_dispatcher()
    cases.assert_rewritten(form)
