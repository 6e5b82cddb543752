"""Attention in packed documents, models that attend so, and batches of documents."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.support.models import make
from tests.support.reference import full, on_mesh, with_grads

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


def shards_of(batch: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    return {name: distribute_tensor(tensor, mesh, [Shard(1)]) for name, tensor in batch.items()}


def train_step(
    compiled: Any,
    reference: nn.Module,
    batch: dict[str, Tensor],
    shards: dict[str, DTensor],
    close: Callable[[Tensor, Tensor], None],
) -> Any:
    """Differentiate a model over shards and another on one process; hold loss and gradients."""
    expected = reference(**batch, use_cache=False)
    expected.loss.backward()
    with implicit_replication():
        result = compiled(**shards, use_cache=False)
        result.loss.backward()
    torch.testing.assert_close(full(result.loss), expected.loss, rtol=1e-6, atol=0)
    for p, q in zip(compiled.parameters(), reference.parameters(), strict=True):
        close(full(p.grad), q.grad)
        p.grad = q.grad = None
    return result


def in_documents(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    place = torch.arange(query.shape[2], device=query.device)
    mask = (place[:, None] >= place) & (documents[:, None, :, None] == documents[:, None, None])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def in_window(query: Tensor, key: Tensor, value: Tensor, *_: Tensor, window: int) -> Tensor:
    """Attend causally, to so many keys at the most."""
    place = torch.arange(query.shape[2], device=query.device)
    mask = (place[:, None] >= place) & (place[:, None] - place < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def under_alibi(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
    """Attend causally under an additive bias, with -inf where there is no pair."""
    place = torch.arange(query.shape[2], device=query.device)
    slopes = torch.exp2(-torch.arange(1.0, query.shape[1] + 1, device=query.device))
    distance = (place - place[:, None]).to(query.dtype)
    bias = slopes[:, None, None].to(query.dtype) * distance
    bias = bias.masked_fill(place[:, None] < place, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


def draw_documents(length: int) -> Tensor:
    return (torch.rand(1, length) < 0.1).cumsum(-1)


def packed_on_meta(
    mesh: DeviceMesh,
    tokens: int,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (4, 2),
    has_whole_documents: bool = False,
) -> list[Tensor]:
    """Return query, key, value and documents without numbers, of so many tokens on each rank."""
    length, like = tokens * mesh.size(), {"dtype": torch.bfloat16, "device": "meta"}
    shapes = [(batch, number, length, 64) for number in (heads[0], heads[1], heads[1])]
    whole = [torch.empty(shape, requires_grad=True, **like) for shape in shapes]
    documents = torch.empty(batch, length, dtype=torch.int64, device="meta")
    placed = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in whole]
    where = Replicate() if has_whole_documents else Shard(1)
    return [*placed, distribute_tensor(documents, mesh, [where])]


def difference(
    function: Callable[..., Tensor],
    compiled: Callable[..., Tensor],
    whole: Sequence[Tensor],
    tables: Sequence[Tensor],
    mesh: DeviceMesh,
    placements: Sequence[Placement] = (Shard(2),),
    of_tables: Sequence[Placement] = (Shard(1),),
    *,
    is_dynamic: bool = False,
) -> float:
    """Return how far output and gradients over a mesh are from those on one process.

    Args:
        function: of query, key, value and tables, for one process.
        compiled: the same for DTensors.
        whole: query, key, value, and the gradient of the output.
        tables: such as the documents of all tokens, (B, S).
        mesh: that all of these are put on.
        placements: of query, key, value and output.
        of_tables: the placements of tables.
        is_dynamic: whether Dynamo is told that lengths change.
    """
    expected = with_grads(lambda *qkv: function(*qkv, *tables), whole)
    placed = on_mesh(tables, mesh, *of_tables)

    def run(*qkv: Tensor) -> Tensor:
        for dim, tensors in ((2, qkv), (1, placed)):
            for one in tensors if is_dynamic else ():
                torch._dynamo.maybe_mark_dynamic(one, dim)
        out = compiled(*qkv, *placed)
        assert isinstance(out, DTensor) and list(out.placements) == list(placements)
        return out

    with implicit_replication():
        found = with_grads(run, on_mesh(whole, mesh, *placements))
    pairs = zip(found, expected, strict=True)
    return max(float((full(one) - other).abs().max()) for one, other in pairs)


def largest_error(compiled: Callable[..., Tensor], mesh: DeviceMesh, documents: Tensor) -> float:
    """Return how far compiled attention in documents is from that of one process, in float64."""
    whole = [torch.randn(1, 2, documents.shape[1], 8).double() for _ in range(4)]
    return difference(in_documents, compiled, whole, [documents], mesh)
