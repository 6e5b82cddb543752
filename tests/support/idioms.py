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
    rounds   computes in float32        bfloat16    computes in bfloat16        graph   see on_whole

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


# --- Families: (B, S, E) of (B, S, E) -----------------------------------------------------------

FAMILIES = {
    # Each token by itself. Over plain shards all these are right, and those below are refused, says
    # tests/region/test_plain_shards.py.
    "tokenwise": """
x   x + m.mix(F.gelu(m.norm(x)))   F.rms_norm(x, (WIDTH,))   m.mix(x) * F.silu(m.mix(x))
x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()   x.clamp(-1, 1).where(x > 0, x * 2)
m.mix(x.flatten(0, 1)).view(x.shape)   m.mix(x.reshape(-1, WIDTH)).view(len(x), -1, WIDTH)
m.norm(x.transpose(0, 1)).transpose(0, 1)
m.norm(x.transpose(0, 1).reshape(-1, WIDTH)).view(-1, len(x), WIDTH).mT.mT.transpose(0, 1)
torch.einsum("bse,fe->bsf", x, m.mix.weight)   (m.mix.weight @ x.mT).mT
torch.einsum("bshd,hde->bshe", x.unflatten(-1, (2, -1)), m.rows[:2, :12, None] * m.rows[0, \
:12]).flatten(2)
x.cumsum(-1).roll(1, -1).flip(-1).sort(-1)[0]   x.softmax(-1) + x.log_softmax(-1)
q, k, v = m.heads(x); x + rope(q, k, v, b.places)   x + sinusoids(b.places)
torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, \
2))) * torch.polar(torch.ones_like(b.weights), b.weights)[..., None]).flatten(-2)
x + m.rows[b.places]   x + m.rows.detach().index_select(0, b.places.flatten()).view_as(x)
y = torch.zeros_like(x); y[..., ::2] = x[..., 1::2]; y[..., 1::2] = -x[..., ::2]; y
y = torch.zeros(x.shape, dtype=x.dtype); y[..., :4] = x[..., 4:8]; y + x
x.clone().mul_(2).add_(m.cls).relu_()   x.masked_fill((b.labels > 9)[..., None], 0.0)
x + F.one_hot(b.labels, VOCAB).double() @ m.head.weight   F.dropout(x, 0.0)
w, i = m.router(x).softmax(-1).topk(2, -1); \
x + (F.one_hot(i, EXPERTS) * w[..., None]).sum(-2) @ m.router.weight
`nn.Conv1d(WIDTH, WIDTH, 1)`(x.mT).mT   m.attend(x.repeat_interleave(2, 0))[::2]
x[:, :, None].expand(-1, -1, 2, -1).mean(2)   Doubled.apply(x)   x + x.detach() * 2
checkpoint(lambda y: F.gelu(m.norm(y)), x, use_reentrant=False)
with torch.no_grad(): y = x.sigmoid(); x + y
with torch.autocast("cpu", enabled=False): y = m.norm(x).double(); x + y
y = m.attend(x.flip(-1), is_causal=False); x + attention(m.heads(x)[0], *m.heads(y)[1:])
with local_attention(): y = attention(*(x.transpose(0, 1)[:, None],) * 3); x + y.transpose(0, 1)
y = x.cumsum(1); x
""",
    # Attentions that are not over the sequence; tokens that meet others, or are replaced; positions
    # that each rank makes; numbers that were one until a part was written to; what is kept.
    "mixing": """
m.attend(x.reshape(-1, 3, WIDTH)).view(x.shape)
m.attend(x.transpose(0, 1), is_causal=False).transpose(0, 1)
q, k, v = m.heads(x); x + attention(q, k[:, :, : $n // 2], v[:, :, : $n // 2])
q, k, v = m.heads(x); x + attention(q, $rows, v)   m.attend(x.repeat(1, 2, 1))[:, :$n]
q, k, v = m.heads(x); x + attention($rows[:, :, :4], k, v).mean(1, keepdim=True)
m.attend(torch.cat([m.rows[:2].expand(len(x), -1, -1), x], 1))[:, 2:]
q, k, v = m.first(x).unflatten(-1, (3, HEADS, -1)).unbind(2); \
F.scaled_dot_product_attention(q, k, v).flatten(2)
m.attend(torch.cat([x, x * 2], 1))[:, :$n]   x.cumsum(1)   torch.cumsum(input=x, dim=-2)
`nn.Conv1d(WIDTH, WIDTH, 3, padding=1)`(x.mT).mT   x + F.pad(x, (0, 0, 1, 0))[:, :-1]
x + F.pad(x, (0, 0, 1, -1))   y = torch.zeros_like(x); y[:, 1:] = x[:, :-1]; x + y
x + x.roll(1, 1)   x.roll(1)   x.flip(1)   x.sort(1)[0]   x.gather(1, x.argsort(1))
x + (x @ x.mT).softmax(-1) @ x   x + x.sigmoid() @ (x.mT @ x)   x.softmax(1)
x.flatten(0, 1).softmax(0).view(x.shape)   x + (x.mT @ m.rows[:$n, :$n]).mT
x - x.mean(1, keepdim=True)   x / x.abs().amax()   F.normalize(x, dim=1)
`nn.BatchNorm1d(WIDTH)`(x.mT).mT   `nn.GroupNorm(2, WIDTH)`(x.mT).mT
x + (x[:, 1:] - x[:, :-1]).square().mean()   x + x.unfold(1, 2, 1).sum(-1).mean()
x + F.avg_pool1d(x.mT, 3, 1).mean()   torch.fft.fft(x, dim=1).real   x + x[:, :1]   recur(x)
x + F.embedding_bag(x.argmax(-1), m.rows)[:, None]   x[:, torch.arange($n).flip(0)]
x + x[:, ::2].square().mean()   torch.cat([x[:, 3:], x[:, :3]], 1)
x.gather(1, b.places.flip(1)[..., None].expand_as(x))
torch.as_strided(x.contiguous(), x.shape, (WIDTH, WIDTH, 1))   x.mT.reshape(len(x), -1, WIDTH)
Centered.apply(x)   checkpoint(lambda y: y.cumsum(1), x, use_reentrant=False)   x + x.data.cumsum(1)
x + x.detach().flip(1)   with torch.no_grad(): y = x.mean(1, keepdim=True); x + y
torch.cat([m.rows[:1].expand(len(x), 1, WIDTH), x[:, 1:]], 1)   y = x.clone(); y[:, 0] = m.cls; y
y = x.clone(); y.unflatten(-1, (2, -1)).transpose(1, 2)[:, :, 0].zero_(); y
y = x.detach().clone(); torch._foreach_copy_([y], [x.detach().roll(1, 1)]); x + y
y, pull = torch.func.vjp(lambda w: F.linear(x.detach(), w), m.mix.weight); \
F.linear(x, m.mix.weight - 0.1 * pull(torch.ones_like(y))[0])
x.index_fill(1, torch.tensor([0]), 0.0)   x + m.rows[torch.arange($n)]
x + m.rows[torch.arange($n - 1, -1, -1)]   x + m.rows[torch.arange($n) + 0 * len(x)]
x * torch.tensor([i / 6 for i in range($n)])[:, None]
x + m.rows[torch.ones_like(x[..., 0]).long().cumsum(1) - 1]
x + m.rows[torch.ones($n).nonzero().squeeze(-1)]   x * torch.linspace(0, 1, $n)[:, None]
x + m.rows[:$n]   x * m.rows.detach()[:$n]
x + torch.sin(torch.arange($n)[:, None] * torch.arange(WIDTH))
x + torch.ones($n, $n, dtype=x.dtype).tril() @ x   $ones; w[0].zero_(); x * w[:, None]
$ones; w[:3].fill_(4); x + w[:, None]   $ones; w[::2] = 0.5; x * w[:, None]
$ones; w.view(2, -1)[0].mul_(2); x * w[:, None]
x + torch.zeros($n, $n, dtype=x.dtype).fill_diagonal_(1)[0][:, None]
$ones; w[2:4].copy_(m.cls[:2].detach()); x * w[:, None]
$ones; w[0].zero_(); torch.where(w[:, None] > 0, x, 0.0)
x * F.pad(torch.ones($n - 1), (1, 0))[:, None]   m.seen.add_(x.detach().mean((0, 1))); x
m.seen.add_(x.detach().amax((0, 1))); x
m.seen[:VOCAB].add_(F.one_hot(b.labels, VOCAB).sum((0, 1))); x
""",
    # Each token by itself.
    "pointwise": """
torch.$function(x)   F.$activation(x)   (x.abs() + 1).sqrt()   x * (x.square() + 1).rsqrt()
x.abs().log1p()   x**3 / 4   torch.lerp(x, x.sin(), 0.3)   torch.addcmul(x, x, x, value=0.1)
torch.addcdiv(x, x, x.abs() + 1)   torch.maximum(x, x.sin())   torch.fmod(x, 0.7)
torch.remainder(x, 0.7)   torch.atan2(x, x.abs() + 1)   torch.hypot(x, x + 1)
torch.copysign(x, -x)   torch.logaddexp(x, -x)   (x / (x.abs() > 0)).nan_to_num(0.0, 0.0, 0.0)
x + (x * 4).round() / 4   x * x.sign()   x * torch.heaviside(x.detach(), x.new_ones(()))
x.float().double() * 0 + x   F.glu(torch.cat([x, x.sin()], -1))
x * (x >= x.topk(4, -1).values[..., -1:])
x + torch.bucketize(x.detach(), x.new_tensor([-1.0, 0.0, 1.0]))   x.gather(-1, x.argsort(-1))
torch.fft.fft(x).real / 4   x.clone().view(-1, WIDTH).clamp_(-1, 1).view_as(x)
torch.vmap(lambda entry: entry.sin() * 2)(x)
""",
    # With parameters, or with the batch.
    "weights": """
torch.addmm(m.cls, x.flatten(0, 1), m.mix.weight).view_as(x)
torch.baddbmm(x, x, m.mix.weight.expand(len(x), -1, -1))
F.bilinear(x, x, m.mix.weight.expand(WIDTH, -1, -1)) / 8
F.prelu(x.transpose(1, 2), m.cls).transpose(1, 2)   x * b.weights[..., None]
torch.where((b.ids % 2 == 0)[..., None], x, m.embed(b.labels))
x * torch.cos(b.places[..., None] / 10)
x * F.cosine_similarity(x, m.cls.expand_as(x), -1)[..., None]
x + torch.cdist(x, m.router.weight.expand(len(x), -1, -1)).sum(-1, keepdim=True) / 8
sum(m.first(x).split(WIDTH, -1))   x - m.seen.add_(1.0)
x + (m.rows[:8][torch.cdist(x, m.rows[:8][None]).argmin(-1)] - x).detach()
`nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())`(x)
with torch.no_grad(): m.cls.mul_(0.5); x + m.cls
torch.func.functional_call(m.mix, {"weight": m.mix.weight * 2, "bias": m.mix.bias}, (x,))
""",
    # Numbers over the sequence that meet each token again.
    "reduce": """
x - x.$extreme(1, keepdim=True)   x - x.$extreme((0, 1))   x - x.$extreme()
x / (1 + x.var(1, keepdim=True))   x.softmax(0)   x + x.gather(1, x.argmax(1, keepdim=True))
x @ torch.einsum("bse,bsf->ef", x, x) / 64   x + (x.new_ones(1, $n) @ x) / 8
x / x.square().mean((1, 2), keepdim=True).sqrt()   F.layer_norm(x, x.shape[1:])
F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)
F.instance_norm(x.transpose(1, 2)).transpose(1, 2)   x * torch.histc(x.detach(), 8, -3, 3)[3] / 64
x - (x * b.keep[..., None]).sum(1, keepdim=True) / b.keep.sum(1)[:, None, None]
x + ((x @ m.cls).softmax(1)[:, None] @ x)   x - m.rows[:$n].mean(0)  # length
q, k, v = m.heads(x); x + ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
q, k, v = m.heads(x); x + (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2)
torch.cond(x.mean() > 0.05, torch.sin, torch.cos, (x,))
counts = torch.bincount(b.ids.flatten(), minlength=VOCAB).clamp(min=1); \
sums = x.new_zeros(VOCAB, WIDTH).index_add(0, b.ids.flatten(), x.flatten(0, 1)); \
x - (sums / counts[:, None])[b.ids]
""",
    # Partial sums, means, extremes, norms (B, E), and what meets them.
    "partial": """
x + ($p).sum(-1)[:, None, None] / 8   x + (($p) + ($p2))[:, None] / 2
x + (($p) * ($p2))[:, None] / 2   x + (1.5 - ($p))[:, None]   x * (2.0 / (1 + ($p).abs()))[:, None]
x + torch.cat([$p, m.cls.expand(len(x), -1)], -1).$collapse[:, None, None]
x + torch.stack([$p, $p2]).mean(0)[:, None]   x + torch.stack([$p, $p2, $p3], 1).amax(1)[:, None]
x + torch.where(($p) > 0.5, $p2, m.cls)[:, None]   x + torch.maximum($p, $p2)[:, None]
p = $p; x + ($of_p)[:, None]   p = $p; p = $of_p; x + ($of_p2)[:, None]
p = $p; x + ($of_p).$collapse[:, None, None]   p = $p.clone(); $write_p; x + p[:, None]
p = torch.zeros_like($p); p += $p2; x + p[:, None]
p = torch.cat([x.mean(1, keepdim=True), x], 1); x + p[:, :1]   p = $p; y = x.clone(); y[:, 0] = p; y
p = $p; y = x.clone(); y[:, 1:3] += p[:, None]; y   p = $p; torch.cat([p[:, None], x[:, 1:]], 1)
p = $p; m.seen.mul_(0.9).add_(p.detach().mean(0), alpha=0.1); x - m.seen
with torch.no_grad(): p = $p; x + ($of_p)[:, None]   x + m.attend(($p)[:, None], is_causal=False)
q, k, v = m.heads(x); x + attention(q, k, v, is_causal=True, scale=1.0) * ($p)[:, None]
p = $p; x + F.glu(p, -1).repeat(1, 2)[:, None]   x - ($p)[:, None]
x * torch.sigmoid(m.mix($p))[:, None]
""",
    "scan": """
x.flip(1).cumsum(1).flip(1) / 8   x.diff(dim=1, prepend=x[:, :1])   x.roll((1, 1), (0, 1))
x.flatten(0, 1).cumsum(0).view_as(x) / 8   x * x.argsort(1).argsort(1) / 16
x * (x.norm(dim=-1) >= x.norm(dim=-1).topk(4, 1).values[:, -1:])[..., None]
`nn.GRU(WIDTH, WIDTH, batch_first=True)`(x)[0]
""",
    "index": """
torch.cat(x.chunk(2, 1)[::-1], 1)   torch.cat([x.split(5, 1)[1], x.split(5, 1)[0], x[:, 10:]], 1)
x + x[(x > 1).nonzero(as_tuple=True)].sum()   x.tril()   x + x[0]
x[:, torch.randperm($n, generator=torch.Generator().manual_seed(0))]
torch.cat([x[:, ::2], x[:, 1::2]], 1)   x[:, None, :, None].squeeze(1).squeeze(2)
x.slice_scatter(x[:, :3], 1, 2, 5)
x.diagonal_scatter(x.new_zeros(len(x), min($n, WIDTH)), dim1=1, dim2=2)
x.index_put((torch.tensor([0]), torch.tensor([4])), x[0, 0])
x.put(torch.tensor([0, 100]), x.new_zeros(2))
torch.zeros_like(x).index_put((torch.arange(len(x))[:, None], b.places.flip(1)), x)
x * (F.one_hot(m.router(x).argmax(-1), EXPERTS).cumsum(1) <= 3).any(-1, keepdim=True)
x.scatter(1, m.router(x)[..., :1].topk(5, 1).indices.expand(-1, -1, WIDTH), 0.0)
torch.zeros_like(x).masked_scatter(b.keep[..., None].expand_as(x), m.mix(x[b.keep]))
x.index_put((b.keep,), m.cls)   x[:, :4].repeat_interleave(torch.tensor([1] * 3 + [$n - 3]), 1)
x + m.rows[b.labels]   x + m.rows[b.places.max()]
x + torch.zeros_like(x).scatter_add(1, (b.places // 4)[..., None].expand_as(x), x)
""",
    "write": """
y = x.clone(); y[$i] = 0.5; y   y = x.clone(); y[$i] = y[$i].clone().sin() * 3; y
y = x.clone(); y[$i] += m.cls[: y[$i].shape[-1]]; y
y = x.clone(); y[$i].copy_(m.cls[: y[$i].shape[-1]]); y
y = x.clone(); y[$i].masked_fill_(y[$i] < 0, 0.25); y
y = x.clone(memory_format=torch.contiguous_format); ($view).mul_(2.0); y + x
y = x.clone(memory_format=torch.contiguous_format); v = $view; v.copy_(v.clone().sin()); y + x
y = x.detach().clone(); ($view).mul_(2.0); y + x
y = x.clone(); y[:, 1:, :8] = x[:, :-1, :8]; y[:, :1, :8] = 0; y
y = x.clone(); v = y[:, 1:4]; y.mul_(2); x + v.sum(1, keepdim=True) / 8
y = x.clone(); v = y.transpose(1, 2); y[:, 1:4] = 0; v.transpose(1, 2) * 2
y = x.clone(); v, w = y[:, 1:4], y[:, 2:6]; v.mul_(2); x + w.sum(1, keepdim=True) / 8
y = x.clone(); first = y[:, 0].clone(); y[:, 0] = y[:, -1]; y[:, -1] = first; y
y = x.clone(); y[:, 1:] += x[:, :-1]; y
y, h = torch.empty_like(x), $n // 2; y[:, :h] = x[:, :h].sin(); y[:, h:] = x[:, h:].cos(); y
y = torch.empty_like(x); torch.sin(x.detach(), out=y); x + y
y = x.clone(); for i in range(1, 4): y[:, i] = y[:, i] + 0.5 * y[:, i - 1]; y
y = x.clone(); before = y.sum(-1, keepdim=True); y[:, 1:4] = 0; y + before
y = x.clone(); y.data[:, 1:4] *= 2; y   y = x.clone(); y.copy_(y.roll(1, 1)); y
y = x.detach().clone(); for entry in y: entry[3:5] = 0.5; x + y
y = x.clone(); y[b.ids == 3] += 1.0; y   y = x.clone(); y[:, 2:7] = b.image; y
y = x.clone(); y[torch.arange(len(x)), b.keep.sum(1) - 1] = m.cls; y
m.seen.mul_(0.9).add_(x.detach()[:, -1].mean(0), alpha=0.1); x - m.seen
ids = b.ids.clone(); ids[:, 1:] = b.ids[:, :-1]; ids[:, 0] = 1; x + m.embed(ids)
table = m.rows.clone(); table[3:9] = 0; x + table[b.places]
""",
    "shape": """
x.flatten(0, 1).sin().unflatten(0, (len(x), -1))
x.unflatten(-1, (2, -1)).permute(2, 0, 1, 3).sin().permute(1, 2, 0, 3).flatten(2)
x.flatten().sin().view_as(x)   x.unflatten(1, (-1, 3 if $n % 3 == 0 else 4)).sin().flatten(1, 2)
windows(x, lambda w: w - w.mean(1, keepdim=True))
x.unflatten(1, (3 if $n % 3 == 0 else 4, -1)).transpose(1, 2).flatten(1, 2)
x + x[:, : $n // 2 * 2].reshape(len(x), -1, 2 * WIDTH).sin().mean(1)[:, None, WIDTH:]
torch.stack([x, x.sin()], 1).sum(1)   torch.cat([x, x.sin()], 1)[:, :$n]
x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(-1)
torch.cat(x.split([6, WIDTH - 6], -1)[::-1], -1)   torch.stack([entry.sin() for entry in x])
x.rot90(1, (1, 2)).rot90(-1, (1, 2))
F.pixel_unshuffle(x[:, None, : $n // 2 * 2], 2).mean((1, 2, 3))[:, None, None] + x
torch.block_diag(*x)[:$n, :WIDTH] + x   F.pad(x, (0, 0, 3, 0))[:, :$n]
F.pad(x, (0, 0, 0, -$n % 8)).unflatten(1, (-1, 8)).mean(2).repeat_interleave(8, 1)[:, :$n] + x
F.pad(x.mT, (1, 1), mode="circular")[..., 2:].mT
torch.cat([x[:, i : i + 1] for i in range($n)], 1)   torch.vmap(m.mix, 1, 1)(x)
torch.vmap(lambda entry: m.attend(entry[None])[0])(x)
""",
    # More attentions: of windows, entries, other batches, modules.
    "attend": """
q, k, v = m.heads(x); x + $heads   m.attend(x, attn_mask=$mask)
q, k, v = m.heads(x); y = x + attention(q, k, v); y + attention(m.heads(y, m.second)[0], k, v)
q, k, v = (t.view(len(x), $n, HEADS, 4).permute(0, 2, 1, 3) for t in m.first(x).chunk(3, -1)); \
x + F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3).reshape(x.shape)
q, k, v = (torch.stack(t.split(4, -1), 1) for t in m.first(x).split(WIDTH, -1)); \
x + attention(q, k, v, is_causal=True)
windows(x, lambda w: m.attend(w.transpose(0, 1), is_causal=False).transpose(0, 1))
x + F.scaled_dot_product_attention(*(x.unflatten(-1, (2, -1)),) * 3).flatten(2)
m.attend(x.flatten(0, 1)[None]).view_as(x)
torch.cat([m.attend(half) for half in x.chunk(2, 1)], 1)
torch.cat([m.attend(entry[None]) for entry in x])   m.attend(x.flip(1)).flip(1)
with torch.no_grad(): x = m.attend(x); m.attend(x, m.second)
torch.where(b.keep[..., None], m.attend(x), x)   m.attend(torch.cat([b.image, x], 1))[:, 5:]
m.attend(F.pad(x, (0, 0, 0, -$n % 8)))[:, :$n]
x + m.attend(x[:, ::2]).repeat_interleave(2, 1)[:, :$n]
y, w = `nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)`(x, x, x); \
y + x * w.diagonal(0, 1, 2)[..., None]
`nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)`(x, x, x, key_padding_mask=~b.keep, \
need_weights=False)[0]
`nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)`(x, \
src_key_padding_mask=~b.keep)
with torch.autocast("cpu", torch.bfloat16): y = m.float_attend(x); x + y  # bfloat16
""",
    "tokens": """
torch.where((b.places == 0)[..., None], m.cls, x)   torch.cat([x[:, :2], b.image, x[:, 7:]], 1)
torch.lerp(x, F.pad(x, (0, 0, 1, 0))[:, :-1], torch.sigmoid(m.cls))
x + m.embed(F.pad(b.ids[:, :-1], (1, 0)))   x + m.embed((7 * b.ids + b.ids.roll(1, 1)) % VOCAB)
x * torch.bincount(b.ids.flatten(), minlength=VOCAB)[b.ids][..., None]
x * ((b.ids == 3).cumsum(1) > 0)[..., None]   x * (b.ids.roll(1, 1) != 3)[..., None]
x.index_copy(1, torch.arange(4), m.mix(x[:, :4]))
""",
    "position": """
x + ($places)[..., None] / 16   x + sinusoids($places)
q, k, v = m.heads(x); x + rope(q, k, v, $places)   x + m.rows[2 : $n + 2]
x + F.interpolate(m.rows.T[None], $n, mode="linear")[0].T   x / $n * 8  # length
x / x.numel() * 100  # length   x.sin() if $n > 20 else x.cos()  # length
x * 0.9 ** torch.arange($n, dtype=x.dtype)[:, None]   torch.eye($n, dtype=x.dtype) @ x
x + torch.randn($n, 1, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
""",
    "conv": """
stretch(x, F.max_pool1d(x.mT, 2))   stretch(x, F.adaptive_avg_pool1d(x.mT, 4))
stretch(x, F.lp_pool1d(x.mT.abs() + 0.1, 2, 2))
F.interpolate(x.mT, scale_factor=2, mode="linear").mT[:, ::2]
F.unfold(x[:, None], (3, WIDTH), padding=(1, 0)).mT.unflatten(-1, (3, -1)).mean(2)
F.avg_pool1d(F.pad(x.mT, (1, 1), mode="replicate"), 3, 1).mT
`nn.Conv1d(WIDTH, WIDTH, 4)`(F.pad(x.mT, (3, 0))).mT
`nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)`(x.mT)[..., :$n].mT
`nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)`(x.mT).mT
stretch(x, `nn.Conv1d(WIDTH, WIDTH, 3, padding=1, stride=2)`(x.mT))
`nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)`(x.mT).mT
`nn.Conv2d(1, 1, 3, padding=1)`(x[:, None])[:, 0]
`nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular")`(x.mT).mT
""",
    # Numbers that Python reads off tensors.
    "read": """
x * (1 + abs($scalar))   x.clamp(max=0.1 + abs($scalar))   x.masked_fill(x > $scalar, 0.5)
torch.where(x > $scalar, x, 0.1 * x)   x + 10 ** -abs($scalar)   x * max(0.1, $scalar)
x * torch.as_tensor($scalar)   x * torch.full((WIDTH,), $scalar, dtype=x.dtype)
x * torch.tensor([$scalar, 1.0] * (WIDTH // 2), dtype=x.dtype)   x.sin() if $test else x.cos()
s = $scalar; t = $scalar2; x * s + t   with torch.no_grad(): s = torch.tensor($scalar); x * s
with torch.inference_mode(): s = $scalar; x * s   print($number, file=io.StringIO()); x
assert $number < 1e9; x.sin()   torch._assert($number < 1e9, "large"); x.sin()
while x.abs().$extreme() > 3: x = x / 2; x   for _ in range($size): x = x.sin(); x
for _ in range($count % 4): x = x * 1.1; x
x + torch.from_numpy(x.detach().numpy().mean(1, keepdims=True))
x[:, : $size + 2].mean(1, keepdim=True) + x   x[:, $size:].mean(1, keepdim=True) + x
x + m.rows[: $size + 1].mean(0)   x + m.rows[$count.item() % 9]
x + m.rows[$size : $size2 + 10].sum(0)   x * torch.zeros($size + 1).numel()
F.pad(x, (0, 0, 0, $size + 1))[:, :$n]   torch.cat(x.split([$size + 1, $n - $size - 1], 1)[::-1], 1)
x * torch.bincount(b.ids.flatten(), minlength=b.ids.max().item() + 1)[3] / 4
x * torch.arange(int(b.keep.sum(1).max())).sum() / 64   y = x.clone(); y[:, : $size + 1] = 0.5; y
y = x.clone(); y[$count.item() % len(x)] *= $scalar; y   y = x.clone(); y.fill_($scalar); y * x
y = x.clone(); y.clamp_(min=-abs($scalar)); y   m.seen.fill_($scalar); x - m.seen
m.seen.add_(x.detach().mean((0, 1)), alpha=float($count) / 16); x - m.seen
F.interpolate(m.rows.T[None], $size + 2)[0].T.mean(0) + x   F.dropout(x, 0.0 * $scalar) * $scalar
m.attend(x[:, : max(2, $count.item() % $n)])[:, :1] + x
q, k, v = m.heads(x); x + attention(q, k, v, is_causal=True, scale=0.1 + abs($scalar))
y = m.mix(x); y * (y.detach().abs().amax().item() + $scalar)
sizes = b.keep.sum(1).tolist(); torch.stack([e * s / 8 for e, s in zip(x, sizes)])
ends = b.keep.sum(1).tolist(); x + torch.stack([e[:s].mean(0) for e, s in zip(x, ends)])[:, None]
lengths = [int(row.sum()) for row in b.keep]; x * max(lengths) / 8
""",
    "autograd": """
Centered.apply(x)   x + (x.round() - x).detach()
mean = x.mean(1, keepdim=True); checkpoint(lambda t: t - mean, x, use_reentrant=False)
y = x.clone(); y.register_hook(lambda grad: grad * 2); y
y = x.clone(); y.register_hook(lambda grad: grad - grad.mean(1, keepdim=True)); y
y = x.clone(); y.register_hook(lambda grad: grad.clamp(max=grad.abs().max().item() / 2)); y
y = m.mix(x); y.register_hook(lambda grad: grad.flip(1)); y
torch.func.jvp(lambda t: t.cumsum(1), (x,), (x,))[1] / 8
y = x.clone(); y.data = x.detach().roll(1, 1); y
x + (x.detach() / x.detach().abs().amax()).round()
x + torch.func.grad(lambda t: m.mix(t).mean(1).square().sum())(x)
torch.vmap(lambda w: F.linear(x, w))(torch.stack([m.mix.weight, m.mix.weight * 2])).sum(0)
torch._assert(x.shape[-1] == WIDTH, "width"); x.sin()   torch._dynamo.graph_break(); x * 2
""",
    # What makes the first hidden states.
    "embedding": """
m.embed.weight[b.ids]   F.one_hot(b.ids, VOCAB).to(m.cls.dtype) @ m.embed.weight
F.embedding(b.ids, m.head.weight)   m.embed.weight[b.ids.unique()].sum(0) + x
x + F.embedding_bag(b.ids, m.embed.weight, mode="mean")[:, None]
x + F.embedding_bag(b.ids, m.embed.weight, mode="max")[:, None]
F.embedding_bag(b.ids.flatten()[:, None], m.embed.weight, \
scale_grad_by_freq=True).view(*b.ids.shape, -1)
x + F.embedding_bag(b.ids.flatten(), m.embed.weight, torch.arange(0, b.ids.numel(), \
b.ids.shape[1]))[:, None]
m.embed(b.ids.flip(1).cumsum(1).flip(1) % VOCAB)
m.embed.weight.gather(0, b.ids.flatten()[:, None].expand(-1, WIDTH)).view(*b.ids.shape, WIDTH)
(m.embed.weight - m.embed.weight.mean(0))[b.ids]   b.ids[..., None].to(m.cls.dtype) * m.cls / VOCAB
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
x.mean(1)   x.sum(1) / 8   x.amax(1)   x.norm(dim=1)   x.norm(math.inf, dim=1)
torch.linalg.vector_norm(x, 3, 1)   x.tanh().prod(1)   (x > 1.5).any(1).to(x.dtype)
(x < 1.5).all(1).double()   (x > 0).sum(1).double() / 8   (x > 1).count_nonzero(1).double()
x.var(1)   x.logsumexp(1)   x.nanmean(1)   x.aminmax(dim=1).max
x.masked_fill(~b.keep[..., None], -9.0).amax(1)
(x * b.keep[..., None]).sum(1) / b.keep.sum(1, keepdim=True)
(x * b.keep[..., None]).sum(1) / (x * 0 + b.keep[..., None]).sum(1).clamp_(min=1)
(x * b.weights[..., None]).sum(1) / b.weights.sum(1, keepdim=True)   x.softmax(1).amax(1)
x.cumsum(1)[:, -1] / 8   x[:, -1]   x[:, 0]   x.median(1).values
F.adaptive_avg_pool1d(x.mT, 1)[..., 0]   x.mean((0, 1)).expand(len(x), -1)   m.mix(x).mean(1)
x[torch.arange(len(x)), b.keep.sum(1) - 1]
torch.stack([entry[keep].mean(0) for entry, keep in zip(x, b.keep)])   x[:, $n // 2]
x[:, [0, 4, -1]].sum(1)   x.narrow(1, $n // 2 - 1, 2).sum(1)   x.quantile(0.3, 1)
x.kthvalue(3, 1).values   x.topk(4, 1).values.mean(1)   x.argmin(1).to(x.dtype) / 8
torch.trapezoid(x, dim=1) / 8   x[torch.arange(len(x)), b.ids.argmax(1)]
m.attend(x[:, ::2]).mean(1)
""",
    "of_p": """
F.normalize(p, dim=-1)   F.normalize(p.to(x.dtype), p=1, dim=-1)   m.mix(p)   m.norm(p)
p.softmax(-1)   p - p.mean(-1, keepdim=True)   p - p.mean(0)   p - p.amax(0)   p + p.norm()
p * p.prod(-1, keepdim=True)   p + p.max()   p * (p > 1).any()   p * (p > 0.2).sum(-1, keepdim=True)
p + p.sort(-1).values   p + m.embed(p.argmax(-1) % VOCAB)   p.cumsum(0)   p.flip(0)   p.roll(1, -1)
p @ (p.T @ p) / 32   p.T.contiguous().T.tanh()   p[0] + p   p.detach() + p   p.round()
p.abs().clamp(min=1)   p.masked_fill(p > 1, 0.0)   torch.where(p > 0.5, p, 0.0)
p.repeat(2, 1)[: len(x)]   torch.cat(p.chunk(2, -1)[::-1], -1)   p.nan_to_num()
p.float().double() * 0 + p   torch.stack([p, p]).sum(0)   torch.outer(p[:, 0], p[0])
F.linear(p, m.mix.weight)   p.unsqueeze(1).expand(-1, 3, -1).mean(1)   p * p.sum(0).sum()
1 / (1 + p.square())   torch.lerp(p, m.cls.expand_as(p), 0.3)
""",
    "write_p": """
p.clamp_(min=1)   p.mul_(2)   p.add_(1)   p.add_(m.cls)   p.masked_fill_(p > 0.5, 0.0)   p.relu_()
p.copy_($p)   p += $p   p[0] = 0.5   p[..., :3] = 1.0   p[:, 2] += 1   p[p > 1] = 1.0   p[0].mul_(3)
p.view(-1)[:5].zero_()   p.index_fill_(1, torch.tensor([1, 4]), 0.25)
p.sqrt_().add_(p.detach().max())   p.data.clamp_(min=0.3)   p.t().add_(1.0)
""",
    # What Python reads: numbers of the whole, 0-d.
    "number": """
x.mean()   (x.sum() / 64)   x.abs().max()   x.min()   (x.norm() / 8)   x.std()   x[0, 0, 0]
x[-1, 2, 1]   x.logsumexp((0, 1, 2))   ((x > 0).sum() / 64)   (b.weights.sum() / 16)
b.weights.max()   m.loss(x, b.labels)   m.loss(x, b.answers)   m.mix.weight.norm()   x.mean(1).max()
(x.norm(dim=1).sum() / 64)   x.median()   x.tanh().prod(1).sum()   b.keep.double().mean()
x.mean(1)[0, 0]   (x * x).mean((0, 2))[1]   (x.cumsum(1)[0, -1, 0] / 8)   x.abs().sum(-1).max()
F.mse_loss(x, x.sin())   F.cosine_similarity(x[0].flatten(), m.embed(b.labels)[0].flatten(), 0)
(m.head(x).argmax(-1) == b.labels).double().mean()
""",
    # Ways to read them, and conditions on them.
    "scalar": """
$number.item()   float($number)   abs($number.item())   round(float($number), 3)
float(f"{$number:.6f}")   float(f"{$number.item():.9f}")   float("{}".format(float($number)))
np.float64($number.item())   $number.detach().item()   int($number)   float($count) / 16
float(str($count.item())) / 16   math.log(2 + $count.item())   [0.5, 1.5, 2.5][$count % 3]
[0.5, 1.5][$number > 0.1]   sum($vector.tolist()) / 64   max($vector.tolist())
float($vector.detach().numpy().max())   torch.from_numpy($vector.detach().numpy()).sum().item() / 8
""",
    "size": """
int($count) % 4   $count.item() % 4   divmod($count.item(), 4)[1]   list(range(4))[int($count) % 4]
len(x[x[..., 0] > 0]) % 4   (x > 0.5).nonzero().shape[0] % 4   x.round().unique().numel() % 4
""",
    "test": """
$number > 0.1   $number.item() > 0.1   bool($count > 7)   $count % 2 == 0   $number.isnan()
not torch.isnan(x).any()   torch.allclose(x, x)   torch.equal(x[:, :1], x[:, :1])
$vector.max() > 0.5 and $number < 2   ($vector > 0.3).all()
""",
    "count": """
(b.answers != IGNORED).sum()   b.keep.sum()   b.keep.sum(1).max()   b.keep.sum(1)[0]   (x > 0).sum()
b.ids.max()   b.ids[0, 0]   b.places.max()   x.abs().argmax()   (b.ids == 3).sum()
b.ids.amax(1)[-1]   x.argmax(1)[0, 0]   b.keep.all().long()   b.ids.unique().max()
""",
    "vector": """
x[0, :, 0]   x.mean(1)[0]   x.amax((0, 1))   x.norm(dim=1)[0]   b.weights.sum(1)
b.keep.sum(1).double()   x.abs().max(1).values[0]   b.weights[0]   x.square().mean((1, 2)).sqrt()
""",
    # Cells of y (B, S, E) and views of it that are written to.
    "i": """
:, 0   :, -1   :, :3   :, 1:   :, 2:6   :, $n // 2 - 1 : $n // 2 + 2   :, 1::2   0   1, 2:4, 2:6
..., :4   0, 4   :, [0, 3, -1]
""",
    "view": """
y.transpose(1, 2)[..., 2:5]   y.view(-1, WIDTH)[3:7]   y.view(-1)[30:100]
y.unflatten(-1, (2, -1))[:, 2:5, 0]   y.narrow(1, $n // 2 - 1, 3)   y.select(1, 4)
y.diagonal(dim1=1, dim2=2)   y.chunk(2, 1)[1]   y.split(4, 1)[1]   y.unbind(1)[3]
y.permute(1, 0, 2)[1:5]   y[:, None, 2:]   y[:, 1:][:, 1:3]   y[:, 2::3]
y.as_strided((1, 3, WIDTH), y.stride())   y.unfold(1, 2, 2)[:, 1]
torch.view_as_complex(y.unflatten(-1, (-1, 2))).real[:, 3:]   y.detach()[:, 2:4]
""",
    "places": """
torch.arange($n)   torch.arange(b.ids.shape[1], device=x.device)[None]   torch.arange(1, $n + 1)
torch.arange(0, 2 * $n, 2) % LONGEST   torch.arange($n) % 4
torch.tensor([2 * k % LONGEST for k in range($n)])   b.ids.new_tensor(list(range($n)))
torch.from_numpy(np.arange($n))   torch.ones($n, dtype=torch.long).cumsum(0) - 1
(b.keep.long().cumsum(1) - 1).clamp(min=0)   (b.ids != 3).long().cumsum(1)
torch.zeros($n, dtype=torch.long)   b.places   b.places - b.places.min()
b.places - b.places[:, :1]
torch.meshgrid(torch.arange(len(x)), torch.arange($n), indexing="ij")[1]
torch.arange(LONGEST)[:$n].clamp(max=20)   torch.arange($n).expand(len(x), -1)
""",
    # Attentions of the heads q, k, v (B, H, S, D).
    "heads": """
attention(q, split_heads(m.rows[:7].expand(len(x), -1, -1)), \
split_heads(m.rows[7:14].expand(len(x), -1, -1)))
attention(q, k[:, :, ::2], v[:, :, ::2])   attention(q, k.flip(2), v.flip(2), is_causal=True)
attention(q, F.pad(k, (0, 0, 1, -1)), v, is_causal=True)
attention(q, k.cumsum(2) / 8, v, is_causal=True)
attention(q, *(F.avg_pool1d(t.flatten(0, 1).mT, 2).mT.unflatten(0, (len(x), HEADS)) for t in (k, \
v)))
attention(q, k - k.mean(2, keepdim=True), v, is_causal=True)
attention(q, k.detach(), v.detach(), is_causal=True)   attention(q, *m.heads(b.image, m.second)[1:])
attention(q, k[:1].expand_as(k), v[:1].expand_as(v), is_causal=True)
attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)
attention(q, k[:, :3], v[:, :3], is_causal=True, enable_gqa=True)
attention(q, k[:, :, :1], v[:, :, :1])   attention(q.mean(2, keepdim=True), k, v)
F.pad(attention(q[:, :, :4], k, v), (0, 0, 0, $n - 4))
attention(q * math.log($n), k, v, is_causal=True)  # length   attention(q, q, q, is_causal=True)
attention(q, k, v)   attention(q, torch.cat([k, k.sin()], 2), torch.cat([v, v.sin()], 2))
attention(q, *(torch.cat(pair, 2) for pair in zip(m.heads(b.image, m.second)[1:], (k, v))))
attention(F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v, is_causal=True)
attention(q, k, v, is_causal=True) - 0.3 * attention(k, q, v, is_causal=True)
0 * attention(q.float(), k.float(), v.float(), is_causal=True).double()   rope(q, k, v, $places)
""",
    "ones": """
w = torch.ones($n, dtype=x.dtype)
""",
    "rows": "split_heads(m.rows[:$n].expand(len(x),-1,-1))",
    "mask": """
torch.ones($n, $n, dtype=torch.bool).tril()   (distance($n) >= 0) & (distance($n) < 5)
b.keep[:, None, None]
((b.places // 5)[:, :, None] == (b.places // 5)[:, None])[:, None] & (distance($n) >= 0)
((b.ids == 3).cumsum(1)[:, :, None] == (b.ids == 3).cumsum(1)[:, None])[:, \
None] & (distance($n) >= 0)
(distance($n) >= 0) | (torch.arange($n) < 3)   (b.places[:, :, None] >= b.places[:, None])[:, None]
-distance($n).abs() * 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)[:, None, None]
m.rows[distance($n).clamp(-8, 8) + 8][..., :HEADS].permute(2, 0, 1)
(b.ids[:, :, None] == b.ids[:, None])[:, None] | (distance($n) == 0)
torch.from_numpy(np.tri($n, dtype=bool))   m.rows[:$n] @ m.rows[:$n].T / 4
~torch.eye($n, dtype=torch.bool)
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
    "of_elements": "mse_loss l1_loss smooth_l1_loss huber_loss",
    "classes": "torch.arange(1,len(x)+1)",
    "how": """
reduction="mean"   ignore_index=3   label_smoothing=0.1
weight=m.rows[:VOCAB, 0].detach().abs(), label_smoothing=0.1
""",
    "number_of_labels": """
(b.answers != IGNORED).sum()   (b.answers != IGNORED).sum().item()
max(1, (b.answers != IGNORED).sum().item())   (b.answers != IGNORED).sum().clamp(min=1)
len(b.answers[b.answers != IGNORED])   sum((row != IGNORED).sum().item() for row in b.answers)
sum((b.answers != IGNORED).sum(1).tolist())
""",
}

# --- Losses: a number of (B, S, E) --------------------------------------------------------------

LOSSES = {
    # Over plain shards the first are right, and those behind are refused, as above.
    "means": """
F.mse_loss(x, x.detach() * 2, reduction="none").square().mean()   F.mse_loss(x, m.embed(b.labels))
-m.head(x).log_softmax(-1).gather(-1, b.labels[..., None]).mean()   m.head(x.mean(1)).mean()
F.cross_entropy(m.head(x).mT, b.labels)   m.loss(x, b.labels, reduction="none").mean()
F.cross_entropy(m.head(x).mT, b.labels, reduction="none").mean(1).mean(0)
m.loss(x, b.labels.masked_fill(b.places % 2 == 0, IGNORED))
m.loss(x, b.labels.masked_fill(b.places % 2 == 0, IGNORED), label_smoothing=0.1)
m.loss(x, b.labels) + 0.1 * m.attend(x).square().mean()
m.loss(x, b.labels) + m.rows.square().mean()   m.loss(x, b.labels, reduction="sum")  # sum
m.loss(x, b.labels, reduction="sum") / (3 * m.rows.shape[0])  # sum
m.loss(x, b.labels.masked_fill(b.places < 5, IGNORED), reduction="sum") / 14  # sum
torch.einsum("bs,bse->be", m.head(x)[..., 0].sigmoid(), x).sum()  # sum
torch.dot(x.flatten(), m.embed(b.labels).flatten())  # sum
(x.flatten(0, 1).T @ m.embed(b.labels).flatten(0, 1)).sum()  # sum
(x * (b.labels > 9)[..., None]).sum()  # sum
""",
    "mixed": """
F.cross_entropy(m.head(x[:, 0]), b.labels[:, 0])   m.head(x[:, -1]).square().mean()
m.loss(x[:, 1:], b.labels[:, 1:])   m.loss(x, F.pad(b.labels, (0, 1), value=IGNORED)[:, 1:])
m.loss(x, b.labels.masked_fill(b.places < 5, IGNORED))
m.loss(x, b.labels, weight=m.rows[:VOCAB, 0].detach().abs())
(m.loss(x, b.labels, \
reduction="none").view_as(b.labels) * (b.places > 3)).sum() / (b.places > 3).sum()
m.loss(x, b.labels, reduction="none")[b.places.flatten() > 3].mean()
c = m.router(x).softmax(-1); m.loss(x, b.labels) + (c.mean((0, 1)) * F.one_hot(c.argmax(-1), \
EXPERTS).double().mean((0, 1))).sum()
m.loss(x, b.labels).exp()   x.mean() * m.embed(b.labels).mean()
F.mse_loss(x, m.embed(b.labels)).sqrt()   x.std()   x.norm()   x.amax(1).mean()
x.flatten().logsumexp(0)   F.cross_entropy(m.head(x.mean(1)), b.labels[:, 0] * 0)
m.norm(x.mean(1)).square().mean()   (x.flatten(0, 1).T @ m.embed(b.labels).flatten(0, 1)).norm()
c = m.head(x).softmax(-1).mean((0, 1)); -(c * c.log()).sum()   x.sum() + m.embed(b.labels).mean()
x.sum() + m.rows.square().sum()   -F.logsigmoid(x.sum(1) - m.embed(b.labels).sum(1)).mean()
m.loss(x + F.embedding(b.labels, m.embed.weight, scale_grad_by_freq=True), b.labels)
""",
    # Three tables of tests/dtensor/test_rows.py. Ops without a sharding rule, or with a wrong one;
    # those with a tag are computed in graphs, too.
    "on_whole": """
weigh(F.one_hot(b.ids, VOCAB) * x[..., :1])   weigh(F.one_hot(b.ids) * x[..., :1])
weigh(F.logsigmoid(x))  # graph   weigh(F.prelu(x.mT, m.cls).mT)   weigh(F.hardtanh(x, -0.3, 0.4))
F.binary_cross_entropy_with_logits(x[..., 0], b.keep.to(x.dtype))  # graph
F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype), m.cls.detach().abs(), \
pos_weight=m.cls.detach().abs())  # graph
weigh(x.masked_scatter(b.keep[..., None].expand_as(x), m.rows))  # graph
weigh(x.masked_scatter(b.keep[..., None], x * 2))   weigh(x.argmax(1))
y = x * 2; y.data = x.detach().roll(1, 1); weigh(x * y)
weigh(F.adaptive_avg_pool1d(x.mT, 1)[..., 0])
weigh(F.conv1d(x.flatten(0, 1)[:, None], m.cls[None, None, :3], padding=1).view_as(x).sum(1))
weigh(x[torch.arange(len(x)), (torch.arange($n) * (b.ids != 3)).argmax(-1)])  # graph
i = (b.ids == b.ids.amax(1, keepdim=True)).int().argmax(-1); \
weigh(x.gather(1, i[:, None, None].expand(-1, 1, WIDTH)))  # graph
weigh(x[b.keep])   y = x * 1; y[b.keep] = 0.0; weigh(y)   weigh(x.masked_select(b.keep[..., None]))
weigh(b.keep.nonzero())   weigh(b.ids.unique())
weigh(torch.bincount(b.ids.flatten(), minlength=40))
weigh(x.index_add(1, torch.tensor([0, 2, 6]), m.rows[:3].expand(len(x), -1, -1)))
weigh((x * 1).index_add_(1, torch.tensor([0, 2, 6]), m.rows[:3].expand(len(x), -1, -1)))
weigh(torch.zeros_like(x).index_add_(1, torch.tensor([0, 2, 3, 6, 5, 1, 1, *range(7, $n)]), \
x))  # graph
weigh((x * 1).index_copy_(1, torch.tensor([0, 2, 6]), m.rows[:3].expand(len(x), -1, -1)))
weigh((x * 1).scatter_(1, b.ids[..., None] % $n, 0.5))
weigh(torch.zeros_like(x).scatter_reduce(1, (b.ids % $n)[..., None].expand_as(x), x, \
"amax"))  # graph
weigh(torch.searchsorted(torch.arange(7).to(x.dtype), x))   weigh(x.repeat_interleave(2, 1))
weigh(x.repeat_interleave(b.ids[0] % 3, 1))   weigh(F.pad(x, (0, 0, 1, -1)) * x)
weigh(x.flatten(1) @ m.rows.flatten()[: $n * WIDTH, None].expand(-1, 3))  # graph
weigh(x.unbind(1)[5])   weigh(x.unfold(1, 3, 2))   weigh(x.movedim(1, 0).sin())
weigh(F.linear(F.batch_norm(x.mT, None, None, training=True).mT, m.mix.weight[:3]))  # graph
weigh(F.linear(F.max_pool1d(x.mT, 3, 2).mT, m.mix.weight[:3]))   weigh(torch.cdist(x, x + 1))
weigh(F.pixel_shuffle(x[:, None].repeat(1, 4, 1, 1), 2))  # graph   weigh(x.quantile(0.3, 1))
F.ctc_loss(x.log_softmax(-1).transpose(0, 1), b.labels[:, :2] % 22 + 1, ($n,) * len(x), \
(2,) * len(x))
weigh((x * 1).unsqueeze_(1).transpose_(1, 2))   weigh((x * 1).tril_())   weigh(b.ids << 1)
w, i = x[..., 0].topk(3, 1); i = i[..., None].expand(-1, -1, WIDTH); \
weigh(x.scatter_add(1, i, x.gather(1, i).tanh() * w[..., None]))
y, i = x * 1, x[..., 0] > 0; y[i] = y[i].tanh(); weigh(y)
t = x.flatten(0, 1); e = t.detach()[:, :3].argmax(-1); y = torch.zeros_like(t); \
for k in range(3): y.index_add_(0, torch.where(e == k)[0], \
t[torch.where(e == k)[0]] * (k + 1.0)); weigh(y)
weigh(F.layer_norm(x.mT, ($n,)).square().sum(0))
y = torch.polar(x, x * 2); weigh(y.real) + weigh(y.angle())  # graph
weigh(F.embedding(b.ids, m.head.weight)) + weigh(F.embedding(b.ids, m.head.weight, \
scale_grad_by_freq=True)) + weigh(F.embedding(b.labels, m.head.weight))
F.cross_entropy(m.head(x).flip(1).flatten(0, 1), b.labels.flatten())  # graph
""",
    # Of other ops, which DTensor would take as they are under inference_mode.
    "composite": """
