"""Kernels that are known to be wrong: each row is met, and something else computes in their place.

No such GPU is here, and no such library: devices, versions and ops are stand-ins.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import attention as torchs
from torch.nn.attention import SDPBackend, _fa4, sdpa_kernel

from cp_inductor import UnsupportedKernel, explain
from cp_inductor.tiles import kernel_table, known_wrong
from cp_inductor.tiles.aten_kernels import CudnnCUDA, FlashCPU, FlashCUDA
from cp_inductor.tiles.kernel_table import KERNELS, KernelRow, choose_kernel
from cp_inductor.tiles.masked_tiles import MaskedCPU
from tests.rehearsal.stand_ins import StandIns
from tests.support.graphs import attend_causal
from tests.support.ranks import fake_mesh
from tests.support.reference import make_qkv, on_mesh, run_tile

HOPPER, BLACKWELL = (9, 0), (10, 0)
FORWARDS = (CudnnCUDA.forward_op, FlashCUDA.forward_op)
BACKWARDS = (CudnnCUDA.backward_op, FlashCUDA.backward_op)


def ops_of_tile(num_queries: int, num_keys: int, *, is_causal: bool = False) -> list[Any]:
    """Return what a tile of cuDNN calls, forward and backward."""
    sizes: dict[str, Any] = {"kv_len": num_keys, "head_dim": 16, "dtype": torch.bfloat16}
    with StandIns() as seen:
        run_tile("cudnn_cuda", make_qkv(num_queries, **sizes), is_causal=is_causal)
    return seen.called


def test_a_tail_of_keys_has_its_gradient_from_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    # The CPU is taken for an H100 with the cuDNN of torch 2.13's wheels.
    monkeypatch.setattr("cp_inductor.tiles.aten_kernels.chip_of", lambda device: HOPPER)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert ops_of_tile(128, 192) == [FORWARDS[0], BACKWARDS[1]]
    assert ops_of_tile(128, 128) == [FORWARDS[0], BACKWARDS[0]]
    assert ops_of_tile(192, 192, is_causal=True) == [FORWARDS[0], BACKWARDS[0]]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    assert ops_of_tile(128, 192) == [FORWARDS[0], BACKWARDS[0]]


@pytest.mark.parametrize(("queries", "keys"), [(1, 128), (9, 1), (1, 1)])
def test_one_token_is_no_tile_of_cudnn(queries: int, keys: int) -> None:
    assert ops_of_tile(queries, keys) == [FORWARDS[1], BACKWARDS[1]]


@pytest.mark.parametrize(
    ("version", "is_wrong"),
    [(None, False), (91800, False), (91900, True), (92401, False), (92500, True), (92501, False)],
)
def test_which_cudnn_is_wrong_for_one_query(
    version: int | None, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert known_wrong.ONE_QUERY.is_met(BLACKWELL) == is_wrong
    assert not known_wrong.ONE_QUERY.is_met(HOPPER)
    assert not known_wrong.ONE_QUERY.is_met(None)


def test_fa4_is_not_chosen_for_two_wide_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs, "current_flash_attention_impl", lambda: "FA4")
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

    def choose(batch: int, head_dim: int, capability: tuple[int, int]) -> tuple[str, str]:
        one: Tensor = torch.empty(batch, 2, 4, head_dim)
        how: dict[str, Any] = {"device": "cuda", "capability": capability}
        how["dtype"] = torch.bfloat16
        with torchs.sdpa_kernel(order, set_priority=True):
            return choose_kernel(one, one, one, site="here", **how)

    name, why = choose(2, 256, BLACKWELL)
    assert name == "efficient_cuda"
    assert "FA4 4.0.0 betas, head dim 256 and two sequences or more: wrong gradients" in why
    for batch, head_dim, chip in ((1, 256, BLACKWELL), (2, 128, BLACKWELL), (2, 256, HOPPER)):
        assert choose(batch, head_dim, chip)[0] == "flash_cuda"
    monkeypatch.setattr(known_wrong, "version", lambda name: "4.0.0")
    assert choose(2, 256, BLACKWELL)[0] == "flash_cuda"


def test_torch_hands_fa4_no_window_of_minus_one() -> None:
    """If it does one day, flash may not be chosen where FA4 has taken its place."""
    assert _fa4._aten_to_fa4_window_size(-1) is None


def test_the_report_prints_the_rows_of_its_kernel() -> None:
    with fake_mesh(0, 2) as mesh:
        tensors = on_mesh(make_qkv(32, head_dim=16, dtype=torch.bfloat16)[:3], mesh, Shard(2))
        of = {name: explain(attend_causal, *tensors, target=f"cuda:{name}") for name in CHIPS}
    for name, row in CHIPS.items():
        assert of[name].attentions[0].facts["known_wrong"] == ((str(row),) if row else ())
        assert ("known to be wrong" in str(of[name])) == (row is not None)


CHIPS = {"h100": known_wrong.TAIL_OF_KEYS, "b200": known_wrong.ONE_QUERY, "a100": None}


# --- Kernels are chosen by what they say they can do: the first row of the table that serves.


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
