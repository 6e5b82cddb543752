"""What parts of a model are given and leave beside their tokens, as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import (
    InvalidArgument,
    UnsupportedAttention,
    UnsupportedPlacement,
    UnsupportedWrite,
    pass_states,
    tokens_before,
)
from tests.support.combinations import AOT, EAGER, assert_beside, check_distributed, compiled
from tests.support.models import make
from tests.support.ranks import fake_rank, on_ranks, run_ranks, world_mesh

TOLERANCE = 1e-12
GENERATOR = torch.Generator().manual_seed(5)
X, OF_TOKENS = torch.randn(2, 2, 9, 8, dtype=torch.float64, generator=GENERATOR).unbind()
CONDITION = OF_TOKENS[:, 4]


class Decaying(nn.Module):
    """Is given a rate, and returns its outputs and the state after the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        keep, tokens = rate.sigmoid(), self.project(tokens)
        powers = keep ** torch.arange(1, tokens.shape[1] + 1)[:, None]
        states = (tokens / powers).cumsum(1) * powers
        before, after = pass_states(states[:, -1], decay=powers[-1].expand_as(states[:, -1]))
        return states + powers * before[:, None], after


class OfState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.head = Decaying(), nn.Linear(8, 8)
        self.rate = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        tokens, state = self.mixer(x, self.rate.exp())
        return tokens.square().mean() + self.head(state).square().sum()


class Summing(nn.Module):
    """Leaves a loss in an attribute, or in a buffer."""

    def __init__(self, has_buffer: bool) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        if has_buffer:
            self.register_buffer("loss", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        sums = self.project(tokens).cumsum(1)
        self.loss = sums.square().mean()
        return sums


class OfSums(nn.Module):
    def __init__(self, has_buffer: bool = False) -> None:
        super().__init__()
        self.mixer = Summing(has_buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x).sin().mean() + self.mixer.loss


class Modulated(nn.Module):
    """Of tokens and a condition (B, C), (B, 1, C), or (B, S, C) of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.modulate = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        if condition.ndim < 3:
            condition = condition[:, None]
        scale, shift = self.modulate(condition).chunk(2, -1)
        return self.project(tokens) * scale + shift


class OfCondition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(8, 8), Modulated()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.block(x, self.embed(condition)).square().mean()


@dataclass
class Batch:
    """Whose `__post_init__` may run once, and sets what no field names."""

    tokens: Tensor
    factor: float = 1.0
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.factor, self.length, self.shifted = 2 * self.factor, 9, self.tokens + 1


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor | Batch) -> Batch:
        batch = Batch(x) if isinstance(x, Tensor) else x
        tokens = self.project(batch.tokens) * batch.factor + batch.shifted
        return Batch(tokens.square().mean() / batch.length)


class Packaged(nn.Module):
    """Returns its tokens in a dict, and in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Any]:
        tokens = self.project(x["tokens"])
        return {"tokens": tokens, "batch": Batch(tokens.cos())}


class PackagedByToken(Packaged):
    def forward(self, tokens: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return super().forward({"tokens": tokens})


class OfPackage(nn.Module):
    def __init__(self, is_tokenwise: bool = False) -> None:
        super().__init__()
        self.before, self.mixer = nn.Linear(8, 8), PackagedByToken() if is_tokenwise else Packaged()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.before(x)
        is_tokenwise = isinstance(self.mixer, PackagedByToken)
        package = self.mixer(tokens if is_tokenwise else {"tokens": tokens})
        return package["tokens"].square().mean() + package["batch"].shifted.sin().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "a state": (OfState, (X,), {"recurrent": (Decaying,)}),
    "a loss left behind": (OfSums, (X,), {"whole": (Summing,)}),
    "one in a buffer": (lambda: OfSums(True), (X,), {"whole": (Summing,)}),
    "a condition": (OfCondition, (X, CONDITION), {"tokenwise": (Modulated,)}),
    "one token's": (OfCondition, (X, CONDITION[:, None]), {"tokenwise": (Modulated,)}),
    "each token's": (OfCondition, (X, OF_TOKENS), {"tokenwise": (Modulated,)}),
    "each token's, whole": (
        OfCondition,
        (X, OF_TOKENS),
        {"tokenwise": (Modulated,), "seq_dims": {"condition": None}},
    ),
    "in packages": (OfPackage, (X,), {"whole": (Packaged,)}),
    "of each token": (lambda: OfPackage(True), (X,), {"tokenwise": (PackagedByToken,)}),
    "a dataclass": (OfBatch, (Batch(X),), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, AOT])