F.cross_entropy(m.head(x).mT, b.answers)   F.nll_loss(m.head(x).log_softmax(-1).mT, b.answers)
F.cross_entropy(m.head(x).mT, b.answers, weight=m.rows[:VOCAB, 0].detach().abs())
m.loss(x, b.answers, label_smoothing=0.1)   F.cross_entropy(x.mT, x.softmax(-1).mT)
m.loss(x, b.answers, reduction="sum") / (b.answers != IGNORED).sum().item()
F.l1_loss(x, x * 2 + 1)   F.triplet_margin_loss(x, x * 2, x + 1)
F.margin_ranking_loss(x[..., 0], x[..., 1], x[..., 2].sign())
F.poisson_nll_loss(x, x.detach().abs())   torch.cov(x.flatten(0, 1).T).square().sum()
F.cosine_embedding_loss(x.flatten(0, 1), x.flatten(0, 1) * 2 + 1, x.detach()[..., \
0].flatten().sign())
F.ctc_loss(x.log_softmax(-1).transpose(0, 1), torch.tensor([[1, 2], [2, 3]]), ($n,) * 2, (2, 2))
""",
    # What accumulates along the sequence, also of equal elements and of what is no number.
    "along": """
weigh(x.cumsum(1))   weigh(x.logcumsumexp(1))   weigh(x.cumprod(1))   weigh(b.ids.cumsum(-1))
weigh(b.keep.cumsum(-1))   weigh(b.ids.cumsum(0, dtype=torch.int32))
y, i = x.cummax(1); weigh(y) + weigh(i)   y, i = x.round().cummin(1); weigh(y) + weigh(i)
y = x.where(x < 1, torch.nan); weigh(y.cumsum(1).nan_to_num())
y = x.where(x < 1, torch.nan); y, i = y.cummax(1); weigh(y.nan_to_num()) + weigh(i)
""",
    "loss": """
