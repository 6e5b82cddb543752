"""Kernels are chosen by what they say they can do: the first row of the table that serves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_inductor import UnsupportedKernel
from cp_inductor.tiles import kernel_table
from cp_inductor.tiles.aten_kernels import FlashCPU
from cp_inductor.tiles.kernel_table import KERNELS, KernelRow, choose_kernel
from cp_inductor.tiles.masked_tiles import MaskedCPU

HOPPER, BLACKWELL = (9, 0), (10, 0)


def choose(dtype: torch.dtype, device: str, head_dim: int = 64, **how: Any) -> str:
    tensor = torch.empty(1, 2, 4, head_dim)
    return choose_kernel(tensor, tensor, tensor, dtype=dtype, device=device, site="here", **how)[0]


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


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_cudnn_is_the_first_choice_where_sdpa_prefers_it(capability: tuple[int, int]) -> None:
    choose_here = partial(choose, device="cuda", capability=capability)
    assert choose_here(torch.bfloat16) == choose_here(torch.float16, head_dim=128) == "cudnn_cuda"
    assert choose_here(torch.float32) == "efficient_cuda"
    for head_dim in (20, 136, 256):
        assert choose_here(torch.bfloat16, head_dim=head_dim) == "flash_cuda"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choose_here(torch.bfloat16) == "flash_cuda"
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert choose_here(torch.bfloat16) == "efficient_cuda"


def test_cudnn_is_not_chosen_where_algorithms_must_be_deterministic() -> None:
    try:
        torch.use_deterministic_algorithms(True)
        assert choose(torch.bfloat16, "cuda", capability=HOPPER) == "flash_cuda"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert choose(torch.bfloat16, "cuda", capability=HOPPER) == "cudnn_cuda"
    finally:
        torch.use_deterministic_algorithms(False)
