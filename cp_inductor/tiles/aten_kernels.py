"""The kernels of aten that SDPA chooses from, as tiles, and `Math`, for what none of them does.

What cuDNN's asks for was read in pytorch's main branch of 2025 and 2026 (aten/src/ATen/native):

=============  ======================================================================  ============
of             is asked                                                                read in
=============  ======================================================================  ============
device         compute capability 8.0 to 12.1, cuDNN 9; first choice on 9.0 and 10.x   sdp_utils.cpp
dtypes         bfloat16 and float16                                                    sdp_utils.cpp
head dim       a multiple of 8 up to 128 (beyond: some builds, some directions)        sdp_utils.cpp
heads          G divides H; B and H up to 65535                                        sdp_utils.cpp
lengths        more than one key (one query alone has failed, too: issue 138529);      sdp_utils.cpp
               see also `known_wrong`
causal         aligned at the upper left; here S == T                                  MHA.cpp
strides        1 of the last dim, any others; dim and stride of each go to cuDNN       MHA.cpp
lse            float32 (B, H, S, 1), natural log; the backward reads it packed,        meta, cudnn-
               whatever its strides (cuDNN before 9.26)                                frontend #304
out, grad_out  strides that follow from the query's: plans are cached by the shapes    MHA.cpp
               and strides of query, key and value alone
determinism    none: it is not chosen under `use_deterministic_algorithms`             sdp_utils.cpp
=============  ======================================================================  ============

sdp_utils.cpp stands in transformers/cuda, MHA.cpp in cudnn; "meta" is torch/_meta_registrations.py.

Shapes: see `cp_inductor.tiles.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_inductor.tiles.combine import finite_lse
from cp_inductor.tiles.kernels import (
    Gradients,
    Kernel,
    Partial,
    PlainKernel,
    Switch,
    TileCall,
    hide_blind_rows,
    repeat_heads,
    sum_heads,
    with_whole_rows,
)
from cp_inductor.tiles.known_wrong import TAIL_OF_KEYS, chip_of
from cp_inductor.torch_private.sizes import is_known

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)

FLASH = Switch("flash", torch.backends.cuda.flash_sdp_enabled, SDPBackend.FLASH_ATTENTION)
EFFICIENT = Switch(
    "memory-efficient",
    torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION,
)
CUDNN = Switch("cuDNN", torch.backends.cuda.cudnn_sdp_enabled, SDPBackend.CUDNN_ATTENTION)
MIN_CUDNN_VERSION = 90000

# (B, S, H, D) and (B, H, S, D), as orders of dims; each is its own inverse.
BY_ROWS, BY_HEADS = (0, 2, 1, 3), (0, 1, 2, 3)


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
        lse = whole.lse if call.bias is None else hide_blind_rows(whole.lse)
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
        lse = whole.lse if call.bias is None else hide_blind_rows(whole.lse)
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


class CudnnCUDA(PlainKernel):
    """cuDNN's attention: bfloat16 and float16, G <= H, D a multiple of 8 up to 128.

    It takes no bias: where there is one, the memory-efficient kernel serves. Flash, whose partial
    means the same, serves where there is one query or key, and where strides are not known.
    """

    forward_op = aten._scaled_dot_product_cudnn_attention.default
    backward_op = aten._scaled_dot_product_cudnn_attention_backward.default
    device, dtypes, switch = "cuda", HALF, CUDNN
    max_head_dim, head_dim_multiple, min_capability = 128, 8, (8, 0)
    packed = ("lse", "grad_out")
    for_bias = EfficientCUDA

    @classmethod
    def obstacle(cls, dtype: torch.dtype, head_dim: Any, *, has_bias: bool) -> str | None:
        """See `PlainKernel.obstacle`."""
        is_warned = torch.is_deterministic_algorithms_warn_only_enabled()
        if torch.are_deterministic_algorithms_enabled() and not is_warned:
            return "cuDNN is not deterministic"
        return super().obstacle(dtype, head_dim, has_bias=has_bias)

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """See `PlainKernel.runs_on`."""
        is_new = (torch.backends.cudnn.version() or 0) >= MIN_CUDNN_VERSION
        return chip_of(device) is None or (is_new and super().runs_on(device))

    def _serving(self, call: TileCall, *, is_backward: bool = False) -> Kernel:
        if call.bias is not None:
            return super()._serving(call)
        query, key = call.query, call.key
        is_long = is_known(query.shape[2] > 1) and is_known(key.shape[2] > 1)
        has_order = _is_by_rows(query) or is_known(query.stride(2) < query.stride(1))
        has_tail = is_backward and not call.is_causal and not is_known(key.shape[2] % 128 != 64)
        is_wrong = has_tail and TAIL_OF_KEYS.is_met(chip_of(query.device))
        return self if is_long and has_order and not is_wrong else FlashCUDA()

    def _attend(self, call: TileCall) -> Partial:
        inputs = with_whole_rows(*call.tensors)
        out, lse, *_ = self.forward_op(*inputs, None, True, 0.0, call.is_causal, scale=call.factor)
        return Partial(out, lse.reshape(call.query.shape[:3]))

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        query, key, value = with_whole_rows(*call.tensors)
        # Whichever the query is in memory; see out and grad_out above.
        order = BY_ROWS if _is_by_rows(query) else BY_HEADS
        grad_out, out = (
            t.permute(order).contiguous().permute(order) for t in (grad_out, whole.out)
        )
        no_dropout = [query.new_empty(1, dtype=torch.int64)] * 2
        lse = whole.lse.contiguous().unsqueeze(-1)
        of_sequences = (None, None, None, query.shape[2], key.shape[2], 0.0, call.is_causal)
        inputs = (grad_out, query, key, value, out, lse, *no_dropout, *of_sequences)
        dq, dk, dv = self.backward_op(*inputs, scale=call.factor)
        return dq, dk, dv


def _sees_nothing(bias: Tensor) -> Tensor:
    """Return which rows have no pair, (B | 1, H | 1, S)."""
    return bias.amax(-1) == -float("inf")


def _lse_of_rows(lse: Tensor, bias: Tensor | None) -> Tensor:
    """Return the lse, -inf of rows that see nothing, of which kernels say other things."""
    return lse if bias is None else lse.masked_fill(_sees_nothing(bias), -float("inf"))


def _pad_head_dims(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad the last dim with zeros to a multiple of 8, as SDPA does before it calls a kernel."""
    return tuple(t if t.shape[-1] % 8 == 0 else F.pad(t, (0, -t.shape[-1] % 8)) for t in tensors)


