"""Attention in packed documents, models that attend so, and batches of documents."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.support.models import make

MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "qwen3": ("Qwen3", {}),
}


def make_model(name: str, layers: int = 2) -> nn.Module:
    pytest.importorskip("transformers")
    model, sizes = MODELS[name]
    sizes = {**sizes, "num_hidden_layers": layers, "max_position_embeddings": 512}
    return make(model, **sizes).double()


def make_batch(step: int, length: int) -> dict[str, Tensor]:
    """Return packed documents, whose lengths are others in every step."""
    draw = random.Random(step)
    positions: list[int] = []
    while len(positions) < length:
        positions += range(min(draw.choice((1, 7, 50, 150)), length - len(positions)))
    tokens = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(step))
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "position_ids": torch.tensor([positions]),
    }


def in_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    place = torch.arange(query.shape[2], device=query.device)
    mask = (place[:, None] >= place) & (documents[:, None, :, None] == documents[:, None, None])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def draw_documents(length: int) -> Tensor:
    return (torch.rand(1, length) < 0.1).cumsum(-1)


def largest_error(compiled: Callable[..., Tensor], mesh: DeviceMesh, documents: Tensor) -> float:
    """Return how far output and gradients are from those of one process, in float64."""
    length = documents.shape[1]
    whole = [torch.randn(1, 2, length, 8).double() for _ in range(4)]
    leaves = [one.clone().requires_grad_() for one in whole[:3]]
    expected = in_documents(*leaves, documents)
    expected.backward(whole[3])
    *shards, grad_out = (distribute_tensor(one, mesh, [Shard(2)]) for one in whole)
    for one in shards:
        one.requires_grad_()
    table = distribute_tensor(documents, mesh, [Shard(1)])
    with implicit_replication():
        out = compiled(*shards, table)
    out.backward(grad_out)
    pairs = [
        (out, expected),
        *((one.grad, leaf.grad) for one, leaf in zip(shards, leaves, strict=True)),
    ]
    return max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)
