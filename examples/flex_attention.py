"""A model that attends as torchtitan's do: a compiled flex_attention, and a BlockMask per batch.

    torchrun --standalone --nproc-per-node 2 examples/flex_attention.py

Documents are packed, and end with token 0. The wrapper and the masks are those of the unsharded
model: a mask_mod is a function of positions in the whole sequence, and the BlockMask is made of the
whole batch. Each step is compared with the unsharded model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

import cp_inductor

END = 0


class FlexAttention(nn.Module):
    """All layers share one compiled flex_attention."""

    compiled: ClassVar[Callable[..., Any]] = torch.compile(flex_attention)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        """Attend, (B, H, S, D)."""
        out: Tensor = FlexAttention.compiled(query, key, value, block_mask=mask, enable_gqa=True)
        return out


class Layer(nn.Module):
    """Attention with grouped queries, and an MLP."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.norm, self.norm_mlp = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.attention = FlexAttention()

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        """Return (B, S, D)."""
        y = self.norm(x)
        heads = [
            linear(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]
        x = x + self.out(self.attention(*heads, mask).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm_mlp(x))))


class Model(nn.Module):
    """A small decoder."""

    def __init__(self, vocabulary: int = 64, dim: int = 32, num_layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, 4, 2) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, mask: BlockMask) -> Tensor:
        """Return the mean loss."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether a key is not after the query."""
    return q >= k


def mask_of_documents(ids: Tensor) -> BlockMask:
    """Return the mask of a whole batch (B, S): causal within documents."""
    documents = (ids == END).cumsum(-1)

    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    batch, length = ids.shape
    return create_block_mask(
        and_masks(causal, within), batch, None, length, length, device=str(ids.device)
    )


def main() -> None:
    """Train for some steps, and compare each with the unsharded model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cp_inductor")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=75)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    whole, model = models[0], cp_inductor.parallelize(models[1], mesh)
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)
    reference = torch.compile(whole, backend="aot_eager", fullgraph=True, dynamic=False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (whole, model)]
    for step in range(args.steps):
        tokens = torch.randint(0, 64, (2, args.seq_len + 1))
        ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        mask = mask_of_documents(ids)
        # torch 2.13 refuses to differentiate flex_attention on the CPU, but for this.
        with cp_inductor.flex_gradients_on_cpu():
            expected = reference(ids, labels, mask)
            loss = compiled(ids, labels, mask)
            expected.backward()
            loss.backward()
        difference = abs(loss.item() / expected.item() - 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {expected.item():.4f}  relative difference {difference:.1e}")
    if dist.get_rank() == 0:
        rewritten = torch._dynamo.utils.counters["cp_inductor"]["sites_rewritten"]
        print(f"attentions rewritten {rewritten}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
