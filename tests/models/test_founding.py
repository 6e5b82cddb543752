"""The cases this project was founded on: whole transformers, counted collectives.

nn.TransformerEncoder with a mask and is_causal; cross-attention with different query and context
lengths under fullgraph. A decoder is in test_parallelize.py. Eager and compiled, on several ranks,
each held against the unsharded model, forward and backward. A ring needs P-1 exchanges per
attention in the forward and 2 (P-1) in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

import cp_inductor
from tests.support.combinations import AOT, EAGER, compiled
from tests.support.comms import Counts
from tests.support.graphs import attend_full
from tests.support.ranks import fake_rank, on_ranks, world_mesh
from tests.support.reference import (
    TOLERANCE,
    assert_close,
    assert_shards_close,
    attend_with_grads,
    make_qkv,
    shard,
)

NUM_LAYERS = 2

# One of them is neither the first nor the last.
WORLD_SIZE = 3


@cp_inductor.config.patch(strategy="ring")
def run_and_count(run: Callable[[], Tensor], model: nn.Module, num_sites: int) -> Tensor:
    """Run forward and backward once to compile, once to count; return the output."""
    with Counts():
        run().sum().backward()
    model.zero_grad()
    num_exchanges = (dist.get_world_size() - 1) * num_sites
    forward, backward = Counts(), Counts()
    with forward:
        out = run()
    loss = out.sum()
    with backward:
        loss.backward()
    assert forward.exchanges() == forward.get_total_counts() == num_exchanges
    # DTensor may have collectives of its own for the gradients of weights.
    assert backward.exchanges() == 2 * num_exchanges
    return out


def expected_of(
    model: nn.Module, *inputs: Tensor, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and parameter gradients of the unsharded model; its gradients are cleared."""
    out = model(*inputs, **kwargs)
    out.sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return out.detach(), grads


def check_grads(model: nn.Module, grads: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        else:
            dist.all_reduce(grad)
        # Ranks add their parts, rounded, in another order than one process does.
        bound = 4 * TOLERANCE[dtype] * max(1.0, grads[name].abs().max().item())
        assert (grad - grads[name]).abs().max().item() <= bound, name


# 1. nn.TransformerEncoder


def encoder(dtype: torch.dtype, num_layers: int = NUM_LAYERS) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 8, 32, dropout=0.0, batch_first=True)
    torch.manual_seed(1)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False).to(dtype)


def causal_mask(length: int, dtype: torch.dtype, is_causal: bool) -> Tensor | None:
    if not is_causal:
        return None
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


def check_encoder(form: str, dtype: torch.dtype, is_causal: bool, *, of_shards: bool) -> None:
    rank, world_size, mesh = dist.get_rank(), dist.get_world_size(), world_mesh()
    torch._dynamo.reset()
    # What is rounded shows in one layer.
    num_layers, length = NUM_LAYERS if dtype == torch.float32 else 1, 4 * world_size
    model, x = encoder(dtype, num_layers), torch.rand(2, length, 32).to(dtype)
    mask = causal_mask(length, dtype, is_causal)
    expected, grads = expected_of(model, x, mask=mask, is_causal=is_causal)
    options = None
    if of_shards:
        options, mask = {"mesh": mesh}, causal_mask(4, dtype, is_causal)
        sharded = shard(x, rank, world_size, 1).contiguous()
    else:
        model, sharded = distribute_module(model, mesh), distribute_tensor(x, mesh, [Shard(1)])
        mask = None if mask is None else distribute_tensor(mask, mesh, [Replicate()])
    run = compiled(model, form, fullgraph=True, options=options)
    out = run_and_count(lambda: run(sharded, mask=mask, is_causal=is_causal), model, num_layers)
    local = out.to_local() if isinstance(out, DTensor) else out
    assert_close(local, shard(expected, rank, world_size, 1), dtype)
    check_grads(model, grads, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, AOT])
@on_ranks(WORLD_SIZE)
def test_encoder_of_dtensors(form: str) -> None:
    ways = list(product((torch.float32, torch.bfloat16), (True, False)))
    if form == AOT:
        ways = [ways[0], ways[3]]  # each dtype and each mask; eager code has all
    for dtype, is_causal in ways:
        check_encoder(form, dtype, is_causal, of_shards=False)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.long)])
@on_ranks(WORLD_SIZE)
def test_encoder_of_shards(is_causal: bool) -> None:
    check_encoder(AOT, torch.float32, is_causal, of_shards=True)


def test_attention_weights_are_refused() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def model(x: Tensor) -> Tensor:
        return attention(x, x, x)[0]

    with fake_rank(0, 2):
        run = torch.compile(model, backend="cp_aot_eager", options={"mesh": world_mesh()})
        with pytest.raises(cp_inductor.UnsupportedAttention, match="need_weights=False"):
            run(torch.rand(2, 4, 16))


# 2. Different query and context lengths


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(WORLD_SIZE)
def test_cross_attention(dtype: torch.dtype) -> None:
    sizes = {"batch": 8, "num_heads": 8, "head_dim": 32, "dtype": dtype}
    query, key, value, _ = make_qkv(8 * WORLD_SIZE, kv_len=24 * WORLD_SIZE, **sizes)
    expected = attend_with_grads(query, key, value, torch.ones_like(query))
    module = nn.ParameterList(
        nn.Parameter(shard(t, dist.get_rank(), WORLD_SIZE)) for t in (query, key, value)
    )
    run = compiled(attend_full, AOT, fullgraph=True, options={"mesh": world_mesh()})
    # What is itself a parameter would be the same on every rank.
    out = run_and_count(lambda: run(*(piece * 1 for piece in module)), module, 1)
    assert_shards_close([out.detach(), *(piece.grad for piece in module)], expected, dtype)
