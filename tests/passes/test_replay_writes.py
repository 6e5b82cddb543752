"""Writes in place to parts of DTensors and views; tests/dtensor/test_rows.py has their numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import CPError, parallelize
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


# --- Writes in place that reach other names on one process: right here as well, or refused.

AOT = "cp_aot_eager"


def repeated(key: Tensor) -> Tensor:
    return key[:, :, None].expand(-1, -1, 2, -1, -1).reshape(key.shape[0], 4, -1, 4)


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(8, 8)
        self.register_buffer("noise", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        if self.name.startswith("repeated"):
            query = h.unflatten(-1, (2, 4)).transpose(1, 2)
            keys = repeated(query)
            (keys if self.name == "repeated" else query).mul_(0.25)
            return F.scaled_dot_product_attention(repeated(query), keys, keys).square().sum()
        if self.name == "drawn":
            with torch.no_grad():
                self.noise.normal_().mul_(0.1)
            return (h + self.noise).square().sum()
        if self.name == "returned":
            return torch.sigmoid(h)
        view = h[:, 3:]
        if self.name == "over a break":
            torch._dynamo.graph_break()
            h.mul_(2)
        elif self.name == "in a checkpoint":
            checkpoint(Tensor.mul_, h, 2, use_reentrant=False)
        return view.square().sum()


@pytest.mark.parametrize("name", ["repeated", "repeated, the source", "drawn"])
@on_ranks(2)
def test_right(name: str) -> None:
    model, x = Model(name).double(), torch.randn(2, 9, 8, dtype=torch.float64)
    alone = copy.deepcopy(model)
    parallelize(model, world_mesh(), seq_dims={"x": 1})
    for run in (alone, torch.compile(model, backend=AOT, fullgraph=True)):
        torch.manual_seed(1)
        run(x).backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    torch.testing.assert_close(model.noise, alone.noise)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("over a break", r"input 0 of a compiled graph .* \(2, 6, 8\) that is alive"),
        ("in a checkpoint", "got one in tag_activation_checkpoint, to what is read outside"),
        ("returned", r"output 0 \(shape \(2, 9, 8\)\) of a compiled graph: expected version 0"),
    ],
)
@on_ranks(2)
def test_refused(name: str, said: str) -> None:
    model = parallelize(Model(name), world_mesh(), seq_dims={"x": 1})

    def step() -> None:
        out = torch.compile(model, backend=AOT)(torch.randn(2, 9, 8))
        out.mul_(2)
        out.sum().backward()

    with pytest.raises(CPError, match=said):
        step()
