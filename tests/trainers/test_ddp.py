"""Replicated weights x context parallelism, on 4 ranks: DDP, and what Inductor makes of it.

More than 90 s of CPU where it is a long case's turn: four ranks compile each case, and buckets show
only in models of several blocks.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.combinations import (
    AOT,
    COMPILED,
    EAGER,
    FORMS,
    NOTHING,
    NUM_LAYERS,
    assert_grads,
    assert_rewritten,
    combination,
    compiled,
    grads_of,
    make_mesh,
    make_model,
    plain_name,
    train_step,
    unsharded,
    whole,
)
from tests.support.comms import Counts
from tests.support.ranks import on_ranks
from tests.support.tensor_parallel import parallelize

ALL_REDUCE = torch.ops.c10d.allreduce_


@combination("DDP over (dp, cp), its graph splitter on", *FORMS)
@on_ranks(4)
def test_ddp(form: str) -> None:
    mesh = make_mesh(2, 2)
    loss, grads = unsharded()
    group = mesh["dp", "cp"]._flatten("data").get_group()
    # Small buckets: the graph splitter cuts the model before, between and behind the blocks.
    model = DistributedDataParallel(make_model(), process_group=group, bucket_cap_mb=0.02)
    run = compiled(model, form)
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024), Counts():
        actual = train_step(run, mesh)
    torch.testing.assert_close(actual, loss)
    assert_rewritten(form)
    assert_grads(grads_of(model), grads)
    if form != EAGER:
        assert counters["aot_autograd"]["total"] > 1, "the graph was not split"
        assert counters["cp_inductor"]["sites_rewritten"] == NUM_LAYERS
    counts = Counts()
    with counts:
        train_step(run, mesh)
    assert counts.exchanges() >= 2 * NUM_LAYERS
    # One is that of the loss.
    assert counts.get_comm_counts()[ALL_REDUCE] > 2
    # The second batch found the gradients of the first, which were averages.
    assert_grads(grads_of(model), {name: 2 * grad for name, grad in grads.items()})


@combination("DDP over cp, tensor parallelism over tp", EAGER, AOT)
@on_ranks(4)
def test_tensor_parallel(form: str) -> None:
    """What DDP reduces on cp are the local parts of weights that are sharded on tp."""
    mesh = make_mesh(2, 2, names=("cp", "tp"))
    loss, grads = unsharded()
    model = make_model()
    parallelize(model, mesh["tp"], "blocks")
    placements = {
        name: parameter.placements
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }
    # Given a mesh of others, it takes the DTensors apart, and puts them together in the forward.
    wrapped = DistributedDataParallel(model, device_mesh=mesh["cp"])
    # Behind the first forward those are no parameters of the modules any more.
    parameters = {plain_name(name): parameter for name, parameter in wrapped.named_parameters()}
    run = compiled(wrapped, form)
    # torch's hooks leave the DTensors of the first forward in place, and compiled code would go
    # through their graph, which is freed by then, a second time (2.13).
    for times in (1, 2) if form == EAGER else (1,):
        torch.testing.assert_close(train_step(run, mesh), loss)
        found = {
            name: whole(DTensor.from_local(parameter.grad, mesh["tp"], placements[name]))
            if name in placements
            else parameter.grad
            for name, parameter in parameters.items()
        }
        assert_grads(found, {name: times * grad for name, grad in grads.items()})
    assert_rewritten(form)


# Compiled autograd: one graph for the whole backward, in which gradients are reduced.


def backward_with(backend: str, *, fullgraph: bool = True) -> Any:
    def compile_graph(gm: torch.fx.GraphModule) -> Any:
        return torch.compile(gm, fullgraph=fullgraph, backend=backend)

    return compiled_autograd._enable(compile_graph)


@combination("replicate over (dp, cp), compiled autograd", AOT, COMPILED, eager=NOTHING)
@on_ranks(4)
def test_compiled_autograd(form: str) -> None:
    mesh = make_mesh(2, 2)
    loss, grads = unsharded(num_layers=1)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = replicate(make_model(num_layers=1), device_mesh=mesh["dp", "cp"]._flatten("data"))
        run = compiled(model, form)
        with backward_with(form):
            actual = train_step(run, mesh)
    torch.testing.assert_close(actual, loss)
    assert_rewritten(form)
    assert_grads(grads_of(model), grads)
