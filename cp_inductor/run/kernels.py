"""One tile: a single-device flash attention, forward and backward, behind one shape of call.

    partial = kernel.forward(query, key, value, is_causal=False, scale=None)
    grads = kernel.backward(grad_out, query, key, value, *partial, is_causal=False, scale=None)

What the kernels of aten disagree about is settled here: how many KV heads they take, which head
dims, how long their lse is, which of them take a mask, what they say of a row that sees nothing
(out 0, lse -inf, gradients 0), and which strides they read rightly. Inside a plan, `backward` is
given the out and lse of the whole row, not of the tile: the softmax it recomputes is then the
global one, and the gradients of all tiles add up.

Shapes: B batch, H query heads, G key-value heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_inductor.errors import UnsupportedKernel
from cp_inductor.torch_private.sizes import is_known

aten = torch.ops.aten


class Partial(NamedTuple):
    """A tile's result: out (B, H, S, D), lse (B, H, S), natural log.

    Out is in the dtype of the inputs, or wider where what computed it is.
    """

    out: Tensor
    lse: Tensor


class Kernel(ABC):
    """A single-device attention. Query (B, H, S, D); key and value (B, G, T, D).

    A bias (B | 1, H | 1, S, T) is added to the scaled scores; -inf where there is no pair.
    """

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> Partial:
        """Attend; causal means key index <= query index and needs S == T."""

    @abstractmethod
    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value in their shapes and dtypes."""


class FlashCPU(Kernel):
    """aten's CPU flash attention: float64, float32, bfloat16 and float16, G <= H, any D.

    It takes every row of query, key, value and out for D adjacent numbers, whatever the stride of
    the last dim: SDPA does not call it otherwise. Rows that overlap its matrix products misread.
    The strides of gradients, lse and bias it follows.

    Of fewer than 16 keys (torch 2.13) it says that a row sees nothing whose scores are all NaN.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> Partial:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *with_whole_rows(query, key, value), 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return Partial(out, _lse_of_rows(lse, bias))

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = _lse_for_backward(lse, bias)
        query, key, value, out = with_whole_rows(query, key, value, out)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return grads[0], grads[1], grads[2]


class FlashCUDA(Kernel):
    """aten's CUDA flash attention: bfloat16 and float16, G <= H, D a multiple of 8 (padded).

    It refuses query, key and value whose last dim has another stride than 1; so does the next.
    It takes no bias: where there is one, the memory-efficient kernel serves.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> Partial:
        if bias is not None:
            how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "bias": bias}
            return EfficientCUDA().forward(query, key, value, **how)
        head_dim = query.shape[-1]
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *with_whole_rows(*_pad_head_dims(query, key, value)),
            0.0,
            is_causal,
            scale=_scale(scale, head_dim),
        )
        return Partial(_unpad_head_dim(out, head_dim), lse)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if bias is not None:
            how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "bias": bias}
            return EfficientCUDA().backward(grad_out, query, key, value, out, lse, **how)
        head_dim = query.shape[-1]
        grad_out, query, key, value, out = _pad_head_dims(grad_out, query, key, value, out)
        query, key, value, out = with_whole_rows(query, key, value, out)
        no_dropout = query.new_empty((2,), dtype=torch.uint64)
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            # Read by its address alone: a part of a longer lse would be taken for its beginning.
            lse.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            is_causal,
            no_dropout,
            no_dropout,
            scale=_scale(scale, head_dim),
        )
        dq, dk, dv = (_unpad_head_dim(grad, head_dim) for grad in grads)
        return dq, dk, dv


