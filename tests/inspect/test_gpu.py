"""The CUDA kernels: shapes and strides on fakes everywhere, numbers on a device."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.gpu_campaign import STAGES
from benchmarks.gpu_worlds import World, run_rows
from cp_inductor import cross_compile
from cp_inductor.tiles.kernel_table import choose_kernel, get_kernel
from cp_inductor.tiles.kernels import Partial, TileCall
from tests.support.graphs import attend_causal, generate_code
from tests.support.processes import run_python
from tests.support.ranks import fake_mesh
from tests.support.reference import (
    LAYOUTS,
    TOLERANCE,
    assert_within,
    attend_with_grads,
    lse_in_float64,
    make_qkv,
    run_tile,
)
from tests.support.wrapper import normalize

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CASES = [
    ("cudnn_cuda", torch.bfloat16),
    ("cudnn_cuda", torch.float16),
    ("flash_cuda", torch.bfloat16),
    ("flash_cuda", torch.float16),
    ("efficient_cuda", torch.float32),
    ("efficient_cuda", torch.bfloat16),
    ("efficient_cuda", torch.float16),
]


def as_fakes(tensors: list[Tensor]) -> list[Tensor]:
    """Return fake CUDA tensors of the same shapes and strides, under one mode."""
    mode = FakeTensorMode()
    return [
        FakeTensor(
            mode,
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
            torch.device("cuda:0"),
        )
        for t in tensors
    ]


def significant_strides(tensor: Tensor) -> list[int]:
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes_and_strides if size > 1]


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_shapes_on_fakes(name: str, dtype: torch.dtype, head_dim: int) -> None:
    whole = make_qkv(37, kv_len=45, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    fakes = as_fakes(list(whole))
    if name == "cudnn_cuda" and head_dim % 8:
        pytest.skip("a head dim that cuDNN is not asked for")
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        assert choose_kernel(*fakes[:3], dtype=dtype, site="here")[0] in (name, "flash_cuda")
        out, lse, *grads = run_tile(name, fakes, is_causal=False)
    assert out.shape == fakes[0].shape
    assert lse.shape == fakes[0].shape[:3]
    assert [grad.shape for grad in grads] == [fake.shape for fake in fakes[:3]]
    assert {tensor.dtype for tensor in (out, *grads)} == {dtype}
    assert lse.dtype == torch.float32


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 4), (80, 2), (20, 1), (128, 4)])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_against_float64(
    name: str, dtype: torch.dtype, head_dim: int, num_kv_heads: int, is_causal: bool, layout: str
) -> None:
    """Of any layout; and the fakes know how results lie."""
    whole = make_qkv(133, head_dim=head_dim, num_kv_heads=num_kv_heads, dtype=dtype)
    expected_out, *expected_grads = attend_with_grads(*whole, is_causal=is_causal)
    inputs = [LAYOUTS[layout](tensor.cuda()) for tensor in whole]
    out, lse, *grads = run_tile(name, inputs, is_causal=is_causal)
    # float32 is multiplied as three products of tf32, with an error of 2^-22, not 2^-24.
    tolerance = TOLERANCE[dtype] * (4 if dtype is torch.float32 else 1)
    assert_within(out.cpu(), expected_out, tolerance, "out")
    for what, grad, expected in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        assert_within(grad.cpu(), expected, tolerance, what)
    # The scores of every dtype are summed in float32.
    expected_lse = lse_in_float64(*whole[:2], is_causal=is_causal)
    assert lse.dtype == torch.float32
    assert_within(lse.cpu(), expected_lse, 4 * TOLERANCE[torch.float32], "lse")
    fakes = as_fakes(inputs)
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        fake_results = run_tile(name, fakes, is_causal=is_causal)
    strides = [significant_strides(tensor) for tensor in (out, lse, *grads)]
    assert strides == [significant_strides(fake) for fake in fake_results]


def run_campaign(results: Path, *args: str) -> str:
    """Run the campaign on tiny shapes; return what it printed."""
    return run_python("benchmarks/gpu_campaign.py", "--tiny", "--results", results, *args)


@pytest.mark.long
def test_the_campaign_runs_without_a_device(tmp_path: Path) -> None:
    """On a device that is lent for minutes, nothing may fail that could have failed before."""
    printed = run_campaign(tmp_path, *STAGES).splitlines()
    assert {line.split()[0] for line in printed} == set(STAGES)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(files) == len(STAGES)
    assert all("| failed |" not in text for text in files.values())
    # What is there is not run again.
    assert run_campaign(tmp_path, *STAGES) == ""


def fail_in_many_ways(row: str, mesh: DeviceMesh) -> dict[str, Any]:
    if row == "raises" and mesh.get_local_rank() == 1:
        raise ValueError("this row is wrong")
    if row == "aborts" and mesh.get_local_rank() == 1:
        os.abort()
    if row == "hangs":
        time.sleep(600)
    return {"value": row}


@pytest.mark.long
def test_a_row_of_the_campaign_takes_no_other_with_it() -> None:
    rows = ["raises", "right", "aborts", "hangs", "right too"]
    world, until = World("staged", 2, (0, 1), "cpu"), time.monotonic() + 300
    outcomes = dict(run_rows(world, fail_in_many_ways, rows, row_s=20, until=until))
    assert list(outcomes) == rows
    assert "ValueError: this row is wrong" in outcomes["raises"]
    assert outcomes["aborts"] == "a process ended with SIGABRT"
    assert outcomes["hangs"] == "out of time"
    assert outcomes["right"] == [{"value": "right"}] * 2
    assert outcomes["right too"] == [{"value": "right too"}] * 2


@pytest.mark.gpu
@needs_gpu
def test_numbers_of_every_rank(tmp_path: Path) -> None:
    assert "failed" not in run_campaign(tmp_path, "numbers")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("flash_cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(pytest.param(*case, marks=[pytest.mark.gpu, needs_gpu]) for case in CASES),
    ],
)
def test_part_of_a_longer_lse(name: str, dtype: torch.dtype) -> None:
    """Plans cut queries: a kernel must not take a part of out and lse for their beginning."""
    device = name.rpartition("_")[2]
    whole = make_qkv(96, head_dim=64, dtype=dtype)
    query, key, value, grad_out = (tensor.to(device) for tensor in whole)
    kernel = get_kernel(name)
    out, lse = kernel.forward(TileCall(query, key, value))
    part = [tensor.narrow(2, 32, 40) for tensor in (grad_out, query)]
    rest = [out.narrow(2, 32, 40), lse.narrow(2, 32, 40)]
    found, expected = (
        kernel.backward(TileCall(first[1], key, value), first[0], Partial(*last))
        for first, last in (
            (part, rest),
            ([t.contiguous() for t in part], [t.contiguous() for t in rest]),
        )
    )
    for actual, reference in zip(found, expected, strict=True):
        assert_within(actual, reference, TOLERANCE[dtype] / 8, name)


@pytest.mark.gpu
@needs_gpu
def test_cross_compiled_code_is_what_the_device_gets() -> None:
    """Rank 1 of 2, compiled on a GPU under the fake group, and for it without it."""
    major, minor = torch.cuda.get_device_capability()
    shape = {"dtype": torch.bfloat16, "device": "cuda"}
    query, key = (torch.randn(1, heads, 64, 32, **shape).requires_grad_() for heads in (4, 2))
    options = {"strategy": "ring", "shape_padding": False}
    with fake_mesh(1, 2) as mesh:
        real = generate_code(attend_causal, query, key, key, options={**options, "mesh": mesh})
    cross = cross_compile(
        attend_causal,
        (query, key, key),
        world_size=2,
        rank=1,
        target=f"cuda:sm_{major}{minor}",
        options=options,
    )
    assert [normalize(code) for code in real] == list(map(normalize, cross.code.values()))
