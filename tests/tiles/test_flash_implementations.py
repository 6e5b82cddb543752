"""FlashAttention 3 and 4, as torch puts them in the place of its own flash kernel, take our tiles.

`torch.nn.attention.activate_flash_attention_impl` replaces the aten ops that `FlashCUDA` calls by
functions of torch (`_fa3.py`, `_fa4.py`), which check what they support and call a library. Here
these functions are registered for the CPU, in the same way, and plain implementations take the
place of the library's kernels: torch's checks, layouts and results are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torchs

from cp_inductor.tiles.aten_kernels import FlashCUDA
from cp_inductor.tiles.kernels import with_whole_rows
from tests.rehearsal.program import Overlay
from tests.rehearsal.stand_ins import attend, differentiate
from tests.support.reference import LAYOUTS, check_tile, make_qkv, run_tile

fa3 = pytest.importorskip("torch.nn.attention._fa3")
fa4 = pytest.importorskip("torch.nn.attention._fa4")

SDPA_OPS = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")


def check(*by_rows: Tensor) -> None:
    """Check what the libraries check of (B, S, H, D)."""
    for tensor in by_rows:
        assert tensor.stride(-1) == 1 and tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= 256


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend, of (B, S, H, D); in these libraries the last query sees the last key."""
    check(query, key, value, out)
    assert not is_causal or query.shape[1] == key.shape[1]
    assert query.shape[2] % key.shape[2] == 0
    named = {"query": query, "key": key, "value": value}
    call: dict[str, Any] = {name: tensor.transpose(1, 2) for name, tensor in named.items()}
    result, lse = attend(call | {"scale": scale, "is_causal": is_causal}, None)
    out.copy_(result.transpose(1, 2))
    return out, lse


def backward(
    named: dict[str, Any], lse: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, ...]:
    check(*named.values())
    assert lse.is_contiguous() and lse.dtype == torch.float32
    batch, length, heads, _ = named["query"].shape
    assert lse.shape == (batch, heads, length)
    call = {name: tensor.transpose(1, 2) for name, tensor in named.items()}
    grads = differentiate(call | {"scale": scale, "is_causal": is_causal}, lse, None)
    like = (named[name] for name in ("query", "key", "value"))
    pairs = zip(like, grads, strict=True)
    return tuple(torch.empty_like(one).copy_(grad.transpose(1, 2)) for one, grad in pairs)


def fa3_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
    out, scale, is_causal, window, chunk = rest[3], rest[20], rest[21], rest[22:24], rest[24]
    assert window == (-1, -1) and chunk == 0
    return *forward(query, key, value, scale, is_causal, out), None, None


def fa3_backward(*args: Any) -> None:
    names = ("grad_out", "query", "key", "value", "out")
    lse, *grads, seq_q, seq_k, used_q, used_k, _, _, scale, is_causal = args[5:17]
    assert seq_q is seq_k is used_q is used_k is None
    for grad, one in zip(
        grads, backward(dict(zip(names, args, strict=False)), lse, scale, is_causal), strict=True
    ):
        grad.copy_(one)


