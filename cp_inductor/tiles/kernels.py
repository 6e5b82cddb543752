"""One tile: a single-device flash attention, forward and backward, behind one shape of call.

    call = TileCall(query, key, value, is_causal=False, scale=None)
    partial = kernel.forward(call)
    grads = kernel.backward(call, grad_out, partial)

The kernels of aten differ in how many KV heads they take, which head dims, how long their lse is,
which of them take a mask, what they return for a row that sees nothing (here: out 0, lse -inf,
gradients 0), which strides they read correctly, and which scales. All of that is settled here.
Inside a plan, `backward` gets the out and lse of whole rows, not of the tile: the softmax that it
recomputes is then the global one, and the gradients of all tiles add up.

A new kernel is a class with two methods and a row in `KERNELS`; its ops go into
`cp_inductor.tiles.tile_ops.TILE_OPS`.
`cp_inductor.tiles.kernel_choice` says when it serves.

Shapes: B batch, H query heads, G key-value heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_inductor.torch_private.sizes import is_known

aten = torch.ops.aten

# Of query, key and value, in their shapes and dtypes.
Gradients = tuple[Tensor, Tensor, Tensor]


class Change(Protocol):
    """What takes the place of a tile's scaled scores (B, H, S, T), and its derivative by them."""

    def value(self, scores: Tensor) -> Tensor:
        """Return what takes their place."""

    def slope(self, scores: Tensor) -> Tensor:
        """Return its derivative."""


@dataclass(frozen=True, slots=True)
class TileCall:
    """What a tile attends to.

    Attributes:
        query: (B, H, S, D).
        key, value: (B, G, T, D).
        is_causal: only keys with an index up to the query's; needs S == T.
        scale: of the scores; None is 1 / sqrt(D).
        bias: (B | 1, H | 1, S, T), added to the scaled scores; -inf where there is no pair.
        change: what takes the place of the scaled scores before; `Math` alone computes it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False
    scale: float | None = None
    bias: Tensor | None = None
    change: Change | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def factor(self) -> float:
        """The scale, also where it is the default: padding the head dim does not change it."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


class Partial(NamedTuple):
    """A tile's result: out (B, H, S, D), lse (B, H, S), natural log.

    Out is in the dtype of the inputs, or wider where what computed it is.
    """

    out: Tensor
    lse: Tensor


class Kernel(ABC):
    """A single-device attention."""

    @abstractmethod
    def forward(self, call: TileCall) -> Partial:
        """Attend."""

    @abstractmethod
    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """Differentiate `forward`.

        Args:
            call: of the forward.
            grad_out: (B, H, S, D).
            whole: out and lse, of the tile or of whole rows.
        """


class FlashCPU(Kernel):
    """aten's CPU flash attention: float64, float32, bfloat16 and float16, G <= H, any D.

    It takes every row of query, key, value and out for D adjacent numbers, whatever the stride of
    the last dim: SDPA does not call it otherwise. Rows that overlap its matrix products misread.
    The strides of gradients, lse and bias it follows.

    Of fewer than 16 keys (torch 2.13) it says that a row sees nothing whose scores are all NaN.
    """

    def forward(self, call: TileCall) -> Partial:
        """See `Kernel.forward`."""
        out, lse = self.attend(call)
        return Partial(out, _lse_of_rows(lse, call.bias))

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """See `Kernel.backward`."""
        lse = _lse_for_backward(whole.lse, call.bias)
        return self.differentiate(call, grad_out, Partial(whole.out, lse))

    def attend(self, call: TileCall) -> Partial:
        """Attend; the lse of rows that see nothing is any number."""
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *with_whole_rows(*call.tensors),
            0.0,
            call.is_causal,
            attn_mask=call.bias,
            scale=call.scale,
        )
        return Partial(out, lse)

    def differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """Differentiate; the lse of rows that see nothing is +inf."""
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out,
            *with_whole_rows(*call.tensors, whole.out),
            whole.lse,
            0.0,
            call.is_causal,
            attn_mask=call.bias,
            scale=call.scale,
        )
        return dq, dk, dv


