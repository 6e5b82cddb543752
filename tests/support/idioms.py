"""The grammar of `tests/support/hunt.py`: what models do around attention, one row each.

A row is Python text. In `$name` stands a row of the table `name`; `$name2` is another row of the
same table, and a name that occurs twice in a row is one and the same text. So a row is drawn:

    x + torch.cat([$p, $p2], -1).mean(-1)[:, None, None]
    x + torch.cat([x.amax(1), x.norm(dim=1)], -1).mean(-1)[:, None, None]

The rows of `FAMILIES` make hidden states `x` (B, S, E) of hidden states, those of `LOSSES` a number
of them. They use the model `m`, the batch `b` (both of hunt.py) and the names below, are written
for a whole sequence, and read no rank. Statements end with "; ", the last expression is the result.
`module` in backquotes is a submodule of the model. Behind two spaces and # stand tags:

    sum      the loss is a sum over tokens: over plain shards, those of ranks are added
    length   computes with a number of tokens, which over plain shards is the shard's: a known limit
    rounds   computes in float32        bfloat16    computes in bfloat16

A row that one process cannot run (indices beyond a short sequence, say) makes no program.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from cp_inductor import local_attention, per_rank

WIDTH, HEADS, VOCAB, EXPERTS, LONGEST, IGNORED = 24, 6, 23, 4, 64, -100
# Rows use these as well.
__all__ = ["SDPBackend", "checkpoint", "io", "local_attention", "math", "nn", "np", "per_rank"]
__all__ += ["sdpa_kernel"]


def attention(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """Attend, (B, H, S, D); return (B, S, E)."""
    return F.scaled_dot_product_attention(query, key, value, **how).transpose(1, 2).flatten(2)


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def windows(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to windows of tokens that are entries of a batch."""
    size = 3 if x.shape[1] % 3 == 0 else 4
    return function(x.reshape(-1, size, WIDTH)).reshape(x.shape)


def stretch(x: Tensor, pooled: Tensor) -> Tensor:
    """Stretch tokens, (B, E, any), to the length of x, (B, S, E), and add them."""
    return x + F.interpolate(pooled, x.shape[1]).mT


