"""Modules that mix tokens, on the whole sequence: state-space layers, and a user's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import cp_inductor
from cp_inductor import UnsupportedPlacement
from tests.support.combinations import AOT, EAGER, check_distributed
from tests.support.models import make
from tests.support.ranks import fake_rank, on_ranks, run_ranks, world_mesh


class Running(nn.Module):
    """A recurrence: each token gets the mean of what is before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.decay = nn.Parameter(torch.rand(6))

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> tuple[Tensor, None]:
        out, state = [], torch.zeros_like(tokens[:, 0])
        for token in self.inner(tokens).unbind(1):
            state = state * self.decay + token
            out.append(state)
        done = torch.stack(out, 1)
        return (done if scale is None else done * scale), None


class Mean(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.mixer, self.after = nn.Linear(6, 6), Running(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(self.mixer(x, scale=x)[0])


def check(shape: tuple[int, ...], placements: list[Placement], form: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    out = check_distributed(Model().double(), x, mesh, placements, form, whole=(Running,))
    assert list(out.placements) == placements


@pytest.mark.parametrize("form", [EAGER, AOT])
def test_a_module_of_the_user(form: str) -> None:
    run_ranks(2, check, (2,), [Shard(1)], form)


@pytest.mark.slow
def test_on_three_ranks_and_beside_other_axes() -> None:
    run_ranks(3, check, (3,), [Shard(1)], EAGER)
    run_ranks(4, check, (2, 2), [Shard(0), Shard(1)], EAGER)
    # The same tokens on two ranks: neither may count twice.
    run_ranks(4, check, (2, 2), [Shard(1), Replicate()], EAGER)


class Patches(nn.Module):
    """Begins a sequence, as the embedding of an image does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, 6, kernel_size=2, stride=2)
        self.first = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.project(pixels).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(pixels.shape[0], -1, -1), patches], 1)


@on_ranks(2)
def test_a_sequence_that_begins_in_the_module() -> None:
    model = nn.Sequential(Patches(), nn.Linear(6, 6)).double()
    pixels = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    out = check_distributed(model, pixels, world_mesh(), [Replicate()], whole=(Patches,))
    assert out.placements == (Shard(1),)
    assert out.shape == (2, 5, 6)


def test_refusals() -> None:
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model = nn.Sequential(Running())
        cp_inductor.parallelize(model, mesh, whole=(Running,))
        whole = distribute_tensor(torch.ones(2, 7, 6), mesh, [Replicate(), Replicate()])
        with pytest.raises(UnsupportedPlacement, match="one mesh axis on which none is sharded"):
            model(whole)
        mean = cp_inductor.parallelize(Mean(), mesh, whole=(Mean,))
        tokens = distribute_tensor(torch.ones(2, 7, 6), mesh, [Shard(1), Replicate()])
        with pytest.raises(UnsupportedPlacement, match="return tensors with the sequence in dim 1"):
            mean(tokens)


def test_known_mixers_are_named(first_mesh: DeviceMesh) -> None:
    pytest.importorskip("transformers")
    said = "2 x RwkvSelfAttention.*whole sequence, .* 2 times its share"
    with pytest.warns(UserWarning, match=said):
        cp_inductor.parallelize(make("Rwkv"), first_mesh)