@on_ranks(2)
def test_what_stands_beside_tokens(form: str) -> None:
    for name, (build, given, how) in CASES.items():
        reference = build().double()
        how = dict(how)
        seq_dims = {"x": 1, "tokens": 1} | how.pop("seq_dims", {})
        model = copy.deepcopy(reference)
        cp_inductor.parallelize(model, world_mesh(), seq_dims=seq_dims, **how)
        run = compiled(model, form, fullgraph=True)
        for _ in range(2):
            results = []
            for step in (reference, run):
                result = step(*given)
                results.append(result if isinstance(result, Tensor) else result.tokens)
                results[-1].backward()
        assert_beside(model, reference, (results[1], results[0]), tolerance=TOLERANCE)
        assert name != "a dataclass" or (result.factor, result.length) == (2.0, 9)


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).square().mean()


@pytest.mark.slow
@on_ranks(2)
def test_a_part_that_a_checkpoint_calls_by_itself() -> None:
    """Its backward computes it again as the forward did: on plain weights, beside a run or not."""
    x = X.clone().requires_grad_()
    for how in ({}, {"tokenwise": (nn.Sequential,)}, {"whole": (nn.Sequential,)}):
        for is_reentrant in (True, False):
            reference = InParts().double()
            model = copy.deepcopy(reference)
            cp_inductor.parallelize(model, world_mesh(), seq_dims={"x": 1}, **how)
            for step in (model, reference):
                checkpoint(step.part, x, use_reentrant=is_reentrant).square().mean().backward()
                checkpoint(
                    lambda x, step=step: step.part(x).square().mean() + step(x),
                    x,
                    use_reentrant=is_reentrant,
                ).backward()
            assert_beside(model, reference, tolerance=TOLERANCE)


class Jittered(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * torch.empty_like(tokens).uniform_(0.9, 1.1)


class JitteredState(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens_before(tokens, 1, 1) + torch.rand_like(tokens)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Any) -> Tensor:
        x = self.project(x)
        if isinstance(memory, list):
            memory.append(x.detach())
        else:
            memory["last"] = x.detach()
        return x.square().mean()


@on_ranks(2)
def test_what_would_part_ranks_or_lose_terms_is_refused() -> None:
    mesh, seq_dims = world_mesh(), {"input": 1}
    for named, jittered in (("recurrent", JitteredState), ("tokenwise", Jittered)):
        model, how = nn.Sequential(nn.Linear(8, 8), jittered()).double(), {named: (jittered,)}
        cp_inductor.parallelize(model, mesh, outputs="whole", seq_dims=seq_dims, **how)
        with pytest.raises(UnsupportedPlacement, match=r"draws as many numbers.*\(2, 9, 8\)"):
            model(X)
    out = model(X[:, :8]).mean()
    with pytest.raises(UnsupportedAttention, match=r"first derivatives.*create_graph=True"):
        torch.autograd.grad(out, list(model.parameters()), create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, AOT])
@on_ranks(2)
def test_items_that_a_forward_puts_into_its_batch_are_refused(form: str) -> None:
    """It has a copy of the list or dict, with its part of the batch."""
    model = cp_inductor.parallelize(Remembering().double(), world_mesh(), seq_dims={"x": 1})
    run = compiled(model, form, fullgraph=True)
    for memory in ([X], {"first": X, "last": X}, {"first": X, "last": 0}):
        with pytest.raises(UnsupportedWrite, match="leaves the lists, dicts and records"):
            run(X, memory)
    found: list[Tensor] = []  # has nothing to cut, and is passed as it is
    model(X, found)
    assert len(found) == 1


@on_ranks(2)
def test_modules_that_mix_within_those_that_do_not_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(Summing(False)), nn.Linear(8, 8))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(InvalidArgument, match="mixes tokens within one that has a rank's own"):
        cp_inductor.parallelize(model, world_mesh(), tokenwise=[nn.Sequential], whole=[Summing])
    assert [type(module) for module in model.modules()] == classes


@on_ranks(2)
def test_shards_of_weights_have_their_gradients() -> None:
    model = nn.Linear(8, 8).double()
    model(X).mean().backward()
    reference = copy.deepcopy(model)
    reference.weight.grad = model.weight.grad.clone()
    reference.bias.grad = model.bias.grad.clone()
    hook = model.weight.register_hook(torch.zeros_like)
    with pytest.raises(UnsupportedPlacement, match="weight: expected a parameter without hooks"):
        cp_inductor.parallelize(model, world_mesh(), weights=world_mesh())
    hook.remove()
    cp_inductor.parallelize(model, world_mesh(), weights=world_mesh())
    assert_beside(model, reference, tolerance=0)


# --- Modules that mix tokens, on the whole sequence: state-space layers, and a user's own.


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
