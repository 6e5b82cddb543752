"""Plain implementations of attention kernels, and what those that tiles call ask for.

    out, lse, ... = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=...)
      => softmax(q k^T) v by matrix multiplications, in the layout in which the kernel returns it

Scores and sums are in float32 (float64 for float64), and probabilities are rounded to the dtype of
the inputs before they meet the values, as in the kernels. What a kernel asks of its arguments was
read in torch 2.13, aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp, attention.cu
and attention_backward.cu. What cuDNN asks for is said, with its sources, in
`cp_inductor.tiles.aten_kernels.CudnnCUDA`.

Shapes: B batch, H query heads, G key-value heads, S queries, T keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_inductor.torch_private.arguments import bind_arguments
from tests.support.reference import repeat_heads, scores_of, sum_repeats

aten = torch.ops.aten
Complain = Callable[[str], None]

HALVES = (torch.bfloat16, torch.float16)
LSE_ALIGNMENT = 32  # queries; the memory-efficient kernel writes its lse in rows padded to this
VECTOR_BYTES = 16  # which flash loads at once
MOST_OF_CUDNN = 65535  # batch entries, and heads


def _flash(call: Mapping[str, Any], complain: Complain) -> tuple[Any, ...]:
    query, key = call["query"], call["key"]
    _check_halves(call, "flash", 256, complain)
    out, lse = attend(call, None)
    # mha_fwd makes its output like the query (B, S, H, D).
    result = torch.empty_like(query.transpose(1, 2)).transpose(1, 2).copy_(out)
    state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    mask = query.new_empty(0)
    return result, lse, None, None, query.shape[2], key.shape[2], state, unused, mask


def _flash_backward(call: Mapping[str, Any], complain: Complain) -> tuple[Any, ...]:
    query, key, value = call["query"], call["key"], call["value"]
    _check_halves(call, "flash", 256, complain)
    _check_rows(call, ("out",), complain)
    if call["logsumexp"].dtype != torch.float32 or not call["logsumexp"].is_contiguous():
        complain("logsumexp must be float32 and contiguous, as it is read by its address")
    if tuple(call["logsumexp"].shape) != tuple(query.shape[:3]):
        complain(f"logsumexp of shape {tuple(call['logsumexp'].shape)} for {tuple(query.shape)}")
    _check_lengths(call, complain)
    _check_seeds(call, torch.uint64, complain)
    grads = differentiate(call, call["logsumexp"], None)
    of_rows = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return tuple(
        torch.empty_like(rows).transpose(1, 2).copy_(grad)
        for rows, grad in zip(of_rows, grads, strict=True)
    )


def _efficient(call: Mapping[str, Any], complain: Complain) -> tuple[Any, ...]:
    query = call["query"]
    _check_efficient(call, complain)
    out, lse = attend(call, call["attn_bias"])
    batch, heads, length, _ = query.shape
    result = query.new_empty(batch, length, heads, call["value"].shape[-1]).transpose(1, 2)
    result.copy_(out)
    padded = -(-length // LSE_ALIGNMENT) * LSE_ALIGNMENT if call["compute_log_sumexp"] else 0
    lse_padded = torch.full((batch, heads, padded), math.inf, dtype=torch.float32)
    if padded:
        lse_padded[..., :length] = lse
    seed = torch.zeros((), dtype=torch.int64)
    return result, lse_padded, seed, seed.clone()


def _efficient_backward(call: Mapping[str, Any], complain: Complain) -> tuple[Any, ...]:
    query = call["query"]
    _check_efficient(call, complain)
    _check_rows(call, ("out",), complain)
    lse, length = call["logsumexp"], query.shape[2]
    padded = -(-length // LSE_ALIGNMENT) * LSE_ALIGNMENT
    if lse.dtype != torch.float32 or lse.shape[-1] < padded or lse.stride(-1) != 1:
        complain(f"logsumexp must be float32 in rows padded to {LSE_ALIGNMENT} queries")
    _check_seeds(call, torch.int64, complain)
    grads = differentiate(call, lse[..., :length], call["attn_bias"])
    laid_out = [
        torch.empty_permuted(grad.shape, (0, 2, 1, 3), dtype=query.dtype).copy_(grad)
        for grad in grads
    ]
    if call["grad_input_mask"][3]:
        complain("no plain implementation gives a gradient of the bias")
    return (*laid_out, torch.empty(0))


def _cudnn(call: Mapping[str, Any], complain: Complain) -> tuple[Any, ...]:
    query, key = call["query"], call["key"]
    _check_cudnn(call, complain)
    if not call["compute_log_sumexp"]:
        complain("no lse is asked for: partials cannot be combined without it")
    out, lse = attend(call, None)
    state = torch.zeros((), dtype=torch.int64)
    lengths = query.shape[2], key.shape[2]
    out = torch.empty_like(query).copy_(out)
    return out, lse.unsqueeze(-1), None, None, *lengths, state, state.clone(), None


def _cudnn_backward(call: Mapping[str, Any], complain: Complain) -> tuple[Any, ...]:
    query, key, lse = call["query"], call["key"], call["logsumexp"]
    _check_cudnn(call, complain)
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        complain("logsumexp must be float32 and packed: cuDNN before 9.26 ignores its strides")
    if tuple(lse.shape) != (*query.shape[:3], 1):
        complain(f"logsumexp of shape {tuple(lse.shape)} for {tuple(query.shape)}")
    _check_lengths(call, complain)
    _check_seeds(call, torch.int64, complain)
    order = (0, 2, 1, 3) if query.stride(2) >= query.stride(1) else (0, 1, 2, 3)
    for name in ("out", "grad_out"):
        # torch finds cuDNN's plan by query, key and value: others must have strides that follow.
        if not call[name].permute(order).is_contiguous():
            complain(f"{name} has strides {call[name].stride()}, which those of query do not tell")
    grads = differentiate(call, lse.squeeze(-1), None)
    tensors = (query, key, call["value"])
    return tuple(torch.empty_like(t).copy_(g) for t, g in zip(tensors, grads, strict=True))


def _on_cpu(call: Mapping[str, Any], complain: Complain) -> tuple[Any, ...]:
    """Attend as the kernel of the CPU, but round where those of a GPU do."""
    query, mask = call["query"], call["attn_mask"]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    if "grad_out" in call:
        grads = differentiate(call, call["logsumexp"], mask)
        return tuple(grad.to(query.dtype) for grad in grads)
    out, lse = attend(call, mask)
    return out.to(query.dtype), lse


# op => its plain implementation, of its arguments by name
STAND_INS: Mapping[Any, Callable[[Mapping[str, Any], Complain], tuple[Any, ...]]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _on_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _on_cpu,
}


# Arguments that no kernel reads where nothing is dropped.
UNREAD = frozenset({"philox_seed", "philox_offset"})


def stand_in(op: Any, args: Any, kwargs: Any, complain: Complain) -> tuple[Any, ...]:
    """Call the plain implementation of an op.

    Args:
        op: a key of `STAND_INS`.
        args, kwargs: of the call, on the CPU.
        complain: told what the kernel would refuse, or read wrongly.
    """
    call = bind_arguments(op, args, kwargs)
    if "grad_out_" in call:  # its name in the memory-efficient kernel's schema
        call["grad_out"] = call["grad_out_"]
    if "grad_out" in call and call["grad_out"].shape != call["out"].shape:
        complain(f"grad_out {tuple(call['grad_out'].shape)} for out {tuple(call['out'].shape)}")
    return STAND_INS[op](call, complain)


def _check_cudnn(call: Mapping[str, Any], complain: Complain) -> None:
    _check_halves(call, "cuDNN", 128, complain)
    query, key = call["query"], call["key"]
    if query.shape[2] < 2 or key.shape[2] < 2:
        complain(f"{query.shape[2]} queries and {key.shape[2]} keys: cuDNN takes 2 and more")
    if max(query.shape[:2]) > MOST_OF_CUDNN:
        complain(f"batch or heads of {tuple(query.shape)} beyond {MOST_OF_CUDNN}")
    if call["attn_bias"] is not None:
        complain("no plain implementation of cuDNN's bias")


def _check_lengths(call: Mapping[str, Any], complain: Complain) -> None:
    lengths = call["query"].shape[2], call["key"].shape[2]
    if (call["max_q"], call["max_k"]) != lengths:
        complain(f"max_q, max_k = {call['max_q']}, {call['max_k']}: not the lengths")
    if call["cum_seq_q"] is not None or call["cum_seq_k"] is not None:
        complain("cum_seq_q and cum_seq_k must be None: the batch is dense")


def _check_seeds(call: Mapping[str, Any], dtype: torch.dtype, complain: Complain) -> None:
    for name in ("philox_seed", "philox_offset"):
        if (found := call[name].dtype) != dtype:
            wanted = str(dtype).removeprefix("torch.")
            complain(f"{name} must be {wanted}, as the forward returns it, not {found}")


def _check_halves(
    call: Mapping[str, Any], kernel: str, max_head_dim: int, complain: Complain
) -> None:
    query, key, value = call["query"], call["key"], call["value"]
    if query.dtype not in HALVES:
        complain(f"{kernel} takes bfloat16 and float16, not {query.dtype}")
    if query.shape[-1] % 8 or query.shape[-1] > max_head_dim:
        complain(f"head dim {query.shape[-1]}: {kernel} takes multiples of 8 up to {max_head_dim}")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        complain(f"{query.shape[1]} query heads for {key.shape[1]} and {value.shape[1]} of keys")
    _check_common(call, complain)
    for name in ("query", "key", "value"):
        strides = _strides_in_use(call[name])
        if call[name].data_ptr() % VECTOR_BYTES or any(
            stride * call[name].element_size() % VECTOR_BYTES for stride in strides
        ):
            complain(f"rows of {name} do not begin at multiples of {VECTOR_BYTES} bytes")


def _check_efficient(call: Mapping[str, Any], complain: Complain) -> None:
    query, key, bias = call["query"], call["key"], call["attn_bias"]
    if query.dtype not in (*HALVES, torch.float32):
        complain(f"the memory-efficient kernel takes half types and float32, not {query.dtype}")
    if query.shape[1] != key.shape[1]:
        complain(f"{query.shape[1]} query heads for {key.shape[1]} of keys: it takes as many")
    _check_common(call, complain)
    if bias is None:
        return
    full = (*query.shape[:3], key.shape[2])
    if bias.dtype != query.dtype or tuple(bias.shape) != full or bias.stride(-1) != 1:
        complain(f"a bias {tuple(bias.shape)} {bias.dtype}, strides {bias.stride()}, not {full}")
    elements = VECTOR_BYTES // query.element_size()
    if any(stride % elements for stride in _strides_in_use(bias)):
        complain(f"rows of the bias do not begin at multiples of {elements} elements")


def _check_common(call: Mapping[str, Any], complain: Complain) -> None:
    query, key, value = call["query"], call["key"], call["value"]
    if not query.dtype == key.dtype == value.dtype:
        complain(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}")
    if key.shape[2] != value.shape[2] or query.shape[-1] != key.shape[-1]:
        complain(f"shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}")
    if call["is_causal"] and query.shape[2] != key.shape[2]:
        complain(
            f"causal with {query.shape[2]} queries and {key.shape[2]} keys: kernels differ in"
            " where the diagonal is"
        )
    if call["dropout_p"]:
        complain("no plain implementation of dropout")
    if not min(query.shape) or not min(key.shape):
        complain("nothing to attend to: kernels do not take empty tensors")
    _check_rows(call, ("query", "key", "value"), complain)


def _check_rows(call: Mapping[str, Any], names: tuple[str, ...], complain: Complain) -> None:
    for name in names:
        if call[name].stride(-1) != 1:
            complain(f"{name} has last stride {call[name].stride(-1)}, not 1")


def _strides_in_use(tensor: Tensor) -> list[int]:
    """Return the strides of dims with more than one element, but the last dim's."""
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return [stride for size, stride in pairs if size > 1]


