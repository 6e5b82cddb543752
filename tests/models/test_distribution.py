"""Models on the ranks of a mesh: weights that are one stay one, and are trained as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

import cp_inductor
from cp_inductor import InvalidArgument, UnsupportedPlacement, UntiedWeights
from cp_inductor.modules import ties
from cp_inductor.modules.distribute import share_elements
from tests.support.combinations import (
    AOT,
    EAGER,
    compiled,
    grads_of,
    make_batch,
    make_model,
    mean_loss,
)
from tests.support.models import make
from tests.support.ranks import fake_rank, run_ranks

# Losses, and norms of gemma, are in float32 whatever the rest is in.
TOLERANCE = 1e-5


def native() -> nn.Module:
    return make_model(is_tied=True)


def tied(name: str) -> nn.Module:
    return native() if name == "native" else make(name)


def loss_of(run: Any, batch: tuple[Tensor, ...]) -> Tensor:
    ids, positions, labels = batch
    if hasattr(getattr(run, "_orig_mod", run), "config"):
        inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
        if getattr(run, "_orig_mod", run).config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        loss: Tensor = run(**inputs).loss
        return loss
    return mean_loss(run(ids, positions), labels)


def trained(
    model: nn.Module, run: Any, batch: tuple[Tensor, ...]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Take two steps; return the losses, the first gradients, and the weights, all whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], {}
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(run, batch)
        loss.backward()
        losses.append(whole(loss.detach()).item())
        grads = grads or {
            name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    return losses, grads, {name: whole(p) for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def check_training(name: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    batch = make_batch(batch=2, length=14)
    torch.manual_seed(3)
    alone = tied(name).double()
    expected = trained(alone, alone, batch)
    torch.manual_seed(3)
    model = tied(name).double()
    names = list(model.state_dict())
    generation_config = getattr(model, "generation_config", None)
    assert cp_inductor.distribute(model, mesh) is model
    assert getattr(model, "generation_config", None) is generation_config
    assert list(model.state_dict()) == names
    run = torch.compile(model, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    sharded = tuple(distribute_tensor(part, mesh, [Shard(1)]) for part in batch)
    is_native = generation_config is None
    with nullcontext() if is_native else implicit_replication():
        losses, grads, weights = trained(model, run, sharded)
    torch.testing.assert_close(losses, expected[0], rtol=TOLERANCE, atol=TOLERANCE)
    for actual, known in ((grads, expected[1]), (weights, expected[2])):
        assert list(actual) == list(known)
        for name, tensor in actual.items():
            torch.testing.assert_close(
                tensor,
                known[name],
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda m, n=name: f"{n} {m}",
            )


@pytest.mark.parametrize(
    "name",
    [
        "native",
        pytest.param("GPT2LMHeadModel", marks=pytest.mark.long),
        pytest.param("Gemma", marks=pytest.mark.long),
        pytest.param("BartForConditionalGeneration", marks=pytest.mark.long),
    ],
)
def test_tied_weights_train_as_one(name: str) -> None:
    if name != "native":
        pytest.importorskip("transformers")
    run_ranks(2, check_training, name)


def check_sums(form: str) -> None:
    """A second batch finds the gradients of the first, and adds its own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    alone, model = native().double(), cp_inductor.distribute(native().double(), mesh)
    run = compiled(model, form, fullgraph=True)
    for batch in (make_batch(seed=2), make_batch(seed=3)):
        loss_of(alone, batch).backward()
        loss_of(run, tuple(distribute_tensor(t, mesh, [Shard(1)]) for t in batch)).backward()
    assert model.head.weight is model.tokens.weight
    expected = grads_of(alone)
    for name, grad in grads_of(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.slow)])
def test_gradients_add_up(form: str) -> None:
    run_ranks(2, check_sums, form)


def some_ids(mesh: DeviceMesh) -> DTensor:
    """Return (1, 4) ids, sharded; not scattered, which a fake group does not do."""
    return DTensor.from_local(torch.zeros(1, 2, dtype=torch.long), mesh, [Shard(1)])


