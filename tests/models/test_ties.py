"""DTensor weights that were one parameter, and that torch's distribute_module has made two."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor import UntiedWeights
from cp_inductor.modules import ties


class Tied(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.middle(self.embedding(ids))))


def compiled_step(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compile, and run as far as one rank alone can."""
    # Not scattered, which a fake group does not do.
    ids = DTensor.from_local(torch.zeros(1, 2, dtype=torch.long), mesh, [Shard(1)])
    torch.compile(model, backend="cp_aot_eager", fullgraph=True)(ids)


def untied() -> Tied:
    model = Tied()
    # Meant: an embedding that starts as the head does, and is trained for itself.
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model


def test_what_distribute_module_unties_is_refused(mesh: DeviceMesh) -> None:
    model = distribute_module(Tied(), mesh)
    with pytest.raises(UntiedWeights, match=r"embedding.weight and head.weight: .* one parameter"):
        compiled_step(model, mesh)
    with torch.no_grad():  # where no gradient is lost
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


def test_a_copy_that_was_meant_gets_a_warning(
    first_mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    ties._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "cp_inductor"):
        compiled_step(distribute_module(untied(), first_mesh), first_mesh)
    (said,) = [record.message for record in caplog.records if "UntiedWeights" in record.message]
    assert "embedding.weight and head.weight are two parameters of equal values" in said


def test_no_false_alarm(first_mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    ties._warn.cache_clear()
    zeros, apart, layers = untied(), untied(), untied()
    nn.init.zeros_(zeros.embedding.weight)
    nn.init.zeros_(zeros.head.weight)
    with torch.no_grad():
        apart.head.weight[-1, -1] += 1
        layers.head.weight[-1, -1] += 1
    # As experts are made of a dense layer.
    layers.again = nn.Linear(8, 8)
    layers.again.load_state_dict(layers.middle.state_dict())
    with caplog.at_level(logging.WARNING, "cp_inductor"):
        for model in (zeros, apart, layers):
            compiled_step(distribute_module(model, first_mesh), first_mesh)
    assert "UntiedWeights" not in caplog.text
