"""Modules that mix tokens, on the whole sequence: state-space layers, and a user's own."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import UnsupportedPlacement
from tests.support.combinations import assert_beside
from tests.support.ranks import fake_mesh, fake_rank, on_ranks, run_ranks, world_mesh

TOLERANCE = 1e-12


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


def check_model(
    shape: tuple[int, ...], names: tuple[str, ...], placements: list[Placement], backend: str | None
) -> None:
    """Compare a model with itself on one process; `placements` are those of the input."""
    torch.manual_seed(0)
    model = Model().double()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cp_inductor.parallelize(model, mesh, whole=(Running,))
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    leaf, expected_leaf = distribute_tensor(x, mesh, placements), x.clone()
    leaf.requires_grad_()
    expected_leaf.requires_grad_()
    run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    with implicit_replication():
        out = run(leaf)
        assert list(out.placements) == placements
        out.square().sum().backward()
    expected = reference(expected_leaf)
    expected.square().sum().backward()
    gradients = leaf.grad, expected_leaf.grad
    assert_beside(model, reference, (out, expected), gradients, tolerance=TOLERANCE)


@pytest.mark.parametrize("backend", [None, "cp_aot_eager"])
def test_a_module_of_the_user(backend: str | None) -> None:
    run_ranks(2, check_model, (2,), ("cp",), [Shard(1)], backend)


@pytest.mark.slow
def test_on_three_ranks_and_beside_other_axes() -> None:
    run_ranks(3, check_model, (3,), ("cp",), [Shard(1)], None)
    run_ranks(4, check_model, (2, 2), ("dp", "cp"), [Shard(0), Shard(1)], None)
    # The same tokens on two ranks: neither may count twice.
    run_ranks(4, check_model, (2, 2), ("cp", "tp"), [Shard(1), Replicate()], None)


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
    torch.manual_seed(0)
    model = nn.Sequential(Patches(), nn.Linear(6, 6)).double()
    reference = copy.deepcopy(model)
    mesh = world_mesh()
    cp_inductor.parallelize(model, mesh, whole=(Patches,))
    pixels = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    out = model(distribute_tensor(pixels, mesh, [Replicate()]))
    assert out.placements == (Shard(1),)
    assert out.shape == (2, 5, 6)
    out.square().sum().backward()
    expected = reference(pixels)
    expected.square().sum().backward()
    assert_beside(model, reference, (out, expected), tolerance=TOLERANCE)


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


def test_known_mixers_are_named() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.RwkvConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2
    )
    with fake_mesh(0, 2) as mesh:
        model = transformers.RwkvForCausalLM(config)
        with pytest.warns(
            UserWarning, match="2 x RwkvSelfAttention.*whole sequence, .* 2 times its share"
        ):
            cp_inductor.parallelize(model, mesh)
