"""The kernels of aten that SDPA chooses from, as tiles: flash and memory-efficient attention.

Shapes: see `cp_inductor.tiles.kernels`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_inductor.tiles.kernels import (
    Gradients,
    Partial,
    PlainKernel,
    Switch,
    TileCall,
    hide_blind_rows,
    repeat_heads,
    sum_heads,
    with_whole_rows,
)
from cp_inductor.torch_private.sizes import is_known

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)

FLASH = Switch("flash", torch.backends.cuda.flash_sdp_enabled, SDPBackend.FLASH_ATTENTION)
EFFICIENT = Switch(
    "memory-efficient",
    torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION,
)


class FlashCPU(PlainKernel):
    """aten's CPU flash attention: float64, float32, bfloat16 and float16, G <= H, any D.

    It takes every row of query, key, value and out for D adjacent numbers, whatever the stride of
    the last dim: SDPA does not call it otherwise. Its matrix products misread rows that overlap.
    It follows the strides of gradients, lse and bias.

    If there are fewer than 16 keys (torch 2.13), it says that a row sees nothing whose scores are
    all NaN.
    """

    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    device, dtypes, switch = "cpu", (torch.float64, torch.float32, *HALF), FLASH

    def _attend(self, call: TileCall) -> Partial:
        inputs = with_whole_rows(*call.tensors)
        out, lse = self.forward_op(
            *inputs, 0.0, call.is_causal, attn_mask=call.bias, scale=call.scale
        )
        return Partial(out, _lse_of_rows(lse, call.bias))

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        lse = _lse_for_backward(whole.lse, call.bias)
        inputs = (grad_out, *with_whole_rows(*call.tensors, whole.out), lse)
        dq, dk, dv = self.backward_op(
            *inputs, 0.0, call.is_causal, attn_mask=call.bias, scale=call.scale
        )
        return dq, dk, dv


class EfficientCUDA(PlainKernel):
    """aten's memory-efficient attention: float32 and half types, G == H (KV heads repeated)."""

    forward_op = aten._scaled_dot_product_efficient_attention.default
    backward_op = aten._scaled_dot_product_efficient_attention_backward.default
    device, dtypes, switch = "cuda", (torch.float32, *HALF), EFFICIENT
    packed = ("lse",)

    LSE_ALIGNMENT = 32  # the kernel writes, and reads back, lse rows padded to this many queries
    BIAS_ALIGNMENT = 16  # elements; see pad_bias in aten's attention.cpp

    def _attend(self, call: TileCall) -> Partial:
        query, num_heads = call.query, call.query.shape[1]
        key, value = repeat_heads(call.key, num_heads), repeat_heads(call.value, num_heads)
        inputs = with_whole_rows(*_pad_head_dims(query, key, value))
        out, lse, _, _ = self.forward_op(
            *inputs, self._bias(call), True, 0.0, call.is_causal, scale=call.factor
        )
        out, lse = _unpad_head_dim(out, query.shape[-1]), lse.narrow(2, 0, query.shape[2])
        if call.bias is not None:
            # In a row without a pair the kernel computes 0 / 0.
            out = out.masked_fill(_sees_nothing(call.bias).unsqueeze(-1), 0.0)
        return Partial(out, _lse_of_rows(lse, call.bias))

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
        key, value = repeat_heads(call.key, num_heads), repeat_heads(call.value, num_heads)
        tensors = _pad_head_dims(grad_out, call.query, key, value, whole.out)
        grad_out, query, key, value, out = tensors
        query, key, value, out = with_whole_rows(query, key, value, out)
        lse = _lse_for_backward(whole.lse, call.bias)
        # +inf makes every probability of a padding row exp(-inf) = 0.
        lse = F.pad(lse, (0, -query.shape[2] % self.LSE_ALIGNMENT), value=float("inf"))
        lse = lse.contiguous()
        no_dropout = [query.new_empty(1, dtype=torch.int64)] * 2
        inputs = (grad_out, query, key, value, self._bias(call), out, lse, *no_dropout, 0.0)
        needed = [True, True, True, False]
        dq, dk, dv, _ = self.backward_op(*inputs, needed, call.is_causal, scale=call.factor)
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


class FlashCUDA(PlainKernel):
    """aten's CUDA flash attention: bfloat16 and float16, G <= H, D a multiple of 8 (padded).

    It refuses query, key and value whose last dim has another stride than 1; so does the next.
    It takes no bias: where there is one, the memory-efficient kernel serves.
    """

    forward_op = aten._scaled_dot_product_flash_attention.default
    backward_op = aten._scaled_dot_product_flash_attention_backward.default
    device, dtypes, switch = "cuda", HALF, FLASH
    max_head_dim, min_capability = 256, (8, 0)
    packed = ("lse",)
    for_bias = EfficientCUDA

    def _attend(self, call: TileCall) -> Partial:
        inputs = with_whole_rows(*_pad_head_dims(*call.tensors))
        out, lse, *_ = self.forward_op(*inputs, 0.0, call.is_causal, scale=call.factor)
        return Partial(_unpad_head_dim(out, call.query.shape[-1]), lse)

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        tensors = _pad_head_dims(grad_out, *call.tensors, whole.out)
        # FA2 copies an odd gradient itself; FA4 need not.
        grad_out, query, key, value, out = with_whole_rows(*tensors)
        no_dropout = [query.new_empty((2,), dtype=torch.uint64)] * 2
        # Read by its address alone: a part of a longer lse would be taken for its beginning.
        lse = whole.lse.contiguous()
        of_sequences = (None, None, query.shape[2], key.shape[2], 0.0, call.is_causal, *no_dropout)
        inputs = (grad_out, query, key, value, out, lse, *of_sequences)
        grads = self.backward_op(*inputs, scale=call.factor)
        dq, dk, dv = (_unpad_head_dim(grad, call.query.shape[-1]) for grad in grads)
        return dq, dk, dv


def _sees_nothing(bias: Tensor) -> Tensor:
    """Return which rows have no pair, (B | 1, H | 1, S)."""
    return bias.amax(-1) == -float("inf")


def _lse_of_rows(lse: Tensor, bias: Tensor | None) -> Tensor:
    """Return the lse, -inf of rows that see nothing, of which kernels say other things."""
    return lse if bias is None else lse.masked_fill(_sees_nothing(bias), -float("inf"))


def _lse_for_backward(lse: Tensor, bias: Tensor | None) -> Tensor:
    return lse if bias is None else hide_blind_rows(lse)


def _pad_head_dims(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad the last dim with zeros to a multiple of 8, as SDPA does before it calls a kernel."""
    return tuple(t if t.shape[-1] % 8 == 0 else F.pad(t, (0, -t.shape[-1] % 8)) for t in tensors)


def _unpad_head_dim(tensor: Tensor, head_dim: int) -> Tensor:
    # narrow, not indexing: that would ask for a device also of a fake tensor.
    return tensor if tensor.shape[-1] == head_dim else tensor.narrow(-1, 0, head_dim)
