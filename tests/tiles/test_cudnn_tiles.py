"""cuDNN's tiles: what they hand to the op, and what comes of it.

No CPU has the op. Its plain implementation takes its place, which complains of what cuDNN, or
torch's code around it, would refuse or read wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
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

from cp_inductor import (
    UnsupportedAttention,
    UnsupportedBuffer,
    UnsupportedKernel,
    context_parallel,
    explain,
)
from cp_inductor.region.regions import SequenceRegion
from cp_inductor.tiles.aten_kernels import CudnnCUDA
from tests.rehearsal.stand_ins import StandIns, stand_in
from tests.support.graphs import attend_causal
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.reference import LAYOUTS, check_shards, check_tile, make_qkv, on_mesh, run_tile

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION


def test_an_old_cudnn_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for version, runs in ((None, False), (8907, False), (91900, True)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert CudnnCUDA.runs_on(cuda) == runs


def in_orders(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """On a CPU, Dynamo needs SDPA to choose flash at each call."""
    with sdpa_kernel([CUDNN, FLASH], set_priority=True):
        with sdpa_kernel([FLASH, CUDNN]):
            first = attend_causal(query, key, value)
        with sdpa_kernel([FLASH, CUDNN], set_priority=True):
            second = attend_causal(query * 2, key, value)
        third = attend_causal(query * 3, key, value)
    return [first, second, third, attend_causal(query * 4, key, value)]


def test_order_and_switches_are_those_around_the_call() -> None:
    with fake_mesh(0, 2) as mesh:
        tensors = on_mesh(make_qkv(32, head_dim=16, dtype=torch.bfloat16)[:3], mesh, Shard(2))
        report = explain(in_orders, *tensors, target="cuda:sm_80")
    kernels = [one.facts["kernel"] for one in report.attentions]
    assert kernels == ["cudnn_cuda", "flash_cuda", "cudnn_cuda", "flash_cuda"]
    reasons = [one.facts["why_kernel"] for one in report.attentions]
    assert reasons == ["SDPA's first choice"] * 4


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_numbers_of_any_strides(
    layout: Callable[[Tensor], Tensor], is_causal: bool, num_kv_heads: int
) -> None:
    sizes: dict[str, Any] = {"kv_len": 37 if is_causal else 45, "num_kv_heads": num_kv_heads}
    tensors = [layout(t) for t in make_qkv(37, head_dim=32, dtype=torch.bfloat16, **sizes)]
    # The gradient comes in the order of the model, whatever that of the query is.
    tensors[3] = tensors[3].transpose(1, 2).contiguous().transpose(1, 2)
    with StandIns() as mode:
        found = run_tile("cudnn_cuda", tensors, is_causal=is_causal)
    assert not mode.complaints
    assert mode.called == [CudnnCUDA.forward_op, CudnnCUDA.backward_op]
    check_tile(found, tensors, is_causal=is_causal)


def test_what_cudnn_would_read_wrongly_is_found() -> None:
    query, key, value, grad = make_qkv(32, head_dim=16, dtype=torch.bfloat16)
    empty = torch.zeros((), dtype=torch.int64)

    def complaints(**changed: Any) -> str:
        names = "grad_out query key value out logsumexp philox_seed philox_offset attn_bias"
        names += " cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
        lse = torch.zeros(*query.shape[:3], 1)
        given = (grad, query, key, value, query, lse, empty, empty, None, None, None, 32, 32, 0.0)
        call = dict(zip(names.split(), (*given, False), strict=True)) | changed
        found: list[str] = []
        stand_in(CudnnCUDA.backward_op, tuple(call.values()), {}, found.append)
        return "\n".join(found)

    assert not complaints()
    by_rows = grad.transpose(1, 2).contiguous().transpose(1, 2)
    assert "grad_out has strides" in complaints(grad_out=by_rows)
    assert "out has strides" in complaints(out=by_rows)
    assert "packed" in complaints(logsumexp=torch.zeros(1, 32, 4, 1).transpose(1, 2))
    assert "philox_seed must be int64" in complaints(philox_seed=empty.to(torch.uint64))
    assert "not the lengths" in complaints(max_q=31)
    assert "16 bytes" in complaints(key=torch.cat([key, key[..., :1]], -1)[..., :16])


# --- Kernels that the user has switched off, and attention that is none of SDPA's: refused by name.


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