def fa4_forward(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    assert kwargs["window_size_left"] is kwargs["window_size_right"] is None
    out = torch.empty_like(query) if kwargs["out"] is None else kwargs["out"]
    return forward(query, key, value, kwargs["softmax_scale"], kwargs["causal"], out)


def fa4_backward(*args: Any, softmax_scale: float, causal: bool, **_: Any) -> tuple[Tensor, ...]:
    names = ("query", "key", "value", "out", "grad_out")
    *tensors, lse = args
    return backward(dict(zip(names, tensors, strict=True)), lse, softmax_scale, causal)


def implementation_of(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the function that torch registers for an op of CUDA."""
    registered: dict[str, Callable[..., Any]] = {}

    class Library:
        def __init__(self, *_: Any) -> None:
            pass

        def impl(self, op: str, function: Callable[..., Any], *_: Any) -> None:
            registered[op] = function

    with mock.patch.object(module, "Library", Library):
        getattr(module, f"_{module.__name__[-3:]}_register_kernels")()
    return registered[name]


@pytest.fixture(params=[("FA3", 9), ("FA4", 9), ("FA4", 10)], ids=lambda one: f"{one[0]}-{one[1]}")
def activated(request: pytest.FixtureRequest) -> Iterator[str]:
    """Activate an implementation for the CPU, which is taken for a GPU."""
    name, major = request.param
    module = fa3 if name == "FA3" else fa4
    library = SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
    # What these take for torch. Compilers ask the real one, which has no GPU.
    torch_with_gpu = Overlay(torch, {"cuda": SimpleNamespace(is_available=lambda: True)})

    def register() -> Any:
        ops = torch.library.Library("aten", "IMPL", "CPU")
        for op in SDPA_OPS:
            ops.impl(op, implementation_of(module, op), "CPU")
        return SimpleNamespace(remove=ops._destroy)

    torchs.register_flash_attention_impl(f"{name} on a CPU", register_fn=register)
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(module, "torch", torch_with_gpu),
        mock.patch.object(module, "_get_device_major", return_value=major),
        mock.patch.object(fa3, "_FA3_CUDA_FWD", fa3_forward),
        mock.patch.object(fa3, "_FA3_CUDA_BWD", fa3_backward),
        mock.patch.object(fa4, "_FA4_MODULE_PATH", "here"),
        mock.patch.object(fa4, "_fa4_import_module", return_value=library),
    ):
        torchs.activate_flash_attention_impl(f"{name} on a CPU")
        try:
            yield name
        finally:
            torchs.restore_flash_attention_impl()
            del torchs._registry._FLASH_ATTENTION_IMPLS[f"{name} on a CPU"]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("is_causal", "head_dim", "num_kv_heads"), [(True, 32, 2), (False, 20, 4), (False, 128, 1)]
)
def test_they_take_tiles_of_any_strides(
    activated: str,
    layout: Callable[[Tensor], Tensor],
    is_causal: bool,
    head_dim: int,
    num_kv_heads: int,
) -> None:
    assert torchs.current_flash_attention_impl() == f"{activated} on a CPU"
    keys = 37 if is_causal else 45
    sizes: dict[str, Any] = {"kv_len": keys, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
    tensors = [layout(t) for t in make_qkv(37, dtype=torch.bfloat16, **sizes)]
    found = run_tile("flash_cuda", tensors, is_causal=is_causal)
    check_tile(found, tensors, is_causal=is_causal)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_compiled_code_finds_what_fakes_promise(
    activated: str, layout: Callable[[Tensor], Tensor]
) -> None:
    """Generated code asserts sizes and strides of what fakes say, which know of no replacement."""
    whole = make_qkv(37, dtype=torch.float16, num_kv_heads=2, head_dim=32)
    tensors = with_whole_rows(*map(layout, whole))
    query, key, value, grad = tensors
    real = FlashCUDA.forward_op(query, key, value, 0.0, True, scale=0.5)
    in_place: Any = (grad, query, key, value, real[0], real[1], None, None, 37, 37, 0.0, True)
    grads = FlashCUDA.backward_op(*in_place, real[6], real[7], scale=0.5)
    mode = torch._subclasses.FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in tensors]
    with mode:
        fake = FlashCUDA.forward_op(*fakes[:3], 0.0, True, scale=0.5)
        state = torch.empty(2, dtype=torch.uint64)
        of_fakes: Any = (fakes[3], *fakes[:3], *fake[:2], None, None, 37, 37, 0.0, True)
        fake_grads = FlashCUDA.backward_op(*of_fakes, state, state, scale=0.5)
    for got, promised in zip((*real[:2], *grads), (*fake[:2], *fake_grads), strict=True):
        assert got.shape == promised.shape and got.dtype == promised.dtype
        assert got.stride() == promised.stride()
