"""Attention in float64 on one process: what every sharded result is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from cp_inductor.tiles.kernel_table import get_kernel
from cp_inductor.tiles.kernels import TileCall

# Relative to the largest magnitude of the reference. float64 and float32: a few hundred roundings
# of 2^-53 and 2^-24. Half types: the result's own rounding, and that of the partials and of the
# probabilities inside the kernel, each 2^-9 (bfloat16) or 2^-11 (float16).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Attend in float64, by the definition, with KV heads repeated for grouped queries.

    Args:
        allowed: bool (B | 1, H | 1, S, T), which pairs exist; a query without any has out 0.
        bias: (B | 1, H | 1, S, T), added to the scores.
        keep: (B, H, S, T), multiplied with the probabilities.
    """
    query, key, value = (tensor.double() for tensor in (query, key, value))
    bias = None if bias is None else bias.double()
    how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "bias": bias}
    scores = scores_of(query, key, allowed=allowed, **how)
    blind = (scores == -float("inf")).all(-1, keepdim=True)
    probabilities = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    probabilities = probabilities if keep is None else probabilities * keep.double()
    return probabilities @ repeat_heads(value, query.shape[1])


def scores_of(
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the scores (B, H, S, T), in the dtype of the query; -inf where there is no pair."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ repeat_heads(key, query.shape[1]).mT * scale
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -float("inf"))
    if bias is not None:
        scores = scores + bias
    return scores if allowed is None else scores.masked_fill(~allowed, -float("inf"))


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def sum_repeats(grad: Tensor, num_heads: int) -> Tensor:
    """Return the gradient of heads that were repeated."""
    return grad.unflatten(1, (num_heads, -1)).sum(2)


def attend_with_grads(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, **kwargs: object
) -> tuple[Tensor, ...]:
    """Return (out, dq, dk, dv) in float64."""
    inputs = [tensor.double() for tensor in (query, key, value, grad_out)]
    return with_grads(lambda *leaves: attend(*leaves, **kwargs), inputs)  # type: ignore[arg-type]


