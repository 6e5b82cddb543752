"""What the ranks of a rehearsal need, imported once, before they are forked.

A process that has threads or a process group cannot be forked safely: nothing here leaves any.
"""

# ruff: noqa: F401 - what is imported here is used by the ranks

from __future__ import annotations

import sys

import torch
import torch._inductor.codegen.triton
import torch._inductor.codegen.wrapper
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch._inductor.kernel.flex.flex_attention
import torch._inductor.runtime.triton_heuristics
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

import tests.rehearsal.rank
from cp_inductor.inspect.cross_compile import cross_compile


def fill_caches() -> None:
    """Compile a causal attention and one under a mask, for a rank that does not exist."""
    if "tqdm" in sys.modules:  # whose bars, which torch's compiler has, start a thread
        sys.modules["tqdm"].tqdm.monitor_interval = 0
    for attend in (_causal, _window):
        shape = torch.empty(1, 2, 96, 16, device="meta", requires_grad=True)
        cross_compile(attend, (shape,) * 3, world_size=2, rank=1, placements=[Shard(2)])


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    place = torch.arange(query.shape[2], device=query.device)
    mask = (place[:, None] >= place) & (place[:, None] - place < 40)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
