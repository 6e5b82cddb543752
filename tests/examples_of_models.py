"""Functions that command lines name, as a user would write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    local = query.new_zeros(query.shape[2], query.shape[2])
    return F.scaled_dot_product_attention(out, key, value, attn_mask=local)


def plain() -> Any:
    """A causal attention over this rank's shards."""
    shape = torch.empty(1, 4, 64, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return attend, (shape, shape, shape)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def distributed(mesh: DeviceMesh) -> Any:
    """A whole sequence, distributed over the mesh it is given."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 4, 256, 32, generator=generator).bfloat16()
    shards = [distribute_tensor(whole, mesh, [Shard(2)]) for _ in range(3)]
    return attend, shards, {}, {"strategy": "allgather"}


def refused() -> Any:
    return mixed, plain()[1]
