"""Which probabilities are dropped depends on where they are in the whole attention alone.

Every case is held against float64 attention on one process, under what one process drops.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor.dtensor.axis import first_batch_and_head
from tests.support.combinations import AOT, EAGER, compiled, make_mesh
from tests.support.random_attention import keep_of
from tests.support.ranks import fake_rank, on_ranks, run_ranks, world_mesh
from tests.support.reference import (
    assert_all_close,
    attend_with_grads,
    full,
    make_qkv,
    on_mesh,
    shard,
    with_grads,
)

DROPOUT_P = 0.3
LENGTH = 29


def drop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=DROPOUT_P, is_causal=True)


def check_against_one_process(tensors: Sequence[Tensor], whole: tuple[Tensor, ...]) -> None:
    """Hold out, dq, dk and dv against what one process drops after the same `manual_seed`."""
    torch.manual_seed(3)
    batch, num_heads, length, _ = whole[0].shape
    seed = int(torch.randint(0, 1 << 31, ()))
    keep = keep_of(seed, (batch, num_heads, length, length), DROPOUT_P)
    expected = attend_with_grads(*whole, is_causal=True, keep=keep)
    assert_all_close(tensors, expected, torch.float64)


def check_other_axis(form: str, batch: int, length: int, other: Placement, in_region: bool) -> None:
    """DTensors, over an axis for the batch or the heads, and one for the sequence.

    In a region DTensors shard the heads alone, and the region says that the sequence is sharded.
    """
    mesh = make_mesh(2, 2, names=("other", "cp"))
    whole = given = make_qkv(length, dtype=torch.float64, batch=batch)
    placements = (mesh, [other, Shard(2)])
    if in_region:
        given = tuple(shard(t, mesh["cp"].get_local_rank(), 2).contiguous() for t in whole)
        placements = (mesh["other"], [other])

    def run(*qkv: Tensor) -> Tensor:
        with cp_inductor.context_parallel(mesh["cp"]), implicit_replication():
            return compiled(drop, form, fullgraph=True)(*qkv)

    torch.manual_seed(3)
    found = with_grads(run, (distribute_tensor(t, *placements) for t in given))
    tensors = [full(tensor) for tensor in found]
    if in_region:
        tensors = cp_inductor.context_parallel_unshard(mesh["cp"], tensors, [2] * 4)
    check_against_one_process(tensors, whole)


# Batch, length, placement on the other axis, and whether a region has the sequence. Dynamo learns
# placements by the rules of DTensor for what SDPA consists of. They cannot flatten what is cut
# unevenly, nor batch and heads where heads are cut.
OTHER_AXES = {
    EAGER: (
        (3, LENGTH, Shard(0), False),
        (2, LENGTH, Shard(1), False),
        (2, LENGTH, Replicate(), False),
        (2, 28, Shard(1), True),
    ),
    AOT: ((4, 28, Shard(0), False), (1, 28, Shard(1), False), (2, 28, Shard(1), True)),
}


@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
def test_no_two_batch_entries_or_heads_drop_the_same(form: str) -> None:
    for case in OTHER_AXES[form]:
        run_ranks(4, check_other_axis, form, *case)


def test_where_shards_begin() -> None:
    """As DTensor cuts: two axes over one dim, the last ranks with less, or with nothing."""
    for rank in range(6):
        with fake_rank(rank, 6):
            mesh = make_mesh(2, 3, names=("dp", "more"))
            for batch in (1, 4, 5, 13):
                whole = torch.arange(batch)[:, None, None, None].expand(-1, 2, 3, 1)
                for placements in (
                    (Shard(0), Shard(0)),
                    (Shard(0), Shard(1)),
                    (Shard(2), Shard(0)),
                ):
                    # Every rank has the whole: nothing need be sent.
                    tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                    first, head = first_batch_and_head(tensor)
                    local = tensor.to_local()
                    assert not local.numel() or first == local[0, 0, 0, 0]
                    assert head == (min(rank % 3, 2) if placements[1] == Shard(1) else 0)


# --- How much, and by which seed ---


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_how_much_is_dropped(dropout_p: float) -> None:
    keep = keep_of(12345, (2, 4, 96, 128), dropout_p)
    kept = (keep != 0).double()
    assert torch.allclose(keep[keep != 0], torch.tensor(1 / (1 - dropout_p), dtype=torch.float64))
    deviation = (dropout_p * (1 - dropout_p)) ** 0.5

    def check(mean: Tensor, count: float) -> None:
        assert ((mean - (1 - dropout_p)).abs() < 5.5 * deviation / count**0.5).all()

    check(kept.mean(), kept.numel())
    check(kept.mean((0, 1, 2)), 2 * 4 * 96)  # of every key
    check(kept.mean((0, 1, 3)), 2 * 4 * 128)  # of every query
    check(kept.mean((2, 3)), 96 * 128)  # of every batch entry and head
    centred = (kept - (1 - dropout_p)) / deviation
    for dim in range(4):
        correlation = (
            centred.narrow(dim, 1, kept.shape[dim] - 1)
            * centred.narrow(dim, 0, kept.shape[dim] - 1)
        ).mean()
        assert correlation.abs() < 6 / kept.numel() ** 0.5 * 2**0.5
    other = (keep_of(12346, (2, 4, 96, 128), dropout_p) != 0).double()
    assert ((other - (1 - dropout_p)) / deviation * centred).mean().abs() < 6 / kept.numel() ** 0.5


def test_all_may_be_dropped() -> None:
    assert keep_of(1, (2, 4, 5, 7), 1.0).eq(0).all()


@pytest.mark.long
@on_ranks(1)
def test_dropout_through_inductor() -> None:
    """Its numbers are other ones than those of eager code, and follow the seed as well."""
    whole = make_qkv(LENGTH, dtype=torch.float64)
    sharded = on_mesh(whole, world_mesh(), Shard(2))
    through_inductor = torch.compile(drop, backend="cp_inductor", fullgraph=True)
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        with implicit_replication():
            results.append(torch.stack([full(t) for t in with_grads(through_inductor, sharded)]))
    assert counters["cp_inductor"]["sites_rewritten"] == 1
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2])
