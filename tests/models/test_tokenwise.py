"""Modules that treat every token alone, on the shards themselves: experts, and a user's own."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import UnsupportedPlacement
from tests.support.combinations import AOT, EAGER, assert_beside, check_distributed, whole
from tests.support.ranks import on_ranks, world_mesh

# The experts of transformers compute in float32 on the CPU, at most.
TOLERANCE = 1e-5


class SortedScale(nn.Module):
    """Per token, with an op for which DTensor would gather all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        flat = self.inner(tokens.view(-1, 8)) + self.shift
        order = flat[:, 0].argsort()
        done = torch.empty_like(flat).index_copy(0, order, flat[order] * factor)
        return done.view(tokens.shape)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(8, 8), SortedScale()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.before(x), factor=2.0)


class Counted(SortedScale):
    """Writes to a buffer, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(tokens, factor) * self.calls


class BySign(nn.Module):
    """Two experts, of which one computes nothing if none of the tokens is for it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        done = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (tokens[..., 0] > 0) == bool(number)
            if chosen.any():
                done = done.masked_scatter(chosen[..., None], expert(tokens[chosen]))
        return tokens.sigmoid(), done  # nothing reads the first


@pytest.mark.slow
@on_ranks(3)
def test_gradients_of_weights_that_a_rank_does_not_need() -> None:
    """The first rank has tokens for one expert, the second for the other, the third none."""
    reference = nn.Sequential(nn.Linear(8, 8), BySign())
    nn.init.eye_(reference[0].weight)
    nn.init.zeros_(reference[0].bias)
    x = torch.randn(2, 4, 8)
    x[..., 0] = torch.tensor([1.0, 2.0, -1.0, -2.0])
    _, expected = reference(x)
    expected.square().sum().backward()
    mesh = world_mesh()
    for weights in (None, mesh):  # stored whole, or in shards that are gathered
        model = copy.deepcopy(reference)
        model.zero_grad()
        cp_inductor.parallelize(model, mesh, tokenwise=(BySign,), weights=weights)
        sharded = distribute_tensor(x, mesh, [Shard(1)])
        model(sharded)[1].square().sum().backward()
        assert_beside(model, reference, tolerance=TOLERANCE)
        with torch.no_grad():
            torch.testing.assert_close(whole(model(sharded)[1]), expected)
    for length in (7, 2):  # with fewer tokens than ranks, in a graph whose length is a symbol
        torch.compile(model, backend="cp_aot_eager")(torch.randn(1, length, 8))[1].sum().backward()


