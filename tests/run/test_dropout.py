"""Which probabilities are dropped depends on where they are in the whole attention alone.

Every case is held against float64 attention on one process, under what one process drops.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor.dtensor.axis import first_batch_and_head
from cp_inductor.mask.rule import Rule
from cp_inductor.ops.attention import attention
from cp_inductor.plan import Mask, Recipe, Span, Tile, resolve
from cp_inductor.tiles.tile_masks import Extras, TileMasks
from cp_inductor.tiles.tokens import Tokens
from tests.support.combinations import AOT, EAGER, compiled, make_mesh
from tests.support.ranks import fake_rank, run_ranks
from tests.support.reference import (
    assert_all_close,
    assert_shards_close,
    attend_with_grads,
    make_qkv,
    shard,
    with_grads,
)

DROPOUT_P = 0.3
LENGTH = 29


def keep_of(seed: Tensor, batch: int, num_heads: int, length: int = LENGTH) -> Tensor:
    """Return what every probability is multiplied with on one process, (B, H, S, S)."""
    grid = Recipe(1, length, length, num_heads, num_heads, 8, 8, "full", chunks=1).grid
    like = torch.empty(batch, num_heads, length, 8, dtype=torch.float64)
    tokens, own = Tokens(grid, length, length), Span(0, 1)
    masks = TileMasks(Rule.parse("full"), tokens, own, Extras((), seed), like)
    tile = Tile(0, (own,), (own,), Span(0, num_heads), Mask.FULL)
    return masks.keep(tile, slice(None), DROPOUT_P)


def drop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=DROPOUT_P, is_causal=True)


def check_strategy(strategy: str, rule: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = make_qkv(LENGTH, dtype=torch.float64, num_heads=6, num_kv_heads=6)
    recipe = Recipe(world_size, LENGTH, LENGTH, 6, 6, 20, 8, rule, strategy=strategy, chunks=4)
    text, group_name = resolve(recipe, site="test").format(), dist.group.WORLD.group_name
    how = (text, rank, None, "flash_cpu", group_name)
    seed = torch.tensor(77)
    found = with_grads(
        lambda *qkv: attention(*qkv, [seed], *how, DROPOUT_P, False)[0],
        (shard(tensor, rank, world_size).contiguous() for tensor in whole),
    )
    keep = keep_of(seed, 2, 6)
    expected = attend_with_grads(*whole, is_causal=rule == "causal", keep=keep)
    assert_shards_close(found, expected, torch.float64)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("strategy", ["rows", "blocks", "heads"])
def test_the_strategy_does_not_matter(world_size: int, strategy: str) -> None:
    for rule in ("causal", "full"):
        run_ranks(world_size, check_strategy, strategy, rule)


def whole_of(batch: int, length: int) -> tuple[Tensor, ...]:
    return make_qkv(length, dtype=torch.float64, batch=batch, num_heads=4)


def check_against_one_process(tensors: Sequence[Tensor], whole: tuple[Tensor, ...]) -> None:
    """Hold out, dq, dk and dv against what one process drops after the same `manual_seed`."""
    torch.manual_seed(3)
    keep = keep_of(torch.randint(0, 1 << 31, ()), *whole[0].shape[:3])
    expected = attend_with_grads(*whole, is_causal=True, keep=keep)
    assert_all_close(tensors, expected, torch.float64)


def check_other_axis(form: str, batch: int, length: int, *placements: Placement) -> None:
    """DTensors, over an axis for the batch or the heads, and one for the sequence."""
    mesh = make_mesh(2, 2, names=("other", "cp"))
    whole = whole_of(batch, length)
    *leaves, grad_out = (distribute_tensor(t, mesh, placements) for t in whole)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    torch.manual_seed(3)
    with cp_inductor.context_parallel(mesh["cp"]), implicit_replication():
        out = compiled(drop, form, fullgraph=True)(*leaves)
    grads = torch.autograd.grad(out, leaves, grad_out)
    tensors = [tensor.full_tensor().detach() for tensor in (out, *grads)]
    check_against_one_process(tensors, whole)


# Dynamo learns placements by the rules of DTensor for what SDPA consists of. They cannot flatten
# what is cut unevenly, nor batch and heads where heads are cut.
OTHER_AXES = {
    EAGER: ((3, LENGTH, Shard(0)), (2, LENGTH, Shard(1)), (2, LENGTH, Replicate())),
    AOT: ((4, 28, Shard(0)), (1, 28, Shard(1))),
}


@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
def test_no_two_batch_entries_or_heads_drop_the_same(form: str) -> None:
    for batch, length, placement in OTHER_AXES[form]:
        run_ranks(4, check_other_axis, form, batch, length, placement, Shard(2))


def check_heads_of_a_region(form: str) -> None:
    """DTensors that shard the heads, of whose sequence a region says that it is sharded."""
    mesh = make_mesh(2, 2, names=("tp", "cp"))
    tp, cp = mesh["tp"], mesh["cp"]
    whole = whole_of(2, 28)
    pieces = (shard(t, cp.get_local_rank(), 2).contiguous() for t in whole)
    *leaves, grad_out = (distribute_tensor(piece, tp, [Shard(1)]) for piece in pieces)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    torch.manual_seed(3)
    with cp_inductor.context_parallel(cp), implicit_replication():
        out = compiled(drop, form, fullgraph=True)(*leaves)
    grads = torch.autograd.grad(out, leaves, grad_out)
    heads = [tensor.full_tensor().detach() for tensor in (out, *grads)]
    tensors = cp_inductor.context_parallel_unshard(cp, heads, [2] * len(heads))
    check_against_one_process(tensors, whole)


@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.slow)])
def test_heads_of_a_region_drop_their_own(form: str) -> None:
    run_ranks(4, check_heads_of_a_region, form)


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


def test_a_plain_tensor_begins_at_0() -> None:
    assert first_batch_and_head(torch.ones(2, 3, 4, 5)) == (0, 0)
