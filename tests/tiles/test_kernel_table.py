"""Kernels are chosen by what they say they can do: the first row of the table that serves."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_inductor import UnsupportedKernel
from cp_inductor.tiles import kernel_table
from cp_inductor.tiles.aten_kernels import FlashCPU
from cp_inductor.tiles.kernel_table import KERNELS, KernelRow, choose_kernel
from cp_inductor.tiles.masked_tiles import MaskedCPU


def choose(dtype: torch.dtype, device: str, head_dim: int = 64, *, has_bias: bool = False) -> str:
    tensor = torch.empty(1, 2, 4, head_dim)
    how = {"dtype": dtype, "site": "here", "device": device, "has_bias": has_bias}
    return choose_kernel(tensor, tensor, tensor, **how)  # type: ignore[arg-type]


def test_a_new_row_needs_no_more_than_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Best(FlashCPU):
        dtypes = (torch.float32,)
        max_head_dim = 128

    rows = {"best": KernelRow(Best, MaskedCPU), **KERNELS}
    monkeypatch.setattr(kernel_table, "KERNELS", rows)
    assert choose(torch.float32, "cpu") == "best"
    assert choose(torch.float32, "cpu", 256) == "flash_cpu"
    assert choose(torch.float64, "cpu") == "flash_cpu"
    with pytest.raises(UnsupportedKernel, match="float32 with head dims up to 128 on cpu with the"):
        choose(torch.float16, "xpu")


def test_on_cuda_the_order_is_that_of_sdpa() -> None:
    assert choose(torch.bfloat16, "cuda") == "flash_cuda"
    assert choose(torch.float32, "cuda") == "efficient_cuda"
    assert choose(torch.bfloat16, "cuda", 264) == "efficient_cuda"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose(torch.bfloat16, "cuda") == "efficient_cuda"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choose(torch.bfloat16, "cuda") == "flash_cuda"
        # Tiles with a bias are the memory-efficient kernel's.
        with pytest.raises(UnsupportedKernel, match="memory-efficient attention disabled"):
            choose(torch.bfloat16, "cuda", has_bias=True)
    assert choose(torch.bfloat16, "cuda", has_bias=True) == "flash_cuda"
