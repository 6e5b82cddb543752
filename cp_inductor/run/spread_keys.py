"""Attend from queries that every rank has to keys that lie on all ranks: a token that is generated.

    q (B, H, S, D), the same on every rank        k, v (B, G, T, D), this rank's, in any order
      =>
    out, lse          over this rank's keys
    gather            (out, lse) of all ranks: one row per query and head
    combine           out over the keys of all ranks, the same on every rank

Keys and values do not move, and queries need not. Ranks may hold different numbers of keys, or
none. The mask says for each of this rank's keys which queries see it, so the order of keys is free.

All of it is plain operations on plain tensors, so it can be compiled, by any backend, into one
graph for all fill levels of a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_inductor.tiles.combine import accumulation_dtype, combine_stack
from cp_inductor.tiles.kernel_table import get_kernel
from cp_inductor.tiles.kernels import Change, Partial, TileCall

c10d = torch.ops._c10d_functional
FLASH = get_kernel("flash_cpu")


def attend_to_spread_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    group_name: str,
    world_size: int,
    scale: float | None = None,
    change: Change | None = None,
) -> Partial:
    """Attend to the keys of all ranks, without a gradient.

    Args:
        query: (B, H, S, D), the same on every rank.
        key, value: (B, G, T, D), (B, G, T, E): this rank's. T may differ from rank to rank.
        mask: bool (B | 1, H | 1, S, T), whether a query sees a key; None if each sees all.
        group_name: c10d name of the group of ranks.
        world_size: how many they are.
        scale: of the scores; None is 1 / sqrt(D).
        change: of the scaled scores, such as a cap.

    Returns:
        out (B, H, S, E) and lse (B, H, S), in float32 (float64 for float64), over all keys.
    """
    own = _attend(query, key, value, mask, scale, change)
    dtype = accumulation_dtype(query)
    sent = torch.cat([own.out.to(dtype), own.lse.to(dtype).unsqueeze(-1)], -1)
    parts = gather_from_ranks(sent, group_name=group_name, world_size=world_size)
    return combine_stack(parts[..., :-1], parts[..., -1])


def gather_from_ranks(part: Tensor, *, group_name: str, world_size: int) -> Tensor:
    """Return the tensors of all ranks, which are of one shape: (P, ...)."""
    parts: Tensor = c10d.wait_tensor(
        c10d.all_gather_into_tensor(part.contiguous(), world_size, group_name)
    )
    return parts.view(world_size, *part.shape)


def sum_over_ranks(part: Tensor, *, group_name: str) -> Tensor:
    """Return the sum of a tensor over ranks."""
    total: Tensor = c10d.wait_tensor(c10d.all_reduce(part.contiguous(), "sum", group_name))
    return total


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    change: Change | None,
) -> Partial:
    """Attend to this rank's keys. The query heads of a KV head are rows of one."""
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    dtype = accumulation_dtype(query)
    if num_keys == 0:
        out = query.new_zeros((batch, num_heads, length, value.shape[-1]), dtype=dtype)
        return Partial(out, torch.full_like(out[..., 0], -float("inf")))
    rows = num_heads // num_kv_heads * length
    packed = query.reshape(batch, num_kv_heads, rows, head_dim)
    bias = None
    if mask is not None:
        bias = query.new_zeros(()).masked_fill(~mask, -float("inf"))
        bias = bias.expand(-1, num_heads if mask.shape[1] > 1 else rows // length, -1, -1)
        bias = bias.reshape(mask.shape[0], -1, rows, num_keys)
    call = TileCall(packed, key, value, scale=scale, bias=bias, change=change)
    is_flash = query.device.type == "cpu" and value.shape[-1] == head_dim and change is None
    out, lse = FLASH.forward(call) if is_flash else _attend_in_plain_operations(call)
    shape = (batch, num_heads, length)
    return Partial(out.reshape(*shape, value.shape[-1]), lse.reshape(shape))


def _attend_in_plain_operations(call: TileCall) -> Partial:
    """Attend as flash attention rounds: scores and sums are in float32, probabilities are not.

    With few rows of queries, two matrix products read every key and value once, which is what a
    token costs. A flash kernel for training has a block of threads for each head alone.
    """
    scores = _product(call.query, call.key.transpose(-1, -2)) * call.factor
    if call.change is not None:
        scores = call.change.value(scores)
    if call.bias is not None:
        scores = scores + call.bias
    lse = torch.logsumexp(scores, -1)
    seen = lse.masked_fill(lse == -float("inf"), 0.0)
    probabilities = torch.exp(scores - seen.unsqueeze(-1))
    return Partial(_product(probabilities.to(call.value.dtype), call.value), lse)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Multiply matrices (B, G, ...), into float32 (float64 for float64)."""
    dtype = accumulation_dtype(one)
    if one.dtype == dtype:
        return one @ other
    if not _is_on_gpu(one):
        return one.to(dtype) @ other.to(dtype)
    product = torch.bmm(one.flatten(0, 1), other.flatten(0, 1), out_dtype=dtype)
    return product.unflatten(0, one.shape[:2])


def _is_on_gpu(tensor: Tensor) -> bool:
    """Whether a product can have another dtype than its factors (torch 2.13)."""
    return tensor.device.type == "cuda"
