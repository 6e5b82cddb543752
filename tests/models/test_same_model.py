"""Ranks compare their models before one hands out its weights; what none of them can begin with."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import CPError, RanksDisagree, UnevenSequence, UntiedWeights
from cp_inductor.modules import weights
from cp_inductor.trust import log
from tests.support.ranks import fake_mesh, on_ranks, world_mesh


class Model(nn.Module):
    """Has what may differ: an order, shapes, a tie, a buffer, a module without tensors."""

    def __init__(self, names: str = "qkv", width: int = 4, is_tied: bool = False) -> None:
        super().__init__()
        for value, name in enumerate(names, 1):
            self.add_module(name, nn.Linear(width, 4, bias=False))
            nn.init.constant_(getattr(self, name).weight, 10 * value + dist.get_rank())
        if is_tied:
            self.v.weight = self.q.weight
        self.register_buffer("scale", torch.ones(2))
        self.act = nn.GELU()


def with_gradient(dtype: torch.dtype = torch.float32) -> Model:
    model = Model().to(dtype)
    model.q.weight.grad = torch.full_like(model.q.weight, 9.0 + dist.get_rank())
    return model


def frozen() -> Model:
    model = Model()
    model.k.weight.requires_grad_(False)
    return model


def with_another_module() -> Model:
    model = Model()
    model.act = nn.ReLU()
    return model


WEIGHT = r"weight float32 \[4, 4\]"

# What the last rank has instead, and what all ranks are told: with both values, and who has which.
DIFFERENT: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Model("kqv"), rf"module 1: q \(Linear\): {WEIGHT} on .*0.*, k \(Linear\).* on rank"),
    (lambda: Model("qkvo"), r"module 4: act \(GELU\): no tensor on .*0.*, o \(Linear\).* on rank"),
    (lambda: Model().bfloat16(), rf"q \(Linear\): {WEIGHT} on .*0.*, q .* bfloat16 \[4, 4\] on"),
    (lambda: Model(width=5), rf"q \(Linear\): {WEIGHT} on .*0.*, q .* float32 \[4, 5\] on rank"),
    (lambda: Model(is_tied=True), rf"v \(Linear\): {WEIGHT} on .*0.*, v .*: weight is q.weight on"),
    (with_gradient, rf"q \(Linear\): {WEIGHT} on .*0.*4\] with a gradient, float32 on rank"),
    (frozen, rf"k \(Linear\): {WEIGHT} on .*0.*: {WEIGHT} frozen on rank"),
    (with_another_module, r"act \(GELU\): no tensor on .*0.*, act \(ReLU\): no tensor on rank"),
    (lambda: Model().to("meta"), rf"q \(Linear\): {WEIGHT} on .*0.*: {WEIGHT} on meta on rank"),
]


def refusal_of(shape: tuple[int, ...], make: Callable[[], nn.Module], *named: type) -> str:
    """Return what a rank is told if the last one has another model, or names other modules."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")[-len(shape) :])
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    model = make() if is_odd else Model()
    before, started = dict(model.named_parameters()), time.monotonic()
    with (
        patch.object(log, "PATIENCE_S", 1.0),  # of an axis, and then of the next
        pytest.raises(CPError) as refused,
    ):
        cp_inductor.parallelize(model, mesh, whole=named if is_odd else ())
    assert time.monotonic() - started < 20
    dist.barrier()  # who is told nothing yet would take what follows for what it waits for
    assert all(tensor is before[name] for name, tensor in model.named_parameters())
    return f"{refused.typename}: {refused.value}"


@pytest.mark.slow
@on_ranks(2)
def test_models_that_differ_are_refused_on_all_ranks() -> None:
    for make, words in DIFFERENT:
        text = refusal_of((2,), make)
        assert text.startswith("RanksDisagree") and re.search(words, text), text
    # If models are alike, all ranks get what the first has, gradients as well.
    model = with_gradient(torch.bfloat16)
    model.train(dist.get_rank() == 0)
    for name, parameter in cp_inductor.parallelize(model, world_mesh()).named_parameters():
        value = 10 * (1 + "qkv".index(name[0]))
        assert torch.equal(parameter, torch.full((4, 4), value).bfloat16())
    assert torch.equal(model.q.weight.grad, torch.full((4, 4), 9.0).bfloat16())


# Who refuses alone, or on another axis, would compare what follows with what others left.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ranks", "make", "named", "words"),
    [
        ((2,), 2, Model, (nn.GRU,), "GRU, of which it has none"),
        ((2, 2), 4, Model, (nn.GRU,), "GRU, of which it has none"),
        ((2, 2), 4, frozen, (), "expected ranks . and . to run the same"),
    ],
)
@on_ranks("ranks")
def test_what_one_rank_refuses_and_what_one_axis_sees_all_ranks_are_told(
    shape: tuple[int, ...], ranks: int, make: Any, named: tuple[type, ...], words: str
) -> None:
    text = refusal_of(shape, make, *named)
    assert re.search(words, text), text


