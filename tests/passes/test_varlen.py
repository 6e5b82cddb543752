"""varlen_attn over packed documents whose tokens are sharded: numbers, rules, and refusals.

torch has no kernel of it for the CPU. It is held against attention within each document, in float64
on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import UnsupportedAttention
from cp_inductor.passes.capture_attention import list_attentions
from cp_inductor.torch_private.varlen import varlen_op
from tests.support.graphs import recorded_capture
from tests.support.ranks import fake_mesh, run_ranks, world_mesh
from tests.support.reference import assert_close, shard

pytestmark = pytest.mark.skipif(varlen_op() is None, reason="this torch has no varlen_attn")

AOT = "cp_aot_eager"
STARTS = (0, 5, 5, 16, 31, 37)
HEADS, KV_HEADS, DIM = 4, 2, 16


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    window: tuple[int, int],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return output (T, H, D) and lse (H, T)."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    found: Any = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        15,
        15,
        window_size=window,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        **options,
    )
    out, lse = found
    return out, lse


def per_document(
    query: Tensor, key: Tensor, value: Tensor, window: tuple[int, int], scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the same, one document after the other."""
    outs, lses = [], []
    for start, stop in pairwise(STARTS):
        if start == stop:
            continue
        sides = [side[start:stop].transpose(0, 1) for side in (query, key, value)]
        positions = torch.arange(stop - start)
        distance = positions[:, None] - positions[None]
        mask = torch.ones_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            mask &= distance <= window[0]
        if window[1] >= 0:
            mask &= -distance <= window[1]
        options: Any = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
        outs.append(F.scaled_dot_product_attention(*sides, **options).transpose(0, 1))
        wide = sides[1].repeat_interleave(HEADS // KV_HEADS, 0)
        scores = sides[0] @ wide.transpose(1, 2) * (DIM**-0.5 if scale is None else scale)
        lses.append(scores.masked_fill(~mask, -float("inf")).logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


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


def run_windows(
    windows: tuple[tuple[int, int], ...], dtype: torch.dtype, backend: str, is_replicated: bool
) -> None:
    mesh = world_mesh()
    starts = torch.tensor(STARTS, dtype=torch.int32)
    if is_replicated:
        starts = distribute_tensor(starts, mesh, [Replicate()])
    for window in windows:
        compare(mesh, starts, window, dtype, backend)


def compare(
    mesh: DeviceMesh, starts: Tensor, window: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    scale = 0.3 if window == (-1, 0) else None

    def model(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, starts, window, scale=scale)

    wide = [tensor.double() for tensor in make_tokens(dtype)]
    expected = results(partial(per_document, window=window, scale=scale), wide)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    placed = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in make_tokens(dtype)]
    with implicit_replication():
        actual = results(compiled, placed)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        wanted = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
        assert_close(one.full_tensor(), other, wanted, f"{window}: {name}")
    assert counters["cp_inductor"]["sites_rewritten"] == 1


def test_causal_documents() -> None:
    run_ranks(3, run_windows, ((-1, 0),), torch.float64, AOT, False)


@pytest.mark.long
def test_windows() -> None:
    run_ranks(2, run_windows, ((3, 2), (-1, -1), (6, 0), (-1, 4)), torch.float64, AOT, True)


@pytest.mark.long
def test_through_inductor() -> None:
    run_ranks(2, run_windows, ((-1, 0),), torch.float32, "cp_inductor", False)


# --- Graphs -----------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(1, 3) as mesh:
        yield mesh


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
            query = query + attend(query, key, value, starts, window)[0]
        return query

    starts = torch.tensor(STARTS, dtype=torch.int32)
    with recorded_capture() as graphs, implicit_replication():
        compiled = torch.compile(model, backend=AOT, fullgraph=True, dynamic=False)
        compiled(*shards_of(mesh), starts)
    (graph,) = graphs
    found = [this.attention.rule.format() for this in list_attentions(graph)]
    assert found == list(rules.values())
    assert not graph.graph.find_nodes(op="get_attr")


# --- Refusals ---------------------------------------------------------------------------------


def varlen(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor(STARTS, dtype=torch.int32)
    others = options.pop("others", starts)
    return varlen_attn(query, key, value, starts, others, 15, 15, enable_gqa=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seqused_k": torch.ones(5, dtype=torch.int32)}, "expected seqused_k=None"),
        (
            {"others": torch.tensor(STARTS, dtype=torch.int32) + 0, "window_size": (-1, 0)},
            r"got two tensors and window_size=\(-1, 0\); pass the same tensor twice",
        ),
    ],
)
def test_refused_arguments(mesh: DeviceMesh, options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(
        lambda *sides: varlen(*sides, **options), backend=AOT, fullgraph=True, dynamic=False
    )
    with implicit_replication(), pytest.raises(UnsupportedAttention, match=message):
        compiled(*shards_of(mesh))


def test_refused_over_plain_shards(mesh: DeviceMesh) -> None:
    shards = [shard(tensor, 1, 3, dim=0) for tensor in make_tokens(torch.float32)[:3]]
    compiled = torch.compile(varlen, backend=AOT, fullgraph=True, options={"mesh": mesh})
    message = "which would attend within the local shard only; call varlen_attn on DTensors"
    with pytest.raises(UnsupportedAttention, match=message):
        compiled(*shards)
    region = cp_inductor.context_parallel(mesh)
    with region, pytest.raises(UnsupportedAttention, match="_varlen_attn, which would attend"):
        varlen(*shards)


def test_refused_in_eager_code(mesh: DeviceMesh) -> None:
    message = "varlen_attn on DTensors: expected sharded tokens in a model compiled"
    with implicit_replication(), pytest.raises(UnsupportedAttention, match=message):
        varlen(*shards_of(mesh))
