"""Writes in place that reach other names on one process: right here as well, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_inductor import CPError, parallelize
from tests.support.ranks import on_ranks, world_mesh

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
