"""Writes in place to parts of DTensors and views; tests/dtensor/test_rows.py has their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor.passes.replay_writes import replay_writes
from tests.support.graphs import codes_of_pass
from tests.support.ranks import on_ranks, world_mesh

SHAPE = (2, 33, 8)


def of_an_input(x: Tensor) -> Any:
    z = x[:, 3:5]
    x[:, 1:] *= 2
    return z + 1


@pytest.mark.slow
@on_ranks(4)
def test_an_input_holds_what_was_written_beside_a_batch() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    whole = torch.arange(66, dtype=torch.float64).view(2, 33)
    given = distribute_tensor(whole.clone(), mesh, [Shard(0), Shard(1)])
    with implicit_replication():
        out = torch.compile(of_an_input, backend="cp_aot_eager", fullgraph=True)(given)
    expected = of_an_input(whole)
    assert torch.equal(out.full_tensor(), expected)
    assert given.placements == (Shard(0), Shard(1)) and torch.equal(given.full_tensor(), whole)


@on_ranks(2)
def test_graphs() -> None:
    mesh, plain = world_mesh(), torch.zeros(SHAPE)
    given = distribute_tensor(plain, mesh, [Shard(1)])

    def stale(x: Tensor) -> Tensor:
        y = x.sin()
        z = y[:, 5:9]
        y.mul_(2)
        return z + 1

    def whole(x: Tensor) -> Tensor:
        return x.sin().mul_(2).transpose(1, 2).add_(1)

    before, once, twice = codes_of_pass(replay_writes, stale, given)
    assert ".mul_(" in before and ".mul_(" not in once and "copy_" in once
    assert once.index("copy_") < once.index("slice(5, 9, None)")
    # What it writes to is written as a whole, and no view is older than a write.
    assert once == twice
    for unchanged, value in ((whole, given), (stale, plain)):
        assert len(set(codes_of_pass(replay_writes, unchanged, value))) == 1


@on_ranks(2)
def test_refused_what_draws() -> None:
    mesh = world_mesh()
    given = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)])

    def draw(x: Tensor) -> Tensor:
        x = x.sin()
        x[:, 3:5].uniform_()
        return x

    run = torch.compile(draw, backend="cp_aot_eager", fullgraph=True)
    with pytest.raises(cp_inductor.UnsupportedWrite, match=r"draws random numbers.*torch.where"):
        run(given)


@on_ranks(2)
def test_eager_code_refuses_what_would_be_lost() -> None:
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(2, 2), mesh)
    h = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)])
    lost = (
        "expected a view with the placements of its tensor.*would be lost; compile view and write"
    )
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