def attend(mesh: DeviceMesh) -> None:
    query = torch.randn(1, 2, 8, 8)
    with cp_inductor.context_parallel(mesh):
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


@on_ranks(2)
def test_a_rank_that_attends_instead_is_named() -> None:
    call = attend if dist.get_rank() else partial(cp_inductor.parallelize, Model())
    with pytest.raises(RanksDisagree, match="what: a model on rank 0, an attention on rank 1"):
        call(world_mesh())


@on_ranks(2, deadline_s=120)
def test_a_forked_child_that_attends_is_refused_and_its_parent_goes_on() -> None:
    mesh = world_mesh()
    attend(mesh)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        child = os.fork()
    if not child:
        try:
            attend(mesh)
        except CPError as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    attend(mesh)
    text = os.read(reading, 4096).decode()
    assert text.startswith("ProcessGroupError: attention over a sharded sequence: expected the")
    assert "which was forked from that one, and could only wait" in text


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0, 0)])
def test_an_empty_batch_is_refused_where_it_is_sharded(shape: tuple[int, ...]) -> None:
    refused = pytest.raises(UnevenSequence, match=r"shard: .* skip the batch, on all ranks")
    with fake_mesh(0, 2) as mesh, refused:
        cp_inductor.shard(torch.zeros(shape), mesh)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", [(0, 8, 4), (2, 0, 4)])
def test_an_empty_batch_that_torch_sharded_is_refused(
    shape: tuple[int, ...], is_compiled: bool, first_mesh: DeviceMesh
) -> None:
    model = cp_inductor.parallelize(nn.Linear(4, 4), first_mesh)
    call = torch.compile(model, backend="cp_aot_eager") if is_compiled else model
    batch = distribute_tensor(torch.zeros(shape), first_mesh, [Shard(1)], src_data_rank=None)
    with pytest.raises(UnevenSequence, match=r"skip the batch, on all ranks"):
        call(batch)


# --- DTensor weights that were one parameter, and that torch's distribute_module has made two.


class Tied(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.middle(self.embedding(ids))))


def compiled_step(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compile, and run as far as one rank alone can."""
    # Not scattered, which a fake group does not do.
    ids = DTensor.from_local(torch.zeros(1, 2, dtype=torch.long), mesh, [Shard(1)])
    torch.compile(model, backend="cp_aot_eager", fullgraph=True)(ids)


def untied() -> Tied:
    model = Tied()
    # Meant: an embedding that starts as the head does, and is trained for itself.
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model


def test_what_distribute_module_unties_is_refused(mesh: DeviceMesh) -> None:
    model = distribute_module(Tied(), mesh)
    with pytest.raises(UntiedWeights, match=r"embedding.weight and head.weight: .* one parameter"):
        compiled_step(model, mesh)
    with torch.no_grad():  # where no gradient is lost
        compiled_step(model, mesh)
    compiled_step(model.requires_grad_(False), mesh)


def test_one_memory_of_another_shape_is_refused(mesh: DeviceMesh) -> None:
    """Also where no embedding is among them, and none of the values is known."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.down.weight = self.up.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.down(self.up(ids.unsqueeze(-1) * torch.ones(8)).relu())

    model = distribute_module(Twice(), mesh)
    with implicit_replication(), pytest.raises(UntiedWeights, match=r"up.weight and down.weight"):
        compiled_step(model, mesh)


def test_a_copy_that_was_meant_gets_a_warning(
    first_mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    weights._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "cp_inductor"):
        compiled_step(distribute_module(untied(), first_mesh), first_mesh)
    (said,) = [record.message for record in caplog.records if "UntiedWeights" in record.message]
    assert "embedding.weight and head.weight are two parameters of equal values" in said


def test_no_false_alarm(first_mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    weights._warn.cache_clear()
    zeros, apart, layers = untied(), untied(), untied()
    nn.init.zeros_(zeros.embedding.weight)
    nn.init.zeros_(zeros.head.weight)
    with torch.no_grad():
        apart.head.weight[-1, -1] += 1
        layers.head.weight[-1, -1] += 1
    # As experts are made of a dense layer.
    layers.again = nn.Linear(8, 8)
    layers.again.load_state_dict(layers.middle.state_dict())
    with caplog.at_level(logging.WARNING, "cp_inductor"):
        for model in (zeros, apart, layers):
            compiled_step(distribute_module(model, first_mesh), first_mesh)
    assert "UntiedWeights" not in caplog.text