class EfficientCUDA(Kernel):
    """aten's memory-efficient attention: float32 and half types, G == H (KV heads repeated)."""

    LSE_ALIGNMENT = 32  # the kernel writes, and reads back, lse rows padded to this many queries
    BIAS_ALIGNMENT = 16  # elements; see pad_bias in aten's attention.cpp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> Partial:
        head_dim, num_heads = query.shape[-1], query.shape[1]
        key, value = _repeat_heads(key, num_heads), _repeat_heads(value, num_heads)
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            *with_whole_rows(*_pad_head_dims(query, key, value)),
            self._bias(bias, query),
            True,
            0.0,
            is_causal,
            scale=_scale(scale, head_dim),
        )
        out, lse = _unpad_head_dim(out, head_dim), lse.narrow(2, 0, query.shape[2])
        if bias is not None:
            # Of a row without a pair the kernel computes 0 / 0.
            out = out.masked_fill(_sees_nothing(bias).unsqueeze(-1), 0.0)
        return Partial(out, _lse_of_rows(lse, bias))

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, num_heads, num_kv_heads = query.shape[-1], query.shape[1], key.shape[1]
        key, value = _repeat_heads(key, num_heads), _repeat_heads(value, num_heads)
        grad_out, query, key, value, out = _pad_head_dims(grad_out, query, key, value, out)
        query, key, value, out = with_whole_rows(query, key, value, out)
        lse = _lse_for_backward(lse, bias)
        # +inf makes every probability of a padding row exp(-inf) = 0.
        lse = F.pad(lse, (0, -query.shape[2] % self.LSE_ALIGNMENT), value=float("inf"))
        lse = lse.contiguous()
        no_dropout = query.new_empty((), dtype=torch.int64)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            query,
            key,
            value,
            self._bias(bias, query),
            out,
            lse,
            no_dropout,
            no_dropout,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=_scale(scale, head_dim),
        )
        dk, dv = _sum_heads(dk, num_kv_heads), _sum_heads(dv, num_kv_heads)
        dq, dk, dv = (_unpad_head_dim(grad, head_dim) for grad in (dq, dk, dv))
        return dq, dk, dv

    def _bias(self, bias: Tensor | None, query: Tensor) -> Tensor | None:
        """Give every head a bias, in rows that begin at multiples of what the kernel loads.

        The kernel adds what is of the dtype of the query, and nothing else.
        """
        if bias is None:
            return None
        bias = bias.to(query.dtype)
        missing = -bias.shape[-1] % self.BIAS_ALIGNMENT
        if missing:
            zeros = bias.new_zeros((*bias.shape[:-1], missing))
            bias = torch.cat([bias, zeros], -1).narrow(-1, 0, bias.shape[-1])
        elif not is_known(bias.stride(-1) == 1):
            bias = bias.contiguous()
        return bias.expand(query.shape[0], query.shape[1], *bias.shape[-2:])


class AnyScale(Kernel):
    """A kernel whose scale may be 0 or negative: the sign goes into the query.

    The CPU's masks scores before it scales them: -inf times 0 is NaN, and times less is +inf.
    CUDA's flash, besides, takes the largest product for that of the largest score.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> Partial:
        factor, scale = _split_scale(scale)
        return self.kernel.forward(
            _times(query, factor), key, value, is_causal=is_causal, scale=scale, bias=bias
        )

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        factor, scale = _split_scale(scale)
        tensors = (grad_out, _times(query, factor), key, value, out, lse)
        dq, dk, dv = self.kernel.backward(*tensors, is_causal=is_causal, scale=scale, bias=bias)
        return _times(dq, factor), dk, dv


def _split_scale(scale: float | None) -> tuple[int, float | None]:
    """Return what the query is multiplied with, exactly, and a scale above 0."""
    if scale is None or scale > 0:
        return 1, scale
    return (-1, -scale) if scale < 0 else (0, 1.0)


def _times(tensor: Tensor, factor: int) -> Tensor:
    return tensor if factor == 1 else tensor * factor


class Grads(NamedTuple):
    """Gradients of a tile, in float32; the bias's (B | 1, H | 1, S, T), if it was asked for."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