m.loss(x, $labels, $how)
F.cross_entropy(m.head(x).flatten(0, 1), m.head(m.norm(x)).detach().softmax(-1).flatten(0, 1))
($token).mean()   ($token)[:, 1:].mean()   m.loss(x[:, ::2], b.labels[:, ::2])
F.cross_entropy(m.head($p), $classes)   (($token) * b.weights).sum() / b.weights.sum()
F.cross_entropy(m.head(x)[b.keep], b.labels[b.keep])   ($token).flatten().topk(5)[0].mean()
($token).max()   t = $token; F.relu(t - t.mean()).mean()
(($token) * m.head(x)[..., 0].softmax(1)).sum()   m.loss(x, b.labels) * x.square().mean()
($token).sum(1).mean() / b.ids.shape[1]  # length   ($token).sum() / b.labels.numel()  # length
m.loss(x, b.labels) + m.head(x).logsumexp(-1).square().mean()
m.loss(x, b.labels) + m.loss(m.attend(x, m.second), b.labels)
r = (b.weights * b.keep).sum(1); c = m.pick(x, b.labels); \
c = (c - c.detach()).exp() * ((r - r.mean()) / (r.var() + 1))[:, None]; \
-((c * b.keep).sum(1) / b.keep.sum(1)).mean()
f = x.flatten(0, 1); (f.T @ f / len(f) - torch.eye(WIDTH).to(x)).square().sum() / 64  # length
-(m.head(x).softmax(-1) * m.head(x).log_softmax(-1)).sum(-1).mean()
m.loss(x, b.labels) * (1 + (m.head(x).argmax(-1) == b.labels).to(x.dtype).mean())
F.kl_div(*(f(m.head(y).flatten(0, 1), -1) for f, y in ((F.log_softmax, x), (F.softmax, \
m.norm(x)))), reduction="batchmean")
F.kl_div(m.head(x).log_softmax(-1), m.head(m.norm(x)).softmax(-1), reduction="mean")
F.hinge_embedding_loss(x, ($target).sign())
F.multi_margin_loss(m.head(x).flatten(0, 1), b.labels.flatten())
F.multilabel_soft_margin_loss(m.head(x).flatten(0, 1), F.one_hot(b.labels.flatten(), VOCAB))
(x - $target).norm(dim=1).mean()   1 - F.cosine_similarity(x, $target, 1).mean()
F.gaussian_nll_loss(x, $target, m.mix(x).square() + 0.1)   torch.cdist(x, x).mean() / 8
(($token) * 0.9**b.places).mean()
(m.pick(x, b.labels) * b.weights.flip(1).cumsum(1).flip(1)).mean()   m.loss(x[:1], b.labels[:1])
sum(F.cross_entropy(m.head(entry), labels) for entry, labels in zip(x, b.labels)) / len(x)
m.loss(x[:, :-1], b.ids[:, 1:]) + m.loss(m.mix(x)[:, :-2], b.ids[:, 2:])
F.cross_entropy(m.head(x).flatten(0, 1).float(), b.labels.flatten()).double()  # rounds
m.loss(x, b.answers, reduction="sum") / $number_of_labels
($token).masked_fill(b.answers == IGNORED, 0.0).sum() / $number_of_labels
t = $token; ((1 - (-t).exp()) ** 2 * t).mean()   m.loss(x, b.labels) * (-m.cls[0]).exp() + m.cls[0]
m.loss(x, b.labels) / float($number)   (m.attend(m.embed(b.labels), m.second) - x).square().mean()
with sdpa_kernel(SDPBackend.MATH): t = m.loss(m.attend(x), b.labels); \
t + torch.autograd.grad(t, x, create_graph=True)[0].square().sum()
F.cross_entropy(F.normalize($p, dim=-1) @ F.normalize($p2, dim=-1).T * 5, torch.arange(len(x)))
F.cosine_similarity($p, $p2).square().mean()   F.triplet_margin_loss($p, $p2, b.image.mean(1))
F.mse_loss($p, $p2)   F.$of_elements(x, $target)
""",
    "sum": """
