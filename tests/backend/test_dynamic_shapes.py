"""A dynamic sequence length compiles once and is right for every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support.graphs import attend_causal
from tests.support.ranks import fake_mesh, on_ranks, run_ranks, world_mesh
from tests.support.reference import assert_close, attend_with_grads, make_qkv, shard

LENGTHS_PER_RANK = (16, 20, 32, 61)


def check_lengths(backend_name: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    compiles = []

    def backend(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        compiles.append(gm)
        return getattr(cp_inductor.backend, backend_name)(gm, inputs, **kwargs)

    options = {"mesh": mesh}
    compiled = torch.compile(attend_causal, backend=backend, fullgraph=True, options=options)
    for length in LENGTHS_PER_RANK:
        whole = make_qkv(length * world_size, batch=1, num_heads=2, head_dim=16)
        *leaves, grad_out = (shard(tensor, rank, world_size).contiguous() for tensor in whole)
        for leaf in leaves:
            torch._dynamo.mark_dynamic(leaf.requires_grad_(), 2)
        out = compiled(*leaves)
        grads = torch.autograd.grad(out, leaves, grad_out)
        expected = attend_with_grads(*whole, is_causal=True)
        for actual, reference in zip((out.detach(), *grads), expected, strict=True):
            assert_close(actual, shard(reference, rank, world_size), torch.float32, str(length))
    assert len(compiles) == 1


# Over plain shards; over DTensors, and behind a layer, below.
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["cp_aot_eager", pytest.param("cp_inductor", marks=pytest.mark.long)]
)
def test_one_graph_for_lengths_that_are_marked(backend: str) -> None:
    run_ranks(2, check_lengths, backend)


@on_ranks(2)
def test_a_length_that_does_not_divide_is_still_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    compiled = torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True)
    for length in (12, 14, 15):
        tensors = [distribute_tensor(t, mesh, [Shard(2)]) for t in make_qkv(length)[:3]]
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 2)
        if length % 2:
            with pytest.raises(cp_inductor.UnevenSequence, match="length"):
                compiled(*tensors)
        else:
            compiled(*tensors)


class Heads(nn.Module):
    """Attention behind a linear layer, which flattens the batch and the sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (2, 12)).transpose(1, 2)
        return F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)


def check_batches(is_marked: bool, lengths: tuple[int, ...]) -> int:
    mesh = world_mesh()
    whole = Heads().double()
    model = cp_inductor.parallelize(Heads().double(), mesh)
    compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True)
    for length in lengths:
        x = torch.randn(3, length, 8, dtype=torch.float64)
        expected = whole(x)
        expected.square().sum().backward()
        own = distribute_tensor(x, mesh, [Shard(1)])
        if is_marked:
            torch._dynamo.mark_dynamic(own, 1)
        with implicit_replication():
            out = compiled(own)
        torch.testing.assert_close(out.full_tensor(), expected)
        out.square().sum().backward()
        for weight, reference in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, reference.grad)
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_marked", "lengths", "num_graphs"),
    [
        (True, (12, 16, 20), 1),
        # One for 12 tokens, one for all that divide, and one for 15.
        (False, (12, 16, 15, 20), 3),
    ],
)
def test_batches_of_several_sequences(
    is_marked: bool, lengths: tuple[int, ...], num_graphs: int
) -> None:
    assert run_ranks(2, check_batches, is_marked, lengths) == [num_graphs] * 2


def attend_window(query: Any, key: Any, value: Any) -> Any:
    place = torch.arange(query.shape[2])
    mask = (place <= place[:, None]) & (place[:, None] < place + 5)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def check_lengths_that_change(attend: Any, dynamic: bool | None) -> int:
    """Rank 0 holds 8 tokens of 15 and of 16, which Dynamo by itself would not tell apart."""
    mesh = world_mesh()
    compiled = torch.compile(attend, backend="cp_aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (24, 12, 15, 16):
        whole = make_qkv(length, dtype=torch.float64)
        inputs = [tensor.requires_grad_() for tensor in whole[:3]]
        expected = attend(*inputs)
        wanted = torch.autograd.grad(expected, inputs, whole[3])
        *leaves, grad_out = (
            distribute_tensor(tensor.detach(), mesh, [Shard(2)]) for tensor in whole
        )
        for leaf in leaves:
            leaf.requires_grad_()
            if dynamic is False:
                torch._dynamo.maybe_mark_dynamic(leaf, 2)
        with implicit_replication():
            out = compiled(*leaves)
        assert out.shape == expected.shape
        grads = torch.autograd.grad(out, leaves, grad_out)
        for actual, reference in zip((out, *grads), (expected, *wanted), strict=True):
            assert_close(
                actual.full_tensor().detach(), reference.detach(), torch.float64, str(length)
            )
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attend", "dynamic", "num_graphs"),
    [
        # By itself, Dynamo makes symbols from the second length on.
        (attend_causal, None, 3),
        pytest.param(attend_causal, False, 2, marks=pytest.mark.long),
        pytest.param(attend_window, None, 4, marks=pytest.mark.long),
    ],
)
def test_a_length_that_does_not_divide_may_be_a_number(
    attend: Any, dynamic: bool | None, num_graphs: int
) -> None:
    assert run_ranks(2, check_lengths_that_change, attend, dynamic) == [num_graphs] * 2


@pytest.mark.parametrize("attend", [attend_causal, attend_window])
def test_a_symbol_that_became_a_number_is_guarded(attend: Any) -> None:
    """Rank 0 holds 8 of 15 and of 16 tokens; torch guards local sizes that became numbers."""

    def embed_and_attend(table: Any, ids: Any) -> Any:
        heads = F.embedding(ids, table)[:, None]
        return attend(heads, heads, heads)

    with fake_mesh(0, 2) as mesh:
        table = distribute_tensor(torch.zeros(4, 8), mesh, [Replicate()])
        compiled = torch.compile(
            embed_and_attend, backend="cp_aot_eager", fullgraph=True, dynamic=False
        )
        for length in (12, 15, 16):
            ids = torch.zeros(1, length, dtype=torch.int64)
            shards = distribute_tensor(ids, mesh, [Shard(1)])
            torch._dynamo.maybe_mark_dynamic(shards, 1)
            with implicit_replication():
                assert compiled(table, shards).shape == (1, 1, length, 8)


def check_whole_lengths(dynamic: bool | None) -> None:
    """Rank 0 holds 11 tokens of 21 and of 22; Dynamo by itself would not look at the whole."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))

    def attend_and_mean(query: Any, key: Any, value: Any) -> Any:
        out = attend_causal(query, key, value)
        return out, out.sum() / query.shape[2]

    compiled = torch.compile(
        attend_and_mean, backend="cp_aot_eager", fullgraph=True, dynamic=dynamic
    )
    for length in (21, 22, 21, 24, 23):
        query, key, value, _ = make_qkv(length, batch=1, num_heads=2, head_dim=16)
        pieces = [distribute_tensor(t, mesh, [Shard(2)]) for t in (query, key, value)]
        out, mean = compiled(*pieces)
        expected = attend_causal(query, key, value)
        piece = shard(expected, rank, world_size)
        assert_close(out.to_local(), piece, torch.float32, str(length))
        assert_close(mean.full_tensor(), expected.sum() / length, torch.float32, str(length))


def test_whole_lengths_are_guarded() -> None:
    run_ranks(2, check_whole_lengths, False)