class FlashCUDA(Kernel):
    """aten's CUDA flash attention: bfloat16 and float16, G <= H, D a multiple of 8 (padded).

    It refuses query, key and value whose last dim has another stride than 1; so does the next.
    It takes no bias: where there is one, the memory-efficient kernel serves.
    """

    def forward(self, call: TileCall) -> Partial:
        """See `Kernel.forward`."""
        if call.bias is not None:
            return EfficientCUDA().forward(call)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *with_whole_rows(*_pad_head_dims(*call.tensors)),
            0.0,
            call.is_causal,
            scale=call.factor,
        )
        return Partial(_unpad_head_dim(out, call.query.shape[-1]), lse)

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """See `Kernel.backward`."""
        if call.bias is not None:
            return EfficientCUDA().backward(call, grad_out, whole)
        tensors = _pad_head_dims(grad_out, *call.tensors, whole.out)
        grad_out, query, key, value, out = tensors
        query, key, value, out = with_whole_rows(query, key, value, out)
        no_dropout = query.new_empty((2,), dtype=torch.uint64)
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            # Read by its address alone: a part of a longer lse would be taken for its beginning.
            whole.lse.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            call.is_causal,
            no_dropout,
            no_dropout,
            scale=call.factor,
        )
        dq, dk, dv = (_unpad_head_dim(grad, call.query.shape[-1]) for grad in grads)
        return dq, dk, dv


class EfficientCUDA(Kernel):
    """aten's memory-efficient attention: float32 and half types, G == H (KV heads repeated)."""

    LSE_ALIGNMENT = 32  # the kernel writes, and reads back, lse rows padded to this many queries
    BIAS_ALIGNMENT = 16  # elements; see pad_bias in aten's attention.cpp

    def forward(self, call: TileCall) -> Partial:
        """See `Kernel.forward`."""
        query, num_heads = call.query, call.query.shape[1]
        key, value = repeat_heads(call.key, num_heads), repeat_heads(call.value, num_heads)
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            *with_whole_rows(*_pad_head_dims(query, key, value)),
            self._bias(call),
            True,
            0.0,
            call.is_causal,
            scale=call.factor,
        )
        out, lse = _unpad_head_dim(out, query.shape[-1]), lse.narrow(2, 0, query.shape[2])
        if call.bias is not None:
            # In a row without a pair the kernel computes 0 / 0.
            out = out.masked_fill(_sees_nothing(call.bias).unsqueeze(-1), 0.0)
        return Partial(out, _lse_of_rows(lse, call.bias))

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """See `Kernel.backward`."""
        num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
        key, value = repeat_heads(call.key, num_heads), repeat_heads(call.value, num_heads)
        tensors = _pad_head_dims(grad_out, call.query, key, value, whole.out)
        grad_out, query, key, value, out = tensors
        query, key, value, out = with_whole_rows(query, key, value, out)
        lse = _lse_for_backward(whole.lse, call.bias)
        # +inf makes every probability of a padding row exp(-inf) = 0.
        lse = F.pad(lse, (0, -query.shape[2] % self.LSE_ALIGNMENT), value=float("inf"))
        lse = lse.contiguous()
        no_dropout = query.new_empty((), dtype=torch.int64)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            query,
            key,
            value,
            self._bias(call),
            out,
            lse,
            no_dropout,
            no_dropout,
            0.0,
            [True, True, True, False],
            call.is_causal,
            scale=call.factor,
        )
        dk, dv = sum_heads(dk, num_kv_heads), sum_heads(dv, num_kv_heads)
        dq, dk, dv = (_unpad_head_dim(grad, call.query.shape[-1]) for grad in (dq, dk, dv))
        return dq, dk, dv

    def _bias(self, call: TileCall) -> Tensor | None:
        """Give every head a bias, in rows that begin at multiples of what the kernel loads.

        The kernel adds what is of the dtype of the query, and nothing else.
        """
        if call.bias is None:
            return None
        query = call.query
        bias = call.bias.to(query.dtype)
        missing = -bias.shape[-1] % self.BIAS_ALIGNMENT
        if missing:
            zeros = bias.new_zeros((*bias.shape[:-1], missing))
            bias = torch.cat([bias, zeros], -1).narrow(-1, 0, bias.shape[-1])
        elif not is_known(bias.stride(-1) == 1):
            bias = bias.contiguous()
        return bias.expand(query.shape[0], query.shape[1], *bias.shape[-2:])


