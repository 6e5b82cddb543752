"""The op pair as an op: schema, fakes with true strides, autograd; and eager DTensor attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import cp_inductor
from cp_inductor.ops.attention import attention, attention_backward
from cp_inductor.plan import Recipe, resolve
from cp_inductor.plan.strategies import TABLE
from cp_inductor.run.attention import Attention
from cp_inductor.run.own_transfers import reads_shard
from tests.support.comms import Counts
from tests.support.graphs import attend_causal
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import (
    LAYOUTS,
    assert_all_close,
    assert_close,
    attend_with_grads,
    make_qkv,
    on_mesh,
    shard,
    with_grads,
)


def local_leaves(**shape: object) -> tuple[list[Tensor], Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = make_qkv(5 * world_size, **shape)  # type: ignore[arg-type]
    *leaves, grad_out = (shard(tensor, rank, world_size).contiguous() for tensor in tensors)
    return [leaf.requires_grad_() for leaf in leaves], grad_out


def arguments_of(
    strategy: str, is_causal: bool, *, keep: int = 0, num_kv_heads: int = 2
) -> tuple[Any, ...]:
    world_size = dist.get_world_size()
    length, itemsize, rule = 5 * world_size, 4, "causal" if is_causal else "full"
    recipe = Recipe(
        world_size, length, length, 4, num_kv_heads, 20, itemsize, rule, strategy=strategy
    )
    recipe = replace(resolve(recipe, site="test"), keep=keep)
    how = (0.5, "flash_cpu", dist.group.WORLD.group_name, 0.0, False)
    return recipe.format(), dist.get_rank(), *how


# strategy, is_causal, is_transposed
WAYS = (("ring", True, True), ("blocks", True, False), ("blocks", False, True))


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.long)])
@on_ranks("world_size")
def test_opcheck(world_size: int) -> None:
    for strategy, is_causal, is_transposed in WAYS:
        leaves, grad_out = local_leaves(num_kv_heads=2)
        if is_transposed:
            leaves = [LAYOUTS["transposed"](leaf.detach()).requires_grad_() for leaf in leaves]
        arguments = arguments_of(strategy, is_causal, keep=int(is_transposed))
        torch.library.opcheck(attention, (*leaves, [], *arguments))
        with torch.no_grad():
            out, lse, *kept = attention(*leaves, [], *arguments)
        detached = [leaf.detach() for leaf in leaves]
        torch.library.opcheck(
            attention_backward, (grad_out, *detached, out, lse, [], kept, *arguments)
        )


@pytest.mark.parametrize("world_size", [4, 6, 8])
@pytest.mark.parametrize("strategy", [*TABLE, "heads2+blocks", "heads2_own+blocks", "auto"])
def test_what_is_kept_unasked_takes_the_place_of_the_shard(strategy: str, world_size: int) -> None:
    """Then the shard is not saved; so by default no strategy saves more than another."""
    length = 512 * world_size
    recipe = Recipe(world_size, length, length, 24, 24, 64, 2, "causal", strategy=strategy)
    recipe = resolve(recipe, site="test")
    for rank in range(world_size):
        this = Attention(recipe, rank, None, "flash_cpu", "a group")
        assert reads_shard(this) == (recipe.keep == 0)
    assert (recipe.keep > 0) == (recipe.strategy in ("heads", "heads_own_forward"))


@on_ranks(2)
def test_second_derivatives_are_refused() -> None:
    leaves, grad_out = local_leaves()
    out, lse = attention(*leaves, [], *arguments_of("ring", True, num_kv_heads=4))
    assert lse.requires_grad
    (dq,) = torch.autograd.grad(out, leaves[:1], grad_out.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


def sharded_leaves(
    placements: list[Placement], mesh_shape: tuple[int, ...], **shape: object
) -> tuple[list[DTensor], DTensor, tuple[Tensor, ...]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    whole = make_qkv(8, **shape)  # type: ignore[arg-type]
    *leaves, grad_out = on_mesh(whole, mesh, *placements)
    return [leaf.requires_grad_() for leaf in leaves], grad_out, whole


def check_eager(
    placements: list[Placement], mesh_shape: tuple[int, ...], num_exchanges: int
) -> None:
    """SDPA on DTensors, not compiled, against float64; it must issue the ring's collectives."""
    for is_causal in (True, False):
        leaves, grad_out, whole = sharded_leaves(placements, mesh_shape, num_kv_heads=2)
        counts = Counts()
        with counts:
            out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
        assert counts.exchanges() == num_exchanges
        with counts:
            grads = torch.autograd.grad(out, leaves, grad_out)
        assert counts.exchanges() == counts.get_total_counts() == 2 * num_exchanges
        expected = attend_with_grads(*whole, is_causal=is_causal)
        assert {one.placements for one in (out, *grads)} == {tuple(placements)}
        assert_all_close((out.detach(), *grads), expected, torch.float32)


@on_ranks(2)
@cp_inductor.config.patch(strategy="ring")
def test_eager_dtensors() -> None:
    check_eager([Shard(2)], (2,), 1)
    check_eager([Shard(1)], (2,), 0)
    check_eager([Shard(0)], (2,), 0)
    check_eager([Replicate()], (2,), 0)


@on_ranks(4)
@cp_inductor.config.patch(strategy="ring")
def test_eager_dtensors_on_two_axes() -> None:
    check_eager([Shard(0), Shard(2)], (2, 2), 1)
    check_eager([Shard(2), Shard(1)], (2, 2), 1)
    check_eager([Replicate(), Shard(2)], (2, 2), 1)
    check_eager([Shard(0), Shard(1)], (2, 2), 0)


@on_ranks(3)
def test_eager_of_any_length() -> None:
    """Lengths that do not divide, in eager: ranks hold what DTensor gives them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for seq_len, strategy in ((7, "blocks"), (2, "auto"), (101, "blocks"), (101, "ring")):
        whole = make_qkv(seq_len, num_kv_heads=2)
        with cp_inductor.config.patch(strategy=strategy):
            found = with_grads(attend_causal, on_mesh(whole, mesh, Shard(2)))
        expected = attend_with_grads(*whole, is_causal=True)
        assert_all_close(found, expected, torch.float32, f"{strategy} {seq_len}")


@on_ranks(2)
def test_gradient_of_another_placement() -> None:
    """sum() hands back a replicated gradient; it is resharded, not taken for a shard."""
    leaves, _, whole = sharded_leaves([Shard(2)], (2,))
    F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    expected = attend_with_grads(*whole[:3], torch.ones_like(whole[0]), is_causal=True)
    for leaf, reference in zip(leaves, expected[1:], strict=True):
        assert_close(leaf.grad.full_tensor(), reference, torch.float32)


@on_ranks(2)
def test_eager_refusals() -> None:
    mesh = world_mesh()
    three = [distribute_tensor(t, mesh, [Shard(2)]) for t in make_qkv(8, num_heads=3)[:3]]
    # Dynamo propagates shapes through what is refused, and no graph is made of it all the same.
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    with cp_inductor.config.patch(strategy="heads"):
        for run in (F.scaled_dot_product_attention, compiled):
            with pytest.raises(Exception, match="3 query") as raised:
                run(*three)
            is_own = isinstance(raised.value, cp_inductor.UnsupportedStrategy)
            assert is_own == (run is not compiled)