def with_grads(function: Callable[..., Tensor], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return what a function returns, and the gradients of its arguments; zeros for unused ones.

    Args:
        tensors: the arguments, and last the gradient of what is returned.
    """
    *leaves, grad_out = (tensor.detach() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out, materialize_grads=True)


def shard(tensor: Tensor, rank: int, world_size: int, dim: int = 2) -> Tensor:
    """Return a rank's piece of a sequence, as torch.chunk cuts it; empty where none is left."""
    length = tensor.shape[dim]
    most = -(-length // world_size)
    sizes = [min(most, max(0, length - most * rank)) for rank in range(world_size)]
    return tensor.split(sizes, dim)[rank]


def full(tensor: Any) -> Any:
    """Return the whole of a DTensor, and what is none as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Compare results of a dtype, as exactly as it is rounded."""
    assert actual.dtype == dtype, f"{what}: {actual.dtype}"
    assert_within(actual, expected, TOLERANCE[dtype], what)


def assert_within(
    actual: Tensor,
    expected: Tensor,
    tolerance: float,
    what: str = "",
    *,
    least: float = 1.0,
    is_relative: bool = True,
) -> None:
    """Compare by the largest difference, relative to the largest expected magnitude.

    Args:
        least: what that magnitude counts as if it is less.
        is_relative: otherwise the tolerance itself is the bound.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    if actual.numel():
        difference = (actual.double() - expected.double()).abs().max().item()
        largest = max(least, expected.abs().max().item()) if is_relative else 1.0
        bound = tolerance * largest
        assert difference <= bound, f"{what}: {difference:.3g} > {bound:.3g}"


def assert_all_close(
    actual: Iterable[Tensor], expected: Iterable[Tensor], dtype: torch.dtype, what: str = ""
) -> None:
    """Compare out, dq, dk, dv and perhaps dbias, of DTensors the whole ones."""
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        name = ("out", "dq", "dk", "dv", "dbias")[index]
        assert_close(full(one), other, dtype, f"{what} {name}")


def assert_shards_close(
    actual: Iterable[Tensor], expected: Iterable[Tensor], dtype: torch.dtype, what: str = ""
) -> None:
    """Compare this rank's shards of out, dq, dk and dv with those of the whole ones."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local = (one.to_local() if isinstance(one, DTensor) else one for one in actual)
    shards = (shard(other, rank, world_size) for other in expected)
    assert_all_close(local, shards, dtype, what)


def check_shards(
    run: Callable[..., Tensor],
    whole: Sequence[Tensor],
    context: AbstractContextManager[Any] | None = None,
    what: str = "",
    **how: Any,
) -> None:
    """Hold an attention of this rank's shards, and its gradients, against float64.

    Args:
        run: from query, key and value.
        whole: query, key, value and the gradient of out.
        context: in which it is run; its backward comes behind it.
        how: of `attend`.
    """
    expected = attend_with_grads(*whole, **how)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    *pieces, grad_out = (shard(tensor, rank, world_size).clone() for tensor in whole)
    for piece in pieces:
        piece.requires_grad_()
    with context or nullcontext():
        out = run(*pieces)
    grads = torch.autograd.grad(out, pieces, grad_out)
    assert_shards_close((out.detach(), *grads), expected, whole[0].dtype, what)


def on_mesh(tensors: Iterable[Tensor], mesh: DeviceMesh, *placements: Placement) -> list[Tensor]:
    """Return DTensors of tensors that are whole on every rank."""
    return [distribute_tensor(tensor, mesh, placements) for tensor in tensors]


# What models hand to attention, from (B, H, S, D): as it is; a (B, S, H, D) projection, transposed;
# one chunk of a fused projection; and the head dim not innermost.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "chunked": lambda t: torch.cat([t.transpose(1, 2)] * 3, dim=-1).chunk(3, -1)[1].transpose(1, 2),
    "head dim outside": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
}


def lse_in_float64(query: Tensor, key: Tensor, *, is_causal: bool) -> Tensor:
    return scores_of(query.double(), key.double(), is_causal=is_causal).logsumexp(-1)


def run_tile(name: str, tensors: Sequence[Tensor], **how: Any) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk and dv of a kernel, given query, key, value and grad_out.

    Args:
        how: other fields of the kernel's call.
    """
    *qkv, grad_out = tensors
    kernel, call = get_kernel(name), TileCall(*qkv, **how)
    partial = kernel.forward(call)
    return *partial, *kernel.backward(call, grad_out, partial)


def check_tile(found: Sequence[Tensor], tensors: Sequence[Tensor], *, is_causal: bool) -> None:
    """Hold what `run_tile` returns, of tensors in a half type, against float64."""
    out, lse, *grads = found
    expected = attend_with_grads(*tensors, is_causal=is_causal)
    for got, wanted in zip((out, *grads), expected, strict=True):
        assert got.shape == wanted.shape and got.dtype == tensors[0].dtype
        bound = TOLERANCE[got.dtype] * wanted.abs().clamp(min=1.0)
        assert ((got.double() - wanted).abs() <= bound).all()
    expected_lse = lse_in_float64(*tensors[:2], is_causal=is_causal)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def make_qkv(
    seq_len: int,
    *,
    kv_len: int | None = None,
    batch: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """Return query, key, value and grad_out of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads = num_kv_heads or num_heads
    shapes: Sequence[tuple[int, ...]] = (
        (batch, num_heads, seq_len, head_dim),
        (batch, num_kv_heads, kv_len or seq_len, head_dim),
        (batch, num_kv_heads, kv_len or seq_len, head_dim),
        (batch, num_heads, seq_len, head_dim),
    )
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )


def meaning_of(
    rule: str, shape: tuple[int, int, int, int], tables: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the pairs (B, H, S, T) of a rule, and what it adds, as Python reads its text."""
    b, h, q, k = (
        torch.arange(n).view([-1 if other == dim else 1 for other in range(4)])
        for dim, n in enumerate(shape)
    )
    names: dict[str, Any] = {"b": b, "h": h, "q": q, "k": k, "full": True, "causal": k <= q}
    names |= {"Eq": torch.eq, "Ne": torch.ne, "floor": torch.floor, "Mod": torch.remainder}
    names["Step"] = lambda index, start: (index >= start).long()
    for number, table in enumerate(tables):
        for kind in "tx":
            names[f"{kind}{number}"] = lambda *at, table=table: table[at]
    allowed, bias = [*rule.split(";"), "0.0"][:2]
    pairs, added = (torch.as_tensor(eval(text, names)).expand(shape) for text in (allowed, bias))
    return pairs, added
