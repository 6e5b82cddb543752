"""What becomes of placements where ops have no sharding rule, what is refused and what is said.

Results and gradients are in tests/dtensor/test_rows.py.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from math import prod
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
import cp_inductor.backend
from cp_inductor import CPError, UnsupportedWrite
from cp_inductor.torch_private.traces import traces
from tests.support.combinations import AOT, EAGER, check_distributed
from tests.support.ranks import on_ranks, run_ranks, world_mesh

BATCH, LENGTH, WIDTH, CLASSES = 2, 7, 8, 10


def rows(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64).cumsum(-1)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    ids = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
    ids[1, 5], ids[0, 6] = CLASSES - 1, 3  # the largest is on one rank alone
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 1:4] = mask[1, 3:6] = True
    return [x, ids, mask]


@pytest.mark.slow
@on_ranks(2)
def test_the_sequence_stays_sharded() -> None:
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    x, ids, mask = (distribute_tensor(one, mesh, [Shard(1)]) for one in inputs())
    x.requires_grad_()
    with implicit_replication():
        # What computes elements alone gathers nothing, forward and backward.
        for compute in (
            lambda: F.one_hot(ids, CLASSES) * x[..., :1],
            lambda: F.logsigmoid(x),
            lambda: F.prelu(x.transpose(1, 2), rows(WIDTH)).transpose(1, 2),
            lambda: F.hardtanh(x, -0.3, 0.4),
        ):
            x.grad = None
            result = compute()
            result.sum().backward()
            assert result.placements == x.grad.placements == (Shard(1),), result
        # Complex numbers, also of what is broadcast and has the sequence in another dim.
        numbers, whole = x.detach(), inputs()[0]
        for op in (torch.polar, torch.complex):
            for made, expected in (
                (op(numbers, numbers * 2), op(whole, whole * 2)),
                (op(numbers, numbers[0]), op(whole, whole[:1].expand_as(whole))),
            ):
                assert made.placements == (Shard(1),)
                assert torch.equal(made.full_tensor(), expected)
                assert torch.equal(made.conj()[:, 1:6].full_tensor(), expected.conj()[:, 1:6])
        negative = DTensor.from_local(numbers.to_local()[:, :3]._neg_view(), mesh, [Shard(1)])
        assert torch.equal(negative[:, :4].full_tensor(), -whole[:, [0, 1, 2, 4]])
        # What accumulates along the sequence moves once, and little.
        for op in (torch.cumsum, torch.logcumsumexp, torch.cumprod):
            with CommDebugMode() as counted:
                assert op(x, 1).placements == (Shard(1),)
            assert counted.get_total_counts() == 1, op
        # A result of the shape of the tokens is sharded as they are.
        scattered = x.masked_scatter(mask[..., None].expand_as(x), rows(6, 8))
        assert scattered.placements == (Shard(1),)
        assert x[mask].placements == (Replicate(),)


@pytest.mark.slow
@on_ranks(2)
def test_what_is_refused() -> None:
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    x = distribute_tensor(inputs()[0], mesh, [Shard(1)])
    with implicit_replication():
        with pytest.raises(CPError, match=r"plain tensor of shape \(2, 7, 8\); make it from a DT"):
            torch.zeros(2, 9, 8, dtype=x.dtype)[:, :LENGTH].add_(x)
        with pytest.raises(CPError, match=r"as_strided.*use unfold or slices"):
            x.as_strided((2, 3), (1, 2))
        with pytest.raises(UnsupportedWrite, match=r"test_on_whole.*make it whole before"):
            DTensor.from_local(inputs()[0], mesh, [Partial("max")]).clamp_(0)
        before = x.full_tensor()
        with pytest.raises(CPError, match=r"a plain tensor of shape \(2, 7, 8\); distribute it"):
            x.data = inputs()[0] + 1
        assert torch.equal(x.full_tensor(), before)
        # What is wrong on one process has the error of one process.
        with pytest.raises(RuntimeError, match="Number of elements of source") as raised:
            x.masked_scatter(x > 0, rows(2))
        assert not isinstance(raised.value, CPError)


@pytest.mark.slow
@on_ranks(2)
def test_a_gather_is_logged_once() -> None:
    mesh, case, is_first = world_mesh(), TestCase(), dist.get_rank() == 0
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    x = distribute_tensor(torch.randn(1, 31, 3), mesh, [Shard(1)])
    logged = case.assertLogs if is_first else case.assertNoLogs
    with logged("cp_inductor", logging.INFO) as log:
        for _ in range(2):
            x.renorm(2, 1, 1.0)
    if is_first:
        (line,) = log.output
        assert "aten.renorm.default (test_on_whole.py:" in line and "372 bytes" in line


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda t: t[:, 1:], lambda t: t[:, ::2], lambda t: t[:, 0], lambda t: t[0]),
    *(lambda t: t.detach(), lambda t: t[0].t(), lambda t: t.permute(1, 0, 2)),
    *(lambda t: t[:, :, None], lambda t: t[None].expand(3, -1, -1, -1), lambda t: t[:1].squeeze()),
)


@pytest.mark.slow
@on_ranks(2)
def test_views_under_inference_mode() -> None:
    """Views of tensors that were made outside are read, not written to."""
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    for length in (8, 9):
        x = torch.randn(2, length, 4)
        shards = distribute_tensor(x, world_mesh(), [Shard(1)])
        with torch.inference_mode():
            for view in VIEWS:
                assert torch.equal(view(shards).full_tensor(), view(x))
            for write in (
                lambda t: t[:, 3:5].fill_(0.5),
                lambda t: t.__setitem__((slice(None), 3), 0.5),
                lambda t: t[0][3:5].zero_(),
                lambda t: t[:, 3:5][0].zero_(),
                lambda t: t[0][3:5].addr_(rows(2), rows(4)),
            ):
                with pytest.raises(UnsupportedWrite, match="which DTensor has copied"):
                    write(shards.clone())
            for view in (lambda t: t[1][2], lambda t: t.detach()[:, 3:], lambda t: t.chunk(2, 1)):
                changed = shards.clone()
                held = view(changed)
                with pytest.raises(UnsupportedWrite, match="is alive and would be stale"):
                    changed.add_(1)
                del held
                changed.add_(1)


@on_ranks(2)
def test_lists_that_are_read_and_written() -> None:
    """An entry reads what the entries before it have written."""
    cp_inductor.parallelize(nn.Linear(1, 1), world_mesh())
    sums = (DTensor.from_local(inputs()[0] / 2, world_mesh(), [Partial()]) for _ in range(7))
    for places in ((Partial(), Shard(1)), (Shard(1), Replicate()), (Partial(), Partial())):
        p, q = (next(sums).redistribute(placements=[place]) for place in places)
        torch._foreach_add_([p, q, q], [q, p, p])
        for written, factor in ((p, 2), (q, 5)):
            torch.testing.assert_close(written.full_tensor(), inputs()[0] * factor)
    with torch.inference_mode():  # made of other ops, which torch does not take apart here
        torch.testing.assert_close(next(sums).square_().full_tensor(), inputs()[0].square())


# --- Convolutions along a sharded dim, beside themselves on one process.

PADDED = {"kernel_size": 3, "padding": 1}
EACH_CHANNEL = {"kernel_size": 4, "padding": 3, "groups": 4, "bias": False}
# Convolution, what it convolves, on how many ranks, and how they hold it.
CASES: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...], Any, list[Placement]]] = {
    "odd length": (nn.Conv1d, PADDED, (2, 4, 9), (2,), [Shard(2)]),
    "stride": (nn.Conv1d, {**PADDED, "stride": 2}, (2, 4, 10), (2,), [Shard(2)]),
    "each channel": (nn.Conv1d, EACH_CHANNEL, (2, 4, 9), (3,), [Shard(2)]),
    "fewer than ranks": (nn.Conv1d, {"kernel_size": 6}, (2, 4, 7), (3,), [Shard(2)]),
    "images": (nn.Conv2d, {"kernel_size": 3}, (2, 4, 5, 7), (2,), [Shard(3)]),
    "beside a batch": (nn.Conv1d, {"kernel_size": 3}, (3, 4, 9), (2, 2), [Shard(0), Shard(2)]),
    "beside channels": (nn.Conv1d, {"kernel_size": 3}, (2, 4, 9), (2, 2), [Shard(2), Shard(1)]),
    "channels": (nn.Conv1d, {"kernel_size": 3}, (2, 4, 9), (2,), [Shard(1)]),
    "left to torch": (nn.Conv1d, {"kernel_size": 3}, (2, 4, 9), (2,), [Replicate()]),
}


def check(name: str, form: str) -> None:
    kind, sizes, shape, ranks, placements = CASES[name]
    made: Any = kind
    torch.manual_seed(0)
    model, x = made(4, 4, **sizes).double(), torch.randn(shape, dtype=torch.float64)
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("a", "b")[: len(ranks)])
    out = check_distributed(model, x, mesh, placements, form)
    assert getattr(out, "placements", (Replicate(),)) == tuple(placements)


@pytest.mark.parametrize(
    ("name", "form"), [*((name, EAGER) for name in CASES), ("odd length", AOT)]
)
def test_convolution(name: str, form: str) -> None:
    run_ranks(prod(CASES[name][3]), check, name, form)


@on_ranks(2)
def test_that_it_gathers_is_said() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = cp_inductor.parallelize(nn.Conv1d(4, 4, 3), mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(distribute_tensor(torch.ones(2, 4, 9), mesh, [Shard(2)]))
    found = [str(one.message) for one in said if "every rank gathers" in str(one.message)]
    assert len(found) == (1 if dist.get_rank() == 0 else 0)  # the first says it for all


@on_ranks(1)
def test_what_dispatch_calls_is_not_compiled() -> None:
    """After a graph break: a compile there clears a table that C++ writes to next, and crashes."""
    traced: list[Any] = []
    cp_inductor.parallelize(nn.Linear(2, 2), world_mesh())
    x = distribute_tensor(torch.ones(2, 4, 8), world_mesh(), [Shard(1)])

    @torch.compiler.disable(recursive=False)
    def rest(values: Tensor) -> Tensor:
        return F.linear(values, values[0])

    traces.before.append(lambda frame: traced.append([*frame]))
    try:
        torch.compile(lambda x: rest(x + 1), backend="cp_aot_eager")(x)
    finally:
        traces.before.pop()
    assert traced and not any("schema" in names for names in traced), traced
