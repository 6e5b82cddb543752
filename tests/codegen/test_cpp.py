"""The code Inductor generates: order of starts, tiles and waits; one fused combine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from tests.support.graphs import AttentionBlock, attend_causal, attend_full, generate_code
from tests.support.ranks import fake_mesh
from tests.support.reference import make_qkv
from tests.support.wrapper import START, TILE_BACKWARD_ON_CPU, WAIT, Wrapper, check_order

pytestmark = pytest.mark.usefixtures("ring")


def code_of(
    rank: int,
    world_size: int,
    function: Callable[..., Tensor] = attend_causal,
    *,
    needs_grad: bool = True,
    **shape: Any,
) -> list[str]:
    with fake_mesh(rank, world_size) as mesh:
        shape = {"seq_len": 16, "head_dim": 16, "dtype": torch.bfloat16, **shape}
        tensors = [tensor.requires_grad_(needs_grad) for tensor in make_qkv(**shape)[:3]]
        return generate_code(function, *tensors, options={"mesh": mesh, "schedule": "local"})


def kernels(code: str) -> dict[str, str]:
    """Source of every generated C++ kernel by its name."""
    pattern = r"(cpp_fused_\w+) = async_compile\.cpp_pybinding\(.*?r'''(.*?)'''\)"
    return dict(re.findall(pattern, code, flags=re.DOTALL))


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("function", [attend_causal, attend_full])
def test_forward_of_the_last_of_three(function: Callable[..., Tensor], needs_grad: bool) -> None:
    code = code_of(2, 3, function, needs_grad=needs_grad)[0]
    order = Wrapper.read(code).order
    assert order == ["start", "tile", "wait", "start", "tile", "wait", "tile"]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_forward_of_the_first_of_three(needs_grad: bool) -> None:
    code = code_of(0, 3, needs_grad=needs_grad)[0]
    order = Wrapper.read(code).order
    assert order == ["start", "tile", "wait", "start", "wait"]


def test_backward() -> None:
    _, code = code_of(2, 3)
    order = Wrapper.read(code).order
    kv_and_tile = ["start", "tile", "wait"]
    assert order == [
        *kv_and_tile,
        *["start", "tile", "start", "wait"],  # the first gradient leaves before kv is waited for
        *["tile", "wait", "start", "wait"],
    ]
    check_order(code, START, TILE_BACKWARD_ON_CPU, WAIT, START, TILE_BACKWARD_ON_CPU, START, WAIT)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_fused_combine(kv_heads: int) -> None:
    code = code_of(2, 3, needs_grad=False, num_kv_heads=kv_heads)[0]
    # Own keys are packed only by ranks that give them away: here one kernel is left, the combine.
    assert re.findall(r"^\s+(cpp_fused_\w+)\(", code, re.M) == [*kernels(code)]
    (source,) = kernels(code).values()
    partials = re.findall(r"at::BFloat16\* ?(\w+)[,)]", source)
    assert len(partials) == 3  # the result overwrites one of them
    for partial in partials:
        assert source.count(f"loadu({partial} ") == 1
    assert sum(source.count(f".store({partial} ") for partial in partials) == 1


def test_no_combine_where_there_is_one_partial() -> None:
    code = code_of(0, 3, needs_grad=False)[0]
    assert len(kernels(code)) == 1  # packing kv for the next rank


@pytest.mark.slow
def test_two_layers_of_dtensors() -> None:
    with fake_mesh(1, 2) as mesh:
        model = distribute_module(nn.Sequential(AttentionBlock(), AttentionBlock()), mesh)
        x = distribute_tensor(torch.randn(1, 8, 32), mesh, [Shard(1)])
        forward, backward = generate_code(model, x)
    order = Wrapper.read(forward).order
    assert order == ["start", "tile", "wait", "tile"] * 2
    order = Wrapper.read(backward).order
    one_layer = ["start", "tile", "wait", "tile", "start", "wait"]
    assert [call for call in order if call in ("start", "tile")] == [
        call for call in one_layer * 2 if call in ("start", "tile")
    ]


def test_without_the_pin_the_order_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pin_order is for: the day Inductor keeps the order by itself, it can go."""
    from cp_inductor.passes.pipeline import PostGrad

    monkeypatch.setattr(PostGrad, "__call__", lambda self, graph: None)
    code = code_of(2, 3, needs_grad=False)[0]
    order = Wrapper.read(code).order
    assert order != ["start", "tile", "wait", "start", "tile", "wait", "tile"]