def attend(call: Mapping[str, Any], bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out (B, H, S, D), in float32 at least, and the lse (B, H, S)."""
    query, scores = call["query"], _scores(call, bias)
    lse = torch.logsumexp(scores, -1)
    probabilities = _round(torch.exp(scores - lse.unsqueeze(-1)), query.dtype)
    values = repeat_heads(call["value"], query.shape[1]).to(scores.dtype)
    return probabilities @ values, lse


def differentiate(
    call: Mapping[str, Any], lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given out and lse of whole rows."""
    query, key, value = call["query"], call["key"], call["value"]
    scores = _scores(call, bias)
    factor = query.shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
    probabilities = torch.exp(scores - lse.unsqueeze(-1).to(scores.dtype))
    dtype, num_heads = scores.dtype, query.shape[1]
    grad_out, out = call["grad_out"].to(dtype), call["out"].to(dtype)
    keys, values = (repeat_heads(one, num_heads).to(dtype) for one in (key, value))
    delta = (grad_out * out).sum(-1, keepdim=True)
    of_scores = probabilities * (grad_out @ values.transpose(-1, -2) - delta) * factor
    rounded, of_scores = _round(probabilities, query.dtype), _round(of_scores, query.dtype)
    dq = of_scores @ keys
    dk = of_scores.transpose(-1, -2) @ query.to(dtype)
    dv = rounded.transpose(-1, -2) @ grad_out
    return dq, sum_repeats(dk, key.shape[1]), sum_repeats(dv, key.shape[1])


def _scores(call: Mapping[str, Any], bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(call["query"].dtype, torch.float32)
    bias = None if bias is None else bias.to(dtype)
    how: Any = {"is_causal": call["is_causal"], "scale": call["scale"], "bias": bias}
    return scores_of(call["query"].to(dtype), call["key"].to(dtype), **how)


def _round(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(tensor.dtype)


class StandIns(TorchDispatchMode):
    """Replaces attention kernels, and keeps what they were and what was wrong with the calls."""

    supports_higher_order_operators = True  # flex_attention, which passes through

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether it stands aside where flex_attention compiles itself in eager code."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []
        self.complaints: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in STAND_INS:
            return func(*args, **(kwargs or {}))
        self.called.append(func)
        return stand_in(func, args, kwargs or {}, self.complaints.append)