@runtime_checkable
class ByDelta(Protocol):
    """A kernel that can be given <out, grad_out> of each row in the place of out."""

    def backward_by_delta(
        self, call: TileCall, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> Gradients:
        """Differentiate; lse and delta are (B, H, S)."""


class AnyScale(Kernel):
    """A kernel whose scale may be 0 or negative: the sign goes into the query.

    The CPU's masks scores before it scales them: -inf times 0 is NaN, and times less is +inf.
    CUDA's flash, besides, takes the largest product for that of the largest score.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def forward(self, call: TileCall) -> Partial:
        """See `Kernel.forward`."""
        _, positive = _split_scale(call)
        return self.kernel.forward(positive)

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """See `Kernel.backward`."""
        sign, positive = _split_scale(call)
        return _with_sign(sign, self.kernel.backward(positive, grad_out, whole))

    def backward_by_delta(
        self, call: TileCall, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> Gradients:
        """Differentiate, given <out, grad_out> of each row (B, H, S) in the place of out."""
        sign, positive = _split_scale(call)
        assert isinstance(self.kernel, ByDelta)
        return _with_sign(sign, self.kernel.backward_by_delta(positive, grad_out, lse, delta))


def _with_sign(sign: int, grads: Gradients) -> Gradients:
    dq, dk, dv = grads
    return dq if sign == 1 else dq * sign, dk, dv


def _split_scale(call: TileCall) -> tuple[int, TileCall]:
    """Return the scale's sign, and the call with it in the query, which is exact."""
    if call.scale is None or call.scale > 0:
        return 1, call
    sign, scale = (-1, -call.scale) if call.scale < 0 else (0, 1.0)
    return sign, replace(call, query=call.query * sign, scale=scale)


KERNELS: dict[str, type[Kernel]] = {
    "flash_cpu": FlashCPU,
    "flash_cuda": FlashCUDA,
    "efficient_cuda": EfficientCUDA,
}


def get_kernel(name: str) -> Kernel:
    """Return the kernel of a name in `KERNELS`; its scale may have any sign."""
    return AnyScale(KERNELS[name]())


def _sees_nothing(bias: Tensor) -> Tensor:
    """Return which rows have no pair, (B | 1, H | 1, S)."""
    return bias.amax(-1) == -float("inf")


def _lse_of_rows(lse: Tensor, bias: Tensor | None) -> Tensor:
    """Return the lse, -inf of rows that see nothing, of which kernels say other things."""
    return lse if bias is None else lse.masked_fill(_sees_nothing(bias), -float("inf"))


def _lse_for_backward(lse: Tensor, bias: Tensor | None) -> Tensor:
    return lse if bias is None else hide_blind_rows(lse)


def hide_blind_rows(lse: Tensor) -> Tensor:
    """Return the lse, +inf of rows that see nothing: their probabilities are exp(-inf) = 0."""
    return lse.masked_fill(lse == -float("inf"), float("inf"))


def with_whole_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy those tensors (B, H, S, D) whose rows are not D adjacent numbers, apart from each other.

    Strides that are not known while a graph is traced count as odd ones.
    """
    return tuple(tensor if _has_whole_rows(tensor) else tensor.contiguous() for tensor in tensors)


def _has_whole_rows(tensor: Tensor) -> bool:
    length, head_dim = tensor.shape[-2:]
    is_adjacent = is_known(tensor.stride(-1) == 1) or is_known(head_dim <= 1)
    return is_adjacent and (is_known(tensor.stride(-2) >= head_dim) or is_known(length <= 1))


def _pad_head_dims(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad the last dim with zeros to a multiple of 8, as SDPA does before it calls a kernel."""
    return tuple(t if t.shape[-1] % 8 == 0 else F.pad(t, (0, -t.shape[-1] % 8)) for t in tensors)


def _unpad_head_dim(tensor: Tensor, head_dim: int) -> Tensor:
    # narrow, not indexing: that would ask for a device also of a fake tensor.
    return tensor if tensor.shape[-1] == head_dim else tensor.narrow(-1, 0, head_dim)


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """(B, G, T, D) -> (B, H, T, D), each KV head repeated for its group of query heads."""
    num_groups = num_heads // tensor.shape[1]
    return tensor if num_groups == 1 else tensor.repeat_interleave(num_groups, dim=1)


def sum_heads(grad: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, T, D) -> (B, G, T, D), the inverse of `repeat_heads` for gradients."""
    if grad.shape[1] == num_kv_heads:
        return grad
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(1, (num_kv_heads, -1)).sum(2, dtype=dtype).to(grad.dtype)
