"""Modules that treat every token alone, on the shards themselves: experts, and a user's own."""

from __future__ import annotations

import copy
import importlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import UnsupportedPlacement
from tests.ranks import fake_rank, run_ranks

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attn_implementation": "sdpa",
}
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


def check_mixture(with_logits: bool) -> None:
    """A whole Mixtral, of an odd length, with the loss that balances its experts, or without."""
    transformers = pytest.importorskip("transformers")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    reference = copy.deepcopy(model)
    ids = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {"output_router_logits": with_logits, "use_cache": False}
    expected = reference(input_ids=ids, labels=ids, **how)
    expected.loss.backward()
    cp_inductor.distribute(model, mesh)
    compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    shards = distribute_tensor(ids, mesh, [Shard(1)])
    with implicit_replication():
        result = compiled(input_ids=shards, labels=shards, **how)
        result.loss.backward()
    assert abs(result.loss.item() - expected.loss.item()) < TOLERANCE
    if with_logits:
        assert expected.aux_loss > 0.01
        assert abs(result.aux_loss.item() - expected.aux_loss.item()) < TOLERANCE
    for (name, p), (_, q) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        difference = (p.grad.full_tensor() - q.grad).abs().max()
        assert difference <= TOLERANCE * q.grad.abs().max(), (name, difference)


@pytest.mark.slow
def test_mixture_of_experts_with_the_loss_that_balances_them() -> None:
    run_ranks(2, check_mixture, True)


@pytest.mark.long
def test_mixture_of_experts() -> None:
    run_ranks(2, check_mixture, False)


def check_projections() -> None:
    """Queries by experts: a module of JetMoE that is called by two methods."""
    transformers = pytest.importorskip("transformers")
    modeling = importlib.import_module("transformers.models.jetmoe.modeling_jetmoe")
    names = ("vocab_size", "hidden_size", "num_local_experts", "num_experts_per_tok")
    sizes = {name: SIZES[name] for name in names}
    config = transformers.JetMoeConfig(**sizes, num_key_value_heads=2, kv_channels=8)
    torch.manual_seed(0)
    module = modeling.JetMoeMoA(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    reference = copy.deepcopy(module)
    whole = torch.randn(2, 7, 32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp_inductor.distribute(module, mesh)
    outs = []
    for moa, tokens in ((module, distribute_tensor(whole, mesh, [Shard(1)])), (reference, whole)):
        queries, _, routing = moa.map(tokens)
        outs.append(moa.reduce(queries.sin(), routing))
        outs[-1].square().sum().backward()
    out, expected = outs
    assert out.placements == (Shard(1),)
    pairs = [(out, expected)]
    pairs += [
        (p.grad, q.grad) for p, q in zip(module.parameters(), reference.parameters(), strict=True)
    ]
    for actual, wanted in pairs:
        difference = (actual.full_tensor() - wanted).abs().max()
        assert difference <= TOLERANCE * wanted.abs().max()


def test_queries_by_experts() -> None:
    run_ranks(2, check_projections)


def check_own_module() -> None:
    """In eager and compiled, of sharded tokens and of tokens that all ranks have."""
    reference = Model().double()
    x = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = x.clone().requires_grad_()
    expected = reference(leaf)
    expected.square().sum().backward()
    for backend in (None, "cp_aot_eager"):
        for placement in (Shard(1), Shard(0), Replicate()):
            check_own_placement(reference, leaf, expected, placement, backend)


def check_own_placement(
    reference: nn.Module, leaf: Tensor, expected: Tensor, placement: Placement, backend: str | None
) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = copy.deepcopy(reference)
    model.zero_grad()
    cp_inductor.distribute(model, mesh, tokenwise=(SortedScale,))
    run: Any = model
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    given = distribute_tensor(leaf.detach(), mesh, [placement]).requires_grad_()
    out = run(given)
    assert isinstance(out, DTensor) and out.placements == (placement,)
    torch.testing.assert_close(out.full_tensor(), expected)
    out.square().sum().backward()
    assert isinstance(given.grad, DTensor)
    torch.testing.assert_close(given.grad.full_tensor(), leaf.grad)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.slow
def test_a_module_of_the_user() -> None:
    run_ranks(2, check_own_module)


def test_modules_keep_their_names_parameters_and_copies() -> None:
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        model = Model()
        names = list(model.state_dict())
        cp_inductor.distribute(model, mesh, tokenwise=(SortedScale,))
        cp_inductor.distribute(model, mesh, tokenwise=(SortedScale,))  # changes nothing
        assert isinstance(model.block, SortedScale) and isinstance(model.block.inner, nn.Linear)
        assert list(model.state_dict()) == names
        assert all(isinstance(tensor, DTensor) for tensor in model.state_dict().values())
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert not isinstance(model.block.inner.weight, DTensor)  # within, it is the local one
        copied = copy.deepcopy(model)
        assert type(copied.block) is type(model.block)
        x = distribute_tensor(torch.randn(2, 6, 8), mesh, [Shard(1)])
        assert torch.equal(copied(x).to_local(), model(x).to_local())
        torch.save(model.state_dict(), io.BytesIO())


def test_plain_tokens_are_refused() -> None:
    with fake_rank(0, 2):
        model = Model()
        cp_inductor.distribute(model, init_device_mesh("cpu", (2,)), tokenwise=(SortedScale,))
        with pytest.raises(
            UnsupportedPlacement, match=r"SortedScale: expected tokens as a DTensor"
        ):
            model.block(torch.randn(2, 6, 8))


@pytest.mark.parametrize("backend", [None, "cp_aot_eager"])
def test_weights_that_come_later_are_refused(backend: str | None) -> None:
    """Their gradients would be of this rank's tokens alone; of frozen ones there are none."""
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        model = Model()
        cp_inductor.distribute(model, mesh, tokenwise=(SortedScale,))
        model.block.adapter = nn.Linear(8, 8)
        tokens = distribute_tensor(torch.randn(2, 6, 8), mesh, [Shard(1)])
        run: Any = model
        if backend is not None:
            run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        refused = UnsupportedPlacement if backend is None else InternalTorchDynamoError
        with pytest.raises(refused, match=r"weight of Linear in SortedScale.*before"):
            run(tokens)
        with torch.no_grad():
            run(tokens)
        model.block.adapter.requires_grad_(False)
        run(tokens)
