"""Gradients of plain weights over DTensors are whole; of shards see `test_reduce_gradients.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.support.ranks import run_ranks, world_mesh


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.project(x), x, x, is_causal=True)


def train_plain_weights(backend: str) -> None:
    """Weights that nobody distributed, over DTensors: two compiles, two steps of an optimizer."""
    mesh = world_mesh()
    model, reference = Block().double(), Block().double()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, reference)]
    for _ in range(2):
        reference(x).square().mean().backward()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with implicit_replication():
            for _ in range(2):  # accumulated
                loss = compiled(distribute_tensor(x, mesh, [Shard(2)])).square().mean()
                (loss / 2).backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert type(parameter.grad) is Tensor
            torch.testing.assert_close(parameter.grad, expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # so that the next compile sees gradients


@pytest.mark.parametrize(
    "backend", ["cp_aot_eager", pytest.param("cp_inductor", marks=pytest.mark.long)]
)
def test_plain_weights_beside_dtensors(backend: str) -> None:
    run_ranks(3, train_plain_weights, backend)
