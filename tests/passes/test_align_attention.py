"""Attentions whose head dims or placements differ between query, key and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor.passes.align_attention import align_attention
from cp_inductor.passes.attentions import SDPA
from tests.support.ranks import on_ranks, run_ranks, world_mesh

SHARD, WHOLE = Shard(2), Replicate()
LENGTH, HEAD_DIM = 13, 8


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out * 2


def inputs(value_dim: int, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    dims = (HEAD_DIM, HEAD_DIM, value_dim)
    return [
        torch.randn(2, 4, length, dim, generator=generator, dtype=torch.float64) for dim in dims
    ]


def check_distributed(
    whole: Sequence[Tensor], placements: Sequence[Placement], run: Callable[..., Tensor] = attend
) -> None:
    mesh = world_mesh()
    whole = [tensor.contiguous().requires_grad_() for tensor in whole]
    expected = run(*whole)
    expected.square().sum().backward()
    leaves = [
        distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_()
        for tensor, placement in zip(whole, placements, strict=True)
    ]
    compiled = torch.compile(run, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    with implicit_replication():  # Dynamo runs torch's own, which makes a causal mask
        out = compiled(*leaves)
    assert torch._dynamo.utils.counters["cp_inductor"]["sites_rewritten"] == 1
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.full_tensor(), expected)
    out.square().sum().backward()
    for leaf, tensor in zip(leaves, whole, strict=True):
        assert isinstance(leaf.grad, DTensor)
        torch.testing.assert_close(leaf.grad.full_tensor(), tensor.grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value_dim", "placements", "scale"),
    [
        (12, (SHARD, SHARD, SHARD), 0.3),
        (8, (WHOLE, SHARD, Shard(1)), None),
        (5, (SHARD, WHOLE, WHOLE), 0.3),
    ],
    ids=str,
)
def test_over_dtensors(
    value_dim: int, placements: Sequence[Placement], scale: float | None
) -> None:
    run_ranks(2, check_distributed, inputs(value_dim), placements, partial(attend, scale=scale))


def check_plain(value_dim: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    whole = inputs(value_dim, 12)
    expected = attend(*whole).chunk(world_size, 2)[rank]
    options = {"mesh": mesh}
    compiled = torch.compile(attend, backend="cp_aot_eager", fullgraph=True, options=options)
    out = compiled(*(tensor.chunk(world_size, 2)[rank] for tensor in whole))
    torch.testing.assert_close(out, expected)


@pytest.mark.slow
def test_over_plain_shards() -> None:
    run_ranks(2, check_plain, 5)


GROUP = 2


def by_index(x: Tensor) -> Tensor:
    """Repeat heads as models of transformers do."""
    batch, heads, length, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, GROUP, length, dim)
    return x.reshape(batch, heads * GROUP, length, dim)


def by_unsqueeze(x: Tensor) -> Tensor:
    batch, heads, length, dim = x.shape
    x = x.unsqueeze(2).expand(-1, -1, GROUP, -1, -1)
    return torch.reshape(x, (batch, heads * GROUP, length, dim))


def in_turns(x: Tensor) -> Tensor:
    """Repeat all heads, one after the other: query heads side by side see other keys."""
    batch, heads, length, dim = x.shape
    x = x[:, None].expand(batch, GROUP, heads, length, dim)
    return x.reshape(batch, heads * GROUP, length, dim)


def repeated(
    repeat_key: Callable[[Tensor], Tensor], repeat_value: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, repeat_key(key), repeat_value(value))

    return run


@pytest.mark.parametrize(
    ("repeat_key", "repeat_value", "is_grouped"),
    [
        (by_index, by_index, True),
        (by_unsqueeze, by_index, True),
        (in_turns, in_turns, False),
        (by_index, in_turns, False),
        (lambda x: by_index(x) * 1, by_index, False),
    ],
)
def test_keys_travel_before_they_are_repeated(
    repeat_key: Callable[[Tensor], Tensor],
    repeat_value: Callable[[Tensor], Tensor],
    *,
    is_grouped: bool,
) -> None:
    found = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> object:
        align_attention(gm, has_axis=True)
        (call,) = (node for node in gm.graph.nodes if node.target in SDPA)
        found.append((call.args[1].op == "placeholder", call.kwargs.get("enable_gqa", False)))
        return gm.forward

    query, key, value = inputs(HEAD_DIM)
    given = (query, key[:, :2], value[:, :2])
    run = repeated(repeat_key, repeat_value)
    out = torch.compile(run, backend=backend, fullgraph=True)(*given)
    assert found == [(is_grouped, is_grouped)]
    torch.testing.assert_close(out, run(*given))


@pytest.mark.slow
@on_ranks(2)
def test_repeated_heads_over_dtensors() -> None:
    query, key, value = inputs(HEAD_DIM)
    run = repeated(by_index, by_index)
    check_distributed((query, key[:, :2], value[:, :2]), (SHARD,) * 3, run)
