"""Pipeline parallelism x context parallelism, on 4 ranks: two stages of two shards each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import cp_inductor
from tests.support.combinations import (
    BATCH,
    FORMS,
    Decoder,
    assert_grads,
    assert_rewritten,
    averaged_grads,
    combination,
    compiled,
    grads_of,
    make_batch,
    make_mesh,
    make_model,
    mean_loss,
    shards_of,
    unsharded,
)
from tests.support.ranks import on_ranks

NUM_MICROBATCHES = 2


class First(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.layers = nn.ModuleDict({"0": model.layers[0]})

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.layers["0"](self.tokens(ids) + self.positions(positions))


class Last(nn.Module):
    def __init__(self, model: Decoder) -> None:
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
    pipeline = schedule(stage, NUM_MICROBATCHES, loss_fn=mean_loss)
    ids, positions, labels = batch
    losses: list[Tensor] = []
    if place == 0:
        pipeline.step(ids, positions)
        return None
    pipeline.step(target=labels, losses=losses)
    assert len(losses) == NUM_MICROBATCHES < BATCH
    return torch.stack(losses).mean().detach()


@combination("pipeline of two stages, GPipe and 1F1B", *FORMS)
@on_ranks(4)
def test_pipeline(form: str) -> None:
    for schedule in (ScheduleGPipe, Schedule1F1B):
        mesh = make_mesh(2, 2, names=("pp", "cp"))
        loss, grads = unsharded()
        part = (First, Last)[mesh["pp"].get_local_rank()](make_model())
        # What a stage receives, the region has not seen made: the program says that it is shards.
        run = compiled(Received(part), form, fullgraph=True)
        with shards_of(make_batch(), mesh) as batch:
            actual = run_stage(run, mesh, schedule, batch)
        assert_rewritten(form)
        if actual is not None:
            dist.all_reduce(actual, group=mesh["cp"].get_group())
            torch.testing.assert_close(actual / 2, loss)
        actual_grads = averaged_grads(part, mesh["cp"])
        assert_grads(actual_grads, {name: grads[name] for name in actual_grads})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["eager", pytest.param("cp_aot_eager", marks=pytest.mark.long)])
@on_ranks(4)
def test_parallelized_stages(form: str) -> None:
    """Stages that hand on whole activations, each of which its ranks cut."""
    mesh = make_mesh(2, 2, names=("pp", "cp"))
    loss, grads = unsharded()
    part = (First, Last)[mesh["pp"].get_local_rank()](make_model())
    cp_inductor.parallelize(part, mesh["cp"], outputs="whole", seq_dims={"x": 1})
    actual = run_stage(compiled(part, form), mesh, Schedule1F1B, make_batch())
    if actual is not None:
        torch.testing.assert_close(actual, loss)
    assert_grads(grads_of(part), {name: grads[name] for name, _ in part.named_parameters()})
