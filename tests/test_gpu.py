"""The CUDA kernels: shapes and strides on fakes everywhere, numbers on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cp_inductor.kernels import choose_kernel, get_kernel
from cp_inductor.ops import attention
from tests.ranks import run_ranks
from tests.reference import assert_close, attend_with_grads, make_qkv

ROOT = Path(__file__).parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CASES = [
    ("flash_cuda", torch.bfloat16),
    ("flash_cuda", torch.float16),
    ("efficient_cuda", torch.float32),
    ("efficient_cuda", torch.bfloat16),
]


def run_kernel(name: str, tensors: list[Tensor], *, is_causal: bool) -> tuple[Tensor, ...]:
    query, key, value, grad_out = tensors
    kernel = get_kernel(name)
    out, lse = kernel.forward(query, key, value, is_causal=is_causal, scale=None)
    grads = kernel.backward(grad_out, query, key, value, out, lse, is_causal=is_causal, scale=None)
    return out, lse, *grads


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_shapes_on_fakes(name: str, dtype: torch.dtype, head_dim: int) -> None:
    mode = FakeTensorMode()
    whole = make_qkv(37, kv_len=45, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    fakes = [FakeTensor(mode, tensor.to("meta"), torch.device("cuda:0")) for tensor in whole]
    with mode:
        assert choose_kernel(*fakes[:3], dtype=dtype, site="here") in (name, "flash_cuda")
        out, lse, *grads = run_kernel(name, fakes, is_causal=False)
    assert out.shape == fakes[0].shape
    assert lse.shape == fakes[0].shape[:3]
    assert [grad.shape for grad in grads] == [fake.shape for fake in fakes[:3]]
    assert {tensor.dtype for tensor in (out, *grads)} == {dtype}
    assert lse.dtype == torch.float32


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 4), (80, 2), (20, 1), (128, 4)])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_against_float64(
    name: str, dtype: torch.dtype, head_dim: int, num_kv_heads: int, is_causal: bool
) -> None:
    whole = make_qkv(133, head_dim=head_dim, num_kv_heads=num_kv_heads, dtype=dtype)
    expected = attend_with_grads(*whole, is_causal=is_causal)
    out, _, *grads = run_kernel(name, [t.cuda() for t in whole], is_causal=is_causal)
    for actual, reference in zip((out, *grads), expected, strict=True):
        assert_close(actual.cpu(), reference, dtype)


def check_op_on_device() -> None:
    leaves = [tensor.cuda().requires_grad_() for tensor in make_qkv(33, dtype=torch.bfloat16)[:3]]
    arguments = (True, None, "flash_cuda", dist.group.WORLD.group_name)
    torch.library.opcheck(attention, (*leaves, *arguments))


@pytest.mark.gpu
@needs_gpu
def test_opcheck() -> None:
    run_ranks(1, check_op_on_device)


def run_benchmark(*args: str) -> dict[str, object]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_attention.py"), "--quick", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.gpu
@needs_gpu
def test_lowered_graphs_on_every_rank() -> None:
    assert run_benchmark("--mode", "numerics", "--ranks", "2")["numerics"]


@pytest.mark.slow
def test_the_benchmark_runs_without_a_device() -> None:
    result = run_benchmark("--device", "cpu")
    assert result["numerics"] and result["timing"]
