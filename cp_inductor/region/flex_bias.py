"""Compute what a score_mod adds to the scores of a rank's queries, as a tensor.

    score_mod:   s + table[h, bucket(q - k)]          table requires a gradient
      =>
    bias = bias_of_scores(score_mod, query, first query, number of keys, ..., table)

The user's own function is called on a score of 0. So every op in it has torch's own gradient. The
function must only add to the score, so that the result does not depend on the score.

Each rank computes the rows of its queries, for its batch entries and heads. Its gradient of a
captured tensor is a part of the sum over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_inductor.dtensor.axis import first_batch_and_head
from cp_inductor.dtensor.wrap import wrap_whole
from cp_inductor.torch_private.flex import bias_at


def reads_batch_and_head(score_mod: fx.GraphModule) -> tuple[bool, bool]:
    """Return whether a score_mod in a Dynamo graph reads the index of a batch entry, of a head."""
    _, batch, head, *_ = score_mod.graph.find_nodes(op="placeholder")
    return bool(batch.users), bool(head.users)


def bias_of_scores(
    score_mod: Any,
    query: Tensor,
    placed: Tensor,
    first_query: int,
    num_keys: int,
    of_batch: bool,
    of_head: bool,
    *captured: Any,
) -> Tensor:
    """Return what a score_mod adds to the scores of this rank's queries.

    Args:
        score_mod: (score, b, h, q, k, *captured) -> score + bias, of scalar tensors.
        query: (B, H, S, D), this rank's shard.
        placed: the DTensor that knows which batch entries and heads these are; over plain shards,
            the query.
        first_query: its position in the whole sequence.
        num_keys: T, of the whole sequence.
        of_batch, of_head: whether the score_mod reads the index of a batch entry, or of a head.
        captured: what it has captured: numbers, DTensors, and tensors that all ranks have alike.

    Returns:
        (B | 1, H | 1, S, T) in float32 (float64 for float64).
    """
    # Torch's types know no sum of a SymInt and a tensor.
    first: Any = first_batch_and_head(placed)
    first_batch, first_head = first
    device = query.device
    indices = [
        first_batch + torch.arange(query.shape[0] if of_batch else 1, device=device),
        first_head + torch.arange(query.shape[1] if of_head else 1, device=device),
        first_query + torch.arange(query.shape[2], device=device),
        torch.arange(num_keys, device=device),
    ]
    dtype = torch.promote_types(query.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=device)
    values = [_whole(it, placed, dtype) if isinstance(it, Tensor) else it for it in captured]
    return bias_at(score_mod, zero, indices, values).to(dtype)


def _whole(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a whole tensor, whose gradient is summed over the ranks that read other rows of it.

    Half precision is widened, in which the bias, and sums of gradients, would be rounded.
    """
    if isinstance(like, DTensor):
        mesh = like.device_mesh
        if not isinstance(tensor, DTensor):
            tensor = wrap_whole(tensor, mesh)
        parts = [Partial() if isinstance(p, Shard) else Replicate() for p in like.placements]
        whole = tensor.redistribute(mesh, [Replicate()] * mesh.ndim)
        tensor = whole.to_local(grad_placements=parts)
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize
    return tensor.to(dtype) if is_narrow else tensor
