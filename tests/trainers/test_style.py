"""Modules that are told to attend over shards: our parallel style, and torch's own."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._attention import (
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
)
from torch.distributed.tensor.parallel import parallelize_module

import cp_inductor
from tests.support.combinations import (
    AOT,
    COMPILED,
    EAGER,
    FORMS,
    assert_rewritten,
    averaged_grads,
    combination,
    compiled,
    grads_of,
    make_mesh,
)
from tests.support.graphs import Attention
from tests.support.ranks import on_ranks, run_ranks
from tests.support.reference import check_shards, make_qkv, shard


class Layers(nn.Module):
    """A layer of torch's own, and an attention with a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)
        self.project = nn.Linear(32, 96)
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        query, key, value = self.project(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
        return x + self.inner(query, key, value).transpose(1, 2).flatten(2)


def check_style(form: str, length: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(world_size, names=("cp",))
    x = torch.rand(2, length, 32)
    reference = Layers()
    expected = reference(x)
    expected.sum().backward()
    style = cp_inductor.ContextParallel(seq_len=length)
    plan = {"encoder.self_attn": style, "inner": style}
    model = copy.deepcopy(parallelize_module(Layers(), mesh, plan))
    assert isinstance(model.encoder.self_attn, nn.MultiheadAttention)
    piece = shard(x, rank, world_size, 1)
    out = compiled(model, form, fullgraph=True)(piece)
    out.sum().backward()
    torch.testing.assert_close(out, shard(expected, rank, world_size, 1))
    for name, grad in averaged_grads(model, mesh).items():
        torch.testing.assert_close(
            world_size * grad, grads_of(reference)[name], rtol=1e-4, atol=1e-5
        )
    if form == COMPILED:
        return  # which code runs in inference is seen before C++ is made of it
    # In inference, torch has a fast path for this layer that would go past the style.
    with torch.no_grad():
        out = compiled(model.eval(), form, fullgraph=True)(piece)
    torch.testing.assert_close(out, shard(expected, rank, world_size, 1))


@combination("ContextParallel() on modules", *FORMS)
def test_style(form: str) -> None:
    # Ranks of one length share what they compile; what tiles they have cp_aot_eager shows.
    worlds = {EAGER: [(3, 12), (3, 11)], AOT: [(3, 11)], COMPILED: [(2, 12)]}
    for world_size, length in worlds[form]:
        run_ranks(world_size, check_style, form, length)


@combination("torch's own style _ContextParallel, the backend exchanged", *FORMS)
@on_ranks(2)
def test_style_of_torch(form: str) -> None:
    mesh = make_mesh(2, names=("cp",))
    kind = _ContextParallel.AttentionType.SDPA
    inner = parallelize_module(Attention(), mesh, _ContextParallel(2, kind))
    # What torch has the models it prepares call; of its handlers there is none for the CPU.
    _enable_context_parallel_dispatcher()
    try:
        check_shards(compiled(inner, form), make_qkv(10), is_causal=True)
    finally:
        _disable_context_parallel_dispatcher()
    assert_rewritten(form)