class Math:
    """Attention in plain operations, in float32 (float64 for float64), on any device.

    For what no kernel does along a plan: dropout whose mask is given, and gradients of a bias. Its
    results stay in that dtype: they are rounded once, when those of all tiles are combined.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        bias: Tensor | None,
        keep: Tensor | None,
    ) -> Partial:
        """Attend.

        Args:
            query: (B, H, S, D).
            key, value: (B, G, T, D).
            scale: of the scores.
            bias: (B | 1, H | 1, S, T); None adds nothing.
            keep: (B, H, S, T), what each probability is multiplied with; None keeps all.
        """
        scores = _scores(query, key, scale, bias)
        lse = torch.logsumexp(scores, -1)
        probabilities = torch.exp(scores - _finite(lse).unsqueeze(-1))
        if keep is not None:
            probabilities = probabilities * keep
        wide = _repeat_heads(value.to(scores.dtype), query.shape[1])
        return Partial(torch.matmul(probabilities, wide), lse)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float | None,
        bias: Tensor | None,
        keep: Tensor | None,
        needs_bias_grad: bool,
    ) -> Grads:
        """Differentiate `forward`; out and lse may be those of the whole row."""
        scores, num_heads = _scores(query, key, scale, bias), query.shape[1]
        dtype = scores.dtype
        probabilities = torch.exp(scores - _finite(lse.to(dtype)).unsqueeze(-1))
        grad = grad_out.to(dtype)
        wide_value = _repeat_heads(value.to(dtype), num_heads)
        grad_probabilities = torch.matmul(grad, wide_value.transpose(-1, -2))
        kept = probabilities
        if keep is not None:
            kept, grad_probabilities = probabilities * keep, grad_probabilities * keep
        dv = torch.matmul(kept.transpose(-1, -2), grad)
        delta = (grad * out.to(dtype)).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - delta)
        factor = _scale(scale, query.shape[-1])
        dq = torch.matmul(grad_scores, _repeat_heads(key.to(dtype), num_heads)) * factor
        dk = torch.matmul(grad_scores.transpose(-1, -2), query.to(dtype)) * factor
        dk, dv = _sum_heads(dk, key.shape[1]), _sum_heads(dv, key.shape[1])
        grad_bias = None
        if needs_bias_grad:
            assert bias is not None
            dims = [dim for dim in (0, 1) if bias.shape[dim] == 1]
            grad_bias = grad_scores.sum(dims, keepdim=True) if dims else grad_scores
        return Grads(dq, dk, dv, grad_bias)


def _scores(query: Tensor, key: Tensor, scale: float | None, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    wide_key = _repeat_heads(key.to(dtype), query.shape[1])
    scores = torch.matmul(query.to(dtype), wide_key.transpose(-1, -2))
    scores = scores * _scale(scale, query.shape[-1])
    return scores if bias is None else scores + bias.to(dtype)


def _finite(lse: Tensor) -> Tensor:
    """Make exp(score - lse) 0 in a row that saw nothing, where both are -inf."""
    return lse.masked_fill(lse == -float("inf"), 0.0)


def _sees_nothing(bias: Tensor) -> Tensor:
    """Return which rows have no pair, (B | 1, H | 1, S)."""
    return bias.amax(-1) == -float("inf")


def _lse_of_rows(lse: Tensor, bias: Tensor | None) -> Tensor:
    """Return the lse, -inf of rows that see nothing, of which kernels say other things."""
    return lse if bias is None else lse.masked_fill(_sees_nothing(bias), -float("inf"))


def _lse_for_backward(lse: Tensor, bias: Tensor | None) -> Tensor:
    """Return the lse, +inf of rows that see nothing: their probabilities are exp(-inf) = 0."""
    return lse if bias is None else lse.masked_fill(lse == -float("inf"), float("inf"))


# The aten ops that are tiles, for passes that look for them in a graph.
BACKWARD_TILE_OPS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    }
)
TILE_OPS = BACKWARD_TILE_OPS | {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}

# Their arguments that `with_whole_rows` is for, and the places of these.
ROWS = frozenset({"query", "key", "value", "out"})
ROWS_OF_TILES = {
    op: tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in ROWS)
    for op in TILE_OPS
}


def get_kernel(name: str) -> Kernel:
    """Return the kernel that `choose_kernel` called by this name."""
    match name:
        case "flash_cpu":
            return AnyScale(FlashCPU())
        case "flash_cuda":
            return AnyScale(FlashCUDA())
        case "efficient_cuda":
            return AnyScale(EfficientCUDA())
    raise ValueError(f"no kernel is called {name!r}")


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dtype: torch.dtype,
    site: str,
    device: str | None = None,
    has_bias: bool = False,
) -> str:
    """Name the kernel that serves these tensors.

    Flash wherever it runs, memory-efficient attention where flash cannot: the order in which
    SDPA itself chooses, and the same switches (``torch.nn.attention.sdpa_kernel``).

    Args:
        query, key, value: (B, H, S, D), (B, G, T, D), (B, G, T, D); real or fake.
        dtype: what SDPA computes in: the inputs' dtype, or autocast's.
        site: for the error.
        device: type of the device it will run on, where that is not the tensors'.
        has_bias: some tiles are under a mask.

    Raises:
        UnsupportedKernel: no kernel serves the device, dtype or head dim, or it is disabled.
    """
    head_dim, device = query.shape[-1], device or query.device.type
    if not key.shape[-1] == value.shape[-1] == head_dim:
        raise UnsupportedKernel(
            site=site,
            expected="one head dim for query, key and value",
            got=f"{head_dim}, {key.shape[-1]} and {value.shape[-1]}",
            remedy="pad value to the head dim of query and slice the output",
        )
    half = (torch.bfloat16, torch.float16)
    is_of_cpu = device == "cpu" and dtype in (torch.float64, torch.float32, *half)
    if is_of_cpu and torch.backends.cuda.flash_sdp_enabled():
        return "flash_cpu"
    if device == "cuda":
        has_efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
        is_served = has_efficient or not has_bias
        if dtype in half and head_dim <= 256 and is_served and _is_flash_on(query.device):
            return "flash_cuda"
        if dtype in (torch.float32, *half) and has_efficient:
            return "efficient_cuda"
    raise UnsupportedKernel(
        site=site,
        expected=(
            "float64, float32, bfloat16 or float16 on cpu with the flash kernel enabled; bfloat16,"
            " float16 or float32 on cuda with the flash or memory-efficient kernel enabled"
        ),
        got=f"{dtype} with head dim {head_dim} on {device}{_describe_disabled()}",
        remedy=(
            "cast query, key and value, move them to a device with a flash kernel, or enable"
            " SDPBackend.FLASH_ATTENTION in the sdpa_kernel around the attention"
        ),
    )


# Dynamo evaluates it, where it would break the graph.
@torch.compiler.assume_constant_result
def is_a_kernel_enabled(device: str) -> bool:
    """Whether ``torch.nn.attention.sdpa_kernel`` leaves any kernel that a tile can be, on a device.

    The names of the switches are CUDA's; SDPA asks that of flash on the CPU, too.
    """
    has_efficient = device != "cpu" and torch.backends.cuda.mem_efficient_sdp_enabled()
    return has_efficient or torch.backends.cuda.flash_sdp_enabled()


def _describe_disabled() -> str:
    switches = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
    }
    disabled = [name for name, is_on in switches.items() if not is_on]
    return f", with {' and '.join(disabled)} attention disabled" if disabled else ""


def _is_flash_on(device: torch.device) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    if device.type != "cuda" or not torch.cuda.is_available():
        return True  # the graph is being cross-compiled, for chips that have the kernel
    return torch.cuda.get_device_capability(device) >= (8, 0)


def with_whole_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy those tensors (B, H, S, D) whose rows are not D adjacent numbers, apart from each other.

    Strides that are not known while a graph is traced count as odd ones.
    """
    return tuple(tensor if _has_whole_rows(tensor) else tensor.contiguous() for tensor in tensors)


