"""Replicated weights x context parallelism, on 4 ranks: DDP, and what Inductor makes of it.

More than 90 s of CPU where it is a long case's turn: four ranks compile each case, and buckets show
only in models of several blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import FileCheck

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
    make_batch,
    make_mesh,
    make_model,
    plain_name,
    train_step,
    unsharded,
    whole,
)
from tests.support.comms import Counts
from tests.support.graphs import generated_code
from tests.support.ranks import fake_rank, run_ranks
from tests.support.tensor_parallel import parallelize

ALL_REDUCE = torch.ops.c10d.allreduce_


def check_ddp(form: str) -> None:
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


@combination("DDP over (dp, cp), its graph splitter on", *FORMS)
def test_ddp(form: str) -> None:
    run_ranks(4, check_ddp, form)


def check_accumulation(form: str) -> None:
    """The second of two batches finds the gradients of the first, which nobody averaged."""
    mesh = make_mesh(2, 2)
    batches = make_batch(seed=2), make_batch(seed=3)
    loss, grads = unsharded(*batches)
    group = mesh["dp", "cp"]._flatten("data").get_group()
    model = DistributedDataParallel(make_model(), process_group=group)
    run = compiled(model, form)
    with model.no_sync():
        first = train_step(run, mesh, batches[0])
    # Nothing was averaged yet: ranks have gradients of their own.
    of_ranks = [torch.empty_like(model.module.head.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, model.module.head.weight.grad)
    assert not any(torch.equal(of_ranks[0], other) for other in of_ranks[1:])
    second = train_step(run, mesh, batches[1])
    torch.testing.assert_close((first + second) / 2, loss)
    assert_rewritten(form)
    assert_grads(grads_of(model), grads)


@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
def test_accumulation(form: str) -> None:
    run_ranks(4, check_accumulation, form)


def check_tensor_parallel(form: str) -> None:
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


@combination("DDP over cp, tensor parallelism over tp", EAGER, AOT)
def test_tensor_parallel(form: str) -> None:
    run_ranks(4, check_tensor_parallel, form)


# Compiled autograd: one graph for the whole backward, in which gradients are reduced.


def backward_with(backend: str, *, fullgraph: bool = True) -> Any:
    def compile_graph(gm: torch.fx.GraphModule) -> Any:
        return torch.compile(gm, fullgraph=fullgraph, backend=backend)

    return compiled_autograd._enable(compile_graph)


def check_compiled_autograd(form: str) -> None:
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


@combination("replicate over (dp, cp), compiled autograd", AOT, COMPILED, eager=NOTHING)
def test_compiled_autograd(form: str) -> None:
    run_ranks(4, check_compiled_autograd, form)


def check_compiled_backward_alone() -> None:
    mesh = make_mesh(1, 2)
    loss, grads = unsharded(num_layers=1)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        group = mesh["dp", "cp"]._flatten("data").get_group()
        model = DistributedDataParallel(make_model(num_layers=1), process_group=group)
        # Dynamo (2.13) breaks where DTensors that eager code made are taken apart.
        with backward_with(AOT, fullgraph=False):
            actual = train_step(model, mesh)
    torch.testing.assert_close(actual, loss)
    assert_grads(grads_of(model), grads)
    assert counters["compiled_autograd"]["captures"] == 1
    # Its attentions are tiles and exchanges in the graph.
    assert counters["cp_inductor"]["tiles"] >= 1


@pytest.mark.long
def test_the_backward_of_an_eager_forward_is_compiled() -> None:
    run_ranks(2, check_compiled_backward_alone)


# Inductor's passes over the all-reduces of gradients, beside our exchanges.

STARTED = r"(all_to_all_single|all_reduce(?:_coalesced)?_?)\.default\("


@dataclass(frozen=True)
class Backward:
    code: str
    num_buckets: int


@cache
def backward_of_rank(rank: int, fusion: str) -> Backward:
    """Return the code of a backward under compiled autograd, one graph, of one of 4 ranks."""
    patches = {
        "_fuse_ddp_communication": True,
        "_fuse_ddp_communication_passes": [fusion, "schedule_comm_wait"],
        "reorder_for_locality": False,
    }
    with fake_rank(rank, 4):
        mesh = make_mesh(2, 2)
        model = replicate(
            make_model(dim=320), device_mesh=mesh["dp", "cp"]._flatten("data"), bucket_cap_mb=1
        )
        with (
            torch._dynamo.config.patch(optimize_ddp="python_reducer"),
            torch._inductor.config.patch(patches),
            generated_code() as codes,
            backward_with(COMPILED),
        ):
            train_step(torch.compile(model, backend=COMPILED), mesh)
        (code,) = (code for code in codes if "all_reduce" in code)
        return Backward(code, counters["inductor"]["ddp_buckets"])


# Dynamo's own, where it resumes behind replicate's hook.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("op", [pytest.param("coalesced", marks=pytest.mark.long), "concat"])
def test_gradients_are_reduced_in_buckets_beside_exchanges(op: str) -> None:
    backward = backward_of_rank(1, f"fuse_ddp_with_{op}_op")
    start = "_c10d_functional.all_to_all_single.default("
    reduce = f"_c10d_functional.all_reduce_{'coalesced_' * (op == 'coalesced')}.default("
    wait = "_c10d_functional.wait_tensor.default("
    assert backward.num_buckets == 6
    assert backward.code.count(reduce) == backward.num_buckets
    # The gradients of the upper layer are on their way while those of the lower are exchanged.
    check = FileCheck().check(reduce).check(start).check(wait)
    check.check_count(reduce, 3).check(start).check(wait).check_count(reduce, 2)
    # What is reduced is waited for in the end.
    check.check_not(start).check_count(wait, backward.num_buckets).run(backward.code)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_all_ranks_start_buckets_and_exchanges_in_one_order(rank: int) -> None:
    """As rank 1 does, whose code the test above reads."""
    codes = [backward_of_rank(n, "fuse_ddp_with_concat_op").code for n in (1, rank)]
    started, of_rank = (re.findall(STARTED, code) for code in codes)
    assert set(started) == {"all_to_all_single", "all_reduce_"}
    assert of_rank == started