@pytest.mark.slow
@on_ranks(2)
def test_experts_that_fsdp_gathers_alone_and_nobody_calls_are_refused() -> None:
    """Each replica's tokens are for another expert: FSDP would give it half of the other's."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    model = nn.Sequential(nn.Identity(), BySign())
    cp_inductor.parallelize(model, mesh["cp"], tokenwise=(BySign,))
    for module in (*model[1].experts, model):
        fully_shard(module, mesh=mesh["dp"])
    tokens = torch.ones(1, 4, 8)
    tokens[..., :2] = torch.tensor([1.0, -1.0])
    both = distribute_tensor(tokens.repeat(1, 2, 1), mesh["cp"], [Shard(1)])
    model(torch.cat([both, -both], 1))
    with pytest.raises(UnsupportedPlacement, match="call fully_shard on the block"):
        model(both if mesh.get_local_rank("dp") else -both)


@pytest.mark.slow
@on_ranks(2)
def test_a_module_of_the_user() -> None:
    """In eager code also of tokens that all ranks have, and with a buffer that it writes to."""
    x = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    forms = (EAGER, Shard(1)), (EAGER, Shard(0)), (EAGER, Replicate()), (AOT, Shard(1))
    for form, placement in forms:
        model = Model()
        model.block = Counted() if form == EAGER else SortedScale()
        how = {"tokenwise": (type(model.block),)}
        out = check_distributed(model.double(), x, world_mesh(), [placement], form, **how)
        assert getattr(out, "placements", (Replicate(),)) == (placement,)
        assert form == AOT or model.block.calls == 1


def sharing(model: Any) -> tuple[Any, DTensor]:
    """Return a model that computes its block on shards, and an input for it."""
    mesh = world_mesh()
    cp_inductor.parallelize(model, mesh, tokenwise=(type(model.block),))
    return model, distribute_tensor(torch.randn(2, 6, 8), mesh, [Shard(1)])


def test_from_outside_modules_are_as_they_were(first_mesh: DeviceMesh) -> None:
    """Whoever reads a weight, other than the module while it computes, gets the parameter."""
    model, x = sharing(Model())
    inner = model.block.inner
    for _ in range(2):
        for name, parameter in model.named_parameters():
            assert model.get_parameter(name) is parameter
            owner, _, key = name.rpartition(".")
            assert getattr(model.get_submodule(owner), key) is parameter
        assert model.get_buffer("block.shift") is model.block.shift
        assert type(model.block.shift) is Tensor
        model(x).square().sum().backward()
        assert type(inner.weight.grad) is Tensor
    with pytest.raises(RuntimeError, match="shape"):  # a forward that raises
        model.block(distribute_tensor(torch.randn(2, 6, 7), first_mesh, [Shard(1)]))
    assert inner.weight is model.get_parameter("block.inner.weight")
    optimizer = torch.optim.SGD([{"params": [inner.weight], "lr": 0.5}, {"params": [inner.bias]}])
    before = inner.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(inner.weight, before)
    for assign in (False, True):
        other = copy.deepcopy(model)
        nn.init.zeros_(other.block.inner.weight)
        assert not other.block.inner.weight.any()
        other.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(other(x).to_local(), model(x).to_local())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert type(loaded.block) is SortedScale  # as on one process
    functional = torch.func.functional_call(model, dict(loaded.named_parameters()), (x,))
    assert torch.equal(functional.to_local(), model(x).to_local())


def test_a_weight_that_is_replaced_by_another_attribute(first_mesh: DeviceMesh) -> None:
    """`del module.weight`, then a tensor in its place, as torch's `prune` and `parametrize` do."""
    model, x = sharing(Model())
    inner = model.block.inner
    expected = model(x).to_local()
    weight = inner.weight
    del inner.weight
    assert not hasattr(inner, "weight")
    with pytest.raises(AttributeError, match="weight"):
        del inner.weight
    inner.weight = weight * 1
    assert torch.equal(model(x).to_local(), expected)
    model(x).sum().backward()
    assert type(weight.grad) is Tensor and weight.grad.any()
    del inner.weight
    inner.weight = weight
    assert inner.get_parameter("weight") is weight


def test_weights_are_tied_trained_and_moved_from_outside(first_mesh: DeviceMesh) -> None:
    model = cp_inductor.parallelize(Model(), first_mesh, tokenwise=(SortedScale,))
    inner = model.block.inner
    inner.weight = model.before.weight
    assert inner.weight is model.before.weight
    copied = copy.deepcopy(model)
    assert copied.block.inner.weight is copied.before.weight
    x = distribute_tensor(torch.randn(2, 6, 8), first_mesh, [Shard(1)])
    model(x).square().sum().backward()
    before = inner.weight.detach().clone()
    torch.optim.AdamW([inner.weight]).step()
    assert not torch.equal(model.before.weight, before)
    model.apply(lambda module: setattr(module, "bias", None) if module is inner else None)
    model.to(torch.bfloat16)
    assert model(x.bfloat16()).dtype == inner.weight.dtype == torch.bfloat16
    inner.bias = nn.Parameter(torch.ones(8))
    model.to(torch.float32)(x).sum().backward()
    assert inner.bias.grad.any()