m.loss(x, b.answers, reduction="sum")  # sum   (($token) * b.keep).sum()  # sum
x.sum().square()  # sum   m.loss(x, b.labels, reduction="sum").log()  # sum
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
F.relu(torch.randn_like(ones))   F.relu(torch.normal(ones * 0, ones))
F.relu(torch.empty_like(ones).exponential_() - 0.7)   torch.randint_like(ones, 2)
torch.multinomial(ones.flatten(0, 1)[:, :2], 1).view(*ones.shape[:2], 1).expand_as(ones) * ones
F.gumbel_softmax(ones[..., :2], hard=True)[..., :1] * ones
F.relu(F.rrelu(-ones, 0.1, 0.9, training=True) + 0.5)
checkpoint(lambda t: F.dropout(t, 0.5), ones, use_reentrant=False)
"""

# What is done to the gradient of a parameter p after the backward.
GRADIENT_WRITES = """
p.grad.fill_(0.25)   p.grad.add_(1.0)   p.grad.clamp_(-1e-3, 1e-3)
p.grad.round_(decimals=9).sign_()   p.grad.nan_to_num_(0.0)
p.grad.mul_((p.detach() > 0).to(p.dtype))   p.grad.div_(p.grad.norm())   p.grad[0] = 0.5
p.grad[:2].zero_()   p.grad.copy_(p.grad.abs())   p.grad.t().add_(1.0)
p.grad.data.clamp_(-1e-3, 1e-3)   p.grad = p.grad / p.grad.abs().max().item()
p.grad.mul_(min(1.0, 1.0 / (p.grad.norm().item() + 1e-6)))   p.grad.lerp_(p.detach(), 0.3)
p.grad[p.grad.abs() < 1e-3] = 0.0   torch._foreach_add_([p.grad], [p.detach()], alpha=0.1)
torch.add(p.grad, p.detach(), out=p.grad)   torch.manual_seed(3); p.grad.normal_()
torch.nn.utils.clip_grad_norm_([p], 0.01)   torch.optim.AdamW([p], fused=True).step()
torch.nn.utils.clip_grad_value_([p], 1e-3, foreach=True)
torch.optim.SGD([p], 0.1, momentum=0.9, weight_decay=0.1).step()
"""


def rows(text: str) -> list[str]:
    """Return the rows of a table: words, or texts on lines of their own or 3 spaces apart."""
    return re.split(r"\n| {3}", text.strip("\n")) if text.startswith("\n") else text.split()


ALL = FAMILIES | PARTS | LOSSES | {"random": RANDOM, "gradient": GRADIENT_WRITES}
TABLES = {name: rows(text) for name, text in ALL.items()}
