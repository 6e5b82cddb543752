"""Losses over a sharded sequence, on ranks: every reduction, normalised over all tokens."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

import cp_inductor
from tests.support.combinations import (
    AOT,
    COMPILED,
    EAGER,
    FORMS,
    combination,
    compiled,
    make_mesh,
    whole,
)
from tests.support.comms import Counts
from tests.support.packed import in_documents
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import full, on_mesh, with_grads

BATCH, LENGTH, VOCABULARY = 2, 11, 13
REDUCTIONS = ("none", "mean", "sum")

ALL_REDUCE = torch.ops.c10d_functional.all_reduce


def make_logits() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels of which ranks ignore unequally many, and weights of classes."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(BATCH, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[:, 3:5] = labels[0, -1] = -100
    return logits, labels, torch.rand(VOCABULARY, generator=generator, dtype=torch.float64)


def loss_of(
    logits: Tensor, labels: Tensor, weight: Tensor | None, reduction: str, is_shifted: bool
) -> Tensor:
    if is_shifted:
        # As causal language models do: the label of a token is the next one, also of the last
        # token of a shard, whose next one is the first of another rank.
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    # (B, V, S), so that a sequence of any length stays sharded.
    return F.cross_entropy(logits.transpose(1, 2), labels, weight, reduction=reduction)


@combination("cross_entropy over a sharded sequence: reductions, weights, shifted labels", *FORMS)
@on_ranks(3)
def test_losses(form: str) -> None:
    mesh = make_mesh(3, names=("cp",))
    logits, labels, weight = make_logits()
    cases = list(product(REDUCTIONS, (None, weight), (False, True)))
    if form == AOT:
        cases = [("mean", weight, True), ("none", None, False), ("sum", weight, False)]
    if form == COMPILED:
        # Every one compiles C++: the mean over weighted classes of shifted labels alone.
        cases = [("mean", weight, True)]
    for reduction, weight_or_none, is_shifted in cases:
        case = (reduction, weight_or_none is not None, is_shifted)
        leaf = logits.clone().requires_grad_()
        expected = loss_of(leaf, labels, weight_or_none, reduction, is_shifted)
        expected.sum().backward()
        torch._dynamo.reset()
        # In eager a loss is ours over what we have cut, or attended over; in our compiles always.
        sharded = (
            cp_inductor.shard(logits, mesh)
            if form == EAGER
            else distribute_tensor(logits, mesh, [Shard(1)])
        ).requires_grad_()
        run = partial(
            compiled(loss_of, form, fullgraph=True),
            sharded,
            distribute_tensor(labels, mesh, [Shard(1)]),
            None if weight_or_none is None else distribute_tensor(weight, mesh, [Replicate()]),
            reduction,
            is_shifted,
        )
        with nullcontext() if form == COMPILED else Counts():
            actual = run()
            actual.sum().backward()
        assert isinstance(sharded.grad, DTensor) and sharded.grad.placements == (Shard(1),), case
        torch.testing.assert_close(whole(actual.detach()), expected.detach(), msg=str(case))
        torch.testing.assert_close(whole(sharded.grad), leaf.grad, msg=str(case))
        if form == COMPILED:
            continue
        counts = Counts()
        with counts:
            run().sum().backward()
        # Numbers are added up; no logits move. The labels that are shifted do.
        assert is_shifted or set(counts.get_comm_counts()) <= {ALL_REDUCE}, case


@combination("vocabulary on tp (loss_parallel), sequence on cp, one loss", EAGER, AOT)
@on_ranks(4)
def test_vocabulary_and_sequence(form: str) -> None:
    """Sequence on cp, vocabulary on tp; then the sequence alone, which that leaves without us."""
    mesh = make_mesh(2, 2, names=("cp", "tp"))
    logits, labels, weight = make_logits()
    if form == EAGER:
        # As a batch would be. An axis on which no sequence is known to lie is DTensor's.
        cp_inductor.shard(labels, mesh["cp"])
    # Its backward looks up the weights of ignored labels, too, and fails.
    cases = [(labels, None), (labels.clamp(min=0), weight)]
    for labels, weight_or_none in cases:
        leaf = logits.clone().requires_grad_()
        expected = loss_of(leaf, labels, weight_or_none, "mean", False)
        expected.backward()
        target = distribute_tensor(labels, mesh, [Shard(1), Replicate()])
        if weight_or_none is not None:
            weight_or_none = distribute_tensor(weight, mesh, [Replicate(), Replicate()])
        run = compiled(loss_of, form, fullgraph=True)
        for placements, context in (
            ([Shard(1), Shard(2)], loss_parallel()),
            ([Shard(1), Replicate()], nullcontext()),
        ):
            sharded = distribute_tensor(logits, mesh, placements).requires_grad_()
            with context:
                mean = run(sharded, target, weight_or_none, "mean", False)
                mean.backward()
            torch.testing.assert_close(whole(mean.detach()), expected.detach())
            torch.testing.assert_close(whole(sharded.grad), leaf.grad)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="torch 2.14 counts all tokens itself"
)
@on_ranks(2)
def test_losses_are_ours_where_the_library_is_used() -> None:
    """Where the library is used a mean is one of all tokens, and nowhere else."""
    mesh = make_mesh(2, 1, names=("dp", "cp"))
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (8,), generator=generator)
    labels[5:] = -100
    average = torch.stack(
        [F.cross_entropy(*half) for half in zip(logits.chunk(2), labels.chunk(2), strict=True)]
    ).mean()
    mean = F.cross_entropy(logits, labels)
    assert (average - mean).abs() > 1e-2

    def loss_on(mesh: DeviceMesh, run: Any = F.cross_entropy) -> tuple[Tensor, DTensor]:
        """Return logits, and the mean of labels of which ranks count unequally many."""
        placements = [Shard(0)] * mesh.ndim
        leaf = distribute_tensor(logits, mesh, placements).requires_grad_()
        return leaf, run(leaf, distribute_tensor(labels, mesh, placements))

    def assert_losses(*expected: Tensor) -> None:
        for one, wanted in zip((mesh["dp"], mesh, axis), expected, strict=True):
            _, loss = loss_on(one)
            assert loss.placements[-1].is_partial() == (wanted is average)
            torch.testing.assert_close(loss.full_tensor(), wanted)

    assert_losses(average, average, average)
    # Begun before the mesh is one of sequences: what a forward was, its backward is.
    leaf, loss = loss_on(axis)
    loss.backward()
    other, begun = loss_on(axis)
    sequence = distribute_tensor(torch.randn(1, 2, 6, 8), axis, [Shard(2)])
    F.scaled_dot_product_attention(sequence, sequence, sequence)
    begun.backward()
    assert torch.equal(whole(other.grad), whole(leaf.grad))
    for _ in range(2):
        assert_losses(average, average, mean)
    with loss_parallel():
        pass
    assert_losses(average, average, mean)
    # In a compile by one of our backends, whatever the mesh; another compiles what eager computes.
    for backend, expected in (("aot_eager", average), (AOT, mean)):
        torch._dynamo.reset()
        with torch.no_grad():
            _, loss = loss_on(mesh["dp"], torch.compile(F.cross_entropy, backend=backend))
        torch.testing.assert_close(whole(loss), expected)
    assert_losses(average, average, mean)
    # One axis of it is enough.
    cp_inductor.shard(torch.ones(1, 2), mesh["cp"])
    assert_losses(average, mean, mean)
    # A rank that a mesh does not hold takes no part.
    alone = DeviceMesh("cpu", [0], _init_backend=False)
    if dist.get_rank() == 1:
        assert loss_on(alone)[1].to_local().numel() <= 1


# --- Labels and scales that every rank has whole, in graphs whose plans the batch decides.


def loss_of_labels(
    documents: Tensor, labels: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor
) -> Tensor:
    """A loss whose labels are whole, of logits that are scaled by position."""
    logits = in_documents(q, k, v, documents).transpose(1, 2).flatten(2)
    positions = torch.arange(logits.shape[1], dtype=logits.dtype, device=logits.device)
    logits = logits * scale + positions[None, :, None].cos()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


UNEVEN = 47  # of which one rank has 24


@on_ranks(2)
def test_losses_and_gradients() -> None:
    """Two steps: the graph of the first serves the second."""
    mesh = world_mesh()
    compiled = torch.compile(loss_of_labels, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    one = torch.ones((), dtype=torch.float64)
    for step in range(2):
        torch.manual_seed(step)
        tokens = [torch.randn(1, n, UNEVEN, 8, dtype=torch.float64) for n in (4, 2, 2)]
        documents = torch.randint(0, 2, (1, UNEVEN)).cumsum(-1)
        labels = torch.randint(0, 32, (1, UNEVEN))
        scale = torch.randn(1, UNEVEN, 1, dtype=torch.float64)
        expected = with_grads(partial(loss_of_labels, documents, labels), (*tokens, scale, one))
        given = [*on_mesh(tokens, mesh, Shard(2)), *on_mesh([scale], mesh, Replicate())]
        with implicit_replication():
            found = with_grads(partial(compiled, documents, labels), (*given, one))
        for result, right in zip(found, expected, strict=True):
            assert (full(result) - right).abs().max() < 1e-12
