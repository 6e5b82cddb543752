"""Eager attention over DTensors: under masks, and placed otherwise than each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import assert_all_close, make_qkv, on_mesh, with_grads

BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 3, 12, 13, 11, 8
TOKENS, WHOLE = Shard(2), Replicate()


def inputs(num_kv_heads: int) -> tuple[Tensor, ...]:
    sizes = {"batch": BATCH, "num_heads": HEADS, "head_dim": HEAD_DIM, "kv_len": KEYS}
    return make_qkv(QUERIES, num_kv_heads=num_kv_heads, dtype=torch.float64, **sizes)


def check(
    shards: Sequence[Tensor], whole: Sequence[Tensor], mask: Tensor | None, own: Tensor | None
) -> None:
    """Compare an attention of DTensors with one of the whole tensors, forward and backward."""
    attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    expected = with_grads(partial(attend, attn_mask=mask), whole)
    with implicit_replication():
        out, *grads = with_grads(partial(attend, attn_mask=own), shards)
    assert isinstance(out, DTensor)
    assert_all_close((out, *grads), expected, torch.float64)
    for grad, shard in zip(grads, shards, strict=False):
        assert isinstance(grad, DTensor) and isinstance(shard, DTensor)
        assert grad.placements == shard.placements


@pytest.mark.slow
@on_ranks(3)
def test_masks() -> None:
    mesh = world_mesh()
    cp_inductor.parallelize(nn.Linear(1, 1), mesh)
    whole = inputs(HEADS)
    generator = torch.Generator().manual_seed(2)
    pairs = torch.rand(QUERIES, KEYS, generator=generator) < 0.6
    pairs[:, 0] = True
    padding = torch.arange(KEYS) < torch.tensor([KEYS, 4, 7])[:, None, None, None]
    bias = torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=generator, dtype=torch.float64)
    # DTensor itself has no rule for the CPU's kernel under a mask, of whole sequences neither.
    for tokens, (mask, placement) in product(
        (TOKENS, Shard(0), Shard(1), WHOLE),
        (
            (pairs, Shard(0)),
            (pairs, WHOLE),
            (pairs, None),
            (padding, Shard(3)),
            (bias, Shard(1)),
            (bias[:1, :1], None),
        ),
    ):
        shards = on_mesh(whole, mesh, tokens)
        own = mask if placement is None else distribute_tensor(mask, mesh, [placement])
        check(shards, whole, mask, own)


@pytest.mark.slow
@on_ranks(4)
def test_placements_that_differ_and_heads_that_do_not_divide() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "cp"))
    cp_inductor.parallelize(nn.Linear(1, 1), mesh)
    heads, batch = Shard(1), Shard(0)
    rows: list[tuple[int, list[list[Placement]]]] = [
        (HEADS, [[WHOLE, WHOLE], [WHOLE, TOKENS], [batch, TOKENS]]),
        (HEADS, [[batch, TOKENS], [batch, WHOLE], [WHOLE, heads]]),
        # 3 key heads do not divide by 2 ranks: 6 query heads would meet 2 of them, 3 each.
        (3, [[heads, TOKENS]] * 3),
        (3, [[heads, WHOLE]] * 3),
    ]
    for num_kv_heads, placements in rows:
        whole = inputs(num_kv_heads)
        shards = [
            distribute_tensor(tensor, mesh, placed)
            for tensor, placed in zip(whole, (*placements, placements[0]), strict=True)
        ]
        for mask in (None, torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()):
            check(shards, whole, mask, mask)