def _unpad_head_dim(tensor: Tensor, head_dim: int) -> Tensor:
    # narrow, not indexing: that would ask for a device also of a fake tensor.
    return tensor if tensor.shape[-1] == head_dim else tensor.narrow(-1, 0, head_dim)


def _is_by_rows(query: Tensor) -> bool:
    return is_known(query.stride(2) >= query.stride(1))


# --- In plain operations ------------------------------------------------------------------------


class Math(Kernel):
    """Attention in plain operations, in float32 (float64 for float64), on any device.

    For dropout whose mask is given, gradients of a bias, and scores that are changed by more than a
    bias. Its results stay in that dtype: they are rounded once, when those of all tiles are
    combined. Calls are not causal: what exists is in their bias.

    Args:
        keep: (B, H, S, T), what each probability is multiplied with; None keeps all.
        needs_bias_grad: the bias is learned.

    Attributes:
        bias_grad: that of the bias (B | 1, H | 1, S, T), if it is learned, after `backward`.
    """

    bias_grad: Tensor
    takes_all_scales = True

    def __init__(self, keep: Tensor | None = None, *, needs_bias_grad: bool = False) -> None:
        self.keep, self.needs_bias_grad = keep, needs_bias_grad

    def _attend(self, call: TileCall) -> Partial:
        scores = _scores(call)
        lse = torch.logsumexp(scores, -1)
        probabilities = torch.exp(scores - finite_lse(lse).unsqueeze(-1))
        if self.keep is not None:
            probabilities = probabilities * self.keep
        wide = repeat_heads(call.value.to(scores.dtype), call.query.shape[1])
        return Partial(torch.matmul(probabilities, wide), lse)

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        query, key, value = call.tensors
        scores, num_heads = _scores(call), query.shape[1]
        dtype = scores.dtype
        probabilities = torch.exp(scores - finite_lse(whole.lse.to(dtype)).unsqueeze(-1))
        grad = grad_out.to(dtype)
        wide_value = repeat_heads(value.to(dtype), num_heads)
        grad_probabilities = torch.matmul(grad, wide_value.transpose(-1, -2))
        kept = probabilities
        if self.keep is not None:
            kept, grad_probabilities = probabilities * self.keep, grad_probabilities * self.keep
        dv = torch.matmul(kept.transpose(-1, -2), grad)
        delta = (grad * whole.out.to(dtype)).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - delta)
        factor, grad_products = call.factor, grad_scores
        if call.change is not None:
            grad_products = grad_scores * _masked(call, call.change.slope(_products(call)))
        dq = torch.matmul(grad_products, repeat_heads(key.to(dtype), num_heads)) * factor
        dk = torch.matmul(grad_products.transpose(-1, -2), query.to(dtype)) * factor
        dk, dv = sum_heads(dk, key.shape[1]), sum_heads(dv, key.shape[1])
        if self.needs_bias_grad:
            assert call.bias is not None
            dims = [dim for dim in (0, 1) if call.bias.shape[dim] == 1]
            self.bias_grad = grad_scores.sum(dims, keepdim=True) if dims else grad_scores
        return dq, dk, dv


def _scores(call: TileCall) -> Tensor:
    scores = _products(call)
    if call.change is not None:
        # What has overflowed where there is no pair would be no number.
        scores = _masked(call, call.change.value(scores))
    return scores if call.bias is None else scores + call.bias.to(scores.dtype)


def _products(call: TileCall) -> Tensor:
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    wide_key = repeat_heads(call.key.to(dtype), call.query.shape[1])
    return torch.matmul(call.query.to(dtype), wide_key.transpose(-1, -2)) * call.factor


def _masked(call: TileCall, numbers: Tensor) -> Tensor:
    """Replace numbers of pairs that do not exist by 0."""
    return numbers if call.bias is None else numbers.masked_fill(call.bias == -float("inf"), 0.0)