def recur(x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        states.append(state)
    return torch.stack(states, 1)


def sinusoids(places: Tensor) -> Tensor:
    powers = 100.0 ** -(torch.arange(WIDTH // 2, dtype=torch.float64) / (WIDTH // 2))
    angles = places[..., None] * powers
    return torch.cat([angles.sin(), angles.cos()], -1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


def rope(query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
    """Attend with queries and keys that are rotated by places (B or none, S)."""
    powers = 10.0 ** -(torch.arange(2, dtype=query.dtype) / 2)
    angles = (places[..., None] * powers).repeat_interleave(2, -1).unsqueeze(-3)
    return attention(rotate(query, angles), rotate(key, angles), value, is_causal=True)


def distance(length: int) -> Tensor:
    place = torch.arange(length)
    return place[:, None] - place[None]


def row_by_row(length: int) -> Tensor:
    mask = torch.zeros(length, length, dtype=torch.bool)
    for row in range(length):
        mask[row, : row + 1] = True
    return mask


def weigh(y: Tensor) -> Tensor:
    """Return a number in which each element has a part of its own."""
    return (y * torch.arange(y.numel(), dtype=torch.float64).cos().view(y.shape)).sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Centered(torch.autograd.Function):
    """Subtracts the tokens' mean; its backward knows only that of what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(1, keepdim=True)


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1).cumsum(1).flip(1)


# --- Families: (B, S, E) of (B, S, E) -----------------------------------------------------------

FAMILIES = {
    # Each token by itself.
    "pointwise": """
torch.$function(x)   F.$activation(x)   (x.abs() + 1).sqrt()   x * (x.square() + 1).rsqrt()
x.abs().log1p()   x**3 / 4   x.clamp(-0.5, 0.5)   torch.where(x > 0, x, 0.1 * x)
x.masked_fill(x < 0, -1.0)   torch.lerp(x, x.sin(), 0.3)   torch.addcmul(x, x, x, value=0.1)
torch.addcdiv(x, x, x.abs() + 1)   torch.maximum(x, x.sin())   torch.fmod(x, 0.7)
torch.remainder(x, 0.7)   torch.atan2(x, x.abs() + 1)   torch.hypot(x, x + 1)
torch.copysign(x, -x)   torch.logaddexp(x, -x)   (x / (x.abs() > 0)).nan_to_num(0.0, 0.0, 0.0)
x + (x * 4).round() / 4   x * x.sign()   x * torch.heaviside(x.detach(), x.new_ones(()))   x.clone()
x.float().double() * 0 + x   F.glu(torch.cat([x, x.sin()], -1))   x.softmax(-1) * 16
x.log_softmax(-1)   x.cumsum(-1) / 4   x.sort(-1).values   x.flip(-1)   x.roll(1, -1)
x * (x >= x.topk(4, -1).values[..., -1:])   x * F.one_hot(x.argmax(-1), WIDTH)
x + torch.bucketize(x.detach(), x.new_tensor([-1.0, 0.0, 1.0]))   x.gather(-1, x.argsort(-1))
torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * (0.6 + 0.8j)).flatten(-2)
torch.fft.fft(x).real / 4   torch.where(x.isfinite(), x, 0.0)   x.clone().mul_(2).add_(1).relu_()
x.clone().view(-1, WIDTH).clamp_(-1, 1).view_as(x)   torch.vmap(lambda entry: entry.sin() * 2)(x)
""",
    # With parameters, or with the batch.
    "weights": """
m.mix(x)   x @ m.mix.weight   torch.einsum("bse,ef->bsf", x, m.mix.weight)
torch.addmm(m.cls, x.flatten(0, 1), m.mix.weight).view_as(x)
torch.baddbmm(x, x, m.mix.weight.expand(len(x), -1, -1))   torch.tensordot(x, m.mix.weight, 1)
F.bilinear(x, x, m.mix.weight.expand(WIDTH, -1, -1)) / 8
F.prelu(x.transpose(1, 2), m.cls).transpose(1, 2)   x * m.cls   m.norm(x)
F.rms_norm(x, (WIDTH,), m.cls)   F.silu(m.mix(x)) * x
x + x @ m.mix.weight[:2].T @ m.mix.weight[:2]
m.router(x).softmax(-1) @ m.router.weight + torch.tanh(m.mix(x))
x + m.router.weight[m.router(x).topk(2, -1).indices].sum(-2)
x + F.one_hot(m.router(x).argmax(-1), EXPERTS).to(x.dtype) @ m.router.weight
x * b.weights[..., None]   x * b.keep[..., None]   x.masked_fill(~b.keep[..., None], 0.0)
torch.where((b.ids == 3)[..., None], m.cls, x)
torch.where((b.ids % 2 == 0)[..., None], x, m.embed(b.labels))   x + m.rows[b.places]
x * torch.cos(b.places[..., None] / 10)   x + m.embed(b.labels)   F.normalize(x, dim=-1)
x * F.cosine_similarity(x, m.cls.expand_as(x), -1)[..., None]
x + torch.cdist(x, m.router.weight.expand(len(x), -1, -1)).sum(-1, keepdim=True) / 8
F.group_norm(x.flatten(0, 1), 2).view_as(x)   sum(m.first(x).split(WIDTH, -1))
x - m.seen.add_(1.0)   x + m.mix(x).detach()
x + (m.rows[:8][torch.cdist(x, m.rows[:8][None]).argmin(-1)] - x).detach()
`nn.Conv1d(WIDTH, WIDTH, 1)`(x.mT).mT
`nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())`(x)
with torch.no_grad(): m.cls.mul_(0.5); x + m.cls
torch.func.functional_call(m.mix, {"weight": m.mix.weight * 2, "bias": m.mix.bias}, (x,))
""",
    # Numbers over the sequence that meet each token again.
    "reduce": """
x - x.mean()   x / x.std()   x / x.norm()   x - x.mean(0)   x - x.mean((0, 1))
x - x.$extreme(1, keepdim=True)   x - x.$extreme((0, 1))   x - x.$extreme()
x / x.std(1, keepdim=True)   x / (1 + x.var(1, keepdim=True))   x / x.norm(dim=1, keepdim=True)
F.normalize(x, dim=1)   x - x.logsumexp(1, keepdim=True)   x.softmax(1) * 16   x.log_softmax(1) / 4
x.softmax(0)   x + x.tanh().prod(1, keepdim=True)   x - x.median(1, keepdim=True).values
x - x.quantile(0.3, 1, keepdim=True)   x + x.nansum(1, keepdim=True) / 8
x * (x > 2.2).any(1, keepdim=True)   x * (x < 2.2).all(1, keepdim=True)
x * (x > 0).count_nonzero(1)[:, None] / 8   x + x.gather(1, x.argmax(1, keepdim=True))
x * x.argmin(1, keepdim=True) / 8   x @ (x.mT @ x) / 64   (x @ x.mT).softmax(-1) @ x
x @ torch.einsum("bse,bsf->ef", x, x) / 64   x + (x.new_ones(1, $n) @ x) / 8
x - x.aminmax(dim=1, keepdim=True).min   x / x.square().mean((1, 2), keepdim=True).sqrt()
x - x.flatten(0, 1).mean(0)   F.layer_norm(x, x.shape[1:])
F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)
F.instance_norm(x.transpose(1, 2)).transpose(1, 2)
F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x)
F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)
`nn.BatchNorm1d(WIDTH)`(x.mT).mT
x + (x.mT @ x).diagonal(dim1=1, dim2=2).sum(-1)[:, None, None] / 64
x * torch.histc(x.detach(), 8, -3, 3)[3] / 64
x - (x * b.keep[..., None]).sum(1, keepdim=True) / b.keep.sum(1)[:, None, None]   x / b.keep.sum()
x * b.keep.sum(1)[:, None, None] / 16   x + ((x @ m.cls).softmax(1)[:, None] @ x)
x - x[b.keep].mean(0)   x * torch.sigmoid(m.mix(x.mean(1)))[:, None]
x - m.rows[:$n].mean(0)  # length
q, k, v = m.heads(x); x + ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
q, k, v = m.heads(x); x + (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2)
torch.where(x.mean() > 0.05, x.sin(), x.cos())
torch.cond(x.mean() > 0.05, torch.sin, torch.cos, (x,))
counts = torch.bincount(b.ids.flatten(), minlength=VOCAB).clamp(min=1); \
sums = x.new_zeros(VOCAB, WIDTH).index_add(0, b.ids.flatten(), x.flatten(0, 1)); \
x - (sums / counts[:, None])[b.ids]
""",
    # Partial sums, means, extremes, norms (B, E), and what meets them.
    "partial": """
x + ($p).sum(-1)[:, None, None] / 8   x + (($p) + ($p2))[:, None] / 2
x + (($p) * ($p2))[:, None] / 2   x + (1.5 - ($p))[:, None]   x * (2.0 / (1 + ($p).abs()))[:, None]
x + torch.cat([$p, $p2], -1).$collapse[:, None, None]
x + torch.cat([$p, m.cls.expand(len(x), -1)], -1).$collapse[:, None, None]
x + torch.stack([$p, $p2]).mean(0)[:, None]   x + torch.stack([$p, $p2, $p3], 1).amax(1)[:, None]
x + torch.where(($p) > 0.5, $p2, m.cls)[:, None]   x + torch.maximum($p, $p2)[:, None]
x + torch.lerp($p, $p2, 0.3)[:, None]   x * F.cosine_similarity($p, $p2, dim=-1)[:, None, None]
x + torch.addcmul($p, $p2, $p2)[:, None] / 4   p = $p; p = p + 0 * m.cls; x + ($of_p)[:, None]
p = $p; x + ($of_p)[:, None]   p = $p; p = $of_p; x + ($of_p2)[:, None]
p = $p; x + ($of_p).$collapse[:, None, None]   p = $p; $write_p; x + p[:, None]
p = $p.clone(); $write_p; x + p[:, None]   p = torch.zeros_like($p); p += $p2; x + p[:, None]
p = torch.zeros(len(x), WIDTH, dtype=x.dtype); p.copy_($p2); x + p[:, None]
p = torch.cat([x.mean(1, keepdim=True), x], 1); x + p[:, :1]   p = $p; y = x.clone(); y[:, 0] = p; y
p = $p; y = x.clone(); y[:, 1:3] += p[:, None]; y   p = $p; torch.cat([p[:, None], x[:, 1:]], 1)
p = $p; m.seen.mul_(0.9).add_(p.detach().mean(0), alpha=0.1); x - m.seen
with torch.no_grad(): p = $p; x + ($of_p)[:, None]   x + m.attend(($p)[:, None], is_causal=False)
q, k, v = m.heads(x); x + attention(q, k, v, is_causal=True, scale=1.0) * ($p)[:, None]
p = $p; x + F.glu(torch.cat([p, p.sin()], -1), -1)[:, None]
p = $p; x + F.glu(p, -1).repeat(1, 2)[:, None]
p = torch.stack([$p, $p2]); x + p.$extreme(0)[:, None]
""",
    "scan": """
x.cumsum(1) / 8   x.tanh().cumprod(1)   x.cummax(1).values   x.cummin(1).values   x.logcumsumexp(1)
x.flip(1)   x.flip(1).cumsum(1).flip(1) / 8   torch.fliplr(x)   x.diff(dim=1, prepend=x[:, :1])
x.roll(1, 1)   x.roll(-1, 1)   x.roll((1, 1), (0, 1))   x.roll(1)   x.cumsum(0)
x.cumsum(1) / torch.arange(1, $n + 1)[:, None]   x + torch.trapezoid(x, dim=1)[:, None] / 8
x.flatten(0, 1).cumsum(0).view_as(x) / 8   recur(x)
torch.ones($n, $n, dtype=x.dtype).tril() @ x / 8   torch.fft.fft(x, dim=1).real / 4
torch.fft.fft2(x).real / 8   x.sort(1).values   x.gather(1, x.argsort(1))
x.transpose(0, 1).msort().transpose(0, 1)   x + x.topk(4, 1).values.mean(1, keepdim=True)
x - x.kthvalue(3, 1, keepdim=True).values   x * x.argsort(1).argsort(1) / 16
x * torch.searchsorted(x[..., 0].sort(1).values.detach(), x[..., 0].detach())[..., None] / 16
x * (x.norm(dim=-1) >= x.norm(dim=-1).topk(4, 1).values[:, -1:])[..., None]
`nn.GRU(WIDTH, WIDTH, batch_first=True)`(x)[0]   `nn.LSTM(WIDTH, WIDTH, batch_first=True)`(x)[0]
""",
    "index": """
x[:, torch.arange($n).flip(0)]   x.index_select(1, torch.arange($n).flip(0))
x.gather(1, torch.arange($n).flip(0)[:, None].expand_as(x))
torch.take_along_dim(x, torch.arange($n).flip(0)[None, :, None], 1)
x[:, ::2].repeat_interleave(2, 1)[:, :$n]   x + x[:, -1:]   x + x[:, :1]
x + x[:, $n // 2][:, None]   x + x[:, [0]]   x + x[:, [0, 4, -1]].sum(1, keepdim=True)
x + x.select(1, 3)[:, None]   x + x.narrow(1, $n // 2 - 1, 2).sum(1, keepdim=True)
torch.cat(x.chunk(2, 1)[::-1], 1)   torch.cat([x.split(5, 1)[1], x.split(5, 1)[0], x[:, 10:]], 1)
torch.cat(x.tensor_split(3, 1)[::-1], 1)   torch.stack(x.unbind(1)[::-1], 1)   x + x[x > 1].sum()
x + x.masked_select(x > 1).sum()   x + x[(x > 1).nonzero(as_tuple=True)].sum()
x + x.take(torch.tensor([0, 17, 70])).sum()   x + x.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
x.tril()   x.triu(1)   x + x[0]   x[[1, 0]]   torch.cat([x[..., 4:], x[..., :4]], -1)
x[..., ::2].repeat_interleave(2, -1)   x + x[0, 4, 3]
F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)   x.contiguous().as_strided(x.shape, x.stride())
x[:, torch.randperm($n, generator=torch.Generator().manual_seed(0))]
torch.cat([x[:, ::2], x[:, 1::2]], 1)
torch.stack([x[:, 1::2], x[:, :-1:2]], 2).flatten(1, 2).sum(1, keepdim=True) + x
x[:, None, :, None].squeeze(1).squeeze(2)   x[..., : WIDTH // 2].repeat(1, 1, 2)
x + x[torch.arange(2), torch.tensor([3, $n - 1])][:, None]
x.index_add(1, torch.tensor([3, $n - 1]), x[:, 1:3])
x.index_copy(1, torch.tensor([3, $n - 2]), x[:, 1:3])   x.index_fill(1, torch.tensor([3, 0]), 0.5)
x.scatter(1, torch.full_like(x[:, :1], 4).long(), x[:, :1])
x.scatter_add(1, torch.full_like(x[:, :1], 4).long(), x[:, :1])
x.scatter_reduce(1, torch.full_like(x[:, :1], 4).long(), x[:, :1], "amax")
x.slice_scatter(x[:, :3], 1, 2, 5)   x.select_scatter(x[:, 0], 1, 4)
x.diagonal_scatter(x.new_zeros(len(x), min($n, WIDTH)), dim1=1, dim2=2)
x.index_put((torch.tensor([0]), torch.tensor([4])), x[0, 0])
x.put(torch.tensor([0, 100]), x.new_zeros(2))   x.masked_scatter(x > 1.5, x.sin())
F.one_hot(torch.arange($n).flip(0), $n).to(x.dtype) @ x
x.masked_scatter(((b.places >= 3) & (b.places < 8))[..., None].expand_as(x), b.image)
x + x[b.keep].sum(0) / 8   x + x[torch.arange(len(x)), b.keep.sum(1) - 1][:, None]
x.gather(1, b.places.flip(1)[..., None].expand_as(x))
torch.zeros_like(x).index_put((torch.arange(len(x))[:, None], b.places.flip(1)), x)
x + x[torch.arange(len(x)), b.ids.argmax(1)][:, None]
x * (F.one_hot(m.router(x).argmax(-1), EXPERTS).cumsum(1) <= 3).any(-1, keepdim=True)
x.scatter(1, m.router(x)[..., :1].topk(5, 1).indices.expand(-1, -1, WIDTH), 0.0)
torch.zeros_like(x).masked_scatter(b.keep[..., None].expand_as(x), m.mix(x[b.keep]))
x.index_put((b.keep,), m.cls)   x[:, :4].repeat_interleave(torch.tensor([1] * 3 + [$n - 3]), 1)
F.embedding(b.places, m.rows) + x   x + m.rows[b.labels]   x + m.rows[b.places.max()]
x + torch.zeros_like(x).scatter_add(1, (b.places // 4)[..., None].expand_as(x), x)
""",
    "write": """
y = x.clone(); y[$i] = 0.5; y   y = x.clone(); y[$i] = m.cls[: y[$i].shape[-1]]; y
y = x.clone(); y[$i] = y[$i].clone().sin() * 3; y   y = x.clone(); y[$i] *= 2; y
y = x.clone(); y[$i] += m.cls[: y[$i].shape[-1]]; y   y = x.clone(); y[$i].zero_(); y
y = x.clone(); y[$i].copy_(m.cls[: y[$i].shape[-1]]); y
y = x.clone(); y[$i].masked_fill_(y[$i] < 0, 0.25); y
y = x.clone(memory_format=torch.contiguous_format); ($view).mul_(2.0); y + x
y = x.clone(memory_format=torch.contiguous_format); ($view).fill_(0.5); y + x
y = x.clone(memory_format=torch.contiguous_format); v = $view; v.copy_(v.clone().sin()); y + x
y = x.detach().clone(); ($view).mul_(2.0); y + x
y = torch.zeros_like(x); y[:, 1:] = x[:, :-1]; x + y
y = x.new_zeros(x.shape); y[:, :-1].copy_(x[:, 1:]); x + y
y = x.clone(); y[:, 1:, :8] = x[:, :-1, :8]; y[:, :1, :8] = 0; y
y = x.clone(); v = y[:, 1:4]; y.mul_(2); x + v.sum(1, keepdim=True) / 8
y = x.clone(); last = y[:, -1]; y.add_(1); x + last[:, None]
y = x.clone(); v = y.transpose(1, 2); y[:, 1:4] = 0; v.transpose(1, 2) * 2
y = x.clone(); v, w = y[:, 1:4], y[:, 2:6]; v.mul_(2); x + w.sum(1, keepdim=True) / 8
y = x.clone(); first = y[:, 0].clone(); y[:, 0] = y[:, -1]; y[:, -1] = first; y
y = x.new_zeros(len(x), $n, WIDTH); for i in range(3): y[:, i] = x[:, i]; x + y
y = x.clone(); y[:, 1:] += x[:, :-1]; y   y = x.clone(); y[:, 1:] = y[:, :-1].clone(); y
y, h = torch.empty_like(x), $n // 2; y[:, :h] = x[:, :h].sin(); y[:, h:] = x[:, h:].cos(); y
y = torch.empty_like(x); torch.sin(x.detach(), out=y); x + y
mask = torch.ones($n, dtype=x.dtype); mask[:3] = 0; x * mask[:, None]
y = torch.empty_like(x); y[..., ::2], y[..., 1::2] = -x[..., 1::2], x[..., ::2]; x + y
y = x.clone(); for i in range(1, 4): y[:, i] = y[:, i] + 0.5 * y[:, i - 1]; y
y = x.clone(); before = y.sum(-1, keepdim=True); y[:, 1:4] = 0; y + before
y = x.clone(); with torch.no_grad(): y[:, 1:4] *= 2; y   y = x.clone(); y.data[:, 1:4] *= 2; y
y = x.clone(); y.index_fill_(1, torch.tensor([0, 4]), 0.0).index_add_(1, torch.tensor([3]), x[:, \
:1]); y
y = x.clone(); y.scatter_(1, torch.full_like(x[:, :1], 4).long(), 0.5); y
y = x.clone(); y.copy_(y.roll(1, 1)); y   x + F.pad(x, (0, 0, 1, -1))
y = x.detach().clone(); for entry in y: entry[3:5] = 0.5; x + y
y = x.clone(); y[b.keep] = m.cls; y   y = x.clone(); y[b.ids == 3] = 0.0; y
y = x.clone(); y[y > 1] = 1.0; y   y = x.clone(); y[b.ids == 3] += 1.0; y
y = x.clone(); y[:, 2:7] = b.image; y
y = x.clone(); y[torch.arange(len(x)), b.keep.sum(1) - 1] = m.cls; y
m.seen.copy_(x.detach().mean((0, 1))); x - m.seen
m.seen.mul_(0.9).add_(x.detach()[:, -1].mean(0), alpha=0.1); x - m.seen
ids = b.ids.clone(); ids[:, 1:] = b.ids[:, :-1]; ids[:, 0] = 1; x + m.embed(ids)
table = m.rows.clone(); table[3:9] = 0; x + table[b.places]
labels = b.labels.clone(); labels[:, :4] = 0; x + m.embed(labels)
""",
    "shape": """
x.flatten(0, 1).sin().unflatten(0, (len(x), -1))   x.view(-1, WIDTH).sin().view(x.shape)
x.view(*x.shape[:2], 2, WIDTH // 2).sin().flatten(2)
x.unflatten(-1, (2, -1)).permute(2, 0, 1, 3).sin().permute(1, 2, 0, 3).flatten(2)
x.transpose(0, 1).contiguous().sin().transpose(0, 1)   x.mT.contiguous().sin().mT
x.flatten(1).sin().unflatten(1, (-1, WIDTH))   x.flatten().sin().view_as(x)
x.flatten(1).sum(1)[:, None, None] / 8 + x
x.unflatten(1, (-1, 3 if $n % 3 == 0 else 4)).sin().flatten(1, 2)
windows(x, lambda w: w - w.mean(1, keepdim=True))   windows(x, torch.sin)
windows(x, lambda w: w.flip(1))
x.unflatten(1, (3 if $n % 3 == 0 else 4, -1)).transpose(1, 2).flatten(1, 2)
x + x[:, : $n // 2 * 2].view(len(x), 2, $n // 2, WIDTH).mean(2).mean(1)[:, None]
x + x[:, : $n // 2 * 2].reshape(len(x), -1, 2 * WIDTH).sin().mean(1)[:, None, WIDTH:]
x[:, :, None].expand(-1, -1, 3, -1).mean(2)   x.repeat(1, 2, 1)[:, :$n]
x.tile(1, 1, 2)[..., :WIDTH]   x.repeat(2, 1, 1)[: len(x)]   torch.stack([x, x.sin()], 1).sum(1)
torch.stack([x, x.sin()], -1).mean(-1)   torch.cat([x, x.sin()])[len(x) :]
torch.cat([x, x.sin()], 1)[:, :$n]   torch.cat([x, x.sin()], 1)[:, $n:]
x.movedim(1, 0).sin().movedim(0, 1)   x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(-1)
torch.cat(x.split([6, WIDTH - 6], -1)[::-1], -1)   torch.hstack([x, x])[:, :$n]
torch.stack([entry.sin() for entry in x])   x.reshape(-1, 2, WIDTH // 2).sin().reshape(x.shape)
x.reshape(len(x), WIDTH, -1).sin().reshape(x.shape)
x.reshape(len(x), WIDTH, -1).mT.reshape(x.shape)   x.rot90(1, (1, 2)).rot90(-1, (1, 2))
F.pixel_unshuffle(x[:, None, : $n // 2 * 2], 2).mean((1, 2, 3))[:, None, None] + x
torch.kron(x, x.new_ones(1, 1, 2))[..., ::2]   torch.block_diag(*x)[:$n, :WIDTH] + x
x + torch.meshgrid(x[0, :, 0], x[0, 0], indexing="ij")[0]   F.pad(x, (0, 0, 0, 3))[:, :$n]
F.pad(x, (0, 0, 3, 0))[:, :$n]
F.pad(x, (0, 0, 0, -$n % 8)).unflatten(1, (-1, 8)).mean(2).repeat_interleave(8, 1)[:, :$n] + x
F.pad(x, (1, 1))[..., 1:-1]   F.pad(x.mT, (1, 1), mode="circular")[..., 2:].mT
torch.cat([x[:, i : i + 1] for i in range($n)], 1)   x + (m.rows[:$n] @ m.rows[:$n].T / 16) @ x
torch.vmap(m.mix, 1, 1)(x)   torch.vmap(lambda entry: m.attend(entry[None])[0])(x)
""",
    # More attentions: of windows, entries, other batches, modules.
    "attend": """
q, k, v = m.heads(x); x + $heads   m.attend(x, attn_mask=$mask)
q, k, v = m.heads(x); y = x + attention(q, k, v); y + attention(m.heads(y, m.second)[0], k, v)
q, k, v = (t.view(len(x), $n, HEADS, 4).permute(0, 2, 1, 3) for t in m.first(x).chunk(3, -1)); \
x + F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3).reshape(x.shape)
q, k, v = (torch.stack(t.split(4, -1), 1) for t in m.first(x).split(WIDTH, -1)); \
x + attention(q, k, v, is_causal=True)
windows(x, lambda w: m.attend(w, m.second, is_causal=False))   windows(x, lambda w: m.attend(w))
windows(x, lambda w: m.attend(w.transpose(0, 1), is_causal=False).transpose(0, 1))
m.attend(x.transpose(0, 1), is_causal=False).transpose(0, 1)
x + F.scaled_dot_product_attention(*(x.unflatten(-1, (2, -1)),) * 3).flatten(2)
F.scaled_dot_product_attention(x.mT, x.mT, x.mT).mT + m.mix(x)
F.scaled_dot_product_attention(*m.first(x).chunk(3, -1), is_causal=True)
m.attend(x.flatten(0, 1)[None]).view_as(x)
torch.cat([m.attend(half) for half in x.chunk(2, 1)], 1)   torch.cat([m.attend(x[:1]), x[1:]])
torch.cat([m.attend(entry[None]) for entry in x])   x + m.attend(x[:, ::2]).mean(1, keepdim=True)
torch.cat([x[:, :4], m.attend(x[:, 4:])], 1)   m.attend(x.flip(1)).flip(1)
checkpoint(m.attend, x, use_reentrant=False)
with torch.no_grad(): x = m.attend(x); m.attend(x, m.second)   m.norm(m.attend(m.norm(m.attend(x))))
torch.where(b.keep[..., None], m.attend(x), x)
m.attend(torch.cat([x, m.embed(b.labels)]))[: len(x)]
m.attend(torch.cat([x, m.embed(b.labels)], 1))[:, :$n]
m.attend(torch.cat([m.rows[:4].expand(len(x), -1, -1), x], 1))[:, 4:]
m.attend(torch.cat([x, m.rows[:4].expand(len(x), -1, -1)], 1))[:, :$n]
m.attend(torch.cat([m.cls.expand(len(x), 1, -1), x], 1), is_causal=False)[:, 1:]
x + m.attend(torch.cat([m.cls.expand(len(x), 1, -1), x], 1), is_causal=False)[:, :1]
m.attend(torch.cat([b.image, x], 1))[:, 5:]   m.attend(F.pad(x, (0, 0, 0, -$n % 8)))[:, :$n]
x + m.attend(x[:, ::2]).repeat_interleave(2, 1)[:, :$n]
`nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)`(x, x, x, need_weights=False)[0] + x
y, w = `nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)`(x, x, x); \
y + x * w.diagonal(0, 1, 2)[..., None]
`nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)`(x, x, x, key_padding_mask=~b.keep, \
need_weights=False)[0]
`nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)`(x)
`nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)`(x, \
src_key_padding_mask=~b.keep)
with torch.autocast("cpu", torch.bfloat16): y = m.float_attend(x); x + y  # bfloat16
""",
    "tokens": """
torch.cat([m.cls.expand(len(x), 1, -1), x[:, 1:]], 1)
torch.cat([x[:, :-1], m.cls.expand(len(x), 1, -1)], 1)
torch.where((torch.arange($n) == 0)[:, None], m.cls, x)
torch.where((b.places == 0)[..., None], m.cls, x)   torch.cat([x[:, :2], b.image, x[:, 7:]], 1)
torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) + x   torch.cat([x[:, 1:], x[:, -1:]], 1) + x
F.pad(x[:, :-1], (0, 0, 1, 0)) + x
torch.lerp(x, F.pad(x, (0, 0, 1, 0))[:, :-1], torch.sigmoid(m.cls))
x * torch.cat([x.new_full((1, 1), 2.0), x.new_ones($n - 1, 1)])
x + 0.5 * (x + torch.cat([x[:, 1::2], x[:, 0::2]], 1).sum(1, keepdim=True))
x * torch.sigmoid(m.mix(x[:, -1]))[:, None]   x * (b.ids != 0)[..., None]
x + m.embed(F.pad(b.ids[:, :-1], (1, 0)))   x + m.embed(b.ids.roll(1, 1))
x + m.embed((7 * b.ids + b.ids.roll(1, 1)) % VOCAB)
x * torch.bincount(b.ids.flatten(), minlength=VOCAB)[b.ids][..., None]
x * ((b.ids == 3) & ((b.ids == 3).cumsum(1) == 1)).logical_not()[..., None]
x * ((b.ids == 3).cumsum(1) > 0)[..., None]   x * (b.ids.roll(1, 1) != 3)[..., None]
x.index_copy(1, torch.arange(4), m.mix(x[:, :4]))
""",
    "position": """
x + m.rows[$places]   x + ($places)[..., None] / 16   x + sinusoids($places)
q, k, v = m.heads(x); x + rope(q, k, v, $places)   x + m.rows[:$n]   x + m.rows[-$n:]
x + m.rows[2 : $n + 2]   x + m.rows.narrow(0, 0, $n)
x + F.interpolate(m.rows.T[None], $n, mode="linear")[0].T
x + torch.from_numpy(np.sin(np.arange($n, dtype=np.float64)[:, None] / 100 ** np.arange(0, 1, \
1 / 24)))
x / $n * 8  # length   x * math.log($n)  # length   x / x.numel() * 100  # length
x * b.ids.size(1) / 16  # length   x.sin() if $n > 20 else x.cos()  # length
x * 0.9 ** torch.arange($n, dtype=x.dtype)[:, None]   x * (torch.arange($n) > 0)[:, None]
x * (b.places > 0)[..., None]   torch.eye($n, dtype=x.dtype) @ x
x * torch.hann_window($n, dtype=x.dtype)[:, None]
x + F.one_hot(torch.arange($n), LONGEST).to(x.dtype) @ m.rows
x + torch.empty($n, 1, dtype=x.dtype).fill_(2)   x + torch.ones($n, WIDTH, dtype=x.dtype)
x + torch.randn($n, 1, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
""",
    "conv": """
F.avg_pool1d(x.mT, 3, 1, 1).mT   F.max_pool1d(x.mT, 3, 1, 1).mT   stretch(x, F.avg_pool1d(x.mT, 2))
stretch(x, F.max_pool1d(x.mT, 2))   stretch(x, F.adaptive_avg_pool1d(x.mT, 4))
stretch(x, F.lp_pool1d(x.mT.abs() + 0.1, 2, 2))   x + F.adaptive_avg_pool1d(x.mT, 1).mT
x + F.adaptive_max_pool1d(x.mT, 1).mT   F.avg_pool1d(x, 3, 1, 1)
F.interpolate(x.mT, scale_factor=2).mT[:, ::2]
F.interpolate(x.mT, scale_factor=2, mode="linear").mT[:, ::2]
F.unfold(x[:, None], (3, WIDTH), padding=(1, 0)).mT.unflatten(-1, (3, -1)).mean(2)
F.avg_pool1d(F.pad(x.mT, (1, 1), mode="replicate"), 3, 1).mT
`nn.Conv1d(WIDTH, WIDTH, 3, padding=1)`(x.mT).mT
`nn.Conv1d(WIDTH, WIDTH, 4)`(F.pad(x.mT, (3, 0))).mT
`nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)`(x.mT)[..., :$n].mT
`nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)`(x.mT).mT
`nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)`(x.mT).mT
stretch(x, `nn.Conv1d(WIDTH, WIDTH, 3, padding=1, stride=2)`(x.mT))
stretch(x, `nn.Conv1d(WIDTH, WIDTH, 4, stride=4)`(x.mT))
stretch(x, `nn.Conv1d(WIDTH, WIDTH, 3)`(x.mT))
`nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)`(x.mT).mT
`nn.Conv2d(1, 1, 3, padding=1)`(x[:, None])[:, 0]
`nn.Conv1d(1, 1, 3, padding=1)`(x.flatten(0, 1)[:, None])[:, 0].view_as(x)
`nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular")`(x.mT).mT
""",
    # Numbers that Python reads off tensors.
    "read": """
x * (1 + abs($number.item()))   x * float($number)   x / (2 + abs(float($number)))
x * (1 + int($number))   x * (1 + int($count) / 16)   x * ($count.item() + 1) / 16
x * math.log(2 + $count.item())   x.sin() if $number > 0.1 else x.cos()
x.sin() if $number.item() > 0.1 else x.cos()   x.sin() if bool($count > 7) else x.cos()
x.sin() if $count % 2 == 0 else x.cos()   x.sin() if $number.isnan() else x.cos()
x.sin() if not torch.isnan(x).any() else x.cos()   x.sin() if torch.allclose(x, x) else x.cos()
x.sin() if torch.equal(x[:, :1], x[:, :1]) else x.cos()
x.sin() if $vector.max() > 0.5 and $number < 2 else x.cos()
x.sin() if ($vector > 0.3).all() else x.cos()   x * (1 + sum($vector.tolist()) / 64)
x * (1 + max($vector.tolist()))   x + torch.from_numpy($vector.detach().numpy()).sum() / 8
x * (1 + float($vector.detach().numpy().max()))
x + torch.from_numpy(x.detach().numpy().mean(1, keepdims=True))   x * [0.5, 1.5, 2.5][$count % 3]
x * list(range(1, 9))[int($count) % 8]   x * [0.5, 1.5][$number > 0.1]
x * float(f"{$number.item():.9f}")   x * float(f"{$number:.6f}")   x * float(str($count.item()))
x * float("{}".format(float($number)))   print($number, file=io.StringIO()); x
x * torch.tensor($number.item(), dtype=x.dtype)
x * torch.tensor([float($number), 1.0] * (WIDTH // 2), dtype=x.dtype)
x * torch.as_tensor($number.item())   x * torch.full((WIDTH,), $number.item(), dtype=x.dtype)
x * np.float64($number.item())   x[:, : int($count % 3) + 2].mean(1, keepdim=True) + x
x[:, $count.item() % 4 :].mean(1, keepdim=True) + x   x + m.rows[: int($count) % 5 + 1].mean(0)
x + m.rows[$count.item() % 9]   x + m.rows[int($count) % 9 : int($count2) % 9 + 10].sum(0)
x * torch.zeros(int($count) % 5 + 1).numel()   x * (1 + len(x[x[..., 0] > 0])) / 8
x * (1 + (x > 0.5).nonzero().shape[0]) / 64   x * x.detach().round().unique().numel() / 8
for _ in range(int($count) % 3): x = x.sin(); x   for _ in range($count % 4): x = x * 1.1; x
while x.abs().max() > 1.5: x = x / 2; x   while x.abs().$extreme() > 3: x = x / 2; x
with torch.no_grad(): s = $number.item(); x * s
with torch.no_grad(): s = torch.tensor($number.item()); x * s
with torch.inference_mode(): s = $number.item(); x * s
s = $number.detach().item(); t = $number2.item(); x * s + t   x.clamp(max=0.1 + abs($number.item()))
x.masked_fill(x > $number.item(), 0.5)   torch.where(x > float($number), x, 0.1 * x)
x + 10 ** -abs($number.item())   x * round(float($number), 3)   x * max(0.1, $number)
assert $number < 1e9; x.sin()   torch._assert($number < 1e9, "large"); x.sin()
x * (1 + divmod($count.item(), 4)[1])   F.pad(x, (0, 0, 0, int($count) % 3 + 1))[:, :$n]
torch.cat(x.split([int($count) % 3 + 1, $n - int($count) % 3 - 1], 1)[::-1], 1)
x * torch.bincount(b.ids.flatten(), minlength=b.ids.max().item() + 1)[3] / 4
x * torch.arange(int(b.keep.sum(1).max())).sum() / 64
y = x.clone(); y[:, : int($count) % 4 + 1] = 0.5; y
y = x.clone(); y[$count.item() % len(x)] *= $number.item(); y
y = x.clone(); y *= $number.item(); y   y = x.clone(); y.fill_($number.item()); y * x
y = x.clone(); y.clamp_(min=-abs(float($number))); y   m.seen.fill_($number.item()); x - m.seen
m.seen.add_(x.detach().mean((0, 1)), alpha=float($count) / 16); x - m.seen
F.interpolate(m.rows.T[None], int($count) % 8 + 2)[0].T.mean(0) + x
F.dropout(x, 0.0 * $number.item()) * $number.item()
m.attend(x[:, : max(2, $count.item() % $n)])[:, :1] + x
q, k, v = m.heads(x); x + attention(q, k, v, is_causal=True, scale=0.1 + abs($number.item()))
checkpoint(lambda t: t * $number.item(), x, use_reentrant=False)
checkpoint(lambda t: t.sin() if $number > 0.1 else t.cos(), x, use_reentrant=False)
y = m.mix(x); y * (y.detach().abs().amax().item() + $number.item())
sizes = b.keep.sum(1).tolist(); x * torch.tensor(sizes, dtype=x.dtype)[:, None, None] / 8
sizes = b.keep.sum(1).tolist(); torch.stack([e * s / 8 for e, s in zip(x, sizes)])
ends = b.keep.sum(1).tolist(); x + torch.stack([e[:s].mean(0) for e, s in zip(x, ends)])[:, None]
lengths = [int(row.sum()) for row in b.keep]; x * max(lengths) / 8
""",
    "autograd": """
Doubled.apply(x)   Centered.apply(x)   x + x.detach()   x + (x.round() - x).detach()
checkpoint(lambda t: t.sin() * t, x, use_reentrant=False)
checkpoint(lambda t: t - t.mean(1, keepdim=True), x, use_reentrant=False)
checkpoint(lambda t: t - t.$extreme(1, keepdim=True), x, use_reentrant=False)
checkpoint(torch.sin, x, use_reentrant=True)
checkpoint(lambda t: t.cumsum(1) / 8, x, use_reentrant=True)
mean = x.mean(1, keepdim=True); checkpoint(lambda t: t - mean, x, use_reentrant=False)
y = x.clone(); y.register_hook(lambda grad: grad * 2); y
y = x.clone(); y.register_hook(lambda grad: grad - grad.mean(1, keepdim=True)); y
y = x.clone(); y.register_hook(lambda grad: grad.clamp(max=grad.abs().max().item() / 2)); y
y = x.clone(); y.register_hook(torch.neg); y
y = m.mix(x); y.register_hook(lambda grad: grad.flip(1)); y
torch.func.jvp(torch.sin, (x,), (x.detach(),))[1]
torch.func.jvp(lambda t: t.cumsum(1), (x,), (x,))[1] / 8
with torch.no_grad(): y = x.sigmoid(); x * y   y = x.clone(); y.data = x.detach().roll(1, 1); y
y = x.detach().clone(); torch._foreach_copy_([y], [x.detach().roll(1, 1)]); x + y
x + (x.detach() * 4).round() / 4   x + (x.detach() / x.detach().abs().amax()).round()
y, pull = torch.func.vjp(lambda w: F.linear(x.detach(), w), m.mix.weight); \
F.linear(x, m.mix.weight - 0.01 * pull(torch.ones_like(y))[0])
x + torch.func.vjp(m.mix, x)[1](x)[0]
x + torch.func.grad(lambda t: m.mix(t).sin().square().sum())(x)
x + torch.func.grad(lambda t: m.mix(t).mean(1).square().sum())(x)
torch.vmap(lambda w: F.linear(x, w))(torch.stack([m.mix.weight, m.mix.weight * 2])).sum(0)
torch._assert(x.shape[-1] == WIDTH, "width"); x.sin()   torch._dynamo.graph_break(); x * 2
""",
    # What makes the first hidden states.
    "embedding": """
m.embed.weight[b.ids]   F.one_hot(b.ids, VOCAB).to(m.cls.dtype) @ m.embed.weight
m.embed.weight.index_select(0, b.ids.flatten()).view(*b.ids.shape, WIDTH)
F.embedding(b.ids, m.embed.weight * 2)   F.embedding(b.ids, m.head.weight)
x + F.embedding(b.places, m.rows)   m.embed.weight[b.ids.unique()].sum(0) + x
F.embedding(b.ids, m.embed.weight, scale_grad_by_freq=True)
F.embedding(b.ids, m.embed.weight, padding_idx=3)
F.embedding_bag(b.ids.flatten()[:, None], m.embed.weight).view(*b.ids.shape, -1)
x + F.embedding_bag(b.ids, m.embed.weight, mode="mean")[:, None]
x + F.embedding_bag(b.ids, m.embed.weight, mode="sum")[:, None] / 8
x + F.embedding_bag(b.ids, m.embed.weight, mode="max")[:, None]
F.embedding_bag(b.ids.flatten()[:, None], m.embed.weight, \
scale_grad_by_freq=True).view(*b.ids.shape, -1)
x + F.embedding_bag(b.ids.flatten(), m.embed.weight, torch.arange(0, b.ids.numel(), \
b.ids.shape[1]))[:, None]
m.embed(b.ids.flip(1).cumsum(1).flip(1) % VOCAB)   m.embed((b.ids * 7 + b.places) % VOCAB)
m.embed.weight.gather(0, b.ids.flatten()[:, None].expand(-1, WIDTH)).view(*b.ids.shape, WIDTH)
F.normalize(m.embed.weight, dim=-1)[b.ids]   (m.embed.weight - m.embed.weight.mean(0))[b.ids]
b.ids[..., None].to(m.cls.dtype) * m.cls / VOCAB
m.mix(b.image.repeat(1, 8, 1)[:, : b.ids.shape[1]])
`nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)`(b.ids)
`nn.Embedding(VOCAB, WIDTH, max_norm=1.0)`(b.ids)
`nn.Embedding(VOCAB, WIDTH, padding_idx=3)`(b.ids)
`nn.Embedding(VOCAB, WIDTH, sparse=True)`(b.ids)
""",
}

# --- Parts of rows ------------------------------------------------------------------------------

PARTS = {
    "n": "x.shape[1]",
    "function": "abs neg exp expm1 sin cos tanh sigmoid erf square atan asinh sinc",
    "activation": """relu gelu silu mish elu celu selu softplus softsign hardtanh hardswish
        hardsigmoid leaky_relu logsigmoid tanhshrink softshrink relu6""",
    "extreme": "mean sum amax amin",
    "collapse": "sum(-1) mean(-1) amax(-1) amin(-1) prod(-1) norm(dim=-1) std(-1) logsumexp(-1)",
    # Of the sequence, (B, E): sums, means, extremes, norms, products, counts.
    "p": """
x.mean(1)   x.sum(1) / 8   x.amax(1)   x.amin(1)   x.max(1).values   x.norm(dim=1)
x.norm(1, dim=1) / 8   x.norm(math.inf, dim=1)   torch.linalg.vector_norm(x, 3, 1)
x.tanh().prod(1)   (x > 1.5).any(1).to(x.dtype)   (x < 1.5).all(1).double()
(x > 0).sum(1).double() / 8   (x > 1).count_nonzero(1).double()   x.var(1)   x.std(1)
torch.var_mean(x, 1)[1]   x.logsumexp(1)
x.square().mean(1).sqrt()   x.nanmean(1)   x.aminmax(dim=1).max
x.masked_fill(~b.keep[..., None], -9.0).amax(1)
(x * b.keep[..., None]).sum(1) / b.keep.sum(1, keepdim=True)
(x * b.keep[..., None]).sum(1) / b.keep.sum(1, keepdim=True).clamp(min=1)
(x * b.keep[..., None]).sum(1) / (x * 0 + b.keep[..., None]).sum(1).clamp_(min=1)
(x * b.weights[..., None]).sum(1) / b.weights.sum(1, keepdim=True)   x.softmax(1).amax(1)
x.cumsum(1)[:, -1] / 8   x[:, -1]   x[:, 0]   x.median(1).values   torch.einsum("bse->be", x) / 8
(x.mT @ b.weights[..., None])[..., 0] / 8   F.adaptive_avg_pool1d(x.mT, 1)[..., 0]
x.mean((0, 1)).expand(len(x), -1)   x.amax((0, 1)).repeat(len(x), 1)
x.norm(dim=(0, 1)).expand(len(x), -1)   m.mix(x).mean(1)   m.mix(x.amax(1))
x[torch.arange(len(x)), b.keep.sum(1) - 1]
torch.stack([entry[keep].mean(0) for entry, keep in zip(x, b.keep)])
""",
    "of_p": """
F.normalize(p, dim=-1)   F.normalize(p.to(x.dtype), p=1, dim=-1)   m.mix(p)   m.norm(p)
F.rms_norm(p, (WIDTH,))   p.softmax(-1)   p.log_softmax(-1)   p / p.abs().sum(-1, keepdim=True)
p - p.mean(-1, keepdim=True)   p - p.mean(0)   p - p.amax(0)   p + p.norm()
p * p.prod(-1, keepdim=True)   p + p.max()   p * (p > 1).any()   p * (p > 0.2).sum(-1, keepdim=True)
p + p.sort(-1).values   p * F.one_hot(p.argmax(-1), WIDTH)   p + m.embed(p.argmax(-1) % VOCAB)
p.cumsum(0)   p.flip(0)   p.roll(1, -1)   p @ (p.T @ p) / 32   p.T.contiguous().T.tanh()   p[0] + p
p.detach() + p   p.round()   p.abs().clamp(min=1)   p.masked_fill(p > 1, 0.0)
torch.where(p > 0.5, p, 0.0)   p.repeat(2, 1)[: len(x)]   torch.cat(p.chunk(2, -1)[::-1], -1)
p.square().sqrt()   p.exp().log()   p.nan_to_num()   p.logical_not().to(x.dtype)
p.isfinite().to(x.dtype)   p.float().double() * 0 + p   torch.stack([p, p]).sum(0)
torch.outer(p[:, 0], p[0])   F.layer_norm(p, (WIDTH,), m.cls)   F.linear(p, m.mix.weight)
F.gelu(m.mix(p)) + p   p.unsqueeze(1).expand(-1, 3, -1).mean(1)   p * p.sum(0).sum()
1 / (1 + p.square())   p**2 - p   p.cos() * p.std(-1, keepdim=True)   p.mul(2).add(m.cls)
torch.lerp(p, m.cls.expand_as(p), 0.3)
""",
    "write_p": """
p.clamp_(min=1)   p.fill_(0.5)   p.mul_(2)   p.add_(1)   p.add_(m.cls)
p.masked_fill_(p > 0.5, 0.0)   p.relu_()   p.sub_(p.mean())   p.div_(2.5)   p.copy_($p)   p += $p
p *= $p   p[0] = 0.5   p[..., :3] = 1.0   p[:, 2] += 1   p[p > 1] = 1.0   p[0].mul_(3)
p.view(-1)[:5].zero_()   p.clamp_(-0.5, 0.5).add_(0.1)
p.index_fill_(1, torch.tensor([1, 4]), 0.25)   p.sqrt_().add_(p.detach().max())
p.data.clamp_(min=0.3)   p.t().add_(1.0)
""",
    # What Python reads: numbers of the whole, 0-d.
    "number": """
x.mean()   x.abs().mean()   (x.sum() / 64)   x.abs().max()   x.abs().amax()   x.min()
(x.norm() / 8)   x.std()   x.var()   x[0, 0, 0]   x[0, -1, 0]   x[-1, 2, 1]   x[0].norm()
(x.square().sum().sqrt() / 8)   x.logsumexp((0, 1, 2))   ((x > 0).sum() / 64)
(x > 0).double().mean()   (b.weights.sum() / 16)   b.weights.max()   b.weights[0, -1]
m.loss(x, b.labels)   m.loss(x, b.answers)   m.mix.weight.norm()   x.mean(1).max()
x.amax(1).mean()   (x.norm(dim=1).sum() / 64)   x.median()   x.tanh().prod(1).sum()
x.detach().abs().max()   b.keep.double().mean()   x.mean(1)[0, 0]   x.amax(1)[-1, 3]
x.flatten()[3]   (x * x).mean((0, 2))[1]   x[:, 2].sum()   (x.cumsum(1)[0, -1, 0] / 8)
x.std(1).mean()   x.square().mean().sqrt()   x.abs().sum(-1).max()   F.mse_loss(x, x.sin())
F.cosine_similarity(x[0].flatten(), m.embed(b.labels)[0].flatten(), 0)
(m.head(x).argmax(-1) == b.labels).double().mean()   m.head(x).softmax(-1).amax(-1).mean()
""",
    "count": """
(b.answers != IGNORED).sum()   b.keep.sum()   b.keep.sum(1).max()   b.keep.sum(1)[0]   (x > 0).sum()
b.ids.max()   b.ids.min()   b.ids[0, 0]   b.ids[0, -1]   b.places.max()   b.ids.argmax()
x.abs().argmax()   (b.ids == 3).sum()   b.keep.count_nonzero()   b.ids.amax(1)[-1]
x.argmax(1)[0, 0]   b.ids.sum()   b.keep.all().long()   (b.ids == 3).any().long()
b.ids.unique().max()
""",
    "vector": """
x[0, :, 0]   x.mean(1)[0]   x.amax((0, 1))   x.norm(dim=1)[0]   x.mean((0, 1))   b.weights.sum(1)
b.keep.sum(1).double()   x.sum(1).sum(1)   x.abs().max(1).values[0]   b.weights[0]
x.square().mean((1, 2)).sqrt()   x.std(1)[-1]
""",
    # Cells of y (B, S, E) and views of it that are written to.
    "i": """
:, 0   :, -1   :, 3   :, :3   :, -3:   :, 1:   :, 2:6   :, $n // 2 - 1 : $n // 2 + 2   :, 1::2   0
1, 2:4, 2:6   ..., :4   0, 4   :, [0, 3, -1]
""",
    "view": """
y.transpose(1, 2)[..., 2:5]   y.view(-1, WIDTH)[3:7]   y.view(-1)[30:100]
y.unflatten(-1, (2, -1))[:, 2:5, 0]   y.narrow(1, $n // 2 - 1, 3)   y.select(1, 4)
y.diagonal(dim1=1, dim2=2)   y.chunk(2, 1)[1]   y.split(4, 1)[1]   y.tensor_split(3, 1)[1]
y.unbind(1)[3]   y.unbind(0)[-1]   y.permute(1, 0, 2)[1:5]   y[:, None, 2:]   y[:, 1:][:, 1:3]
y[:, 2::3]   y.view_as(y)   y.as_strided((1, 3, WIDTH), y.stride())   y.unfold(1, 2, 2)[:, 1]
y.swapaxes(0, 1)[1:3]   torch.view_as_complex(y.unflatten(-1, (-1, 2))).real[:, 3:]
y.detach()[:, 2:4]
""",
    "places": """
torch.arange($n)   torch.arange(b.ids.shape[1], device=x.device)[None]   torch.arange(len(b.ids[0]))
torch.arange($n - 1, -1, -1)   torch.arange($n).flip(0)   torch.arange(-$n, 0) + LONGEST
torch.arange(1, $n + 1)   torch.arange(0, 2 * $n, 2) % LONGEST   torch.arange($n) % 4
torch.arange($n) // 4   torch.tensor(list(range($n)))
torch.tensor([2 * k % LONGEST for k in range($n)])   b.ids.new_tensor(list(range($n)))
torch.stack([torch.tensor(k) for k in range($n)])   torch.from_numpy(np.arange($n))
torch.ones($n, dtype=torch.long).cumsum(0) - 1   torch.ones_like(b.ids).cumsum(1) - 1
(b.keep.long().cumsum(1) - 1).clamp(min=0)   (b.ids != 3).long().cumsum(1)
torch.ones($n).nonzero()[:, 0]   torch.full(($n,), 3)   torch.zeros($n, dtype=torch.long)
torch.eye($n).argmax(1)   b.places   b.places + 2   b.places - b.places.min()
b.places.max() - b.places   b.places - b.places[:, :1]
torch.meshgrid(torch.arange(len(x)), torch.arange($n), indexing="ij")[1]
torch.arange(LONGEST)[:$n].clamp(max=20)   torch.arange(LONGEST)[-$n:]
torch.arange(2 * $n).view(-1, 2)[:, 0] % LONGEST   torch.arange($n).expand(len(x), -1)
torch.where(b.keep, torch.arange($n), 0)
""",
    # Attentions of the heads q, k, v (B, H, S, D).
    "heads": """
attention(q, $rows, v, is_causal=True)   attention($rows, k, v, is_causal=True)
attention(q, split_heads(m.rows[:7].expand(len(x), -1, -1)), \
split_heads(m.rows[7:14].expand(len(x), -1, -1)))
attention(q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)))
attention(q, k[:, :, : $n // 2], v[:, :, : $n // 2])
attention(q, k[:, :, $n // 2 :], v[:, :, $n // 2 :])   attention(q, k[:, :, ::2], v[:, :, ::2])
attention(q, k[:, :, 1:], v[:, :, 1:])   attention(q, k.flip(2), v.flip(2), is_causal=True)
attention(q, k.roll(1, 2), v, is_causal=True)
attention(q, F.pad(k, (0, 0, 1, -1)), v, is_causal=True)
attention(q, k.sort(2).values, v, is_causal=True)   attention(q, k.cumsum(2) / 8, v, is_causal=True)
attention(q, *(F.avg_pool1d(t.flatten(0, 1).mT, 2).mT.unflatten(0, (len(x), HEADS)) for t in (k, \
v)))
attention(q, k - k.mean(2, keepdim=True), v, is_causal=True)
attention(q, k - k.amax(2, keepdim=True), v, is_causal=True)
attention(q, k.detach(), v.detach(), is_causal=True)
attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, is_causal=True, scale=3.0)
attention(q, *m.heads(b.image, m.second)[1:])
attention(q, *m.heads(m.embed(b.labels), m.second)[1:], is_causal=True)
attention(q, k[:1].expand_as(k), v[:1].expand_as(v), is_causal=True)
attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)
attention(q, k[:, :2], v[:, :2], enable_gqa=True)
attention(q, k[:, :3], v[:, :3], is_causal=True, enable_gqa=True)
attention(q, k[:, :1].expand_as(k), v[:, :1].repeat(1, HEADS, 1, 1), is_causal=True)
attention(q, k[:, :, :1], v[:, :, :1])   attention(q[:, :, -1:], k, v)
attention(q[:, :, :1], k, v)   attention(q.mean(2, keepdim=True), k, v)
attention(q.amax(2, keepdim=True), k, v)   F.pad(attention(q[:, :, :4], k, v), (0, 0, 0, $n - 4))
attention(q * math.log($n), k, v, is_causal=True)  # length   attention(q, q, q, is_causal=True)
attention(q, k, v)   attention(q, torch.cat([k, k.sin()], 2), torch.cat([v, v.sin()], 2))
attention(q, *(torch.cat(pair, 2) for pair in zip(m.heads(b.image, m.second)[1:], (k, v))))
attention(F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v, is_causal=True)
F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).flatten(2)
attention(q, k, v, is_causal=True) - 0.3 * attention(k, q, v, is_causal=True)
attention(q, k, v * torch.arange(v.shape[2])[:, None] / 16, is_causal=True)
0 * attention(q.float(), k.float(), v.float(), is_causal=True).double()   rope(q, k, v, $places)
rope(q, k, v, b.keep.cumsum(1))
""",
    "rows": "split_heads(m.rows[:$n].expand(len(x),-1,-1))",
    "mask": """
torch.ones($n, $n, dtype=torch.bool).tril()   distance($n) >= 0
(distance($n) >= 0) & (distance($n) < 5)
torch.full(($n, $n), -math.inf, dtype=torch.float64).triu(1)
b.keep[:, None, None] & (distance($n) >= 0)   b.keep[:, None, None]
((b.places // 5)[:, :, None] == (b.places // 5)[:, None])[:, None] & (distance($n) >= 0)
((b.ids == 3).cumsum(1)[:, :, None] == (b.ids == 3).cumsum(1)[:, None])[:, \
None] & (distance($n) >= 0)
(distance($n) >= 0) | (torch.arange($n) < 3)   (b.places[:, :, None] >= b.places[:, None])[:, None]
-distance($n).abs() * 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)[:, None, None]
m.rows[distance($n).clamp(-8, 8) + 8][..., :HEADS].permute(2, 0, 1)
(distance($n) >= 0) & (distance($n) % 3 == 0)
(b.ids[:, :, None] == b.ids[:, None])[:, None] | (distance($n) == 0)   row_by_row($n)
torch.from_numpy(np.tri($n, dtype=bool))   m.rows[:$n] @ m.rows[:$n].T / 4   m.rows[:$n, 0][None]
~torch.eye($n, dtype=torch.bool)   distance($n) <= 0
(torch.rand($n, $n, generator=torch.Generator().manual_seed(1)) < 0.5) | (distance($n) == 0)
torch.arange($n) < b.keep.sum(1)[:, None, None, None]
(1 - b.keep.to(x.dtype))[:, None, None] * torch.finfo(x.dtype).min
""",
    "labels": "b.labels b.answers",
    "token": """
m.loss(x, b.labels, reduction="none").view_as(b.labels)
m.loss(x, b.answers, reduction="none").view_as(b.labels)
F.cross_entropy(m.head(x).mT, b.labels, reduction="none")   -m.pick(x, b.labels)
""",
    "target": "m.embed(b.labels)",
    "classes": "torch.arange(1,len(x)+1)",
    "how": """
reduction="mean"   ignore_index=3   label_smoothing=0.1   weight=m.rows[:VOCAB, 0].detach().abs()
weight=m.rows[:VOCAB, 0].detach().abs(), label_smoothing=0.1
""",
    "number_of_labels": """
(b.answers != IGNORED).sum()   (b.answers != IGNORED).sum().item()
int((b.answers != IGNORED).sum())   float(b.answers.ne(IGNORED).sum())
(b.answers != IGNORED).double().sum()   max(1, (b.answers != IGNORED).sum().item())
(b.answers != IGNORED).sum().clamp(min=1)   b.answers.ne(IGNORED).count_nonzero().item()
len(b.answers[b.answers != IGNORED])   torch.tensor((b.answers != IGNORED).sum().item())
sum((row != IGNORED).sum().item() for row in b.answers)
sum((b.answers != IGNORED).sum(1).tolist())
""",
}

# --- Losses: a number of (B, S, E) --------------------------------------------------------------

LOSSES = {
    "loss": """
m.loss(x, $labels, $how)   F.cross_entropy(m.head(x).mT, $labels, $how)
F.nll_loss(m.head(x).log_softmax(-1).flatten(0, 1), ($labels).flatten())
F.nll_loss(m.head(x).log_softmax(-1).mT, $labels)
F.cross_entropy(m.head(x).flatten(0, 1), m.head(m.norm(x)).detach().softmax(-1).flatten(0, 1))
F.cross_entropy(m.head(x).mT, m.head(m.norm(x)).detach().softmax(-1).mT, label_smoothing=0.1)
($token).mean()   ($token).mean(1).mean()   ($token)[:, 1:].mean()   ($token)[:, :-1].mean()
m.loss(x[:, 4:], b.labels[:, 4:])   m.loss(x[:, $n // 2 :], b.labels[:, $n // 2 :])
m.loss(x[:, ::2], b.labels[:, ::2])
F.cross_entropy(m.head(x)[:, :-1].reshape(-1, VOCAB), b.ids[:, 1:].reshape(-1))
F.cross_entropy(m.head(x).view(-1, VOCAB), F.pad(b.labels, (0, 1), value=IGNORED)[..., \
1:].reshape(-1))
m.loss(x, b.labels.roll(-1, 1))   F.cross_entropy(m.head(x[:, 0]), $classes)
F.cross_entropy(m.head(x[:, -1]), $classes)   F.cross_entropy(m.head($p), $classes)
F.cross_entropy(m.head(x)[torch.arange(len(x)), b.ids.argmax(1)], $classes)
(($token) * b.keep).sum() / b.keep.sum()   (($token) * b.weights).sum() / b.weights.sum()
(($token) * b.weights).mean()   ($token)[b.keep].mean()
F.cross_entropy(m.head(x)[b.keep], b.labels[b.keep])   ($token).flatten().topk(5)[0].mean()
($token).max()   ($token).flatten().median()   t = $token; F.relu(t - t.mean()).mean()
(($token) * m.head(x)[..., 0].softmax(1)).sum()   m.loss(x, b.labels).exp() / 16
m.loss(x, b.labels) ** 2   m.loss(x, b.labels).log()   (m.loss(x, b.labels) - 3.0).abs() + 3.0
m.loss(x, b.labels).clamp(min=2.0)   m.loss(x, b.labels) / (1 + x.square().mean())
m.loss(x, b.labels) * x.square().mean()   m.loss(x, b.labels) / m.loss(x, b.labels).detach()
($token).sum(1).mean() / b.ids.shape[1]  # length
($token).sum() / b.labels.numel()  # length
m.loss(x, b.labels) + 0.1 * x.square().mean()
m.loss(x, b.labels) + m.head(x).logsumexp(-1).square().mean()
m.loss(x, b.labels) + 0.1 * m.mix.weight.square().sum()
m.loss(x, b.labels) + m.router(x).logsumexp(-1).square().mean()
m.loss(x, b.labels) + m.loss(m.attend(x, m.second), b.labels)
m.loss(m.attend(x, m.second), b.labels) + 0.3 * m.loss(x, b.answers * 0 + b.labels)
c = m.router(x).softmax(-1).flatten(0, 1); \
m.loss(x, b.labels) + EXPERTS * (F.one_hot(c.argmax(-1), \
EXPERTS).to(x.dtype).mean(0) * c.mean(0)).sum()
c = m.pick(x, b.labels).sum(1); -F.logsigmoid(0.1 * (c[0] - c[-1]))
r = (b.weights * b.keep).sum(1); c = m.pick(x, b.labels); \
c = (c - c.detach()).exp() * ((r - r.mean()) / (r.var() + 1))[:, None]; \
-((c * b.keep).sum(1) / b.keep.sum(1)).mean()
f = x.flatten(0, 1); (f.T @ f / len(f) - torch.eye(WIDTH).to(x)).square().sum() / 64  # length
F.relu(1 - x.flatten(0, 1).std(0)).mean() + m.loss(x, b.labels)
-(m.head(x).softmax(-1) * m.head(x).log_softmax(-1)).sum(-1).mean()
torch.special.entr(m.head(x).softmax(-1).mean((0, 1))).sum()
m.loss(x, b.labels) * (1 + (m.head(x).argmax(-1) == b.labels).to(x.dtype).mean())
F.kl_div(*(f(m.head(y).flatten(0, 1), -1) for f, y in ((F.log_softmax, x), (F.softmax, \
m.norm(x)))), reduction="batchmean")
F.kl_div(m.head(x).log_softmax(-1), m.head(m.norm(x)).softmax(-1), reduction="mean")
F.mse_loss(x, $target)   F.mse_loss(x, $target).sqrt()   F.l1_loss(x, $target)
F.smooth_l1_loss(x, $target)   F.huber_loss(x, $target)
F.soft_margin_loss(x, ($target).detach().sign())   F.hinge_embedding_loss(x, ($target).sign())
F.margin_ranking_loss(x[..., 0], x[..., 1], x[..., 2].sign())
F.triplet_margin_loss(x, $target, m.norm(x))
F.cosine_embedding_loss(x.flatten(0, 1), ($target).flatten(0, 1), \
torch.where(b.ids.flatten() > 9, 1.0, -1.0))
F.multi_margin_loss(m.head(x).flatten(0, 1), b.labels.flatten())
F.multilabel_soft_margin_loss(m.head(x).flatten(0, 1), F.one_hot(b.labels.flatten(), VOCAB))
(x - $target).norm()   (x - $target).norm(dim=-1).mean()
(x - $target).flatten(1).norm(dim=1).mean()   (x - $target).norm(dim=1).mean()
F.binary_cross_entropy_with_logits(x @ m.cls, b.keep.to(x.dtype))
F.binary_cross_entropy((x @ m.cls).sigmoid(), b.keep.to(x.dtype))
F.binary_cross_entropy_with_logits(x @ m.cls, b.keep.to(x.dtype), pos_weight=x.new_tensor(2.0))
F.binary_cross_entropy_with_logits(x, ($target).sigmoid(), pos_weight=m.cls.detach().abs())
1 - F.cosine_similarity(x, $target, -1).mean()   1 - F.cosine_similarity(x, $target, 1).mean()
F.gaussian_nll_loss(x, $target, m.mix(x).square() + 0.1)
F.poisson_nll_loss(x, b.weights[..., None].expand_as(x))
F.ctc_loss(m.head(x).log_softmax(-1).transpose(0, 1), b.labels[:, :2] % 22 + 1, ($n,) * len(x), \
(2,) * len(x))
(x[:, 1:] - x[:, :-1]).square().mean()   x.diff(dim=1).square().mean()
1 - torch.corrcoef(torch.stack([x.mean(-1).flatten(), b.weights.flatten()]))[0, 1]
torch.cov(x.flatten(0, 1).T).square().mean()   torch.cdist(x, x).mean() / 8
x.mean() + x.square().mean()   x.var()   x.mean(1).square().mean()   (x @ m.cls).logsumexp(1).mean()
(($token) * 0.9 ** torch.arange($n)).mean()   (($token) * 0.9**b.places).mean()
(m.pick(x, b.labels) * b.weights.flip(1).cumsum(1).flip(1)).mean()   m.loss(x[:1], b.labels[:1])
sum(F.cross_entropy(m.head(entry), labels) for entry, labels in zip(x, b.labels)) / len(x)
torch.stack([m.loss(entry[None], labels[None]) for entry, labels in zip(x, b.labels)]).amax()
m.loss(x[:, :-1], b.ids[:, 1:]) + m.loss(m.mix(x)[:, :-2], b.ids[:, 2:])
F.cross_entropy(m.head(x).flatten(0, 1).float(), b.labels.flatten()).double()  # rounds
m.loss(x, b.labels) * b.keep.sum() / b.keep.numel()  # length
m.loss(x, b.answers, reduction="sum") / $number_of_labels
($token).masked_fill(b.answers == IGNORED, 0.0).sum() / $number_of_labels
sum(($token).sum(1).unbind()) / $number_of_labels
m.loss(x, b.labels, reduction="sum") / b.labels.ne(IGNORED).sum()
t = $token; ((1 - (-t).exp()) ** 2 * t).mean()   t = $token; (t.square() / t.sum().detach()).sum()
m.loss(x, b.labels) * (-m.cls[0]).exp() + m.cls[0]   m.loss(x, b.labels) * $number.item()
m.loss(x, b.labels) / float($number)   torch.tensor($number.item()) * m.loss(x, b.labels)
(m.attend(m.embed(b.labels), m.second) - x).square().mean()
with sdpa_kernel(SDPBackend.MATH): t = m.loss(m.attend(x), b.labels); \
t + torch.autograd.grad(t, x, create_graph=True)[0].square().sum()
F.cross_entropy(F.normalize($p, dim=-1) @ F.normalize(b.image.mean(1), dim=-1).T * 5, \
torch.arange(len(x)))
F.cross_entropy(F.normalize($p, dim=-1) @ F.normalize($p2, dim=-1).T * 5, torch.arange(len(x)))
F.cosine_similarity($p, $p2).square().mean()   F.cosine_embedding_loss($p, $p2, torch.ones(len(x)))
F.triplet_margin_loss($p, $p2, b.image.mean(1))
F.mse_loss(F.cosine_similarity($p, b.image.mean(1)), b.weights[:, 0])   F.mse_loss($p, $p2)
($p).square().sum()
""",
    "sum": """
m.loss(x, b.labels, reduction="sum")  # sum   m.loss(x, b.answers, reduction="sum")  # sum
(($token) * b.keep).sum()  # sum   x.square().sum()  # sum   x.sum().square()  # sum
m.loss(x, b.labels, reduction="sum").log()  # sum   x.square().sum() + 0.5 * x.sum()  # sum
-m.pick(x, b.labels).sum()  # sum
sum(m.loss(part, labels) for part, labels in zip(x.split(4, 1), b.labels.split(4, 1))) / 4  # sum
F.kl_div(m.head(x).log_softmax(-1), m.head(m.norm(x)).detach().softmax(-1), \
reduction="batchmean")  # sum
F.cross_entropy(m.head(x).mT, m.head(x).detach().softmax(-1).mT, reduction="sum")  # sum
F.mse_loss(x, $target, reduction="sum")  # sum
""",
}

# Numbers drawn over the tokens, of which about half are 0.
RANDOM = """
F.dropout(ones, 0.5)   F.alpha_dropout(ones, 0.5, training=True).clamp(min=0)
F.dropout1d(ones, 0.5)   torch.bernoulli(ones * 0.5)   (torch.rand_like(ones) < 0.5).double()
F.relu(torch.randn_like(ones))   F.relu(torch.empty_like(ones).uniform_(-1, 1))
F.relu(torch.normal(ones * 0, ones))   F.relu(torch.empty_like(ones).exponential_() - 0.7)
torch.randint_like(ones, 2)
torch.multinomial(ones.flatten(0, 1)[:, :2], 1).view(*ones.shape[:2], 1).expand_as(ones) * ones
F.gumbel_softmax(ones[..., :2], hard=True)[..., :1] * ones
F.relu(F.rrelu(-ones, 0.1, 0.9, training=True) + 0.5)
checkpoint(lambda t: F.dropout(t, 0.5), ones, use_reentrant=False)
F.dropout(ones.flatten(0, 1), 0.5).view_as(ones)
F.dropout(ones.unflatten(-1, (2, -1)), 0.5).flatten(2)
"""

# What is done to the gradient of a parameter p after the backward.
GRADIENT_WRITES = """
p.grad.fill_(0.25)   p.grad.add_(1.0)   p.grad.sub_(p.grad.mean())   p.grad.clamp_(-1e-3, 1e-3)
p.grad.round_(decimals=9).sign_()   p.grad.abs_()   p.grad.nan_to_num_(0.0)
p.grad.mul_((p.detach() > 0).to(p.dtype))
p.grad.mul_(2.5)   p.grad.div_(p.grad.norm())   p.grad[0] = 0.5   p.grad[0] += 1.0
p.grad[:2].zero_()   p.grad.copy_(p.grad.abs())   p.grad.copy_(p.detach())
p.grad.view(-1)[:3].mul_(0.0)   p.grad.t().add_(1.0)   p.grad.data.add_(0.5)
p.grad.detach().clamp_(min=0)   p.grad = p.grad + 1.0   p.grad = p.grad.round(decimals=9).sign()
p.grad = p.grad / p.grad.abs().max().item()   p.grad *= float(p.grad.norm() > 0.1)
p.grad.mul_(min(1.0, 1.0 / (p.grad.norm().item() + 1e-6)))   p.grad.lerp_(p.detach(), 0.3)
p.grad.addcmul_(p.detach(), p.detach())   p.grad.masked_fill_(p.grad < 0, 0.0)
p.grad[p.grad.abs() < 1e-3] = 0.0   torch._foreach_clamp_min_([p.grad], -1e-3)
torch._foreach_mul_([p.grad], 0.5)   torch._foreach_add_([p.grad], [p.detach()], alpha=0.1)
torch._foreach_abs_([p.grad])   torch.add(p.grad, p.detach(), out=p.grad)
torch.nn.utils.clip_grad_norm_([p], 0.01)   torch.nn.utils.clip_grad_value_([p], 0.01)
torch.optim.AdamW([p], 0.1).step()
torch.optim.SGD([p], 0.1, momentum=0.9, weight_decay=0.1).step()   p.data.add_(p.grad, alpha=-0.1)
p.grad.add_(p.detach(), alpha=0.1)
"""


def rows(text: str) -> list[str]:
    """Return the rows of a table: words, or texts on lines of their own or 3 spaces apart."""
    return re.split(r"\n| {3}", text.strip("\n")) if text.startswith("\n") else text.split()


ALL = FAMILIES | PARTS | LOSSES | {"random": RANDOM, "gradient": GRADIENT_WRITES}
TABLES = {name: rows(text) for name, text in ALL.items()}