class Observed(SortedScale):
    """Calls a function while it computes."""

    observe: Callable[[], None] | None = None

    def forward(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        if self.observe is not None:
            self.observe()
        return super().forward(tokens, factor)


def observed() -> tuple[Any, DTensor]:
    model: Any = Model()
    # Dynamo (2.13) takes no result of a linear layer over (B, S, H) from one graph to the next.
    model.before, model.block = nn.LayerNorm(8), Observed()
    return sharing(model)


def test_threads_read_what_they_compute(first_mesh: DeviceMesh) -> None:
    """Two threads compute at the same time, while a third reads parameters."""
    model, x = observed()
    inner, meet = model.block.inner, threading.Barrier(3)
    read: list[Tensor] = []

    def observe() -> None:
        meet.wait(60)
        read.append(inner.weight)
        meet.wait(60)

    model.block.observe = observe
    with ThreadPoolExecutor(2) as threads:
        computing = [threads.submit(model, x) for _ in range(2)]
        for _ in range(2):
            meet.wait(60)
            assert inner.weight is model.get_parameter("block.inner.weight")
    assert all(one.exception() is None for one in computing)
    assert len(read) == 2 and not any(isinstance(weight, DTensor) for weight in read)


def test_one_graph_serves_all_steps_and_threads(first_mesh: DeviceMesh) -> None:
    model, x = observed()
    run: Any = torch.compile(model, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    for _ in range(3):
        run(x).square().sum().backward()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run, x).result()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo compiles parts of torch as well
def test_a_graph_that_breaks_in_a_module(first_mesh: DeviceMesh) -> None:
    model, x = observed()
    expected, read = model(x).to_local(), []
    model.block.observe = torch._dynamo.disable(lambda: read.append(model.block.inner.weight))
    run: Any = torch.compile(model, backend="cp_aot_eager")
    for _ in range(3):
        out = run(x)
        torch.testing.assert_close(out.to_local(), expected)
        out.sum().backward()
        assert model.block.inner.weight is model.get_parameter("block.inner.weight")
    assert len(read) == 3 and not any(isinstance(weight, DTensor) for weight in read)


class Scored(nn.Module):
    """A layer on a rank's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo asks for it
@pytest.mark.parametrize("form", [EAGER, AOT])
@on_ranks(2)
def test_weights_that_hooks_compute(form: str) -> None:
    """Their gradients are parts already, where the module reads them."""
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    for normed in (nn.utils.weight_norm, nn.utils.spectral_norm, prune.identity):
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            made.append(nn.Sequential(nn.Identity(), Scored()).double())
            normed(made[-1][1].inner, "weight")
        model, expected = made
        cp_inductor.parallelize(model, world_mesh(), seq_dims={"input": 1}, tokenwise=(Scored,))
        run = model if form == EAGER else torch.compile(model, backend=form)
        for call in (run, expected):
            call(x).square().sum().backward()
        assert_beside(model, expected, tolerance=TOLERANCE)


def test_hooks_read_what_a_module_computes_with(first_mesh: DeviceMesh) -> None:
    model, x = observed()
    inner, read = model.block.inner, []
    for module in (model.block, inner):
        module.register_forward_pre_hook(lambda _, args: read.append((inner.weight, args[0])))
    inner.register_full_backward_hook(lambda module, *_: read.append((module.weight, x)))
    inner.weight.register_post_accumulate_grad_hook(
        lambda weight: read.append((inner.weight, weight.grad))
    )
    model(x).sum().backward()
    kinds = [tuple(isinstance(value, DTensor) for value in pair) for pair in read]
    assert sorted(kinds) == [(False, False), (False, False), (False, True), (True, True)]


class Around(nn.Module):
    """A module on shards before and after a flex_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.block = SortedScale()

    def forward(self, x: DTensor) -> Any:
        first = self.block(x)
        local = first.to_local()[:, None]
        local = flex_attention(local, local, local)[:, 0]
        return self.block(DTensor.from_local(local, x.device_mesh, x.placements, run_check=False))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_module_that_is_called_around_flex_attention(first_mesh: DeviceMesh) -> None:
    """Dynamo (2.13) loses attributes that are assigned to on both sides; not what is read here."""
    with torch.no_grad():
        model = cp_inductor.parallelize(Around(), first_mesh, tokenwise=(SortedScale,))
        x = distribute_tensor(torch.randn(2, 6, 8), first_mesh, [Shard(1)])
        compiled: Any = torch.compile(model, backend="cp_aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x).to_local(), model(x).to_local())


class Checkpointed(SortedScale):
    """Runs parts of itself again in the backward: of a container, a module and a function."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.turn = nn.Parameter(torch.randn(8, 8) / 3)
        self.is_reentrant = is_reentrant

    def forward(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        tokens = checkpoint(self.steps[:2], tokens, use_reentrant=self.is_reentrant)
        tokens = checkpoint(self.steps[2], tokens, use_reentrant=self.is_reentrant)
        tokens = checkpoint(self._turned, tokens, use_reentrant=self.is_reentrant)
        return super().forward(tokens, factor)

    def _turned(self, tokens: Tensor) -> Tensor:
        return (tokens @ self.turn).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
@on_ranks(2)
def test_checkpoints_inside_a_module(form: str) -> None:
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1))
    for is_reentrant in (False, True):
        model = Model()
        model.block = Checkpointed(is_reentrant)
        how = {"tolerance": TOLERANCE, "tokenwise": (Checkpointed,), "fullgraph": False}
        check_distributed(model, x, world_mesh(), [Shard(1)], form, **how)
