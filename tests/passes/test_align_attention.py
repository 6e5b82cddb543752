"""Attentions whose head dims or placements differ between query, key and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.passes.align_attention import align_attention
from cp_inductor.passes.attentions import SDPA
from tests.support.combinations import assert_beside
from tests.support.ranks import on_ranks, run_ranks, world_mesh
from tests.support.reference import assert_all_close, shard, with_grads

SHARD, WHOLE = Shard(2), Replicate()
LENGTH, HEAD_DIM = 13, 8


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out * 2


def inputs(value_dim: int, length: int = LENGTH) -> list[Tensor]:
    """Return query, key, value and the gradient of the result."""
    generator = torch.Generator().manual_seed(1)
    dims = (HEAD_DIM, HEAD_DIM, value_dim, value_dim)
    return [
        torch.randn(2, 4, length, dim, generator=generator, dtype=torch.float64) for dim in dims
    ]


def check_distributed(
    whole: Sequence[Tensor], placements: Sequence[Placement], run: Callable[..., Tensor] = attend
) -> None:
    expected = with_grads(run, whole)
    placed = [
        distribute_tensor(tensor, world_mesh(), [placement])
        for tensor, placement in zip(whole, (*placements, SHARD), strict=True)
    ]
    compiled = torch.compile(run, backend="cp_aot_eager", fullgraph=True, dynamic=False)
    with implicit_replication():  # Dynamo runs torch's own, which makes a causal mask
        found = with_grads(compiled, placed)
    assert torch._dynamo.utils.counters["cp_inductor"]["sites_rewritten"] == 1
    assert_all_close(found, expected, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value_dim", "placements", "scale"),
    [(12, (WHOLE, SHARD, Shard(1)), 0.3), (5, (SHARD, WHOLE, WHOLE), None)],
    ids=str,
)
def test_over_dtensors(
    value_dim: int, placements: Sequence[Placement], scale: float | None
) -> None:
    run_ranks(2, check_distributed, inputs(value_dim), placements, partial(attend, scale=scale))


@pytest.mark.slow
@on_ranks(2)
def test_over_plain_shards() -> None:
    mesh = world_mesh()
    *whole, _ = inputs(5, 12)
    compiled = torch.compile(attend, backend="cp_aot_eager", fullgraph=True, options={"mesh": mesh})
    out = compiled(*(shard(tensor, mesh.get_rank(), mesh.size()) for tensor in whole))
    torch.testing.assert_close(out, shard(attend(*whole), mesh.get_rank(), mesh.size()))


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
        align_attention(gm, SequenceAxis("axis 0", "group", 0, 2))
        (call,) = (node for node in gm.graph.nodes if node.target in SDPA)
        found.append((call.args[1].op == "placeholder", call.kwargs.get("enable_gqa", False)))
        return gm.forward

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, repeat_key(key), repeat_value(value))

    query, key, value, _ = inputs(HEAD_DIM)
    given = (query, key[:, :2], value[:, :2])
    out = torch.compile(run, backend=backend, fullgraph=True)(*given)
    assert found == [(is_grouped, is_grouped)]
    torch.testing.assert_close(out, run(*given))


@pytest.mark.slow
@on_ranks(2)
def test_repeated_heads_over_dtensors() -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, by_index(key), by_index(value))

    query, key, value, grad_out = inputs(HEAD_DIM)
    check_distributed((query, key[:, :2], value[:, :2], grad_out), (SHARD,) * 3, run)


# --- nn.MultiheadAttention over DTensors is taken apart, so that its masks are read.

BATCH, TOKENS, DIM, WINDOW = 3, 14, 16, 5


class Encoder(nn.Module):
    """A layer of torch's under a sliding window, for which padding does not exist."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(DIM, 4, 24, 0.0, batch_first=True)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        at = torch.arange(TOKENS)
        distance = at[:, None] - at
        is_far = (distance < 0) | (distance >= WINDOW)
        return self.layer(x, src_mask=is_far, src_key_padding_mask=is_padding)


@pytest.mark.slow
@on_ranks(2)
def test_masks_over_dtensors() -> None:
    mesh = world_mesh()
    torch.manual_seed(1)
    x = torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64)
    is_padding = torch.arange(TOKENS) >= torch.tensor([TOKENS, 9, 6])[:, None]
    whole = Encoder().double()
    expected = whole(x, is_padding)
    expected.square().sum().backward()
    inputs = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in (x, is_padding)]
    for backend in (None, "cp_aot_eager"):
        model = cp_inductor.parallelize(Encoder().double(), mesh)
        run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        with implicit_replication():
            out = run(*inputs)
        out.square().sum().backward()
        assert_beside(model, whole, (out, expected), tolerance=1e-12, least=1.0)
    with implicit_replication():
        (report,) = cp_inductor.explain(model, *inputs).attentions
    assert report.facts["mask"].startswith("causal, window 5"), report
