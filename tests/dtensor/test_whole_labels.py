"""Labels and scales that every rank has whole, in graphs whose plans the batch decides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.support.packed import in_documents
from tests.support.ranks import on_ranks, world_mesh


def loss_of(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, labels: Tensor, scale: Tensor
) -> Tensor:
    """A loss whose labels are whole, of logits that are scaled by position."""
    logits = in_documents(q, k, v, documents).transpose(1, 2).flatten(2)
    positions = torch.arange(logits.shape[1], dtype=logits.dtype, device=logits.device)
    logits = logits * scale + positions[None, :, None].cos()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


LENGTH = 47  # of which one rank has 24


@on_ranks(2)
def test_losses_and_gradients() -> None:
    """Two steps: the graph of the first serves the second."""
    mesh = world_mesh()
    compiled = torch.compile(loss_of, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    for step in range(2):
        torch.manual_seed(step)
        tokens = [torch.randn(1, n, LENGTH, 8, dtype=torch.float64) for n in (4, 2, 2)]
        documents = torch.randint(0, 2, (1, LENGTH)).cumsum(-1)
        labels = torch.randint(0, 32, (1, LENGTH))
        scale = torch.randn(1, LENGTH, 1, dtype=torch.float64)
        wholes = [t.clone().requires_grad_() for t in (*tokens, scale)]
        expected = loss_of(*wholes[:3], documents, labels, wholes[3])
        expected.backward()
        shards = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in tokens]
        replicated = distribute_tensor(scale, mesh, [Replicate()]).requires_grad_()
        with implicit_replication():
            loss: Any = compiled(*shards, documents, labels, replicated)
            loss.backward()
        results = [loss, *[t.grad for t in (*shards, replicated)]]
        gradients = [expected, *[t.grad for t in wholes]]
        for result, right in zip(results, gradients, strict=True):
            found = result.full_tensor() if isinstance(result, DTensor) else result
            assert (found - right).abs().max() < 1e-12
