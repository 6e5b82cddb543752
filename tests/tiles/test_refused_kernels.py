"""Kernels that the user has switched off, and attention that is none of SDPA's: refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cp_inductor import UnsupportedAttention, UnsupportedBuffer, UnsupportedKernel, context_parallel
from cp_inductor.region.regions import SequenceRegion
from tests.support.graphs import attend_causal
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import check_shards, make_qkv


def attend_under_math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def attend_under_math_in_a_checkpoint(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.utils.checkpoint.checkpoint(
            attend_causal, query, key, value, use_reentrant=False
        )


MODELS = {
    "outside": attend_causal,
    "inside": attend_under_math,
    "around a checkpoint": attend_under_math_in_a_checkpoint,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("form", ["region eager", "region", "mesh"])
def test_a_kernel_that_is_disabled_is_refused_by_name(
    form: str, model: Any, mesh: DeviceMesh
) -> None:
    tensors = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    backends = [SDPBackend.MATH] if model is attend_causal else list(ALL_BACKENDS)
    if form != "region eager":
        options = {"mesh": mesh} if form == "mesh" else None
        model = torch.compile(model, backend="cp_aot_eager", options=options)
    region: Any = nullcontext() if form == "mesh" else SequenceRegion(mesh)
    refused = pytest.raises(UnsupportedKernel, match="FLASH_ATTENTION")
    with sdpa_kernel(backends), region, refused:
        model(*tensors)


ALL_BACKENDS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def test_captured_dtensors_under_a_disabled_kernel_are_refused(mesh: DeviceMesh) -> None:
    def model(query: DTensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, query, query).to_local()

    query = DTensor.from_local(torch.randn(1, 2, 8, 4), mesh, [Shard(2)])
    with pytest.raises(UnsupportedKernel, match=r"on cpu, with flash attention disabled"):
        torch.compile(model, backend="cp_aot_eager", fullgraph=True)(query)


@on_ranks(2)
def test_a_backward_is_that_of_its_forward() -> None:
    def run(*leaves: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), SequenceRegion(world_mesh()):
            return attend_causal(*leaves)

    with sdpa_kernel(SDPBackend.MATH):
        check_shards(run, make_qkv(10, dtype=torch.float64), is_causal=True)


# --- flex_attention ---------------------------------------------------------------------------


def causal_blocks(length: int) -> BlockMask:
    return create_block_mask(
        lambda batch, head, query, key: query >= key, None, None, length, length, device="cpu"
    )


def test_a_block_mask_is_no_buffer(mesh: DeviceMesh) -> None:
    mask, ids = causal_blocks(256), torch.zeros(1, 256)
    refused = pytest.raises(UnsupportedBuffer, match=r"buffer 1 .* expected a tensor, got a BlockM")
    with refused:
        context_parallel(mesh, buffers=[ids, mask], buffer_seq_dims=[1, 2])


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.filterwarnings(
    "ignore:Dynamo does not know how to trace", "ignore:flex_attention called without"
)
def test_eager_flex_attention_over_sharded_tensors(has_mask: bool, mesh: DeviceMesh) -> None:
    """And of other placements, and under another backend."""
    mask = causal_blocks(256) if has_mask else None

    def model(query: Tensor) -> Tensor:
        return flex_attention(query, query, query, block_mask=mask)

    query = DTensor.from_local(torch.randn(1, 2, 128, 16), mesh, [Shard(2)])
    # It compiles itself.
    with pytest.raises(UnsupportedAttention, match=r"flex_attention on DTensors: .* eager"):
        model(query)
    failed = torch._dynamo.exc.BackendCompilerFailed
    with pytest.raises(failed, match=r"flex_attention on DTensors: .* another backend"):
        torch.compile(model, backend="aot_eager")(query)
    query = DTensor.from_local(torch.randn(1, 2, 256, 16), mesh, [Shard(1)])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sharded along the sequence"):
        torch.compile(model, backend="cp_aot_eager", fullgraph=True)(query)
