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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import cp_inductor
from cp_inductor.tiles.combine import combine
from cp_inductor.tiles.kernel_table import get_kernel
from cp_inductor.tiles.kernels import TileCall
from tests.support.combinations import compiled
from tests.support.comms import Counts
from tests.support.graphs import attend_full
from tests.support.ranks import fake_rank, run_ranks
from tests.support.reference import (
    TOLERANCE,
    assert_close,
    attend,
    make_qkv,
    shard,
)

NUM_LAYERS = 2

# One of them is neither the first nor the last.
WORLD_SIZE = 3


def world() -> tuple[int, int, DeviceMesh]:
    world_size = dist.get_world_size()
    return (
        dist.get_rank(),
        world_size,
        init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",)),
    )


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
        if isinstance(grad, torch.distributed.tensor.DTensor):
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


def check_encoder_of_dtensors(form: str) -> None:
    ways = list(product((torch.float32, torch.bfloat16), (True, False)))
    if form == "cp_aot_eager":
        ways = [ways[0], ways[3]]  # each dtype and each mask; eager code has all
    for dtype, is_causal in ways:
        check_one_encoder_of_dtensors(form, dtype, is_causal)


def check_one_encoder_of_dtensors(form: str, dtype: torch.dtype, is_causal: bool) -> None:
    rank, world_size, mesh = world()
    torch._dynamo.reset()
    # What is rounded shows in one layer.
    num_layers = NUM_LAYERS if dtype == torch.float32 else 1
    model, x = encoder(dtype, num_layers), torch.rand(2, 4 * world_size, 32).to(dtype)
    mask = causal_mask(4 * world_size, dtype, is_causal)
    expected, grads = expected_of(model, x, mask=mask, is_causal=is_causal)
    model = distribute_module(model, mesh)
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    if mask is not None:
        mask = distribute_tensor(mask, mesh, [Replicate()])
    run = compiled(model, form, fullgraph=True)
    out = run_and_count(lambda: run(sharded, mask=mask, is_causal=is_causal), model, num_layers)
    assert_close(out.to_local(), shard(expected, rank, world_size, 1), dtype)
    check_grads(model, grads, dtype)


def check_encoder_of_shards(form: str, is_causal: bool) -> None:
    rank, world_size, mesh = world()
    torch._dynamo.reset()
    model, x = encoder(torch.float32), torch.rand(2, 4 * world_size, 32)
    whole_mask = causal_mask(4 * world_size, torch.float32, is_causal)
    expected, grads = expected_of(model, x, mask=whole_mask, is_causal=is_causal)
    mask = causal_mask(4, torch.float32, is_causal)
    run = compiled(model, form, fullgraph=True, options={"mesh": mesh})
    piece = shard(x, rank, world_size, 1).contiguous()
    out = run_and_count(lambda: run(piece, mask=mask, is_causal=is_causal), model, NUM_LAYERS)
    assert_close(out, shard(expected, rank, world_size, 1), torch.float32)
    check_grads(model, grads, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["eager", "cp_aot_eager"])
def test_encoder_of_dtensors(form: str) -> None:
    run_ranks(WORLD_SIZE, check_encoder_of_dtensors, form)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.long)])
def test_encoder_of_shards(is_causal: bool) -> None:
    run_ranks(WORLD_SIZE, check_encoder_of_shards, "cp_aot_eager", is_causal)


def test_attention_weights_are_refused() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def model(x: Tensor) -> Tensor:
        return attention(x, x, x)[0]

    with fake_rank(0, 2):
        _, _, mesh = world()
        run = torch.compile(model, backend="cp_aot_eager", options={"mesh": mesh})
        with pytest.raises(cp_inductor.UnsupportedAttention, match="need_weights=False"):
            run(torch.rand(2, 4, 16))


# 2. Different query and context lengths, against attention chunk by chunk


def attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, num_chunks: int) -> Tensor:
    """Attend to one chunk of the context after the other, on one process."""
    kernel = get_kernel("flash_cpu")
    chunks = zip(key.chunk(num_chunks, 2), value.chunk(num_chunks, 2), strict=True)
    return combine([kernel.forward(TileCall(query, k, v)) for k, v in chunks]).out


def check_cross_attention(form: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check_one_cross_attention(form, dtype)


def check_one_cross_attention(form: str, dtype: torch.dtype) -> None:
    rank, world_size, mesh = world()
    torch._dynamo.reset()
    query, key, value, _ = make_qkv(
        8 * world_size,
        kv_len=24 * world_size,
        batch=8,
        num_heads=8,
        head_dim=32,
        dtype=dtype,
    )
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    attend(*leaves).sum().backward()
    pieces = [shard(t, rank, world_size).contiguous() for t in (query, key, value)]
    for piece in pieces:
        piece.requires_grad_()
    module = nn.Module()
    module.pieces = nn.ParameterList(nn.Parameter(piece) for piece in pieces)
    run = compiled(attend_full, form, fullgraph=True, options={"mesh": mesh})
    # What is itself a parameter would be the same on every rank.
    out = run_and_count(lambda: run(*(piece * 1 for piece in module.pieces)), module, 1)
    in_chunks = attend_in_chunks(query, key, value, world_size)
    assert_close(out.detach(), shard(in_chunks, rank, world_size), dtype)
    for parameter, leaf in zip(module.pieces, leaves, strict=True):
        assert_close(parameter.grad, shard(leaf.grad, rank, world_size), dtype)


@pytest.mark.slow
def test_cross_attention() -> None:
    run_ranks(WORLD_SIZE, check_cross_attention, "cp_aot_eager")
