"""Labels and scales that every rank has whole, in graphs whose plans the batch decides."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from tests.support.packed import in_documents
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import full, on_mesh, with_grads


def loss_of(
    documents: Tensor, labels: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor
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
    one = torch.ones((), dtype=torch.float64)
    for step in range(2):
        torch.manual_seed(step)
        tokens = [torch.randn(1, n, LENGTH, 8, dtype=torch.float64) for n in (4, 2, 2)]
        documents = torch.randint(0, 2, (1, LENGTH)).cumsum(-1)
        labels = torch.randint(0, 32, (1, LENGTH))
        scale = torch.randn(1, LENGTH, 1, dtype=torch.float64)
        expected = with_grads(partial(loss_of, documents, labels), (*tokens, scale, one))
        given = [*on_mesh(tokens, mesh, Shard(2)), *on_mesh([scale], mesh, Replicate())]
        with implicit_replication():
            found = with_grads(partial(compiled, documents, labels), (*given, one))
        for result, right in zip(found, expected, strict=True):
            assert (full(result) - right).abs().max() < 1e-12