class Tied(nn.Module):
    """An embedding and a head of one weight, and whatever else there is in models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.again = self.middle  # one module in two places
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("angles", torch.ones(8), persistent=False)
        self.register_buffer("same_angles", self.angles)
        self.register_buffer("nothing", None)
        self.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.scale.is_special = True

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.middle(self.embedding(ids))) * self.angles)


def test_what_is_one_stays_one(mesh: DeviceMesh) -> None:
    model = Tied()
    calls: list[str] = []
    model.head.register_forward_pre_hook(lambda module, args: calls.append("called"))
    names = [[name for name, _ in model.named_parameters()], list(model.state_dict())]
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert cp_inductor.distribute(model, mesh) is model
    assert model.head.weight is model.embedding.weight
    assert model.again is model.middle
    assert model.angles is model.same_angles
    assert [[name for name, _ in model.named_parameters()], list(model.state_dict())] == names
    for tensor in (*model.parameters(), *model.buffers()):
        assert isinstance(tensor, DTensor)
        assert tensor.placements == (Replicate(),)
        assert tensor.is_leaf
    assert isinstance(model.embedding.weight, nn.Parameter)
    assert not model.scale.requires_grad and model.scale.is_special
    assert all(p.requires_grad for p in model.parameters() if p is not model.scale)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to_local(), values[name])
    model(some_ids(mesh))
    assert calls == ["called"]


def test_a_second_call_does_nothing(mesh: DeviceMesh) -> None:
    model = cp_inductor.distribute(Tied(), mesh)
    before = [id(tensor) for tensor in model.parameters()]
    cp_inductor.distribute(model, mesh)
    assert [id(tensor) for tensor in model.parameters()] == before
    model.head = nn.Linear(8, 5)  # what is new is distributed, too
    cp_inductor.distribute(model, mesh)
    assert all(isinstance(tensor, DTensor) for tensor in model.parameters())


def test_state_goes_in_and_out(mesh: DeviceMesh) -> None:
    model = cp_inductor.distribute(Tied(), mesh)
    state = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(model.head.weight.to_local(), state["embedding.weight"].to_local())
    assert model.head.weight is model.embedding.weight


def test_gradients_that_there_are_come_along(mesh: DeviceMesh) -> None:
    model = Tied()
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    grad = model.embedding.weight.grad.clone()
    cp_inductor.distribute(model, mesh)
    assert torch.equal(model.head.weight.grad.to_local(), grad)


def test_a_model_on_meta_stays_there(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Tied()
    cp_inductor.distribute(model, mesh)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.to_local().is_meta


def test_meshes_of_two_axes() -> None:
    with fake_rank(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = cp_inductor.distribute(Tied(), mesh)
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.placements == (Replicate(), Replicate())
        with pytest.raises(UnsupportedPlacement, match=r"expected a tensor on the mesh \('cp',\)"):
            cp_inductor.distribute(model, mesh["cp"])


def test_hugging_face_ties_again(mesh: DeviceMesh) -> None:
    pytest.importorskip("transformers")
    model = cp_inductor.distribute(make("GPT2LMHeadModel"), mesh)
    num_parameters = len(list(model.parameters()))
    model.tie_weights()
    assert len(list(model.parameters())) == num_parameters
    assert model.lm_head.weight is model.transformer.wte.weight


class Values(nn.Parameter):
    pass


def hooked() -> Tied:
    model = Tied()
    model.middle.weight.register_hook(lambda grad: None)
    return model


def hooked_behind() -> Tied:
    model = Tied()
    model.middle.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def with_class() -> Tied:
    model = Tied()
    model.middle.weight = Values(torch.zeros(8, 8))
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (hooked, "middle.weight: expected a tensor without hooks"),
        (hooked_behind, "middle.weight: expected a tensor without hooks"),
        (with_class, "middle.weight: expected a plain tensor, got a Values"),
        (lazy, "0.weight: expected a plain tensor, got a UninitializedParameter"),
        (lambda: torch.zeros(3), "expected an nn.Module and a DeviceMesh, got a Tensor"),
    ],
)
def test_refusals(mesh: DeviceMesh, make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UnsupportedPlacement, match=words):
        cp_inductor.distribute(make(), mesh)


@pytest.mark.parametrize("name", ["tokenwise", "recurrent", "whole"])
def test_names_that_nothing_follows_are_refused(mesh: DeviceMesh, name: str) -> None:
    for given in (["Linear"], nn.Linear, "Linear", [nn.Linear(2, 2)], 3):
        with pytest.raises(InvalidArgument, match=rf"{name}=\): expected a list of classes"):
            cp_inductor.distribute(Tied(), mesh, **{name: given})
    with pytest.raises(InvalidArgument, match=r"conv\.Conv1d, of which it has none; .* Linear"):
        cp_inductor.distribute(Tied(), mesh, **{name: [nn.Conv1d]})


def test_a_model_that_ddp_wraps_is_refused(mesh: DeviceMesh) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(UnsupportedPlacement, match="DistributedDataParallel, which holds"):
        cp_inductor.distribute(model, mesh)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_views_of_a_parameter_are_refused(mesh: DeviceMesh, is_buffer: bool) -> None:
    model = nn.Linear(4, 6, bias=False)
    if is_buffer:
        model.register_buffer("rows", model.weight.detach()[2:])
    else:
        model.rows = nn.Parameter(model.weight.detach()[2:])
    with pytest.raises(UntiedWeights, match=r"weight and rows: .* got two tensors that share"):
        cp_inductor.distribute(model, mesh)


def test_parts_of_one_memory_are_not_views(mesh: DeviceMesh) -> None:
    together = torch.arange(24.0).reshape(4, 6)
    model = nn.ParameterList([together[:, :2], together[:, 2:]])
    cp_inductor.distribute(model, mesh)
    assert torch.equal(model[1].to_local(), torch.arange(24.0).reshape(4, 6)[:, 2:])


def test_strides_are_those_of_the_copy(mesh: DeviceMesh) -> None:
    model = nn.ParameterList([torch.arange(6.0).reshape(2, 3).t()])
    (weight,) = cp_inductor.distribute(model, mesh).parameters()
    assert weight.stride() == weight.to_local().stride() == (2, 1)
    assert torch.equal(weight.to_local(), torch.arange(6.0).reshape(2, 3).t())


def test_which_tensors_share_elements() -> None:
    base = torch.zeros(6, 4)
    assert share_elements(base[:, ::2], base[:, 2:])
    assert not share_elements(base[:, ::2], base[:, 1::2])
    assert not share_elements(base[:3], base[3:])
    assert share_elements(base, base.view(torch.int16)[:1])


# --- Seen by a compile ------------------------------------------------------------------------


def compiled_step(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compile, and run as far as one rank alone can."""
    torch.compile(model, backend="cp_aot_eager", fullgraph=True)(some_ids(mesh))