def _has_whole_rows(tensor: Tensor) -> bool:
    length, head_dim = tensor.shape[-2:]
    is_adjacent = is_known(tensor.stride(-1) == 1) or is_known(head_dim <= 1)
    return is_adjacent and (is_known(tensor.stride(-2) >= head_dim) or is_known(length <= 1))


def _scale(scale: float | None, head_dim: int) -> float:
    """Make the default explicit, so that padding the head dim does not change it."""
    return head_dim**-0.5 if scale is None else scale


def _pad_head_dims(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad the last dim with zeros to a multiple of 8, as SDPA does before it calls a kernel."""
    return tuple(t if t.shape[-1] % 8 == 0 else F.pad(t, (0, -t.shape[-1] % 8)) for t in tensors)


def _unpad_head_dim(tensor: Tensor, head_dim: int) -> Tensor:
    # narrow, not indexing: that would ask for a device also of a fake tensor.
    return tensor if tensor.shape[-1] == head_dim else tensor.narrow(-1, 0, head_dim)


def _repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """(B, G, T, D) -> (B, H, T, D), each KV head repeated for its group of query heads."""
    num_groups = num_heads // tensor.shape[1]
    return tensor if num_groups == 1 else tensor.repeat_interleave(num_groups, dim=1)


def _sum_heads(grad: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, T, D) -> (B, G, T, D), the inverse of `_repeat_heads` for gradients."""
    if grad.shape[1] == num_kv_heads:
        return grad
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(1, (num_kv_heads, -1)).sum(2, dtype=dtype).to(grad.dtype)
