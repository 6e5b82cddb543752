"""Plain shards: every program is right, or refused on every rank; none is silently wrong."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor.backend.failed_trace import errors_unwrapped
from cp_inductor.passes.pipeline import capture
from cp_inductor.passes.settings import read_settings
from cp_inductor.torch_private.dynamo import as_backend_error
from tests.support.ranks import forget_compiles, run_ranks, world_mesh

BATCH, LENGTH, WIDTH, HEADS, CLASSES = 2, 12, 8, 2, 5
DOUBLE = torch.float64
attention = F.scaled_dot_product_attention


class Model(nn.Module):
    """A block of a transformer, and what programs put before or behind its attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.rows = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.one = nn.Conv1d(WIDTH, WIDTH, 1)
        self.over = nn.Linear(LENGTH // 2, LENGTH // 2)
        self.groups = nn.GroupNorm(2, WIDTH)
        self.batches = nn.BatchNorm1d(WIDTH)
        self.often = nn.Embedding(CLASSES, WIDTH, scale_grad_by_freq=True)
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))
        self.register_buffer("weights", torch.rand(CLASSES))
        self.register_buffer("kept", torch.zeros(WIDTH))
        self.register_buffer("angles", torch.rand(WIDTH // 2 // HEADS))
        self.double()

    def heads(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def joined(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(2)

    def attend(self, x: Tensor, *, is_causal: bool = True) -> Tensor:
        q, k, v = self.heads(self.norm(x))
        return x + self.joined(attention(q, k, v, is_causal=is_causal))

    def loss(self, x: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), **kwargs)


# A model, x (B, S, D) of its embedding, labels and positions (B, S) => a loss.
Program = Callable[[Model, Tensor, Tensor, Tensor], Tensor]


def before(piece: Callable[[Model, Tensor], Tensor]) -> Program:
    """Put a piece before the attention."""
    return lambda m, x, labels, positions: m.loss(m.attend(piece(m, x)), labels)


def behind(piece: Callable[[Model, Tensor], Tensor]) -> Program:
    """Let a loss read what a piece makes of the attention's result."""
    return lambda m, x, labels, positions: piece(m, m.attend(x)).square().mean()


def both(piece: Callable[[Model, Tensor], Tensor]) -> Program:
    """Put a piece on either side."""
    return lambda m, x, labels, positions: m.loss(piece(m, m.attend(piece(m, x))), labels)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def rotate(m: Model, x: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    angles = positions[:, None, :, None] * m.angles
    angles = torch.cat([angles, angles], -1)

    def turn(t: Tensor) -> Tensor:
        one, other = t.chunk(2, -1)
        return t * angles.cos() + torch.cat([-other, one], -1) * angles.sin()

    return m.loss(m.joined(attention(turn(q), turn(k), v, is_causal=True)), labels)


def rotate_complex(m: Model, x: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, :, None, None] * m.angles
    q = m.qkv(x).chunk(3, -1)[0].unflatten(-1, (HEADS, -1, 2))
    pairs = torch.view_as_complex(q) * torch.polar(torch.ones_like(angles), angles)
    q = torch.view_as_real(pairs).flatten(3).transpose(1, 2)
    return m.loss(m.joined(attention(q, q, q, is_causal=True)), labels)


def write_features(m: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., ::2] = x[..., 1::2]
    y[..., 1::2] = -x[..., ::2]
    return y


def write_into_zeros(m: Model, x: Tensor) -> Tensor:
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[..., :4] = x[..., 4:]
    return y + x


def route(m: Model, x: Tensor) -> Tensor:
    weights, experts = m.head(x).softmax(-1).topk(2, -1)
    chosen = F.one_hot(experts, CLASSES) * weights[..., None]
    return x + chosen.sum(-2) @ m.head.weight


def pool_by_scores(m: Model, x: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    y = m.attend(x)
    return torch.einsum("bs,bsd->bd", m.head(y)[..., 0].sigmoid(), y).sum()


def two_sequences(m: Model, x: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    memory = m.attend(x.flip(-1), is_causal=False)
    q, (_, k, v) = m.heads(m.attend(x))[0], m.heads(memory)
    return m.loss(m.joined(attention(q, k, v)), labels)


RIGHT: dict[str, Program] = {
    "nothing": before(lambda m, x: x),
    "mlp": both(lambda m, x: x + m.down(F.gelu(m.up(m.norm(x))))),
    "rms_norm": both(lambda m, x: F.rms_norm(x, (WIDTH,))),
    "norm_by_hand": both(lambda m, x: x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()),
    "gated": before(lambda m, x: m.down(m.up(x) * F.silu(m.up(x)))),
    "clamped": both(lambda m, x: x.clamp(-1, 1).where(x > 0, x * 2)),
    "flattened": both(lambda m, x: m.down(m.up(x.flatten(0, 1))).view(x.shape)),
    "viewed": both(lambda m, x: m.down(m.up(x.reshape(-1, WIDTH))).view(BATCH, -1, WIDTH)),
    "sequence_first": both(lambda m, x: m.norm(x.transpose(0, 1)).transpose(0, 1)),
    "sequence_first_flat": before(
        lambda m, x: (
            m.norm(x.transpose(0, 1).reshape(-1, WIDTH))
            .view(-1, BATCH, WIDTH)
            .mT.mT.transpose(0, 1)
        )
    ),
    "einsum": before(lambda m, x: torch.einsum("bsd,fd->bsf", x, m.rows[:WIDTH])),
    "einsum_heads": before(
        lambda m, x: torch.einsum(
            "bshd,hde->bshe", x.unflatten(-1, (2, 4)), m.rows[:8].view(2, 4, 8)[..., :4]
        ).flatten(2)
    ),
    "matmul_left": before(lambda m, x: (m.rows[:WIDTH] @ x.mT).mT),
    "along_features": both(lambda m, x: x.cumsum(-1).roll(1, -1).flip(-1).sort(-1)[0]),
    "softmax_features": both(lambda m, x: x.softmax(-1) + x.log_softmax(-1)),
    "rotary": rotate,
    "rotary_complex": rotate_complex,
    "given_positions": lambda m, x, labels, p: m.loss(m.attend(x + m.places(p)), labels),
    "given_rows": lambda m, x, labels, p: m.loss(m.attend(x + m.rows[p]), labels),
    "given_rows_selected": lambda m, x, labels, p: m.loss(
        m.attend(x + m.table.index_select(0, p.flatten()).view(x.shape)), labels
    ),
    "given_sines": lambda m, x, labels, p: m.loss(
        m.attend(x + (p[..., None] / (1 + torch.arange(WIDTH))).sin()), labels
    ),
    "write_features": both(write_features),
    "write_into_zeros": both(write_into_zeros),
    "in_place": both(lambda m, x: x.clone().mul_(2).add_(m.rows[0]).relu_()),
    "masked_fill": lambda m, x, labels, p: m.loss(
        m.attend(x.masked_fill((labels > 2)[..., None], 0.0)), labels
    ),
    "one_hot": lambda m, x, labels, p: m.loss(
        m.attend(x + F.one_hot(labels, CLASSES).double() @ m.head.weight), labels
    ),
    "route": both(route),
    "dropout_of_none": both(lambda m, x: F.dropout(x, 0.0)),
    "conv_of_one": both(lambda m, x: m.one(x.mT).mT),
    "repeated_batch": lambda m, x, labels, p: m.loss(
        m.attend(x.repeat_interleave(2, 0)), labels.repeat_interleave(2, 0)
    ),
    "expanded_heads": before(lambda m, x: x[:, :, None].expand(-1, -1, 2, -1).mean(2)),
    "checkpointed": both(
        lambda m, x: checkpoint(lambda y: F.gelu(m.norm(y)), x, use_reentrant=False)
    ),
    "own_backward": both(lambda m, x: Doubled.apply(x)),
    "detached": both(lambda m, x: x + x.detach() * 2),
    "without_gradient": both(lambda m, x: x + _without_grad(lambda: x.sigmoid())),
    "autocast": both(lambda m, x: x + _under_autocast(lambda: m.norm(x).double())),
    "loss_of_elements": behind(lambda m, x: F.mse_loss(x, x.detach() * 2, reduction="none")),
    "mean_loss": lambda m, x, labels, p: F.mse_loss(m.attend(x), x.detach()),
    "loss_by_gather": lambda m, x, labels, p: (
        -m.head(m.attend(x)).log_softmax(-1).gather(-1, labels[..., None]).mean()
    ),
    "loss_2d": lambda m, x, labels, p: F.cross_entropy(m.head(m.attend(x)).mT, labels),
    "loss_none_mean": lambda m, x, labels, p: m.loss(m.attend(x), labels, reduction="none").mean(),
    "loss_per_sample": lambda m, x, labels, p: (
        F.cross_entropy(m.head(m.attend(x)).mT, labels, reduction="none").mean(1).mean(0)
    ),
    "some_labels_even": lambda m, x, labels, p: m.loss(
        m.attend(x), labels.masked_fill(p % 2 == 0, -100)
    ),
    "label_smoothing": lambda m, x, labels, p: m.loss(
        m.attend(x), labels.masked_fill(p % 2 == 0, -100), label_smoothing=0.1
    ),
    "two_losses": lambda m, x, labels, p: (
        m.loss(m.attend(x), labels) + 0.1 * m.attend(x).square().mean()
    ),
    "mean_and_weights": lambda m, x, labels, p: (
        m.loss(m.attend(x), labels) + m.rows.square().mean()
    ),
    "pooled": lambda m, x, labels, p: m.head(m.attend(x).mean(1)).mean(),
    "two_sequences": two_sequences,
    "local": lambda m, x, labels, p: m.loss(m.attend(_within_batch(m, x)), labels),
    "unused_sum": lambda m, x, labels, p: (x.cumsum(1), m.loss(m.attend(x), labels))[1],
}
SUMMED: dict[str, Program] = {
    "sum": lambda m, x, labels, p: m.loss(m.attend(x), labels, reduction="sum"),
    "sum_scaled": lambda m, x, labels, p: (
        m.loss(m.attend(x), labels, reduction="sum") / (3 * m.rows.shape[0])
    ),
    "some_labels": lambda m, x, labels, p: (
        m.loss(m.attend(x), labels.masked_fill(p < 5, -100), reduction="sum") / 14
    ),
    "pool_by_scores": pool_by_scores,
    "norm_of_dot": lambda m, x, labels, p: torch.dot(m.attend(x).flatten(), x.detach().flatten()),
    "moments": lambda m, x, labels, p: (m.attend(x).flatten(0, 1).T @ x.flatten(0, 1)).sum(),
    "masked_sum": lambda m, x, labels, p: (m.attend(x) * (labels > 1)[..., None]).sum(),
}


def _without_grad(compute: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return compute()


def _under_autocast(compute: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return compute()


def _within_batch(m: Model, x: Tensor) -> Tensor:
    """Attend over the batch, which every rank has whole."""
    with cp_inductor.local_attention():
        return x + attention(*[x.transpose(0, 1)[:, None]] * 3)[:, 0].transpose(0, 1)


def windows(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    y = x.reshape(-1, 3, WIDTH)
    return m.loss(m.attend(y).view(x.shape), labels)


def over_batch(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    return m.loss(m.attend(x.transpose(0, 1), is_causal=False).transpose(0, 1), labels)


def half_of_keys(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    half = x.shape[1] // 2
    return m.loss(m.joined(attention(q, k[:, :, :half], v[:, :, :half])), labels)


def keys_of_rows(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    q, _, v = m.heads(x)
    k = m.rows[: x.shape[1]].view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
    return m.loss(m.joined(attention(q, k.expand(BATCH, -1, -1, -1), v)), labels)


def queries_of_rows(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    _, k, v = m.heads(x)
    q = m.rows[:4].view(1, 4, HEADS, WIDTH // HEADS).transpose(1, 2).expand(BATCH, -1, -1, -1)
    return attention(q, k, v).square().mean()


def tokens_and_rows(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    return m.attend(torch.cat([m.rows[:2].expand(BATCH, 2, WIDTH), x], 1)).square().mean()


def heads_for_tokens(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
    return m.loss(attention(q, k, v).flatten(2), labels)


def attend_by_hand(m: Model, x: Tensor) -> Tensor:
    return x + (x @ x.mT).softmax(-1) @ x


def attend_linearly(m: Model, x: Tensor) -> Tensor:
    return x + x.sigmoid() @ (x.mT @ x)


def recur(m: Model, x: Tensor) -> Tensor:
    state, states = torch.zeros(BATCH, WIDTH, dtype=DOUBLE), []
    for token in x.unbind(1):
        state = torch.tanh(m.one.weight[..., 0] @ state[..., None])[..., 0] + token
        states.append(state)
    return torch.stack(states, 1)


def shift_by_writing(m: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return x + y


def write_first(m: Model, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = m.rows[0]
    return y


def write_first_of_heads(m: Model, x: Tensor) -> Tensor:
    y = x.clone()
    y.unflatten(-1, (2, 4)).transpose(1, 2)[:, :, 0].zero_()
    return y


def copy_by_foreach(m: Model, x: Tensor) -> Tensor:
    y = x.detach().clone()
    torch._foreach_copy_([y], [x.detach().roll(1, 1)])  # which returns nothing
    return x + y


def learn_inside(m: Model, x: Tensor) -> Tensor:
    """As layers do that are trained while they run."""
    out, pull = torch.func.vjp(lambda weight: F.linear(x.detach(), weight), m.head.weight)
    (grad,) = pull(torch.ones_like(out))
    return F.linear(F.linear(x, m.head.weight - 0.1 * grad), m.head.weight.T)


def set_data(m: Model, x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x.detach().flip(1)
    return y


def branch(m: Model, x: Tensor) -> Tensor:
    scale = x.abs().amax().item()
    return x / scale


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1).cumsum(1).flip(1)


def _written(length: int, write: Callable[[Tensor], Any]) -> Tensor:
    ones = torch.ones(length, dtype=DOUBLE)
    write(ones)
    return ones


def _set_every_other(ones: Tensor) -> None:
    ones[::2] = 0.5


def _keep(m: Model, x: Tensor, found: Tensor) -> Tensor:
    """Add up what was found in a buffer, as batch norms and balanced experts do."""
    with torch.no_grad():
        m.kept[: len(found)] += found.detach()
    return x


def balance(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    chances = m.head(m.attend(x)).softmax(-1)
    chosen = F.one_hot(chances.argmax(-1), CLASSES).double()
    return m.loss(x, labels) + (chances.mean((0, 1)) * chosen.mean((0, 1))).sum()


def masked_mean(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    losses = m.loss(m.attend(x), labels, reduction="none").view(labels.shape)
    return (losses * (p > 3)).sum() / (p > 3).sum()


REFUSED: dict[str, Program] = {
    # Attention that is not over the sequence.
    "windows": windows,
    "over_batch": over_batch,
    "half_of_keys": half_of_keys,
    "keys_of_rows": keys_of_rows,
    "queries_of_rows": queries_of_rows,
    "tokens_and_rows": tokens_and_rows,
    "heads_for_tokens": heads_for_tokens,
    "streams_joined": lambda m, x, labels, p: m.attend(torch.cat([x, x * 2], 1)).square().mean(),
    "twice": lambda m, x, labels, p: m.attend(x.repeat(1, 2, 1)).square().mean(),
    # Tokens that meet others.
    "cumsum": before(lambda m, x: x.cumsum(1)),
    "cumsum_named": before(lambda m, x: torch.cumsum(input=x, dim=-2)),
    "conv": before(lambda m, x: m.conv(x.mT).mT),
    "shift": before(lambda m, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1]),
    "shift_by_pad": before(lambda m, x: x + F.pad(x, (0, 0, 1, -1))),
    "shift_by_writing": before(shift_by_writing),
    "roll": behind(lambda m, x: x + x.roll(1, 1)),
    "roll_of_all": before(lambda m, x: x.roll(1)),
    "flip": before(lambda m, x: x.flip(1)),
    "sort": before(lambda m, x: x.sort(1)[0]),
    "gather_sorted": before(lambda m, x: x.gather(1, x.argsort(1))),
    "attend_by_hand": before(attend_by_hand),
    "attend_linearly": behind(attend_linearly),
    "softmax": before(lambda m, x: x.softmax(1)),
    "softmax_flat": before(lambda m, x: x.flatten(0, 1).softmax(0).view(x.shape)),
    "over_tokens": before(lambda m, x: x + m.over(x.mT).mT),
    "minus_mean": before(lambda m, x: x - x.mean(1, keepdim=True)),
    "by_largest": before(lambda m, x: x / x.abs().amax()),
    "by_norm": behind(lambda m, x: F.normalize(x, dim=1)),
    "batch_norm": before(lambda m, x: m.batches(x.mT).mT),
    "group_norm": before(lambda m, x: m.groups(x.mT).mT),
    "differences": behind(lambda m, x: x[:, 1:] - x[:, :-1]),
    "unfold": behind(lambda m, x: x.unfold(1, 2, 1).sum(-1)),
    "pool": behind(lambda m, x: F.avg_pool1d(x.mT, 3, 1)),
    "fourier": before(lambda m, x: torch.fft.fft(x, dim=1).real),
    "with_the_first": before(lambda m, x: x + x[:, :1]),
    "recur": before(recur),
    "bag": behind(lambda m, x: F.embedding_bag(x.argmax(-1), m.places.weight)),
    "reordered": before(lambda m, x: x[:, [5, 4, 3, 2, 1, 0]]),
    "strided": behind(lambda m, x: x[:, ::2]),
    "halves": before(lambda m, x: torch.cat([x[:, 3:], x[:, :3]], 1)),
    "as_strided": before(lambda m, x: torch.as_strided(x.contiguous(), x.shape, (WIDTH, WIDTH, 1))),
    "turned_view": before(lambda m, x: x.mT.reshape(BATCH, -1, WIDTH)),
    "own_function": before(lambda m, x: Mixing.apply(x)),
    "checkpointed": before(lambda m, x: checkpoint(lambda y: y.cumsum(1), x, use_reentrant=False)),
    "data": before(lambda m, x: x + x.data.cumsum(1)),
    "detached": before(lambda m, x: x + x.detach().flip(1)),
    "without_gradient": before(lambda m, x: x + _without_grad(lambda: x.mean(1, keepdim=True))),
    # Tokens that are replaced.
    "first_replaced": before(
        lambda m, x: torch.cat([m.rows[:1].expand(BATCH, 1, WIDTH), x[:, 1:]], 1)
    ),
    "write_first": before(write_first),
    "write_first_of_heads": before(write_first_of_heads),
    "copied_by_foreach": before(copy_by_foreach),
    "learned_inside": before(learn_inside),
    "fill_first": before(lambda m, x: x.index_fill(1, torch.tensor([0]), 0.0)),
    # Positions that each rank makes.
    "arange": before(lambda m, x: x + m.places(torch.arange(x.shape[1]))),
    "arange_down": before(lambda m, x: x + m.places(torch.arange(x.shape[1] - 1, -1, -1))),
    "arange_from_6": before(lambda m, x: x + m.places(torch.arange(x.shape[1]) + 0 * x.shape[0])),
    "listed": before(lambda m, x: x * torch.tensor([i / 6 for i in range(x.shape[1])])[:, None]),
    "counted": before(lambda m, x: x + m.places(torch.ones_like(x[..., 0]).long().cumsum(1) - 1)),
    "counted_by_nonzero": before(
        lambda m, x: x + m.places(torch.ones(x.shape[1]).nonzero().squeeze(-1))
    ),
    "linspace": before(lambda m, x: x * torch.linspace(0, 1, x.shape[1])[:, None]),
    "rows": before(lambda m, x: x + m.rows[: x.shape[1]]),
    "table": before(lambda m, x: x * m.table[: x.shape[1]]),
    "sines": before(
        lambda m, x: x + torch.sin(torch.arange(x.shape[1])[:, None] * torch.arange(WIDTH))
    ),
    "triangle": before(lambda m, x: x + torch.ones(6, 6, dtype=DOUBLE).tril() @ x),
    # Numbers that were one number, until a part of them was written to.
    "first_zeroed": behind(lambda m, x: x * _written(x.shape[1], lambda w: w[0].zero_())[:, None]),
    "span_filled": before(lambda m, x: x + _written(x.shape[1], lambda w: w[:3].fill_(4))[:, None]),
    "every_other": before(lambda m, x: x * _written(x.shape[1], _set_every_other)[:, None]),
    "first_of_a_view": before(
        lambda m, x: x * _written(x.shape[1], lambda w: w.view(2, -1)[0].mul_(2))[:, None]
    ),
    "diagonal": before(
        lambda m, x: x + torch.zeros(6, 6, dtype=DOUBLE).fill_diagonal_(1)[0][:, None]
    ),
    "row_into_ones": before(
        lambda m, x: (
            x * _written(x.shape[1], lambda w: w[2:4].copy_(m.rows[0, :2].detach()))[:, None]
        )
    ),
    "chosen_by_a_mask": before(
        lambda m, x: torch.where(_written(x.shape[1], lambda w: w[0].zero_())[:, None] > 0, x, 0.0)
    ),
    "padded_ones": behind(lambda m, x: x * F.pad(torch.ones(x.shape[1] - 1), (1, 0))[:, None]),
    # What a model keeps for its next step.
    "kept_mean": lambda m, x, labels, p: m.loss(_keep(m, m.attend(x), x.mean((0, 1))), labels),
    "kept_count": lambda m, x, labels, p: m.loss(
        _keep(m, m.attend(x), F.one_hot(labels, CLASSES).sum((0, 1))), labels
    ),
    "kept_most": lambda m, x, labels, p: m.loss(_keep(m, m.attend(x), x.amax((0, 1))), labels),
    # Losses that are not linear in the ranks' sums.
    "of_cls": lambda m, x, labels, p: F.cross_entropy(m.head(m.attend(x)[:, 0]), labels[:, 0]),
    "of_last": lambda m, x, labels, p: m.head(m.attend(x)[:, -1]).square().mean(),
    "skips_first": lambda m, x, labels, p: m.loss(m.attend(x)[:, 1:], labels[:, 1:]),
    "shifted_labels": lambda m, x, labels, p: m.loss(
        m.attend(x), F.pad(labels, (0, 1), value=-100)[:, 1:]
    ),
    "labels_left_out": lambda m, x, labels, p: m.loss(m.attend(x), labels.masked_fill(p < 5, -100)),
    "class_weights": lambda m, x, labels, p: m.loss(m.attend(x), labels, weight=m.weights),
    "masked_mean": masked_mean,
    "by_mask": lambda m, x, labels, p: m.loss(m.attend(x), labels, reduction="none")[
        p.flatten() > 3
    ].mean(),
    "balance": balance,
    "perplexity": lambda m, x, labels, p: m.loss(m.attend(x), labels).exp(),
    "product": lambda m, x, labels, p: m.attend(x).mean() * x.mean(),
    "root": lambda m, x, labels, p: F.mse_loss(m.attend(x), x.detach()).sqrt(),
    "std": lambda m, x, labels, p: m.attend(x).std(),
    "norm": lambda m, x, labels, p: m.attend(x).norm(),
    "largest": lambda m, x, labels, p: m.attend(x).amax(1).mean(),
    "logsumexp": lambda m, x, labels, p: m.attend(x).flatten().logsumexp(0),
    "pooled_classes": lambda m, x, labels, p: F.cross_entropy(
        m.head(m.attend(x).mean(1)), labels[:, 0] * 0
    ),
    "norm_of_mean": lambda m, x, labels, p: m.norm(m.attend(x).mean(1)).square().mean(),
    "gram": lambda m, x, labels, p: (m.attend(x).flatten(0, 1).T @ x.flatten(0, 1)).norm(),
    "entropy": lambda m, x, labels, p: _entropy(m.head(m.attend(x)).softmax(-1).mean((0, 1))),
    "sum_and_mean": lambda m, x, labels, p: m.attend(x).sum() + x.mean(),
    "sum_and_weights": lambda m, x, labels, p: m.attend(x).sum() + m.rows.square().sum(),
    "preferred": lambda m, x, labels, p: -F.logsigmoid(m.attend(x).sum(1) - x.sum(1)).mean(),
    "frequencies": lambda m, x, labels, p: m.loss(m.attend(x + m.often(labels)), labels),
}
# Inputs that no attention is as long as must be declared.
DECLARED: dict[str, Program] = {
    "patches": lambda m, x, labels, p: m.attend(
        F.conv1d(x.mT, m.conv.weight[..., :2], stride=2).mT
    ).mean(),
}
# What Dynamo has no graph for.
EAGER_REFUSED: dict[str, Program] = {
    "item": before(branch),
    "data_set": before(set_data),
    "row_of_the_largest": lambda m, x, labels, p: m.loss(m.attend(x + m.rows[p.max()]), labels),
    "dlpack": before(lambda m, x: x + torch.from_dlpack(x.detach().mean(1))[:, None]),
    "saved": before(lambda m, x: x + _saved(x.detach().mean(1))[:, None]),
    "numpy": before(lambda m, x: x * torch.from_numpy(x.detach().numpy() * 1)),
    "from_numpy": before(lambda m, x: x * _of_numpy(x.shape[1])),
    "counts": lambda m, x, labels, p: (
        m.loss(m.attend(x), labels, reduction="sum") / (p > 3).sum().item()
    ),
}
ESCAPED: dict[str, Program] = {
    "rolled": before(lambda m, x: _per_rank(lambda: x + x.roll(1, 1))),
    "written": before(lambda m, x: _per_rank(lambda: write_first(m, x))),
    "counts": lambda m, x, labels, p: _per_rank(
        lambda: m.loss(m.attend(x), labels.masked_fill(p < 5, -100))
    ),
}


def _of_numpy(length: int) -> Tensor:
    import numpy

    return torch.from_numpy(numpy.linspace(0, 1, length))[:, None]


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def _entropy(chances: Tensor) -> Tensor:
    return -(chances * chances.log()).sum()


def _per_rank(compute: Callable[[], Tensor]) -> Tensor:
    with cp_inductor.per_rank():
        return compute()


COMPILED = ("flattened", "rotary", "write_into_zeros", "two_sequences", "label_smoothing", "sum")

TABLES = {
    "compiled": {name: {**RIGHT, **SUMMED}[name] for name in COMPILED},
    "unequal": {"labels_left_out": REFUSED["labels_left_out"]},
    "right": RIGHT,
    "summed": SUMMED,
    "declared": DECLARED,
    "refused": REFUSED,
    "refused in eager": EAGER_REFUSED,
    "escaped": ESCAPED,
}


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and positions."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(CLASSES, (2, BATCH, LENGTH), generator=generator)
    return ids.clone(), labels.clone(), torch.arange(LENGTH).expand(BATCH, -1).clone()


def compute(
    program: Program, model: Model, ids: Tensor, labels: Tensor, positions: Tensor
) -> Tensor:
    """Embed, and run a program."""
    return program(model, model.embed(ids), labels, positions)


def run_sharded(form: str, program: Program, model: Model, mesh: Any) -> Tensor:
    """Return this rank's loss, differentiated."""
    scale = 1 if program in SUMMED.values() else mesh.size()
    ids, labels, positions = make_batch()
    if form == "mesh":
        shards = [
            t.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone() for t in (ids, labels, positions)
        ]
        run = torch.compile(
            partial(compute, program, model),
            backend="cp_aot_eager",
            fullgraph=True,
            dynamic=False,
            options={"mesh": mesh},
        )
        loss = run(*shards) / scale
        loss.backward()
        return loss
    buffers = [ids, labels, positions]
    with cp_inductor.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3):
        loss = compute(program, model, ids, labels, positions) / scale
        loss.backward()
    return loss


def judge(form: str, program: Program, mesh: Any) -> str:
    """Return "right", the class and text of a refusal, or how far off the numbers are."""
    model, whole = Model(), Model()
    try:
        part = run_sharded(form, program, model, mesh).detach().clone()
    except cp_inductor.CPError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"error {type(error).__name__}: {str(error)[:300]}"
    dist.all_reduce(part)
    try:
        expected = compute(program, whole, *make_batch())
        expected.backward()
    except RuntimeError:
        return "wrong: one process cannot run it"
    off = [float((part - expected).abs() / (1 + expected.abs()))]
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        grad = torch.zeros_like(one) if one.grad is None else one.grad
        dist.all_reduce(grad)
        want = torch.zeros_like(one) if other.grad is None else other.grad
        off.append(float((grad - want).abs().max() / (1 + want.abs().max())))
    return "right" if max(off) < 1e-9 else f"wrong by {max(off):.1e}"


def judge_all(form: str, tables: list[str]) -> dict[str, str]:
    """Return the verdict of every program on this rank."""
    mesh = world_mesh()
    verdicts = {}
    for table in tables:
        for name, program in TABLES[table].items():
            forget_compiles()
            with warnings.catch_warnings():
                warnings.simplefilter("error", cp_inductor.SequenceWarning)
                verdicts[f"{table}: {name}"] = judge(form, program, mesh)
    return verdicts


def faults(form: str, tables: list[str], expected: str) -> dict[str, Any]:
    """Return the programs whose verdict is not what it should be, on every rank alike."""
    every = run_ranks(2, judge_all, form, tables)
    return {
        name: [verdicts[name] for verdicts in every]
        for name in every[0]
        if not all(verdicts[name].startswith(expected) for verdicts in every)
    }


@pytest.mark.slow
def test_what_computes_each_token_by_itself_is_right() -> None:
    assert faults("region", ["right", "summed", "declared"], "right") == {}


@pytest.mark.slow
def test_what_is_not_known_to_is_refused_on_every_rank() -> None:
    assert faults("region", ["refused", "refused in eager"], "SequenceMixed") == {}


@pytest.mark.slow
def test_compiled_programs() -> None:
    """What the graph alone tells, the next tests check: how numbers come out of it is alike."""
    assert faults("mesh", ["compiled"], "right") == {}
    assert faults("mesh", ["unequal"], "SequenceMixed") == {}


def count_while_parts_are_sent() -> list[str]:
    """Return the verdicts on means whose labels are spread evenly and unevenly.

    At this size the first rank computes a part for the other, and sends it while its own loss is
    being computed.
    """
    mesh = world_mesh()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 32, 32, generator=generator)
    labels = torch.randint(32, (2, 32), generator=generator)
    verdicts = []

    def run(x: Tensor, labels: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())

    for is_even in (True, False):
        labels[:, : 0 if is_even else 10] = -100
        forget_compiles()
        call = torch.compile(
            run, backend="cp_aot_eager", fullgraph=True, dynamic=False, options={"mesh": mesh}
        )
        mine = [t.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone() for t in (x, labels)]
        try:
            loss = call(*mine) / mesh.size()
        except cp_inductor.SequenceMixed:
            verdicts.append("refused")
            continue
        dist.all_reduce(loss)
        verdicts.append("right" if torch.allclose(loss, run(x, labels)) else "wrong")
    return verdicts


@pytest.mark.slow
def test_labels_are_counted_in_the_order_of_exchanges() -> None:
    """An op that waited within made ranks wait for one another."""
    for verdicts in run_ranks(2, count_while_parts_are_sent, deadline_s=120):
        assert verdicts == ["right", "refused"]


@pytest.mark.slow
def test_who_says_per_rank_is_let_through() -> None:
    assert faults("region", ["escaped"], "wrong by") == {}


# What ranks find out when they run.
AT_RUN_TIME = {"labels_left_out"}


class Stopped(cp_inductor.CPError):
    """All that a test wants to know is known."""


def judge_graph(program: Program, mesh: Any, *given: Tensor, **options: Any) -> str:
    """Return the refusal of a program's graph, or "let through", without running it."""

    def stop(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        settings = read_settings({"mesh": mesh, **options})
        with errors_unwrapped():
            capture(gm, settings)
        raise as_backend_error(Stopped(site="", expected="", got="", remedy=""))

    torch._dynamo.reset()
    run = torch.compile(
        partial(compute, program, Model()), backend=stop, fullgraph=True, dynamic=False
    )
    try:
        run(*given)
    except Stopped:
        return "let through"
    except cp_inductor.CPError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


GRAPHS = {
    **{f"right: {name}": (one, "let through") for name, one in {**RIGHT, **SUMMED}.items()},
    **{f"escaped: {name}": (one, "let through") for name, one in ESCAPED.items()},
    **{f"refused: {name}": (one, "SequenceMixed") for name, one in {**REFUSED, **DECLARED}.items()},
}


def test_branches_that_differ(mesh: Any) -> None:
    """One branch returns tokens, the other what mixes them. Or each rank takes its own."""

    def choose(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
        is_first = m.rows.sum() > 0
        y = torch.cond(is_first, lambda x: x * 2, lambda x: x.cumsum(1), (x,))
        return m.loss(m.attend(y), labels)

    def decide(m: Model, x: Tensor, labels: Tensor, p: Tensor) -> Tensor:
        return m.loss(m.attend(torch.cond(x.mean() > 0, torch.sin, torch.cos, (x,))), labels)

    shards = [tensor.chunk(2, 1)[1].clone() for tensor in make_batch()]
    assert judge_graph(choose, mesh, *shards).startswith("SequenceMixed")
    assert judge_graph(decide, mesh, *shards).startswith("SequenceMixed")


# The types are those of eager code, which judges every program in every run.
QUARTERS = [0, *(pytest.param(first, marks=pytest.mark.long) for first in (1, 2, 3))]


@pytest.mark.slow
@pytest.mark.parametrize("first", QUARTERS)
def test_graphs(mesh: Any, first: int) -> None:
    shards = [tensor.chunk(2, 1)[1].clone() for tensor in make_batch()]
    names = list(GRAPHS)[first::4]
    verdicts = {name: judge_graph(GRAPHS[name][0], mesh, *shards) for name in names}
    late = {f"refused: {name}" for name in AT_RUN_TIME}
    assert {
        name: verdict
        for name, verdict in verdicts.items()
        if not verdict.startswith("let through" if name in late else GRAPHS[name][1])
    } == {}
