"""Scalars that a compiled graph returns: the whole of them, so that `item()` can be logged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.ranks import on_ranks, world_mesh


def losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total / 7, F.cross_entropy(logits, labels), logits.detach().sum(), logits * 2


@on_ranks(2)
def test_item_is_whole() -> None:
    mesh = world_mesh()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (7,), generator=generator)
    labels[4:] = -100
    expected_leaf = logits.clone().requires_grad_()
    expected = losses(expected_leaf, labels)
    (3 * expected[0] + expected[1]).backward()

    leaf = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    compiled = torch.compile(losses, backend="cp_aot_eager", fullgraph=True)
    found = compiled(leaf, distribute_tensor(labels, mesh, [Shard(0)]))
    for actual, wanted in zip(found[:3], expected[:3], strict=True):
        assert abs(actual.item() - wanted.item()) < 1e-12
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(actual.full_tensor(), wanted)  # and not twice the sum
    assert found[3].placements == (Shard(0),)
    (3 * found[0] + found[1]).backward()
    assert isinstance(leaf.grad, DTensor) and expected_leaf.grad is not None
    torch.testing.assert_close(leaf.grad.full_tensor(), expected_leaf.grad)
