"""Attention that is left alone on purpose, whatever is around it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cp_inductor
from tests.support.combinations import (
    AOT,
    EAGER,
    compiled,
    make_mesh,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.reference import attend, make_qkv, shard


def both(query: Tensor) -> tuple[Tensor, Tensor]:
    """The same attention twice, once left alone."""
    with cp_inductor.local_attention():
        local = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    return local, F.scaled_dot_product_attention(query, query, query, is_causal=True)


def check_local(form: str, kind: str) -> None:
    mesh = make_mesh(2, names=("cp",))
    rank = dist.get_rank()
    query = make_qkv(10)[0]
    piece = shard(query, rank, 2).contiguous()
    options = {"mesh": mesh} if kind == "mesh" else {}
    run = compiled(both, form, fullgraph=True, options=options)
    if kind == "context":
        with cp_inductor.context_parallel(mesh):
            local, out = run(piece)
    else:
        local, out = run(distribute_tensor(query, mesh, [Shard(2)]) if kind == "dtensor" else piece)
    if kind == "dtensor":
        assert isinstance(local, DTensor) and local.placements == (Shard(2),)
        local, out = local.to_local(), out.to_local()
    expected = attend(query, query, query, is_causal=True)
    alone = attend(piece, piece, piece, is_causal=True)
    torch.testing.assert_close(local, alone.float())
    torch.testing.assert_close(out, shard(expected, rank, 2).float())
    assert rank == 0 or not torch.allclose(local, out)


@pytest.mark.parametrize("kind", ["context", "dtensor", "mesh"])
@pytest.mark.parametrize("form", [EAGER, AOT])
def test_attention_left_alone(form: str, kind: str) -> None:
    if (form, kind) == (EAGER, "mesh"):
        pytest.skip("the option is of a compile")
    run_ranks(2, check_local, form, kind)


def test_what_cannot_be_left_alone_is_refused(mesh: DeviceMesh) -> None:
    query = distribute_tensor(torch.rand(1, 2, 8, 8), mesh, [Shard(2)])
    attention = nn.MultiheadAttention(8, 2)

    def model(query: Tensor) -> Tensor:
        with cp_inductor.local_attention():
            return checkpoint(F.scaled_dot_product_attention, *[query] * 3, use_reentrant=False)

    with cp_inductor.local_attention(), pytest.raises(cp_inductor.UnsupportedAttention):
        F.multi_head_attention_forward(query, query, query, 8, 2, *[None] * 9)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass their to_local"):
        torch.compile(model, backend=AOT, fullgraph=True)(query)
    # For plain tensors it holds in there, too.
    with cp_inductor.local_attention():
        piece = torch.rand(4, 2, 8)
        attention(piece, piece, piece, need_weights=False)


@pytest.mark.parametrize("form", [EAGER, AOT])
@on_ranks(2)
def test_a_checkpoint_left_alone(form: str) -> None:
    """The body of a checkpoint is traced out of reach of regions: left alone all the same."""
    mesh = make_mesh(2, names=("cp",))
    query = make_qkv(10)[0]
    piece = shard(query, dist.get_rank(), 2).contiguous().requires_grad_()

    def model(query: Tensor) -> Tensor:
        with cp_inductor.local_attention():
            return checkpoint(F.scaled_dot_product_attention, *[query] * 3, use_reentrant=False)

    with cp_inductor.context_parallel(mesh):
        out = compiled(model, form, fullgraph=True)(piece)
    out.sum().backward()
    torch.testing.assert_close(out, attend(piece, piece, piece).float())
