"""Attentions whose GPU programs are rehearsed: functions, for processes, and a table.

A row is a job of the rehearsal: some attentions that share a plan's options, in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.rehearsal.rank import Job
from tests.support.graphs import attend_causal
from tests.support.packed import in_documents as packed
from tests.support.packed import in_window
from tests.support.packed import under_alibi as alibi

BF16, FP32 = torch.bfloat16, torch.float32


def causal(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
    return attend_causal(query, key, value)


def full(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, scale=0.3)


def capped(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
    """flex_attention with a soft cap, causal."""

    def is_allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 3 * torch.tanh(score / 3)

    sizes = None, None, query.shape[2], key.shape[2]
    mask = create_block_mask(is_allowed, *sizes, device=query.device)
    out: Any = flex_attention(query, key, value, score_mod=cap, block_mask=mask, enable_gqa=True)
    return out


def checkpointed(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
    out: Any = checkpoint(_doubled, query, key, value, use_reentrant=False)
    return out


def _doubled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal(torch.sin(query), key, value) * 2


class Several(nn.Module):
    """Some attentions, each over its own tokens."""

    def __init__(self, functions: Sequence[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.functions = tuple(functions)

    def forward(self, calls: Sequence[Sequence[Tensor]], documents: Tensor) -> list[Tensor]:
        return [
            function(*call, documents) for function, call in zip(self.functions, calls, strict=True)
        ]


@dataclass(frozen=True)
class Row:
    """A job.

    Attributes:
        name: of the row.
        functions: attentions, which share all else.
        keys: how many, unless as many as queries: `length`.
        documents: their lengths.
        grad: whether it has a backward.
        long: whether a cheaper row covers it as well.
        bound: how far off a half type may be, in errors of one process. Beyond 1.5 where gradients
            of several tiles or heads are rounded before they are added.
    """

    name: str
    functions: tuple[Callable[..., Tensor], ...]
    world_size: int
    dtype: torch.dtype = FP32
    options: Mapping[str, Any] = field(default_factory=dict)
    length: int = 64
    keys: int | None = None
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    documents: tuple[int, ...] = ()
    grad: bool = True
    long: bool = False
    bound: float = 1.5

    def job(self) -> Job:
        return Job(Several(self.functions), self, {}, self.world_size, options=self.options)

    def __call__(self, mesh: DeviceMesh) -> tuple[Any, ...]:
        """Return a call's arguments for a mesh: the same numbers in every world."""
        generator = torch.Generator().manual_seed(5)
        keys = self.kv_heads, self.keys or self.length
        calls = []
        for _ in self.functions:
            call = []
            for heads, length in ((self.heads, self.length), keys, keys):
                shape = (1, heads, length, self.head_dim)
                whole = torch.randn(shape, generator=generator).to(self.dtype)
                call.append(distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_(self.grad))
            calls.append(tuple(call))
        documents = torch.tensor(self.documents or (self.length,))
        numbers = torch.arange(len(documents)).repeat_interleave(documents)
        return tuple(calls), distribute_tensor(numbers[None], mesh, [Replicate()])


def by(strategy: str, **options: Any) -> dict[str, Any]:
    return {"strategy": strategy, **options}


STATIC, BY_BATCH = {"plan": "static"}, {"plan": "runtime"}
THREE = (9, 31, 24)
BOTH = (causal, full)
window = partial(in_window, window=20)
MASKS = (window, packed, alibi, capped)
ROWS = (
    # Some configurations a row. A row takes 3 to 7 CPU seconds, one planned by the batch 25.
    Row("ring, fp32, uneven, GQA", BOTH, 2, FP32, by("ring"), 65, kv_heads=2, grad=False),
    Row("allgather, bf16, uneven", BOTH, 2, BF16, by("allgather"), 63, grad=False),
    Row("allgather, fp32", BOTH, 2, FP32, by("allgather")),
    Row("rows, bf16, GQA", BOTH, 2, BF16, by("rows"), kv_heads=1, grad=False),
    Row("rows, fp32", (causal,), 2, FP32, by("rows"), 50),
    Row("blocks, bf16, stages", BOTH, 2, BF16, by("blocks", stages=2), grad=False),
    Row("blocks, fp32, uneven, GQA", (causal,), 3, FP32, by("blocks"), 77, kv_heads=2),
    Row("heads, bf16", BOTH, 2, BF16, by("heads"), grad=False),
    Row("heads, fp32, uneven, GQA", (causal,), 2, FP32, by("heads"), 37, kv_heads=2),
    Row("heads_own, bf16", BOTH, 2, BF16, by("heads_own"), grad=False),
    Row("auto, odd head dim, fp32", BOTH, 2, FP32, {}, head_dim=12, grad=False),
    Row("cross-attention, bf16", (full,), 2, BF16, {}, 40, keys=72),
    Row("cross-attention, fp32, uneven", (full,), 2, FP32, {}, 33, keys=51, grad=False),
    Row("checkpoint, bf16", (checkpointed,), 2, BF16, by("ring")),
    Row("window, bf16, GQA", (window,), 2, BF16, STATIC, kv_heads=2),
    Row("documents, by batch, bf16", (packed,), 2, BF16, BY_BATCH, documents=THREE, grad=False),
    Row("3 ranks, ring, fp16", BOTH, 3, torch.float16, by("ring"), 70, grad=False),
    # Long cases: backwards of the above, more ranks, and what takes minutes.
    Row("blocks, fp16", BOTH, 2, torch.float16, by("blocks"), grad=False, long=True),
    Row("auto, odd head dim, bf16", BOTH, 2, BF16, {}, head_dim=20, long=True),
    Row("masks, static, fp32", MASKS, 2, FP32, STATIC, documents=THREE, grad=False, long=True),
    Row("4 ranks, bf16", BOTH, 4, BF16, {}, grad=False, long=True),
    Row("ring, fp32, backward", BOTH, 2, FP32, by("ring"), 65, kv_heads=2, long=True),
    Row("rows, bf16, backward", BOTH, 2, BF16, by("rows"), kv_heads=1, long=True),
    Row("blocks, bf16, backward", BOTH, 2, BF16, by("blocks", stages=2), long=True),
    Row("heads_own, bf16, backward", BOTH, 2, BF16, by("heads_own"), long=True),
    Row("heads_own_forward, backward", BOTH, 2, FP32, by("heads_own_forward"), 49, long=True),
    Row("documents, by batch, backward", (packed,), 2, BF16, BY_BATCH, documents=THREE, long=True),
    Row("documents, static, backward", (packed,), 2, FP32, STATIC, documents=THREE, long=True),
    Row("alibi, fp32, backward", (alibi,), 2, FP32, STATIC, long=True),
    Row("score_mod, bf16, backward", (capped,), 2, BF16, STATIC, long=True),
    Row("8 ranks, bf16", (causal,), 8, BF16, {}, 128, long=True),
    Row("8 ranks, ring, fp32", BOTH, 8, FP32, by("ring"), 130, long=True),
    Row("8 ranks, documents", (packed,), 8, FP32, STATIC, documents=THREE, long=True),
    Row("4 ranks, blocks, fp32", BOTH, 4, FP32, by("blocks"), 129, long=True),
    Row("4 ranks, heads, bf16", BOTH, 4, BF16, by("heads"), kv_heads=2, long=True, bound=2.0),
    Row("2 nodes of 2", (causal,), 4, BF16, by("nodes2+blocks"), kv_heads=2, long=True, bound=2.0),
    Row("3 ranks, by batch", (packed,), 3, FP32, BY_BATCH, documents=THREE, long=True),
)
