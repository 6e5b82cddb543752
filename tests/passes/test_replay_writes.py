"""Writes in place to parts of DTensors and views of them, beside one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor.passes.replay_writes import replay_writes
from tests.support.ranks import on_ranks, run_ranks

TOLERANCE = 1e-12
SHAPE = (2, 33, 8)


def attend(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, 2)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return x + out.transpose(1, 2).flatten(2)


def token_shift(h: Tensor, c: Tensor) -> Any:
    y = torch.zeros_like(h)
    y[:, 1:] = h[:, :-1]
    return attend(y)


def reshaped(h: Tensor, c: Tensor) -> Any:
    h.transpose(1, 2)[..., 4].zero_()
    h.flatten(0, 1)[5:40].mul_(2)
    h.view(*h.shape[:2], 4, 2)[:, 5:, 1].zero_()
    h.diagonal(dim1=1, dim2=2).zero_()
    return h


def numbers(h: Tensor, c: Tensor) -> Any:
    h[:, 0] = 3.0
    h[:, 5:7] = 0
    h[..., 2] = 1
    h[:, ::3] = 0
    h[:, -2] = 1
    h[:, 5:5] = 1
    h[:, 40:] = 2
    return h


def views_of_views(h: Tensor, c: Tensor) -> Any:
    a = h[:, 2:30]
    b, sibling = a[:, 3:9], h[:, 4:6]
    b.mul_(3)
    listed = [h[:, 0:2], h]
    listed[0] += 1
    w = h * 2
    h[:, 6] = 0
    return torch.cat([a, sibling, h, b, w, listed[0]], 1)


def of_an_input(x: Tensor, c: Tensor) -> Any:
    z = x[:, 3:5]
    x[:, 1:] *= 2
    return z + 1


# tests/dtensor/test_rows.py has more.
CASES = (token_shift, reshaped, numbers, views_of_views)


def check(ranks: tuple[int, ...], names: tuple[str, ...], backend: str) -> None:
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("dp", "cp")[-len(ranks) :])
    placements: list[Placement] = [Shard(0), Shard(1)][-len(ranks) :]
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=random)
    c = torch.randn(2, 8, dtype=torch.float64, generator=random)
    for case in CASES:
        if case.__name__ in names:
            torch._dynamo.reset()
            check_case(case, whole, distribute_tensor(whole, mesh, placements), c, backend)


def check_case(
    case: Callable[..., Any], whole: Tensor, given: DTensor, c: Tensor, backend: str
) -> None:
    def run(x: Tensor, c: Tensor) -> Any:
        return case(x.sin(), c)

    whole, given = whole.clone().requires_grad_(), given.requires_grad_()
    expected = run(whole, c)
    (expected * expected.detach().cos()).sum().backward()
    with implicit_replication():
        out = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(given, c)
        (out * out.detach().cos()).sum().backward()
    for actual, wanted in ((out.detach(), expected.detach()), (given.grad, whole.grad)):
        assert isinstance(actual, DTensor) and wanted is not None
        error = (actual.full_tensor() - wanted).abs().max() / wanted.abs().max()
        assert error <= TOLERANCE, (case.__name__, error)


def names_of(*cases: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(case.__name__ for case in cases)


@pytest.mark.slow
def test_writes_and_views() -> None:
    run_ranks(2, check, (2,), names_of(*CASES), "cp_aot_eager")


@pytest.mark.slow
def test_on_three_ranks_and_beside_a_batch() -> None:
    run_ranks(3, check, (3,), names_of(*CASES), "cp_aot_eager")
    run_ranks(4, check, (2, 2), names_of(*CASES), "cp_aot_eager")


@pytest.mark.long
def test_through_inductor() -> None:
    run_ranks(2, check, (2,), names_of(token_shift, views_of_views), "cp_inductor")


@on_ranks(2)
def test_an_input_holds_what_was_written() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(66, dtype=torch.float64).view(2, 33)
    given = distribute_tensor(whole.clone(), mesh, [Shard(1)])
    with implicit_replication():
        run = torch.compile(of_an_input, backend="cp_aot_eager", fullgraph=True)
        out = run(given, torch.zeros(()))
    expected = of_an_input(whole, torch.zeros(()))
    assert torch.equal(out.full_tensor(), expected)
    assert given.placements == (Shard(1),) and torch.equal(given.full_tensor(), whole)


def graphs_of_pass(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Return the code of a Dynamo graph before the pass, after it, and after it ran again."""
    codes: list[str] = []

    def backend(gm: fx.GraphModule, _: object) -> Any:
        codes.append(gm.code)
        for _ in range(2):
            replay_writes(gm)
            gm.graph.lint()
            codes.append(gm.code)
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return codes


@on_ranks(2)
def test_graphs() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = torch.zeros(SHAPE)
    given = distribute_tensor(plain, mesh, [Shard(1)])

    def stale(x: Tensor) -> Tensor:
        y = x.sin()
        z = y[:, 5:9]
        y.mul_(2)
        return z + 1

    def whole(x: Tensor) -> Tensor:
        return x.sin().mul_(2).transpose(1, 2).add_(1)

    before, once, twice = graphs_of_pass(stale, given)
    assert ".mul_(" in before and ".mul_(" not in once and "copy_" in once
    assert once.index("copy_") < once.index("slice(5, 9, None)")
    # What it writes to is written as a whole, and no view is older than a write.
    assert once == twice
    for unchanged, value in ((whole, given), (stale, plain)):
        assert len(set(graphs_of_pass(unchanged, value))) == 1


def draws(h: Tensor, c: Tensor) -> Any:
    h[:, 3:5].uniform_()
    return h


@on_ranks(2)
def test_refused_what_draws() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)])
    run = torch.compile(lambda x: draws(attend(x), x), backend="cp_aot_eager", fullgraph=True)
    with pytest.raises(cp_inductor.UnsupportedWrite, match=r"draws random numbers.*torch.where"):
        run(given)


@on_ranks(2)
def test_eager_code_refuses_what_would_be_lost() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    h = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)])
    lost = "expected a view with the placements of its tensor.*would be lost; compile it"
    with pytest.raises(cp_inductor.UnsupportedWrite, match=lost):
        h[:, 1:] = h[:, :-1]
    for write in (lambda: h[:, 0].add_(1), lambda: h.narrow(1, 3, 9).zero_()):
        with pytest.raises(cp_inductor.UnsupportedWrite, match=lost):
            write()
    view = h[:, 5:9]
    with pytest.raises(cp_inductor.UnsupportedWrite, match=r"a view of shape .2, 4, 8. that is al"):
        h.mul_(2)
    del view
    h.mul_(2)
    h[..., 3:5] += 1
    h.transpose(1, 2).add_(1)
    whole = torch.ones(SHAPE)
    whole[..., 3:5] += 1
    assert torch.equal(h.full_tensor(), whole)
