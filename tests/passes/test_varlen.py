"""varlen_attn over packed documents whose tokens are sharded: numbers, rules, and refusals.

torch has no kernel of it for the CPU. It is held against attention under a mask of documents, in
float64 on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import UnsupportedAttention
from cp_inductor.torch_private.dtensor import varlen_op
from tests.support import reference
from tests.support.graphs import captured_graph, rules_of
from tests.support.ranks import on_ranks, world_mesh

pytestmark = pytest.mark.skipif(varlen_op() is None, reason="this torch has no varlen_attn")

AOT = "cp_aot_eager"
STARTS = (0, 5, 5, 16, 31, 37)
BORDERS = torch.tensor(STARTS, dtype=torch.int32)
HEADS, KV_HEADS, DIM = 4, 2, 16


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor = BORDERS,
    others: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return output (T, H, D) and lse (H, T); `others` are where documents of the keys begin."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    borders = (starts, starts if others is None else others)
    how: Any = {"enable_gqa": True, "return_aux": AuxRequest(lse=True), **options}
    out, lse = varlen_attn(query, key, value, *borders, 15, 15, **how)
    return out, lse


def under_mask(
    query: Tensor, key: Tensor, value: Tensor, window: tuple[int, int], scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the same, of whole sequences."""
    place = torch.arange(STARTS[-1])
    documents = torch.searchsorted(torch.tensor(STARTS), place, right=True)
    distance = place[:, None] - place
    left, right = (STARTS[-1] if side < 0 else side for side in window)
    allowed = (documents[:, None] == documents) & (distance <= left) & (-distance <= right)
    query, key, value = (side.transpose(0, 1)[None] for side in (query, key, value))
    out = reference.attend(query, key, value, scale=scale, allowed=allowed)
    lse = reference.scores_of(query, key, scale=scale, allowed=allowed).logsumexp(-1)
    return out[0].transpose(0, 1), lse[0]


def make_tokens(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [
        torch.randn(STARTS[-1], size, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for size in sizes
    ]


def results(run: Callable[..., tuple[Tensor, Tensor]], tokens: list[Tensor]) -> list[Tensor]:
    """Return output, lse, and gradients of a loss of both."""
    *leaves, grad_out = (tensor.detach().clone() for tensor in tokens)
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = run(*leaves)
    loss = (out * grad_out).sum() + lse.sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def compare(window: tuple[int, int], starts: Tensor, scale: float | None = None) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, starts, window_size=window, scale=scale)

    whole = make_tokens(torch.float64)
    expected = results(partial(under_mask, window=window, scale=scale), whole)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=AOT, fullgraph=True, dynamic=False)
    with implicit_replication():
        actual = results(compiled, reference.on_mesh(whole, world_mesh(), Shard(0)))
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        reference.assert_close(one.full_tensor(), other, torch.float64, f"{window}: {name}")
    assert counters["cp_inductor"]["sites_rewritten"] == 1


@on_ranks(3)
def test_causal_documents() -> None:
    compare((-1, 0), BORDERS, scale=0.3)


@pytest.mark.long
@on_ranks(2)
def test_windows() -> None:
    for window in ((3, 2), (-1, 4)):  # what else they become, the graphs below say
        compare(window, distribute_tensor(BORDERS, world_mesh(), [Replicate()]))


# --- Graphs -----------------------------------------------------------------------------------


def shards_of(mesh: DeviceMesh) -> list[Tensor]:
    return [distribute_tensor(t, mesh, [Shard(0)]) for t in make_tokens(torch.float32)[:3]]


def test_what_it_becomes(mesh: DeviceMesh) -> None:
    rules = {
        (-1, 0): "(k-q<=0)&Eq(t0(k)-t0(q),0)",
        (-1, -1): "Eq(t0(k)-t0(q),0)",
        (6, 0): "(k-q<=0)&(-k+q-6<=0)&Eq(t0(k)-t0(q),0)",
    }

    def model(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
        for window in rules:
            query = query + attend(query, key, value, starts, window_size=window)[0]
        return query

    graph = captured_graph(model, *shards_of(mesh), BORDERS)
    assert rules_of(graph) == list(rules.values())
    assert not graph.graph.find_nodes(op="get_attr")


# --- Refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seqused_k": torch.ones(5, dtype=torch.int32)}, "expected seqused_k=None"),
        (
            {"others": BORDERS + 0, "window_size": (-1, 0)},
            r"got two tensors and window_size=\(-1, 0\); pass the same tensor twice",
        ),
    ],
)
def test_refused_arguments(mesh: DeviceMesh, options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(
        lambda *sides: attend(*sides, **options), backend=AOT, fullgraph=True, dynamic=False
    )
    with implicit_replication(), pytest.raises(UnsupportedAttention, match=message):
        compiled(*shards_of(mesh))


def test_refused_over_plain_shards(mesh: DeviceMesh) -> None:
    shards = [reference.shard(tensor, 1, 2, dim=0) for tensor in make_tokens(torch.float32)[:3]]
    compiled = torch.compile(attend, backend=AOT, fullgraph=True, options={"mesh": mesh})
    message = "which would attend within the local shard only; call varlen_attn on DTensors"
    with pytest.raises(UnsupportedAttention, match=message):
        compiled(*shards)
    region = cp_inductor.context_parallel(mesh)
    with region, pytest.raises(UnsupportedAttention, match="_varlen_attn, which would attend"):
        attend(*shards)


def test_refused_in_eager_code(mesh: DeviceMesh) -> None:
    message = "varlen_attn on DTensors: expected sharded tokens in a model compiled"
    with implicit_replication(), pytest.raises(UnsupportedAttention, match=message):
        attend(*shards_of(mesh))
