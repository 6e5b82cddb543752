"""Documents that replicas hand to each other: work is even, the gradient that of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
from cp_inductor import InvalidArgument, UnsupportedPlacement
from cp_inductor.dtensor.packed import assign, capacity_of
from tests.support.ranks import on_ranks, run_ranks

EVEN = 64


def work(lengths: Sequence[int]) -> float:
    return sum(length * (1 + length / EVEN) for length in lengths)


def test_the_busiest_replica_has_no_more_to_do() -> None:
    draw = random.Random(0)
    moved = 0
    for _ in range(200):
        lengths = [
            [draw.choice((1, 5, 40, 300)) for _ in range(draw.randint(1, 30))]
            for _ in range(draw.randint(1, 5))
        ]
        labelled = [[draw.random() < 0.9 for _ in row] for row in lengths]
        most = draw.choice((None, max(map(sum, lengths))))
        goes = assign(lengths, labelled, EVEN, most)
        if goes is None:
            continue
        moved += 1
        got: list[list[int]] = [[] for _ in lengths]
        learns = set()
        for row, to, learnt in zip(lengths, goes, labelled, strict=True):
            for length, at, is_learnt in zip(row, to, learnt, strict=True):
                got[at].append(length)
                learns |= {at} if is_learnt else set()
        assert max(map(work, got)) < max(map(work, lengths))
        assert max(map(sum, got)) <= (most or 1.2 * max(map(sum, lengths)))
        assert learns == set(range(len(lengths)))
    assert moved > 50


def test_work_is_even() -> None:
    lengths = [[32, 32], [1] * 64]
    goes = assign(lengths, [[True] * len(row) for row in lengths], EVEN, None)
    assert goes is not None and sorted(goes[0]) == [0, 1] and goes[1].count(0) == 32


def batch_of(lengths: Sequence[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.randint(0, 20, (len(positions),), generator=generator)
    labels = torch.where((positions == 0) | (ids < 4), -100, ids)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    whole = {"input_ids": ids, "labels": labels, "position_ids": positions, "seq_idx": numbers}
    return {name: tensor[None] for name, tensor in whole.items()}


class Model(nn.Module):
    """Predicts a token from the mean of those before it in its document."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8).double()
        self.head = nn.Linear(8, 20).double()

    def forward(self, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
        positions, numbers = batch["position_ids"][0], batch["seq_idx"][0]
        is_before = (numbers[:, None] == numbers) & (positions[:, None] >= positions)
        weights = is_before.double() / is_before.sum(1, keepdim=True)
        logits = self.head(weights @ self.embed(batch["input_ids"][0]))
        return F.cross_entropy(logits[:-1], batch["labels"][0, 1:], reduction=reduction)


ROWS = [
    [([40, 3], 0), ([2, 2, 5, 1, 9, 1, 30], 1)],
    [([70], 2), ([35, 35], 3)],  # better left
    [([8, 50], 4), ([3] * 20, 5)],
]


@pytest.mark.slow
@on_ranks(4)
def test_the_gradient_is_that_of_the_global_batch() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica = mesh["dp"].get_local_rank()
    model, moved = Model(), 0
    given = [batch_of(*row[replica]) for row in ROWS]
    found = list(cp_inductor.prepared(cp_inductor.balanced(given, mesh["dp"], even_length=EVEN)))
    assert len(found) == len(ROWS)
    for row, before, batch in zip(ROWS, given, found, strict=True):
        assert batch["input_ids"].shape[1] == capacity_of(batch["input_ids"].shape[1])
        length = before["input_ids"].shape[1]
        moved += not torch.equal(batch["input_ids"][:, :length], before["input_ids"])
        model.zero_grad()
        (model(batch) * cp_inductor.loss_weight(batch, mesh["dp"])).backward()
        grads = [parameter.grad / 2 for parameter in model.parameters()]  # type: ignore[operator]
        for grad in grads:
            dist.all_reduce(grad, group=mesh["dp"].get_group())
        wholes = [batch_of(*one) for one in row]
        total = sum(int((one["labels"] != -100).sum()) for one in wholes)
        expected = Model()
        sum(expected(one, reduction="sum") for one in wholes).div(total).backward()
        for grad, parameter in zip(grads, expected.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.allclose(grad, parameter.grad, atol=1e-12)
        ids: list[Any] = [None, None]
        dist.all_gather_object(ids, batch["input_ids"], group=mesh["cp"].get_group())
        assert torch.equal(*ids)
    # The order of documents may be another on a replica whose batch holds the same.
    assert moved == 2


def check_refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, said = dist.get_rank(), []

    def refused(given: Any, run: Callable[..., Any] = cp_inductor.balanced) -> None:
        with pytest.raises(InvalidArgument) as refusal:
            list(run(given, mesh))
        said.append(str(refusal.value))

    good, labelled, nameless = batch_of([5, 9], 0), batch_of([5, 9], 1), batch_of([5, 9], 1)
    refused([good] * (1 + rank))
    labelled["labels"][0, 5] = 3
    refused([labelled if rank else good])
    del nameless["position_ids"], nameless["seq_idx"]
    refused([nameless if rank else good])
    refused([{**good, "scores": good["labels"]} if rank else good])
    branch = {**good, "position_ids": good["position_ids"] + 2 * (good["seq_idx"] == 1)}
    refused([branch if rank else good])
    nothing = {**good, "labels": torch.full((1, 14), -100)}
    for other in (nothing, {"input_ids": good["input_ids"]}, None, {"labels": torch.ones(3)}):
        refused(other if rank else good, cp_inductor.loss_weight)

    def broken() -> Any:
        yield good
        raise OSError("the disk")

    with pytest.raises(OSError if rank else InvalidArgument) as failure:
        list(cp_inductor.balanced(broken() if rank else [good, good], mesh))
    said.append(str(failure.value))
    return said


def test_refused_on_every_replica() -> None:
    pieces = (
        "expected a batch of every replica, got none of replicas [0]",
        "-100 as the first of the labels of each document, got a label that is predicted from",
        "expected one of position_ids",
        "expected tensors that are known by name, got scores on replica 1",
        "expected positions that begin at 0 in each document, got one that begins elsewhere",
        "expected a labelled token on every replica, got none on 1 of 2",
        *["expected labels or shift_labels of shape (B, S), got none on 1 of 2 replicas"] * 3,
    )
    first, second = run_ranks(2, check_refusals)
    failures = ("expected a batch, got OSError on replica 1; see the error on that replica", "disk")
    for said, failure in zip((first, second), failures, strict=True):
        for text, piece in zip(said, (*pieces, failure), strict=True):
            assert piece in text


@pytest.mark.usefixtures("mesh")
def test_arguments_are_checked() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    with pytest.raises(UnsupportedPlacement, match="expected a 1-D mesh, got a 2-D mesh"):
        next(cp_inductor.balanced([], mesh))
    with pytest.raises(InvalidArgument, match="even_length to be an integer"):
        next(cp_inductor.balanced([], mesh["dp"], even_length=0))
