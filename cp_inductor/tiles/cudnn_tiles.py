"""cuDNN's attention as a tile, which SDPA prefers on Hopper and Blackwell.

    TileCall(query, key, value, is_causal)
      =>  out, lse, ... = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)

What it asks for was read in pytorch's main branch of 2025 and 2026 (aten/src/ATen/native):

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
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_inductor.tiles.aten_kernels import HALF, EfficientCUDA, FlashCUDA
from cp_inductor.tiles.kernels import (
    Gradients,
    Partial,
    PlainKernel,
    ScaledKernel,
    Switch,
    TileCall,
    with_whole_rows,
)
from cp_inductor.tiles.known_wrong import TAIL_OF_KEYS, chip_of
from cp_inductor.torch_private.sizes import is_known

aten = torch.ops.aten

CUDNN = Switch("cuDNN", torch.backends.cuda.cudnn_sdp_enabled, SDPBackend.CUDNN_ATTENTION)
MIN_VERSION = 90000

# (B, S, H, D) and (B, H, S, D), as orders of dims; each is its own inverse.
BY_ROWS, BY_HEADS = (0, 2, 1, 3), (0, 1, 2, 3)


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
        if device.type == "cuda" and torch.cuda.is_available():
            version = torch.backends.cudnn.version()
            return version is not None and version >= MIN_VERSION and super().runs_on(device)
        return True

    def _serving(self, call: TileCall, *, is_backward: bool = False) -> ScaledKernel:
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


def _is_by_rows(query: Tensor) -> bool:
    return is_known(query.stride(2) >= query.stride(1))