def untied() -> Tied:
    model = Tied()
    # Meant: an embedding that starts as the head does, and is trained for itself.
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model


def test_what_distribute_module_unties_is_refused(mesh: DeviceMesh) -> None:
    model = distribute_module(Tied(), mesh)
    with pytest.raises(UntiedWeights, match=r"embedding.weight and head.weight: .* one parameter"):
        compiled_step(model, mesh)
    with pytest.raises(UntiedWeights, match="they were one parameter before distribute_module"):
        cp_inductor.distribute(model, mesh)


def test_no_gradient_no_refusal(mesh: DeviceMesh) -> None:
    model = distribute_module(Tied(), mesh)
    with torch.no_grad():
        compiled_step(model, mesh)
    compiled_step(model.requires_grad_(False), mesh)


def test_one_memory_of_another_shape_is_refused(mesh: DeviceMesh) -> None:
    """Also where no embedding is among them, and none of the values is known."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.down.weight = self.up.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.down(self.up(ids.unsqueeze(-1) * torch.ones(8)).relu())

    model = distribute_module(Twice(), mesh)
    with implicit_replication(), pytest.raises(UntiedWeights, match=r"up.weight and down.weight"):
        compiled_step(model, mesh)


@pytest.mark.parametrize("distribute", [distribute_module, cp_inductor.distribute])
def test_a_copy_that_was_meant_gets_a_warning(
    first_mesh: DeviceMesh, distribute: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    ties._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "cp_inductor"):
        compiled_step(distribute(untied(), first_mesh), first_mesh)
    (said,) = [record.message for record in caplog.records if "UntiedWeights" in record.message]
    assert "embedding.weight and head.weight are two parameters of equal values" in said


def test_no_false_alarm(first_mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    ties._warn.cache_clear()
    zeros, apart, layers = untied(), untied(), Tied()
    nn.init.zeros_(zeros.embedding.weight)
    nn.init.zeros_(zeros.head.weight)
    with torch.no_grad():
        apart.head.weight[-1, -1] += 1
    # As experts are made of a dense layer.
    layers.again = nn.Linear(8, 8)
    layers.again.load_state_dict(layers.middle.state_dict())
    with caplog.at_level(logging.WARNING, "cp_inductor"):
        for model in (zeros, apart, layers):
            compiled_step(cp_inductor.distribute(model, first_mesh), first_mesh)
    assert "UntiedWeights" not in caplog.text
