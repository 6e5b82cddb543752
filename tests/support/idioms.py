"""The programs of `tests/support/hunt.py`: what models do around attention, one idiom each.

    embed -> [idiom] -> attention -> [idiom] -> attention -> [idiom] -> loss

A `Program` computes a loss of a `Model` and a `Batch`. Most are made from a function of the hidden
states, `x` (B, S, E), that stands in one of the three places; others are a loss, or all of it.
They are written for a whole sequence, and read no rank. `PROGRAMS` holds all of them by name;
`python -m tests.support.hunt --list` prints names and families.

What a function may use: `x`, the model `m` with the parameters below, and the batch `b`. Lengths
are read off tensors, as models do.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH, HEADS, VOCAB, EXPERTS = 2, 16, 2, 23, 4
LONGEST = 64
PLACES = ("front", "between", "behind")
IGNORED = -100

OfX = Callable[[Tensor], Tensor]
OfHidden = Callable[[Tensor, "Model", "Batch"], Tensor]
OfBatch = Callable[["Model", "Batch"], Tensor]


class Batch(NamedTuple):
    """Inputs of a program; all but the image have the tokens in dim 1.

    Attributes:
        ids, labels: (B, S), integers.
        answers: labels of which some are ignored, unevenly spread.
        places: (B, S), 0 to S - 1.
        keep: (B, S), False at the end of the last entry.
        weights: (B, S), floats.
        image: (B, 5, E), floats.
    """

    ids: Tensor
    labels: Tensor
    answers: Tensor
    places: Tensor
    keep: Tensor
    weights: Tensor
    image: Tensor


def make_batch(length: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH, length), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, length), generator=generator)
    answers = labels.clone()
    answers[:, : 2 * length // 3 : 2] = IGNORED
    places = torch.arange(length).expand(BATCH, length).contiguous()
    keep = places < torch.tensor([[length], [length - 6]])
    weights = torch.rand(BATCH, length, generator=generator, dtype=torch.float64)
    image = torch.randn(BATCH, 5, WIDTH, generator=generator, dtype=torch.float64)
    return Batch(ids, labels, answers, places, keep, weights, image)


@dataclass(frozen=True)
class Program:
    """What is run, and how its result is compared.

    Attributes:
        run: the loss; or the numbers that were drawn, (B, S, E).
        part: makes `model.part`.
        is_sum: the loss is a sum over tokens: shares of ranks are added, not averaged.
        is_whole_graph: may be compiled with `fullgraph=True`.
        reads_length: computes with a number of tokens, which over plain shards is the shard's: one
            of the known limits of docs/correctness.md.
        is_drawn: `run` returns numbers (B, S, E) that differ between tokens, about half of them 0.
        tolerance: relative.
    """

    name: str
    family: str
    run: OfBatch
    part: Callable[[], nn.Module] | None = None
    is_sum: bool = False
    is_whole_graph: bool = True
    is_drawn: bool = False
    reads_length: bool = False
    tolerance: float = 1e-8


class Model(nn.Module):
    """The parameters that programs use, and two attentions, in float64."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.norm = nn.LayerNorm(WIDTH)
        self.rows = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.cls = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        if program.part is not None:
            self.part = program.part()

    def forward(self, batch: Batch) -> Tensor:
        return self.program.run(self, batch)

    def heads(self, x: Tensor, project: nn.Module | None = None) -> list[Tensor]:
        """Return query, key and value, (B, H, S, D)."""
        projected = (project or self.first)(x)
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in projected.chunk(3, -1)]

    def attend(self, x: Tensor, project: nn.Module | None = None, **how: Any) -> Tensor:
        query, key, value = self.heads(x, project)
        return x + attention(query, key, value, **(how or {"is_causal": True}))

    def loss(self, x: Tensor, labels: Tensor, **how: Any) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), **how)


def attention(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """Attend; return (B, S, E)."""
    return join(F.scaled_dot_product_attention(query, key, value, **how))


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def make_model(program: Program) -> Model:
    torch.manual_seed(0)
    return Model(program).double()


PROGRAMS: dict[str, Program] = {}


def add(family: str, name: str, run: OfBatch, **how: Any) -> None:
    name = f"{family}.{name.replace(' ', '_')}"
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(name, family, run, **how)


def around(function: OfHidden, place: str) -> OfBatch:
    """Return a program with a function of the hidden states in a place."""

    def run(m: Model, b: Batch) -> Tensor:
        x = m.embed(b.ids)
        x = function(x, m, b) if place == "front" else x
        x = m.attend(x)
        x = function(x, m, b) if place == "between" else x
        x = m.attend(x, m.second) if place != "front" else x
        x = function(x, m, b) if place == "behind" else x
        return m.loss(x, b.labels)

    return run


HIDDEN: dict[str, OfHidden] = {}


def add_hidden(family: str, functions: dict[str, OfHidden], **how: Any) -> None:
    for name, function in functions.items():
        add(family, name, around(function, "between"), **how)
        HIDDEN[f"{family}.{name.replace(' ', '_')}"] = function


def add_of_x(family: str, functions: dict[str, OfX], **how: Any) -> None:
    add_hidden(family, {name: _ignore_rest(one) for name, one in functions.items()}, **how)


def _ignore_rest(function: OfX) -> OfHidden:
    return lambda x, m, b: function(x)


def add_losses(functions: dict[str, OfHidden], family: str = "loss", **how: Any) -> None:
    for name, function in functions.items():
        add(family, name, _after_attention(function), **how)


def _after_attention(function: OfHidden) -> OfBatch:
    return lambda m, b: function(m.attend(m.embed(b.ids)), m, b)


def placed(name: str, seed: int) -> Program:
    """Return a program, its idiom in one of the three places: another one with another seed."""
    program = PROGRAMS[name]
    if name not in HIDDEN:
        return program
    place = PLACES[(crc32(name.encode()) + seed) % len(PLACES)]
    return replace(program, run=around(HIDDEN[name], place))


def pieces_of(x: Tensor) -> int:
    """Return a number of tokens that divides the sequence: of 33, 32 or 16."""
    return 3 if x.shape[1] % 3 == 0 else 4


# --- Each token by itself ----------------------------------------------------------------------

POINTWISE_OF_TORCH = "abs neg exp expm1 sin cos tanh sigmoid erf square atan asinh sinc"
ACTIVATIONS = """relu gelu silu mish elu celu selu softplus softsign hardtanh hardswish hardsigmoid
    leaky_relu logsigmoid tanhshrink softshrink relu6"""

add_of_x(
    "pointwise",
    {name: getattr(torch, name) for name in POINTWISE_OF_TORCH.split()}
    | {name: getattr(F, name) for name in ACTIVATIONS.split()}
    | {
        "sqrt": lambda x: (x.abs() + 1).sqrt(),
        "rsqrt": lambda x: x * (x.square() + 1).rsqrt(),
        "log1p": lambda x: x.abs().log1p(),
        "pow": lambda x: x**3,
        "clamp": lambda x: x.clamp(-0.5, 0.5),
        "where": lambda x: torch.where(x > 0, x, 0.1 * x),
        "masked_fill": lambda x: x.masked_fill(x < 0, -1.0),
        "lerp": lambda x: torch.lerp(x, x.sin(), 0.3),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.1),
        "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1),
        "maximum": lambda x: torch.maximum(x, x.sin()),
        "fmod": lambda x: torch.fmod(x, 0.7),
        "remainder": lambda x: torch.remainder(x, 0.7),
        "atan2": lambda x: torch.atan2(x, x.abs() + 1),
        "hypot": lambda x: torch.hypot(x, x + 1),
        "copysign": lambda x: torch.copysign(x, -x),
        "logaddexp": lambda x: torch.logaddexp(x, -x),
        "nan_to_num": lambda x: (x / (x.abs() > 0)).nan_to_num(0.0, 0.0, 0.0),
        "round": lambda x: x + (x * 4).round() / 4,
        "sign": lambda x: x * x.sign(),
        "heaviside": lambda x: x * torch.heaviside(x.detach(), x.new_ones(())),
        "clone": lambda x: x.clone(),
        "to float32": lambda x: x.float().double() * 0 + x,
        "glu": lambda x: F.glu(torch.cat([x, x.sin()], -1)),
        "softmax of features": lambda x: x.softmax(-1) * 16,
        "log_softmax of features": lambda x: x.log_softmax(-1),
        "cumsum of features": lambda x: x.cumsum(-1),
        "sort of features": lambda x: x.sort(-1).values,
        "flip of features": lambda x: x.flip(-1),
        "roll of features": lambda x: x.roll(1, -1),
        "topk of features": lambda x: x * (x >= x.topk(4, -1).values[..., -1:]),
        "argmax of features": lambda x: x * F.one_hot(x.argmax(-1), WIDTH),
        "bucketize": lambda x: x + torch.bucketize(x.detach(), x.new_tensor([-1.0, 0.0, 1.0])),
        "gather of features": lambda x: x.gather(-1, x.argsort(-1)),
        "complex": lambda x: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * (0.6 + 0.8j)
        ).flatten(-2),
        "fft of features": lambda x: torch.fft.fft(x).real,
        "isfinite": lambda x: torch.where(x.isfinite(), x, 0.0),
        "in place": lambda x: x.clone().mul_(2).add_(1).relu_(),
        "clamp_ of a view": lambda x: x.clone().view(-1, WIDTH).clamp_(-1, 1).view_as(x),
        "vmap over entries": lambda x: torch.vmap(lambda one: one.sin() * 2)(x),
    },
)

add_hidden(
    "weights",
    {
        "linear": lambda x, m, b: m.mix(x),
        "matmul": lambda x, m, b: x @ m.mix.weight,
        "einsum": lambda x, m, b: torch.einsum("bse,ef->bsf", x, m.mix.weight),
        "addmm": lambda x, m, b: torch.addmm(m.cls, x.flatten(0, 1), m.mix.weight).view_as(x),
        "baddbmm": lambda x, m, b: torch.baddbmm(x, x, m.mix.weight.expand(BATCH, -1, -1)),
        "tensordot": lambda x, m, b: torch.tensordot(x, m.mix.weight, 1),
        "bilinear": lambda x, m, b: F.bilinear(x, x, m.mix.weight.expand(WIDTH, -1, -1)),
        "prelu": lambda x, m, b: F.prelu(x.transpose(1, 2), m.cls).transpose(1, 2),
        "scale": lambda x, m, b: x * m.cls,
        "layer norm": lambda x, m, b: m.norm(x),
        "rms norm": lambda x, m, b: F.rms_norm(x, (WIDTH,), m.cls),
        "gated": lambda x, m, b: F.silu(m.mix(x)) * x,
        "low rank": lambda x, m, b: x + x @ m.mix.weight[:2].T @ m.mix.weight[:2],
        "experts": lambda x, m, b: (
            m.router(x).softmax(-1) @ m.router.weight + torch.tanh(m.mix(x))
        ),
        "top experts": lambda x, m, b: (
            x + m.router.weight[m.router(x).topk(2, -1).indices].sum(-2)
        ),
        "one hot experts": lambda x, m, b: (
            x + F.one_hot(m.router(x).argmax(-1), EXPERTS).to(x.dtype) @ m.router.weight
        ),
        "weights of tokens": lambda x, m, b: x * b.weights[..., None],
        "keep": lambda x, m, b: x * b.keep[..., None],
        "masked_fill of padding": lambda x, m, b: x.masked_fill(~b.keep[..., None], 0.0),
        "mask token": lambda x, m, b: torch.where((b.ids == 3)[..., None], m.cls, x),
        "places as rows": lambda x, m, b: x + m.rows[b.places],
        "places as numbers": lambda x, m, b: x * torch.cos(b.places[..., None] / 10),
        "labels embedded": lambda x, m, b: x + m.embed(b.labels),
        "normalize": lambda x, m, b: F.normalize(x, dim=-1),
        "cosine": lambda x, m, b: x * F.cosine_similarity(x, m.cls.expand_as(x), -1)[..., None],
        "cdist": lambda x, m, b: x + torch.cdist(x, m.router.weight.expand(BATCH, -1, -1)).sum(
            -1, keepdim=True
        ),
        "group norm": lambda x, m, b: F.group_norm(x.flatten(0, 1), 2).view_as(x),
        "fused qkv": lambda x, m, b: sum(m.first(x).split(WIDTH, -1)),
        "running mean": lambda x, m, b: x - m.seen.add_(1.0),
        "frozen": lambda x, m, b: x + m.mix(x).detach(),
        "codebook": lambda x, m, b: (
            x + (m.rows[:8][torch.cdist(x, m.rows[:8][None]).argmin(-1)] - x).detach()
        ),
    },
)  # fmt: skip

add_hidden("weights", {"channels": lambda x, m, b: m.part(x.transpose(1, 2)).transpose(1, 2)},
           part=lambda: nn.Conv1d(WIDTH, WIDTH, 1))  # fmt: skip

# --- Over the sequence -------------------------------------------------------------------------


def by_hand(x: Tensor, m: Model) -> Tensor:
    query, key, value = m.heads(x)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return x + join(scores.softmax(-1) @ value)


def linear_attention(x: Tensor, m: Model) -> Tensor:
    query, key, value = m.heads(x)
    return x + join(query.softmax(-1) @ (key.softmax(-2).mT @ value))


add_of_x(
    "reduce",
    {
        "mean": lambda x: x - x.mean(1, keepdim=True),
        "sum": lambda x: x + x.sum(1, keepdim=True) / 8,
        "mean of all": lambda x: x - x.mean(),
        "mean of entries": lambda x: x - x.mean(0),
        "mean of entries and tokens": lambda x: x - x.mean((0, 1)),
        "amax": lambda x: x - x.amax(1, keepdim=True),
        "amin": lambda x: x - x.amin(1, keepdim=True),
        "max": lambda x: x - x.max(1, keepdim=True).values,
        "std": lambda x: x / x.std(1, keepdim=True),
        "var": lambda x: x / x.var(1, keepdim=True),
        "std of all": lambda x: x / x.std(),
        "norm": lambda x: x / x.norm(dim=1, keepdim=True),
        "norm of all": lambda x: x / x.norm(),
        "normalize": lambda x: F.normalize(x, dim=1),
        "logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
        "softmax": lambda x: x.softmax(1) * 16,
        "log_softmax": lambda x: x.log_softmax(1) / 4,
        "softmax of entries": lambda x: x.softmax(0),
        "prod": lambda x: x + x.tanh().prod(1, keepdim=True),
        "median": lambda x: x - x.median(1, keepdim=True).values,
        "quantile": lambda x: x - x.quantile(0.3, 1, keepdim=True),
        "nansum": lambda x: x + x.nansum(1, keepdim=True) / 8,
        "any": lambda x: x * (x > 2.2).any(1, keepdim=True),
        "all": lambda x: x * (x < 2.2).all(1, keepdim=True),
        "count_nonzero": lambda x: x * (x > 0).count_nonzero(1)[:, None] / 8,
        "argmax": lambda x: x + x.gather(1, x.argmax(1, keepdim=True)),
        "argmin": lambda x: x * x.argmin(1, keepdim=True) / 8,
        "einsum": lambda x: x + torch.einsum("bse->be", x)[:, None] / 8,
        "gram of features": lambda x: x @ (x.mT @ x) / 64,
        "gram of tokens": lambda x: (x @ x.mT).softmax(-1) @ x,
        "gram of all": lambda x: x @ torch.einsum("bse,bsf->ef", x, x) / 64,
        "ones": lambda x: x + (x.new_ones(1, x.shape[1]) @ x) / 8,
        "aminmax": lambda x: x - x.aminmax(dim=1, keepdim=True).min,
        "mean of squares": lambda x: x / x.square().mean((1, 2), keepdim=True).sqrt(),
        "mean of the flat": lambda x: x - x.flatten(0, 1).mean(0),
        "layer norm of tokens": lambda x: F.layer_norm(x, x.shape[1:]),
        "group norm of tokens": lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
        "instance norm": lambda x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
        "batch norm": lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x),
        "batch norm of channels": lambda x: F.batch_norm(
            x.transpose(1, 2), None, None, training=True
        ).transpose(1, 2),
        "trace": lambda x: x + (x.mT @ x).diagonal(dim1=1, dim2=2).sum(-1)[:, None, None] / 64,
        "histogram": lambda x: x * torch.histc(x.detach(), 8, -3, 3)[3] / 64,
        "unique": lambda x: x * x.detach().round().unique().numel() / 8,
    },
)
add_of_x(
    "scan",
    {
        "cumsum": lambda x: x.cumsum(1) / 8,
        "cumprod": lambda x: x.tanh().cumprod(1),
        "cummax": lambda x: x.cummax(1).values,
        "cummin": lambda x: x.cummin(1).values,
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "flip": lambda x: x.flip(1),
        "flipped twice": lambda x: x.flip(1).cumsum(1).flip(1) / 8,
        "fliplr": lambda x: torch.fliplr(x),
        "diff": lambda x: x.diff(dim=1, prepend=x[:, :1]),
        "roll": lambda x: x.roll(1, 1),
        "roll back": lambda x: x.roll(-1, 1),
        "roll of two dims": lambda x: x.roll((1, 1), (0, 1)),
        "roll of the flat": lambda x: x.roll(1),
        "cumsum of entries": lambda x: x.cumsum(0),
        "running mean": lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
        "trapezoid": lambda x: x + torch.trapezoid(x, dim=1)[:, None] / 8,
        "cumsum of the flat": lambda x: x.flatten(0, 1).cumsum(0).view_as(x) / 8,
        "moving average": lambda x: stack_of_steps(x),
        "triangle": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x / 8,
        "fft": lambda x: torch.fft.fft(x, dim=1).real / 4,
        "fft of tokens and features": lambda x: torch.fft.fft2(x).real / 8,
        "sort": lambda x: x.sort(1).values,
        "sort and back": lambda x: x.gather(1, x.argsort(1)),
        "msort": lambda x: x.transpose(0, 1).msort().transpose(0, 1),
        "topk": lambda x: x + x.topk(4, 1).values.mean(1, keepdim=True),
        "kthvalue": lambda x: x - x.kthvalue(3, 1, keepdim=True).values,
        "rank of tokens": lambda x: x * x.argsort(1).argsort(1) / 16,
        "searchsorted": lambda x: (
            x * torch.searchsorted(x[..., 0].sort(1).values.detach(), x[..., 0].detach())[..., None]
        ) / 16,
        "top tokens": lambda x: x * (x.norm(dim=-1) >= x.norm(dim=-1).topk(5, 1).values[:, -1:])[
            ..., None
        ],
    },
)  # fmt: skip


def stack_of_steps(x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        states.append(state)
    return torch.stack(states, 1)


add_hidden("scan", {"gru": lambda x, m, b: m.part(x)[0]},
           part=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))  # fmt: skip
add_hidden("scan", {"lstm": lambda x, m, b: m.part(x)[0]},
           part=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))  # fmt: skip
add_hidden(
    "reduce",
    {
        "attention by hand": lambda x, m, b: by_hand(x, m),
        "linear attention": lambda x, m, b: linear_attention(x, m),
        "masked mean": lambda x, m, b: (
            x - (x * b.keep[..., None]).sum(1, keepdim=True) / b.keep.sum(1)[:, None, None]
        ),
        "count of kept": lambda x, m, b: x / b.keep.sum(),
        "lengths": lambda x, m, b: x * b.keep.sum(1)[:, None, None] / 16,
        "pooled by attention": lambda x, m, b: (
            x + ((x @ m.cls).softmax(1)[:, None] @ x)
        ),
        "mean of kept": lambda x, m, b: x - x[b.keep].mean(0),
        "squeeze and excite": lambda x, m, b: x * torch.sigmoid(m.mix(x.mean(1)))[:, None],
        "mean of parameters": lambda x, m, b: x - m.rows[: x.shape[1]].mean(0),
    },
)  # fmt: skip
add_hidden("reduce", {"batch norm with statistics": lambda x, m, b: m.part(x.mT).mT},
           part=lambda: nn.BatchNorm1d(WIDTH))  # fmt: skip

# --- Indices -----------------------------------------------------------------------------------

add_of_x(
    "index",
    {
        "reversed": lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
        "index_select": lambda x: x.index_select(1, torch.arange(x.shape[1]).flip(0)),
        "gather": lambda x: x.gather(1, torch.arange(x.shape[1]).flip(0)[:, None].expand_as(x)),
        "take_along_dim": lambda x: torch.take_along_dim(
            x, torch.arange(x.shape[1]).flip(0)[None, :, None], 1
        ),
        "every second": lambda x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
        "last": lambda x: x + x[:, -1:],
        "first": lambda x: x + x[:, :1],
        "middle": lambda x: x + x[:, x.shape[1] // 2][:, None],
        "one list": lambda x: x + x[:, [0]],
        "list": lambda x: x + x[:, [0, 5, -1]].sum(1, keepdim=True),
        "select": lambda x: x + x.select(1, 3)[:, None],
        "narrow": lambda x: x + x.narrow(1, 14, 2).sum(1, keepdim=True),
        "swapped halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
        "split": lambda x: torch.cat([x.split(5, 1)[1], x.split(5, 1)[0], x[:, 10:]], 1),
        "tensor_split": lambda x: torch.cat(x.tensor_split(3, 1)[::-1], 1),
        "unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1),
        "boolean": lambda x: x + x[x > 1].sum(),
        "masked_select": lambda x: x + x.masked_select(x > 1).sum(),
        "nonzero": lambda x: x + x[(x > 1).nonzero(as_tuple=True)].sum(),
        "take": lambda x: x + x.take(torch.tensor([0, 17, 200])).sum(),
        "diagonal": lambda x: x + x.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None],
        "tril": lambda x: x.tril(),
        "triu": lambda x: x.triu(1),
        "first entry": lambda x: x + x[0],
        "other entry": lambda x: x[[1, 0]],
        "features": lambda x: torch.cat([x[..., 4:], x[..., :4]], -1),
        "strided features": lambda x: x[..., ::2].repeat_interleave(2, -1),
        "one cell": lambda x: x + x[0, 5, 3],
        "unfold": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
        "as_strided": lambda x: x.contiguous().as_strided(x.shape, x.stride()),
        "permuted": lambda x: x[:, torch.randperm(x.shape[1], generator=generator_of(x))],
        "odd and even": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
        "interleaved": lambda x: torch.stack([x[:, 1::2], x[:, :-1:2]], 2).flatten(1, 2).sum(
            1, keepdim=True
        ) + x,
        "newaxis": lambda x: x[:, None, :, None].squeeze(1).squeeze(2),
        "ellipsis": lambda x: x[..., :8].repeat(1, 1, 2),
        "rows of entries": lambda x: x + x[torch.arange(2), torch.tensor([3, 20])][:, None],
        "index_add": lambda x: x.index_add(1, torch.tensor([3, 20]), x[:, 5:7]),
        "index_copy": lambda x: x.index_copy(1, torch.tensor([3, 11]), x[:, 5:7]),
        "index_fill": lambda x: x.index_fill(1, torch.tensor([3, 11]), 0.5),
        "scatter": lambda x: x.scatter(1, torch.full_like(x[:, :1], 11).long(), x[:, :1]),
        "scatter_add": lambda x: x.scatter_add(1, torch.full_like(x[:, :1], 11).long(), x[:, :1]),
        "scatter_reduce": lambda x: x.scatter_reduce(
            1, torch.full_like(x[:, :1], 11).long(), x[:, :1], "amax"
        ),
        "slice_scatter": lambda x: x.slice_scatter(x[:, :3], 1, 12, 15),
        "select_scatter": lambda x: x.select_scatter(x[:, 0], 1, 11),
        "diagonal_scatter": lambda x: x.diagonal_scatter(x.new_zeros(2, 16), dim1=1, dim2=2),
        "index_put": lambda x: x.index_put((torch.tensor([0]), torch.tensor([11])), x[0, 0]),
        "put": lambda x: x.put(torch.tensor([0, 180]), x.new_zeros(2)),
        "masked_scatter": lambda x: x.masked_scatter(x > 1.5, x.sin()),
        "one hot matrix": lambda x: (
            F.one_hot(torch.arange(x.shape[1]).flip(0), x.shape[1]).to(x.dtype) @ x
        ),
    },
)  # fmt: skip


def generator_of(x: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(x.shape[1] * 0)


def of_image(x: Tensor, m: Model, b: Batch) -> Tensor:
    """Put an image's five tokens among those of the text."""
    is_image = (b.places >= 14) & (b.places < 19)
    return x.masked_scatter(is_image[..., None].expand_as(x), b.image)


def group_means(x: Tensor, m: Model, b: Batch) -> Tensor:
    """Return x less the mean of all tokens of the same number."""
    flat, ids = x.flatten(0, 1), b.ids.flatten()
    counts = torch.bincount(ids, minlength=VOCAB).clamp(min=1)
    sums = x.new_zeros(VOCAB, WIDTH).index_add(0, ids, flat)
    return x - (sums / counts[:, None])[b.ids]


add_hidden(
    "index",
    {
        "image tokens": of_image,
        "means by number": group_means,
        "boolean of the batch": lambda x, m, b: x + x[b.keep].sum(0),
        "last that is kept": lambda x, m, b: (
            x + x[torch.arange(BATCH), b.keep.sum(1) - 1][:, None]
        ),
        "by the batch": lambda x, m, b: x.gather(1, b.places.flip(1)[..., None].expand_as(x)),
        "written by the batch": lambda x, m, b: torch.zeros_like(x).index_put(
            (torch.arange(BATCH)[:, None], b.places.flip(1)), x
        ),
        "argmax of ids": lambda x, m, b: x + x[torch.arange(BATCH), b.ids.argmax(1)][:, None],
        "capacity": lambda x, m, b: (
            x * (F.one_hot(m.router(x).argmax(-1), EXPERTS).cumsum(1) <= 3).any(-1, keepdim=True)
        ),
        "depths": lambda x, m, b: x.scatter(
            1, m.router(x)[..., :1].topk(5, 1).indices.expand(-1, -1, WIDTH), 0.0
        ),
        "packed and back": lambda x, m, b: torch.zeros_like(x).masked_scatter(
            b.keep[..., None].expand_as(x), m.mix(x[b.keep])
        ),
        "boolean write": lambda x, m, b: x.index_put((b.keep,), m.cls),
        "repeat_interleave": lambda x, m, b: x[:, :7].repeat_interleave(
            torch.tensor([1] * 6 + [x.shape[1] - 6]), 1
        ),
        "embedding of places": lambda x, m, b: F.embedding(b.places, m.rows) + x,
        "rows by labels": lambda x, m, b: x + m.rows[b.labels],
        "segment sums": lambda x, m, b: x + torch.zeros_like(x).scatter_add(
            1, (b.places // 4)[..., None].expand_as(x), x
        ),
    },
)  # fmt: skip

# --- Writes in place ---------------------------------------------------------------------------

# For a tensor (B, S, E); 17 tokens of 33, and 16 of 32, are the first rank's.
INDICES: dict[str, Any] = {
    "first": (slice(None), 0),
    "last": (slice(None), -1),
    "one": (slice(None), 5),
    "head": (slice(None), slice(None, 3)),
    "tail": (slice(None), slice(-3, None)),
    "all but first": (slice(None), slice(1, None)),
    "over the border": (slice(None), slice(14, 19)),
    "odd": (slice(None), slice(1, None, 2)),
    "entry": 0,
    "cells": (1, slice(4, 9), slice(2, 6)),
    "features": (..., slice(None, 4)),
    "token": (0, 5),
    "list": (slice(None), [0, 5, -1]),
}


def assign_number(y: Tensor, index: Any, m: Model) -> None:
    y[index] = 0.5


def assign_parameter(y: Tensor, index: Any, m: Model) -> None:
    target = y[index]
    y[index] = m.cls[: target.shape[-1]]


def assign_itself(y: Tensor, index: Any, m: Model) -> None:
    y[index] = y[index].clone().sin() * 3


def multiply(y: Tensor, index: Any, m: Model) -> None:
    y[index] *= 2


def add_parameter(y: Tensor, index: Any, m: Model) -> None:
    y[index] += m.cls[: y[index].shape[-1]]


def zero(y: Tensor, index: Any, m: Model) -> None:
    y[index].zero_()


def copy(y: Tensor, index: Any, m: Model) -> None:
    y[index].copy_(m.cls[: y[index].shape[-1]])


def fill_masked(y: Tensor, index: Any, m: Model) -> None:
    y[index].masked_fill_(y[index] < 0, 0.25)


def written(write: Callable[..., None], index: Any) -> OfHidden:
    def function(x: Tensor, m: Model, b: Batch) -> Tensor:
        y = x.clone()
        write(y, index, m)
        return y

    return function


for _write in (assign_number, assign_parameter, assign_itself, multiply, add_parameter, zero, copy,
               fill_masked):  # fmt: skip
    add_hidden(
        "write",
        {f"{_write.__name__} {name}": written(_write, index) for name, index in INDICES.items()},
    )

# Views of y (B, S, E), which are written to.
VIEWS: dict[str, OfX] = {
    "transposed": lambda y: y.transpose(1, 2)[..., 3:20],
    "flattened": lambda y: y.view(-1, WIDTH)[5:20],
    "all flattened": lambda y: y.view(-1)[70:300],
    "heads": lambda y: y.unflatten(-1, (2, 8))[:, 3:20, 0],
    "narrow": lambda y: y.narrow(1, 12, 8),
    "select": lambda y: y.select(1, 20 % y.shape[1]),
    "diagonal": lambda y: y.diagonal(dim1=1, dim2=2),
    "chunk": lambda y: y.chunk(2, 1)[1],
    "split": lambda y: y.split(10, 1)[1],
    "tensor_split": lambda y: y.tensor_split(3, 1)[1],
    "unbind": lambda y: y.unbind(1)[5],
    "entry": lambda y: y.unbind(0)[1],
    "permuted": lambda y: y.permute(1, 0, 2)[4:20],
    "unsqueezed": lambda y: y[:, None, 2:],
    "view of view": lambda y: y[:, 2:][:, 3:9],
    "steps": lambda y: y[:, 2::3],
    "whole": lambda y: y.view_as(y),
    "as_strided": lambda y: y.as_strided((2, 3, WIDTH), y.stride()),
    "unfold": lambda y: y.unfold(1, 4, 4)[:, 1],
    "swapped": lambda y: y.swapaxes(0, 1)[1:3],
    "real": lambda y: torch.view_as_complex(y.unflatten(-1, (-1, 2))).real[:, 4:],
    "detached": lambda y: y.detach()[:, 4:8],
}


# Autograd forbids writes to views that were made several at once.
OF_SEVERAL = ("chunk", "split", "unbind", "entry")


def written_view(name: str, write: Callable[[Tensor], Any]) -> OfX:
    def function(x: Tensor) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        y = y.detach() if name in OF_SEVERAL else y
        write(VIEWS[name](y))
        return y + x

    return function


for _name, _write_view in {
    "multiply": lambda view: view.mul_(2.0),
    "fill": lambda view: view.fill_(0.5),
    "sine": lambda view: view.copy_(view.clone().sin()),
}.items():
    add_of_x("write", {f"{_name} view {name}": written_view(name, _write_view) for name in VIEWS})


def token_shift(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return x + y


def token_shift_back(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape)
    y[:, :-1].copy_(x[:, 1:])
    return x + y


def token_shift_half(x: Tensor) -> Tensor:
    """As in RWKV: half of the features come from the token before."""
    y = x.clone()
    y[:, 1:, :8] = x[:, :-1, :8]
    y[:, :1, :8] = 0
    return y


def stale_view(x: Tensor) -> Tensor:
    y = x.clone()
    view = y[:, 5:20]
    y.mul_(2)
    return x + view.sum(1, keepdim=True) / 8


def stale_token(x: Tensor) -> Tensor:
    y = x.clone()
    last = y[:, -1]
    y.add_(1)
    return x + last[:, None]


def stale_transposed(x: Tensor) -> Tensor:
    y = x.clone()
    view = y.transpose(1, 2)
    y[:, 3:20] = 0
    return view.transpose(1, 2) * 2


def two_views(x: Tensor) -> Tensor:
    y = x.clone()
    one, other = y[:, 4:20], y[:, 10:26]
    one.mul_(2)
    return x + other.sum(1, keepdim=True) / 8


def swapped_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    first = y[:, 0].clone()
    y[:, 0] = y[:, -1]
    y[:, -1] = first
    return y


def cache_of_keys(x: Tensor) -> Tensor:
    cache = x.new_zeros(x.shape[0], x.shape[1], WIDTH)
    for index in range(3):
        cache[:, index] = x[:, index]
    return x + cache


def added_to_itself(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] += x[:, :-1]
    return y


def overlapping(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] = y[:, :-1].clone()
    return y


def halves_written(x: Tensor) -> Tensor:
    y, half = torch.empty_like(x), x.shape[1] // 2
    y[:, :half] = x[:, :half].sin()
    y[:, half:] = x[:, half:].cos()
    return y


def out_of(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.sin(x.detach(), out=y)
    return x + y


def written_mask(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], dtype=x.dtype)
    mask[:3] = 0
    return x * mask[:, None]


def rotary_written(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., ::2], y[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return x + y


def written_in_loop(x: Tensor) -> Tensor:
    y = x.clone()
    for index in range(2, 6):
        y[:, index] = y[:, index] + 0.5 * y[:, index - 1]
    return y


def written_after_use(x: Tensor) -> Tensor:
    y = x.clone()
    before = y.sum(-1, keepdim=True)
    y[:, 4:20] = 0
    return y + before


def written_under_no_grad(x: Tensor) -> Tensor:
    y = x.clone()
    with torch.no_grad():
        y[:, 4:20] *= 2
    return y


def unsafe_write(x: Tensor) -> Tensor:
    y = x.clone()
    y.data[:, 4:20] *= 2
    return y


def resized_by_index(x: Tensor) -> Tensor:
    y = x.clone()
    y.index_fill_(1, torch.tensor([0, 11]), 0.0)
    y.index_add_(1, torch.tensor([3]), x[:, :1])
    return y


def scattered(x: Tensor) -> Tensor:
    y = x.clone()
    y.scatter_(1, torch.full_like(x[:, :1], 11).long(), 0.5)
    return y


def rolled_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.copy_(y.roll(1, 1))
    return y


def pad_and_cut(x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 1, -1))


def of_rows(x: Tensor) -> Tensor:
    y = x.detach().clone()
    for row in y:
        row[3:6] = 0.5
    return x + y


add_of_x(
    "write",
    {
        function.__name__.replace("_", " "): function
        for function in (
            token_shift, token_shift_back, token_shift_half, stale_view, stale_token,
            stale_transposed, two_views, swapped_in_place, cache_of_keys, added_to_itself,
            overlapping, halves_written, out_of, written_mask, rotary_written, written_in_loop,
            written_after_use, written_under_no_grad, unsafe_write, resized_by_index, scattered,
            rolled_in_place, pad_and_cut, of_rows,
        )
    },
)  # fmt: skip


def write_kept(x: Tensor, m: Model, b: Batch) -> Tensor:
    y = x.clone()
    y[b.keep] = m.cls
    return y


def write_where(x: Tensor, m: Model, b: Batch) -> Tensor:
    y = x.clone()
    y[b.ids == 3] = 0.0
    return y


def write_where_positive(x: Tensor, m: Model, b: Batch) -> Tensor:
    y = x.clone()
    y[y > 1] = 1.0
    return y


def write_added_at_ids(x: Tensor, m: Model, b: Batch) -> Tensor:
    y = x.clone()
    y[b.ids == 3] += 1.0
    return y


def write_image(x: Tensor, m: Model, b: Batch) -> Tensor:
    y = x.clone()
    y[:, 14:19] = b.image
    return y


def write_at_lengths(x: Tensor, m: Model, b: Batch) -> Tensor:
    y = x.clone()
    y[torch.arange(BATCH), b.keep.sum(1) - 1] = m.cls
    return y


def write_buffer(x: Tensor, m: Model, b: Batch) -> Tensor:
    m.seen.copy_(x.detach().mean((0, 1)))
    return x - m.seen


def write_moving_average(x: Tensor, m: Model, b: Batch) -> Tensor:
    m.seen.mul_(0.9).add_(x.detach()[:, -1].mean(0), alpha=0.1)
    return x - m.seen


def write_ids(x: Tensor, m: Model, b: Batch) -> Tensor:
    shifted = b.ids.clone()
    shifted[:, 1:] = b.ids[:, :-1]
    shifted[:, 0] = 1
    return x + m.embed(shifted)


def write_rows(x: Tensor, m: Model, b: Batch) -> Tensor:
    table = m.rows.clone()
    table[3:9] = 0
    return x + table[b.places]


def write_labels(x: Tensor, m: Model, b: Batch) -> Tensor:
    labels = b.labels.clone()
    labels[:, :4] = 0
    return x + m.embed(labels)


add_hidden(
    "write",
    {
        function.__name__.removeprefix("write_"): function
        for function in (
            write_kept, write_where, write_where_positive, write_added_at_ids, write_image,
            write_at_lengths, write_buffer, write_moving_average, write_ids, write_rows,
            write_labels,
        )
    },
)  # fmt: skip

# --- Shapes ------------------------------------------------------------------------------------


def in_windows(x: Tensor, function: OfX) -> Tensor:
    """Apply a function to windows of tokens that are entries of a batch."""
    windows = x.reshape(-1, pieces_of(x), WIDTH)
    return function(windows).reshape(x.shape)


add_of_x(
    "shape",
    {
        "flat": lambda x: x.flatten(0, 1).sin().unflatten(0, (BATCH, -1)),
        "flat view": lambda x: x.view(-1, WIDTH).sin().view(x.shape),
        "heads": lambda x: x.view(*x.shape[:2], 2, 8).sin().flatten(2),
        "heads first": lambda x: x.unflatten(-1, (2, 8)).permute(2, 0, 1, 3).sin().permute(
            1, 2, 0, 3
        ).flatten(2),
        "tokens first": lambda x: x.transpose(0, 1).contiguous().sin().transpose(0, 1),
        "features second": lambda x: x.mT.contiguous().sin().mT,
        "tokens and features": lambda x: x.flatten(1).sin().unflatten(1, (-1, WIDTH)),
        "everything": lambda x: x.flatten().sin().view_as(x),
        "of features": lambda x: x.flatten(1).sum(1)[:, None, None] / 8 + x,
        "unflatten tokens": lambda x: x.unflatten(1, (-1, pieces_of(x))).sin().flatten(1, 2),
        "windows": lambda x: in_windows(x, lambda w: w - w.mean(1, keepdim=True)),
        "windows, tokenwise": lambda x: in_windows(x, torch.sin),
        "windows, mixed": lambda x: in_windows(x, lambda w: w.flip(1)),
        "grid": lambda x: x.unflatten(1, (pieces_of(x), -1)).transpose(1, 2).flatten(1, 2),
        "halves": lambda x: x[:, : x.shape[1] // 2 * 2].view(
            BATCH, 2, x.shape[1] // 2, WIDTH
        ).mean(2).mean(1)[:, None] + x,
        "pairs": lambda x: x + x[:, : x.shape[1] // 2 * 2].reshape(BATCH, -1, 2 * WIDTH).sin().mean(
            1
        ).unflatten(-1, (2, -1)).sum(1)[:, None],
        "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1).mean(2),
        "repeat": lambda x: x.repeat(1, 2, 1)[:, : x.shape[1]],
        "tile of features": lambda x: x.tile(1, 1, 2)[..., :WIDTH],
        "repeat of entries": lambda x: x.repeat(2, 1, 1)[:BATCH],
        "stack": lambda x: torch.stack([x, x.sin()], 1).sum(1),
        "stack of features": lambda x: torch.stack([x, x.sin()], -1).mean(-1),
        "cat of entries": lambda x: torch.cat([x, x.sin()])[BATCH:],
        "cat of tokens": lambda x: torch.cat([x, x.sin()], 1)[:, : x.shape[1]],
        "cat of tokens, second": lambda x: torch.cat([x, x.sin()], 1)[:, x.shape[1] :],
        "movedim": lambda x: x.movedim(1, 0).sin().movedim(0, 1),
        "squeeze": lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(-1),
        "split features": lambda x: torch.cat(x.split([6, 10], -1)[::-1], -1),
        "hstack": lambda x: torch.hstack([x, x])[:, : x.shape[1]],
        "ravel of entries": lambda x: torch.stack([one.sin() for one in x]),
        "reshape with batch": lambda x: x.reshape(-1, 2, 8).sin().reshape(x.shape),
        "reshape across": lambda x: x.reshape(BATCH, WIDTH, -1).sin().reshape(x.shape),
        "reshape mixing": lambda x: x.reshape(BATCH, WIDTH, -1).mT.reshape(x.shape),
        "rot90": lambda x: x.rot90(1, (1, 2)).rot90(-1, (1, 2)),
        "pixel shuffle": lambda x: F.pixel_unshuffle(x[:, None, : x.shape[1] // 2 * 2], 2).mean(
            (1, 2, 3)
        )[:, None, None] + x,
        "kron": lambda x: torch.kron(x, x.new_ones(1, 1, 2))[..., ::2],
        "block_diag": lambda x: torch.block_diag(*x)[: x.shape[1], :WIDTH] + x,
        "meshgrid": lambda x: x + torch.meshgrid(x[0, :, 0], x[0, 0], indexing="ij")[0],
        "pad and cut": lambda x: F.pad(x, (0, 0, 0, 3))[:, : x.shape[1]],
        "pad in front and cut": lambda x: F.pad(x, (0, 0, 3, 0))[:, : x.shape[1]],
        "padded to a multiple": lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % 8)).unflatten(
            1, (-1, 8)
        ).mean(2).repeat_interleave(8, 1)[:, : x.shape[1]] + x,
        "pad of features": lambda x: F.pad(x, (1, 1))[..., 1:-1],
        "circular pad": lambda x: F.pad(x.mT, (1, 1), mode="circular")[..., 2:].mT,
        "list of tokens": lambda x: torch.cat([x[:, i : i + 1] for i in range(x.shape[1])], 1),
    },
)  # fmt: skip
add_hidden(
    "shape",
    {
        "attention in windows": lambda x, m, b: in_windows(
            x, lambda w: m.attend(w, m.second, is_causal=False)
        ),
        "causal attention in windows": lambda x, m, b: in_windows(x, lambda w: m.attend(w)),
        "attention over entries": lambda x, m, b: m.attend(
            x.transpose(0, 1), is_causal=False
        ).transpose(0, 1),
        "attention over heads": lambda x, m, b: x + F.scaled_dot_product_attention(
            *(x.unflatten(-1, (2, 8)),) * 3
        ).flatten(2),
        "attention over features": lambda x, m, b: F.scaled_dot_product_attention(
            x.mT, x.mT, x.mT
        ).mT + m.mix(x),
        "attention without heads": lambda x, m, b: F.scaled_dot_product_attention(
            *m.first(x).chunk(3, -1), is_causal=True
        ),
        "attention of the flat": lambda x, m, b: m.attend(x.flatten(0, 1)[None]).view_as(x),
        "attention of halves": lambda x, m, b: torch.cat(
            [m.attend(half) for half in x.chunk(2, 1)], 1
        ),
        "attention of one entry": lambda x, m, b: torch.cat([m.attend(x[:1]), x[1:]]),
        "attention of each entry": lambda x, m, b: torch.cat([m.attend(one[None]) for one in x]),
        "attention of steps": lambda x, m, b: x + m.attend(x[:, ::2]).mean(1, keepdim=True),
        "attention of columns": lambda x, m, b: in_windows(
            x, lambda w: m.attend(w.transpose(0, 1), is_causal=False).transpose(0, 1)
        ),
        "attention behind a cut": lambda x, m, b: torch.cat([x[:, :4], m.attend(x[:, 4:])], 1),
        "attention flipped": lambda x, m, b: m.attend(x.flip(1)).flip(1),
        "mixer": lambda x, m, b: x + (m.rows[: x.shape[1]] @ m.rows[: x.shape[1]].T / 16) @ x,
        "vmap over tokens": lambda x, m, b: torch.vmap(m.mix, 1, 1)(x),
        "vmap of attention": lambda x, m, b: torch.vmap(lambda one: m.attend(one[None])[0])(x),
    },
)  # fmt: skip

# --- Positions that a model makes --------------------------------------------------------------


def sinusoids(places: Tensor) -> Tensor:
    powers = 100.0 ** -(torch.arange(WIDTH // 2, dtype=torch.float64) / (WIDTH // 2))
    angles = places[..., None] * powers
    return torch.cat([angles.sin(), angles.cos()], -1)


def numpy_sinusoids(length: int) -> Tensor:
    # Dynamo (2.13) divides whole numbers of numpy in float32.
    places, features = (np.arange(size, dtype=np.float64) for size in (length, WIDTH))
    return torch.from_numpy(np.sin(places[:, None] / 100 ** (features[None] / WIDTH)))


POSITIONS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "arange": lambda x, b: torch.arange(x.shape[1]),
    "arange of ids": lambda x, b: torch.arange(b.ids.shape[1], device=x.device)[None],
    "arange of len": lambda x, b: torch.arange(len(b.ids[0])),
    "descending": lambda x, b: torch.arange(x.shape[1] - 1, -1, -1),
    "flipped": lambda x, b: torch.arange(x.shape[1]).flip(0),
    "negative": lambda x, b: torch.arange(-x.shape[1], 0) + LONGEST,
    "from one": lambda x, b: torch.arange(1, x.shape[1] + 1),
    "in steps": lambda x, b: torch.arange(0, 2 * x.shape[1], 2) % LONGEST,
    "modulo": lambda x, b: torch.arange(x.shape[1]) % 4,
    "divided": lambda x, b: torch.arange(x.shape[1]) // 4,
    "list": lambda x, b: torch.tensor(list(range(x.shape[1]))),
    "range": lambda x, b: torch.tensor([2 * k % LONGEST for k in range(x.shape[1])]),
    "new_tensor": lambda x, b: b.ids.new_tensor(list(range(x.shape[1]))),
    "stacked": lambda x, b: torch.stack([torch.tensor(k) for k in range(x.shape[1])]),
    "numpy": lambda x, b: torch.from_numpy(np.arange(x.shape[1])),
    "linspace": lambda x, b: torch.linspace(0, 1, x.shape[1], dtype=x.dtype),
    "cumsum of ones": lambda x, b: torch.ones(x.shape[1], dtype=torch.long).cumsum(0) - 1,
    "cumsum of ones_like": lambda x, b: torch.ones_like(b.ids).cumsum(1) - 1,
    "cumsum of keep": lambda x, b: (b.keep.long().cumsum(1) - 1).clamp(min=0),
    "cumsum of ids": lambda x, b: (b.ids != 3).long().cumsum(1),
    "nonzero": lambda x, b: torch.ones(x.shape[1]).nonzero()[:, 0],
    "full": lambda x, b: torch.full((x.shape[1],), 3),
    "zeros": lambda x, b: torch.zeros(x.shape[1], dtype=torch.long),
    "eye": lambda x, b: torch.eye(x.shape[1]).argmax(1),
    "given": lambda x, b: b.places,
    "given, shifted": lambda x, b: b.places + 2,
    "of its minimum": lambda x, b: b.places - b.places.min(),
    "of its maximum": lambda x, b: b.places.max() - b.places,
    "of its first": lambda x, b: b.places - b.places[:, :1],
    "meshgrid": lambda x, b: torch.meshgrid(torch.arange(BATCH), torch.arange(x.shape[1]),
                                            indexing="ij")[1],
    "clamped": lambda x, b: torch.arange(LONGEST)[: x.shape[1]].clamp(max=20),
    "from the end": lambda x, b: torch.arange(LONGEST)[-x.shape[1] :],
    "unfolded": lambda x, b: torch.arange(2 * x.shape[1]).view(-1, 2)[:, 0] % LONGEST,
    "expanded": lambda x, b: torch.arange(x.shape[1]).expand(BATCH, -1),
    "of a mask": lambda x, b: torch.where(b.keep, torch.arange(x.shape[1]), 0),
}  # fmt: skip


def embedded_at(position: Callable[[Tensor, Batch], Tensor]) -> OfHidden:
    """Add the positions' rows if they are integers, else themselves."""

    def function(x: Tensor, m: Model, b: Batch) -> Tensor:
        places = position(x, b)
        return x + (m.rows[places] if not places.is_floating_point() else places[..., None])

    return function


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    turned = torch.cat([-right, left], -1)
    return x * angles.cos() + turned * angles.sin()


def rope(x: Tensor, m: Model, places: Tensor) -> Tensor:
    """Attend with queries and keys that are rotated by places (B or none, S)."""
    query, key, value = m.heads(x)
    half = torch.arange(4, dtype=x.dtype)
    angles = (places[..., None] * 10.0 ** -(half / 4)).repeat_interleave(2, -1).unsqueeze(-3)
    return x + attention(rotate(query, angles), rotate(key, angles), value, is_causal=True)


add_hidden("positions", {name: embedded_at(position) for name, position in POSITIONS.items()})
add_hidden(
    "positions",
    {
        "rows": lambda x, m, b: x + m.rows[: x.shape[1]],
        "last rows": lambda x, m, b: x + m.rows[-x.shape[1] :],
        "rows from two": lambda x, m, b: x + m.rows[2 : x.shape[1] + 2],
        "rows by narrow": lambda x, m, b: x + m.rows.narrow(0, 0, x.shape[1]),
        "rows interpolated": lambda x, m, b: x + F.interpolate(
            m.rows.T[None], x.shape[1], mode="linear"
        )[0].T,
        "sinusoids": lambda x, m, b: x + sinusoids(torch.arange(x.shape[1])),
        "sinusoids of given": lambda x, m, b: x + sinusoids(b.places),
        "numpy sinusoids": lambda x, m, b: x + numpy_sinusoids(x.shape[1]),
        "rope": lambda x, m, b: rope(x, m, torch.arange(x.shape[1])),
        "rope of given": lambda x, m, b: rope(x, m, b.places),
        "rope of a list": lambda x, m, b: rope(x, m, torch.tensor(list(range(x.shape[1])))),
        "rope backwards": lambda x, m, b: rope(x, m, torch.arange(x.shape[1], 0, -1)),
        "rope of keep": lambda x, m, b: rope(x, m, b.keep.cumsum(1)),
        "scaled by length": lambda x, m, b: x / x.shape[1],
        "scaled by log of length": lambda x, m, b: x * math.log(x.shape[1]),
        "scaled by numel": lambda x, m, b: x / x.numel() * 100,
        "scaled by size of ids": lambda x, m, b: x * b.ids.size(1) / 16,
        "decay": lambda x, m, b: x * 0.9 ** torch.arange(x.shape[1], dtype=x.dtype)[:, None],
        "first token only": lambda x, m, b: x * (torch.arange(x.shape[1]) > 0)[:, None],
        "first given only": lambda x, m, b: x * (b.places > 0)[..., None],
        "eye matrix": lambda x, m, b: torch.eye(x.shape[1], dtype=x.dtype) @ x,
        "hat": lambda x, m, b: x * torch.hann_window(x.shape[1], dtype=x.dtype)[:, None],
        "one hot": lambda x, m, b: x + F.one_hot(torch.arange(x.shape[1]), LONGEST).to(x.dtype)
        @ m.rows,
        "empty and filled": lambda x, m, b: x + torch.empty(x.shape[1], 1, dtype=x.dtype).fill_(2),
        "ones": lambda x, m, b: x + torch.ones(x.shape[1], WIDTH, dtype=x.dtype),
        "random with a seed": lambda x, m, b: x
        + torch.randn(x.shape[1], 1, dtype=x.dtype, generator=generator_of(x)),
    },
)  # fmt: skip

# --- Keys, values and masks --------------------------------------------------------------------


def with_heads(function: Callable[..., Tensor]) -> OfHidden:
    """Make a function of the heads, (q, k, v, m, b) -> (B, S, E), one of hidden states."""
    return lambda x, m, b: x + function(*m.heads(x), m, b)


def rows_as_heads(rows: Tensor) -> Tensor:
    return rows.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2).expand(BATCH, -1, -1, -1)


KEYS: dict[str, Callable[..., Tensor]] = {
    "parameters": lambda q, k, v, m, b: attention(
        q, rows_as_heads(m.rows[: q.shape[2]]), v, is_causal=True
    ),
    "and values parameters": lambda q, k, v, m, b: attention(
        q, rows_as_heads(m.rows[:7]), rows_as_heads(m.rows[7:14])
    ),
    "queries are parameters": lambda q, k, v, m, b: attention(
        rows_as_heads(m.rows[: q.shape[2]]), k, v, is_causal=True
    ),
    "prefix": lambda q, k, v, m, b: attention(
        q, torch.cat([rows_as_heads(m.rows[:3]), k], 2), torch.cat([rows_as_heads(m.rows[3:6]), v],
                                                                   2)
    ),
    "a zero more": lambda q, k, v, m, b: attention(
        q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    ),
    "first half": lambda q, k, v, m, b: attention(
        q, k[:, :, : q.shape[2] // 2], v[:, :, : q.shape[2] // 2]
    ),
    "second half": lambda q, k, v, m, b: attention(
        q, k[:, :, q.shape[2] // 2 :], v[:, :, q.shape[2] // 2 :]
    ),
    "every second": lambda q, k, v, m, b: attention(q, k[:, :, ::2], v[:, :, ::2]),
    "all but first": lambda q, k, v, m, b: attention(q, k[:, :, 1:], v[:, :, 1:]),
    "reversed": lambda q, k, v, m, b: attention(q, k.flip(2), v.flip(2), is_causal=True),
    "shifted": lambda q, k, v, m, b: attention(q, k.roll(1, 2), v, is_causal=True),
    "shifted by pad": lambda q, k, v, m, b: attention(
        q, F.pad(k, (0, 0, 1, -1)), v, is_causal=True
    ),
    "sorted": lambda q, k, v, m, b: attention(q, k.sort(2).values, v, is_causal=True),
    "cumulated": lambda q, k, v, m, b: attention(q, k.cumsum(2) / 8, v, is_causal=True),
    "pooled": lambda q, k, v, m, b: attention(
        q, *(F.avg_pool1d(t.flatten(0, 1).mT, 2).mT.unflatten(0, (BATCH, HEADS)) for t in (k, v))
    ),
    "centered": lambda q, k, v, m, b: attention(q, k - k.mean(2, keepdim=True), v, is_causal=True),
    "detached": lambda q, k, v, m, b: attention(q, k.detach(), v.detach(), is_causal=True),
    "normalized": lambda q, k, v, m, b: attention(
        F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, is_causal=True, scale=3.0
    ),
    "of the image": lambda q, k, v, m, b: attention(q, *m.heads(b.image, m.second)[1:]),
    "of the labels": lambda q, k, v, m, b: attention(
        q, *m.heads(m.embed(b.labels), m.second)[1:], is_causal=True
    ),
    "of the first entry": lambda q, k, v, m, b: attention(
        q, k[:1].expand_as(k), v[:1].expand_as(v), is_causal=True
    ),
    "one head": lambda q, k, v, m, b: attention(
        q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True
    ),
    "one head, expanded": lambda q, k, v, m, b: attention(
        q, k[:, :1].expand_as(k), v[:, :1].repeat(1, HEADS, 1, 1), is_causal=True
    ),
    "of one token": lambda q, k, v, m, b: attention(q, k[:, :, :1], v[:, :, :1]),
    "last query": lambda q, k, v, m, b: attention(q[:, :, -1:], k, v),
    "first query": lambda q, k, v, m, b: attention(q[:, :, :1], k, v),
    "pooled query": lambda q, k, v, m, b: attention(q.mean(2, keepdim=True), k, v),
    "first queries": lambda q, k, v, m, b: F.pad(
        attention(q[:, :, :9], k, v), (0, 0, 0, q.shape[2] - 9)
    ),
    "scaled by length": lambda q, k, v, m, b: attention(
        q * math.log(q.shape[2]), k, v, is_causal=True
    ),
    "all the same": lambda q, k, v, m, b: attention(q, q, q, is_causal=True),
    "full": lambda q, k, v, m, b: attention(q, k, v),
    "doubled": lambda q, k, v, m, b: attention(
        q, torch.cat([k, k.sin()], 2), torch.cat([v, v.sin()], 2)
    ),
    "with the image": lambda q, k, v, m, b: attention(
        q, *(torch.cat(pair, 2) for pair in zip(m.heads(b.image, m.second)[1:], (k, v),
                                                strict=True))
    ),
    "attended twice": lambda q, k, v, m, b: attention(
        F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v, is_causal=True
    ),
    "heads as tokens": lambda q, k, v, m, b: F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v))
    ).flatten(2),
    "difference": lambda q, k, v, m, b: attention(q, k, v, is_causal=True)
    - 0.3 * attention(k, q, v, is_causal=True),
    "values scaled by place": lambda q, k, v, m, b: attention(
        q, k, v * torch.arange(v.shape[2])[:, None] / 16, is_causal=True
    ),
    "float32": lambda q, k, v, m, b: attention(q, k, v, is_causal=True)
    + 0 * attention(q.float(), k.float(), v.float(), is_causal=True).double(),
}  # fmt: skip

add_hidden("keys", {name: with_heads(function) for name, function in KEYS.items()})


def distance(length: int) -> Tensor:
    place = torch.arange(length)
    return place[:, None] - place[None]


def written_causal_mask(length: int) -> Tensor:
    mask = torch.zeros(length, length, dtype=torch.bool)
    for row in range(length):
        mask[row, : row + 1] = True
    return mask


MASKS: dict[str, Callable[..., Tensor]] = {
    "tril": lambda n, m, b: torch.ones(n, n, dtype=torch.bool).tril(),
    "arange": lambda n, m, b: distance(n) >= 0,
    "window": lambda n, m, b: (distance(n) >= 0) & (distance(n) < 5),
    "triu of -inf": lambda n, m, b: torch.full((n, n), -math.inf, dtype=torch.float64).triu(1),
    "padding": lambda n, m, b: b.keep[:, None, None] & (distance(n) >= 0),
    "only padding": lambda n, m, b: b.keep[:, None, None],
    "documents": lambda n, m, b: (
        ((b.places // 5)[:, :, None] == (b.places // 5)[:, None])[:, None] & (distance(n) >= 0)
    ),
    "documents of ids": lambda n, m, b: (
        ((b.ids == 3).cumsum(1)[:, :, None] == (b.ids == 3).cumsum(1)[:, None])[:, None]
        & (distance(n) >= 0)
    ),
    "prefix": lambda n, m, b: (distance(n) >= 0) | (torch.arange(n) < 6),
    "given places": lambda n, m, b: (b.places[:, :, None] >= b.places[:, None])[:, None],
    "alibi": lambda n, m, b: (-distance(n).abs() * torch.tensor([[[0.5]], [[0.25]]])).double(),
    "relative": lambda n, m, b: m.rows[distance(n).clamp(-8, 8) + 8][..., :HEADS].permute(2, 0, 1),
    "dilated": lambda n, m, b: (distance(n) >= 0) & (distance(n) % 3 == 0),
    "same number": lambda n, m, b: (
        (b.ids[:, :, None] == b.ids[:, None])[:, None] | (distance(n) == 0)
    ),
    "loop": lambda n, m, b: written_causal_mask(n),
    "numpy": lambda n, m, b: torch.from_numpy(np.tri(n, dtype=bool)),
    "of a parameter": lambda n, m, b: m.rows[:n] @ m.rows[:n].T / 4,
    "bias of keys": lambda n, m, b: m.rows[:n, 0][None],
    "not itself": lambda n, m, b: ~torch.eye(n, dtype=torch.bool),
    "reversed": lambda n, m, b: distance(n) <= 0,
    "random": lambda n, m, b: (
        torch.rand(n, n, generator=torch.Generator().manual_seed(1)) < 0.5
    ) | (distance(n) == 0),
    "length": lambda n, m, b: torch.arange(n) < b.keep.sum(1)[:, None, None, None],
}  # fmt: skip


def masked(mask: Callable[..., Tensor]) -> OfHidden:
    return lambda x, m, b: m.attend(x, attn_mask=mask(x.shape[1], m, b))


add_hidden("mask", {name: masked(mask) for name, mask in MASKS.items()})

# --- Tokens that are put in, replaced or left out ----------------------------------------------


def registers(x: Tensor, m: Model) -> Tensor:
    extra = m.rows[:4].expand(BATCH, -1, -1)
    return m.attend(torch.cat([extra, x], 1))[:, 4:]


def padded_to_multiple(x: Tensor, m: Model) -> Tensor:
    length = x.shape[1]
    return m.attend(F.pad(x, (0, 0, 0, -length % 8)))[:, :length]


add_hidden(
    "tokens",
    {
        "first replaced": lambda x, m, b: torch.cat([m.cls.expand(BATCH, 1, -1), x[:, 1:]], 1),
        "last replaced": lambda x, m, b: torch.cat([x[:, :-1], m.cls.expand(BATCH, 1, -1)], 1),
        "first replaced by where": lambda x, m, b: torch.where(
            (torch.arange(x.shape[1]) == 0)[:, None], m.cls, x
        ),
        "first given replaced": lambda x, m, b: torch.where((b.places == 0)[..., None], m.cls, x),
        "span replaced": lambda x, m, b: torch.cat([x[:, :14], b.image, x[:, 19:]], 1),
        "shifted by cat": lambda x, m, b: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) + x,
        "shifted back by cat": lambda x, m, b: torch.cat([x[:, 1:], x[:, -1:]], 1) + x,
        "shifted by pad": lambda x, m, b: F.pad(x[:, :-1], (0, 0, 1, 0)) + x,
        "mixed with the one before": lambda x, m, b: torch.lerp(
            x, F.pad(x, (0, 0, 1, 0))[:, :-1], torch.sigmoid(m.cls)
        ),
        "registers": lambda x, m, b: registers(x, m),
        "registers behind": lambda x, m, b: m.attend(
            torch.cat([x, m.rows[:4].expand(BATCH, -1, -1)], 1)
        )[:, : x.shape[1]],
        "cls in front": lambda x, m, b: m.attend(
            torch.cat([m.cls.expand(BATCH, 1, -1), x], 1), is_causal=False
        )[:, 1:],
        "cls read": lambda x, m, b: x
        + m.attend(torch.cat([m.cls.expand(BATCH, 1, -1), x], 1), is_causal=False)[:, :1],
        "image in front": lambda x, m, b: m.attend(torch.cat([b.image, x], 1))[:, 5:],
        "padded": lambda x, m, b: padded_to_multiple(x, m),
        "every second dropped": lambda x, m, b: x + m.attend(x[:, ::2]).repeat_interleave(2, 1)[
            :, : x.shape[1]
        ],
        "first scaled": lambda x, m, b: x * torch.cat(
            [x.new_full((1, 1), 2.0), x.new_ones(x.shape[1] - 1, 1)]
        ),
        "merged pairs": lambda x, m, b: x + 0.5 * (
            x + torch.cat([x[:, 1::2], x[:, 0::2]], 1).sum(1, keepdim=True)
        ),
        "swapped neighbours": lambda x, m, b: torch.stack(
            [x[:, 1 : x.shape[1] // 2 * 2 : 2], x[:, 0 : x.shape[1] // 2 * 2 : 2]], 2
        ).flatten(1, 2).sum(1, keepdim=True) + x,
        "last broadcast": lambda x, m, b: x * torch.sigmoid(m.mix(x[:, -1]))[:, None],
        "tokens of two sources": lambda x, m, b: torch.where(
            (b.ids % 2 == 0)[..., None], x, m.embed(b.labels)
        ),
        "zeroed by ids": lambda x, m, b: x * (b.ids != 0)[..., None],
        "previous ids": lambda x, m, b: x + m.embed(F.pad(b.ids[:, :-1], (1, 0))),
        "rolled ids": lambda x, m, b: x + m.embed(b.ids.roll(1, 1)),
        "bigrams": lambda x, m, b: x + m.embed((7 * b.ids + b.ids.roll(1, 1)) % VOCAB),
        "counts of ids": lambda x, m, b: x * torch.bincount(b.ids.flatten(), minlength=VOCAB)[
            b.ids
        ][..., None],
        "first of its kind": lambda x, m, b: x * (
            (b.ids == 3) & ((b.ids == 3).cumsum(1) == 1)
        ).logical_not()[..., None],
        "behind a separator": lambda x, m, b: x * ((b.ids == 3).cumsum(1) > 0)[..., None],
        "behind another": lambda x, m, b: x * (b.ids.roll(1, 1) != 3)[..., None],
        "dropped and put back": lambda x, m, b: x.index_copy(
            1, torch.arange(4), m.mix(x[:, :4])
        ),
    },
)  # fmt: skip

# --- Convolutions and pools --------------------------------------------------------------------


def same_length(x: Tensor, pooled: Tensor) -> Tensor:
    """Stretch tokens, (B, E, any), to the length of x, (B, S, E), and add them."""
    return x + F.interpolate(pooled, x.shape[1]).mT


add_of_x(
    "conv",
    {
        "average": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
        "average of pairs": lambda x: same_length(x, F.avg_pool1d(x.mT, 2)),
        "maximum": lambda x: F.max_pool1d(x.mT, 3, 1, 1).mT,
        "maximum of pairs": lambda x: same_length(x, F.max_pool1d(x.mT, 2)),
        "adaptive to one": lambda x: x + F.adaptive_avg_pool1d(x.mT, 1).mT,
        "adaptive to four": lambda x: same_length(x, F.adaptive_avg_pool1d(x.mT, 4)),
        "adaptive maximum": lambda x: x + F.adaptive_max_pool1d(x.mT, 1).mT,
        "average of features": lambda x: F.avg_pool1d(x, 3, 1, 1),
        "interpolated": lambda x: F.interpolate(x.mT, scale_factor=2).mT[:, ::2],
        "interpolated linearly": lambda x: F.interpolate(
            x.mT, scale_factor=2, mode="linear"
        ).mT[:, ::2],
        "unfolded": lambda x: F.unfold(x[:, None], (3, WIDTH), padding=(1, 0)).mT.unflatten(
            -1, (3, -1)
        ).mean(2),
        "replicated border": lambda x: F.avg_pool1d(
            F.pad(x.mT, (1, 1), mode="replicate"), 3, 1
        ).mT,
        "lp pool": lambda x: same_length(x, F.lp_pool1d(x.mT.abs() + 0.1, 2, 2)),
    },
)  # fmt: skip

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], OfHidden]] = {
    "same": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), lambda x, m, b: m.part(x.mT).mT),
    "causal": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 4),
        lambda x, m, b: m.part(F.pad(x.mT, (3, 0))).mT,
    ),
    "causal and cut": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH),
        lambda x, m, b: m.part(x.mT)[..., : x.shape[1]].mT,
    ),
    "depthwise": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH),
        lambda x, m, b: m.part(x.mT).mT,
    ),
    "dilated": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2),
        lambda x, m, b: m.part(x.mT).mT,
    ),
    "stride": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, stride=2),
        lambda x, m, b: same_length(x, m.part(x.mT)),
    ),
    "patches": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 4, stride=4),
        lambda x, m, b: same_length(x, m.part(x.mT)),
    ),
    "valid": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 3),
        lambda x, m, b: same_length(x, m.part(x.mT)),
    ),
    "transposed": (
        lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1),
        lambda x, m, b: m.part(x.mT).mT,
    ),
    "of a plane": (
        lambda: nn.Conv2d(1, 1, 3, padding=1),
        lambda x, m, b: m.part(x[:, None])[:, 0],
    ),
    "of features": (
        lambda: nn.Conv1d(1, 1, 3, padding=1),
        lambda x, m, b: m.part(x.flatten(0, 1)[:, None])[:, 0].view_as(x),
    ),
    "circular": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular"),
        lambda x, m, b: m.part(x.mT).mT,
    ),
}
for _name, (_part, _function) in CONVOLUTIONS.items():
    add_hidden("conv", {_name: _function}, part=_part)

# --- Losses ------------------------------------------------------------------------------------


def token_losses(x: Tensor, m: Model, labels: Tensor) -> Tensor:
    return m.loss(x, labels, reduction="none").view_as(labels)


def pick(x: Tensor, m: Model, labels: Tensor) -> Tensor:
    """Return the log-probabilities of labels, (B, S)."""
    return m.head(x).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def moe_balance(x: Tensor, m: Model, b: Batch) -> Tensor:
    chances = m.router(x).softmax(-1).flatten(0, 1)
    shares = F.one_hot(chances.argmax(-1), EXPERTS).to(x.dtype).mean(0)
    return m.loss(x, b.labels) + EXPERTS * (shares * chances.mean(0)).sum()


def preference(x: Tensor, m: Model, b: Batch) -> Tensor:
    """As in DPO: the first entry is better than the second."""
    better, worse = pick(x, m, b.labels).sum(1)
    return -F.logsigmoid(0.1 * (better - worse))


def group_advantages(x: Tensor, m: Model, b: Batch) -> Tensor:
    """As in GRPO: rewards are centered over the entries; each answer is averaged by itself."""
    rewards = (b.weights * b.keep).sum(1)
    advantages = (rewards - rewards.mean()) / rewards.std()
    chances = pick(x, m, b.labels)
    ratios = (chances - chances.detach()).exp() * advantages[:, None]
    return -((ratios * b.keep).sum(1) / b.keep.sum(1)).mean()


def contrastive(x: Tensor, m: Model, b: Batch) -> Tensor:
    pooled = F.normalize(x.mean(1), dim=-1)
    other = F.normalize(b.image.mean(1), dim=-1)
    return F.cross_entropy(pooled @ other.T * 5, torch.arange(BATCH))


def barlow(x: Tensor, m: Model, b: Batch) -> Tensor:
    flat = x.flatten(0, 1)
    products = flat.T @ flat / flat.shape[0]
    return (products - torch.eye(WIDTH, dtype=x.dtype)).square().sum() / 64


def accuracy(x: Tensor, m: Model, b: Batch) -> Tensor:
    is_right = (m.head(x).argmax(-1) == b.labels).to(x.dtype)
    return m.loss(x, b.labels) * (1 + is_right.mean())


def distilled(x: Tensor, m: Model, b: Batch) -> Tensor:
    teacher = m.head(m.norm(x)).detach().softmax(-1)
    return F.kl_div(m.head(x).log_softmax(-1), teacher, reduction="batchmean")


def shifted_loss(x: Tensor, m: Model, b: Batch) -> Tensor:
    """As causal language models compute it: token k says token k + 1."""
    logits = m.head(x)[:, :-1].reshape(-1, VOCAB)
    return F.cross_entropy(logits, b.ids[:, 1:].reshape(-1))


def padded_shift(x: Tensor, m: Model, b: Batch) -> Tensor:
    """As transformers does: labels are padded, then shifted."""
    labels = F.pad(b.labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(m.head(x).view(-1, VOCAB).float(), labels.view(-1)).double()


def variance_terms(x: Tensor, m: Model, b: Batch) -> Tensor:
    return F.relu(1 - x.flatten(0, 1).std(0)).mean() + m.loss(x, b.labels)


def last_kept(x: Tensor, b: Batch) -> Tensor:
    return x[torch.arange(BATCH), b.keep.sum(1) - 1]


CLASSES = torch.tensor([1, 2])

add_losses(
    {
        "mean": lambda x, m, b: m.loss(x, b.labels),
        "ignored": lambda x, m, b: m.loss(x, b.answers),
        "ignored by index": lambda x, m, b: m.loss(x, b.labels, ignore_index=3),
        "class weights": lambda x, m, b: m.loss(
            x, b.labels, weight=m.rows[:VOCAB, 0].detach().abs()
        ),
        "label smoothing": lambda x, m, b: m.loss(x, b.labels, label_smoothing=0.1),
        "label smoothing, ignored": lambda x, m, b: m.loss(x, b.answers, label_smoothing=0.1),
        "channels first": lambda x, m, b: F.cross_entropy(m.head(x).mT, b.labels),
        "nll": lambda x, m, b: F.nll_loss(m.head(x).log_softmax(-1).flatten(0, 1),
                                          b.labels.flatten()),
        "nll, ignored": lambda x, m, b: F.nll_loss(m.head(x).log_softmax(-1).flatten(0, 1),
                                                   b.answers.flatten()),
        "picked": lambda x, m, b: -pick(x, m, b.labels).mean(),
        "chances": lambda x, m, b: F.cross_entropy(
            m.head(x).flatten(0, 1), m.head(m.norm(x)).detach().softmax(-1).flatten(0, 1)
        ),
        "one by one": lambda x, m, b: token_losses(x, m, b.labels).mean(),
        "mean of means": lambda x, m, b: token_losses(x, m, b.labels).mean(1).mean(),
        "skips first": lambda x, m, b: token_losses(x, m, b.labels)[:, 1:].mean(),
        "skips last": lambda x, m, b: token_losses(x, m, b.labels)[:, :-1].mean(),
        "skips first four": lambda x, m, b: m.loss(x[:, 4:], b.labels[:, 4:]),
        "last half": lambda x, m, b: m.loss(x[:, x.shape[1] // 2 :], b.labels[:, x.shape[1] // 2 :])
        if x.shape[1] > 20 else m.loss(x, b.labels),
        "every second": lambda x, m, b: m.loss(x[:, ::2], b.labels[:, ::2]),
        "shifted": shifted_loss,
        "padded shift": padded_shift,
        "rolled labels": lambda x, m, b: m.loss(x, b.labels.roll(-1, 1)),
        "cls": lambda x, m, b: F.cross_entropy(m.head(x[:, 0]), CLASSES),
        "last token": lambda x, m, b: F.cross_entropy(m.head(x[:, -1]), CLASSES),
        "last kept": lambda x, m, b: F.cross_entropy(m.head(last_kept(x, b)), CLASSES),
        "argmax of ids": lambda x, m, b: F.cross_entropy(
            m.head(x)[torch.arange(BATCH), b.ids.argmax(1)], CLASSES
        ),
        "pooled": lambda x, m, b: F.cross_entropy(m.head(x.mean(1)), CLASSES),
        "pooled by maximum": lambda x, m, b: F.cross_entropy(m.head(x.amax(1)), CLASSES),
        "pooled kept": lambda x, m, b: F.cross_entropy(
            m.head((x * b.keep[..., None]).sum(1) / b.keep.sum(1, keepdim=True)), CLASSES
        ),
        "masked mean": lambda x, m, b: (
            (token_losses(x, m, b.labels) * b.keep).sum() / b.keep.sum()
        ),
        "weighted mean": lambda x, m, b: (
            (token_losses(x, m, b.labels) * b.weights).sum() / b.weights.sum()
        ),
        "weighted": lambda x, m, b: (token_losses(x, m, b.labels) * b.weights).mean(),
        "boolean mean": lambda x, m, b: token_losses(x, m, b.labels)[b.keep].mean(),
        "boolean logits": lambda x, m, b: F.cross_entropy(m.head(x)[b.keep], b.labels[b.keep]),
        "hard tokens": lambda x, m, b: token_losses(x, m, b.labels).flatten().topk(9)[0].mean(),
        "maximum": lambda x, m, b: token_losses(x, m, b.labels).max(),
        "median": lambda x, m, b: token_losses(x, m, b.labels).flatten().median(),
        "above its mean": lambda x, m, b: F.relu(
            token_losses(x, m, b.labels) - token_losses(x, m, b.labels).mean()
        ).mean(),
        "softmax over tokens": lambda x, m, b: (
            token_losses(x, m, b.labels) * m.head(x)[..., 0].softmax(1)
        ).sum(),
        "exponential": lambda x, m, b: m.loss(x, b.labels).exp(),
        "square": lambda x, m, b: m.loss(x, b.labels) ** 2,
        "log": lambda x, m, b: m.loss(x, b.labels).log(),
        "flooded": lambda x, m, b: (m.loss(x, b.labels) - 3.0).abs() + 3.0,
        "clamped": lambda x, m, b: m.loss(x, b.labels).clamp(min=2.0),
        "ratio": lambda x, m, b: m.loss(x, b.labels) / (1 + x.square().mean()),
        "product": lambda x, m, b: m.loss(x, b.labels) * x.square().mean(),
        "by its own size": lambda x, m, b: m.loss(x, b.labels) / m.loss(x, b.labels).detach(),
        "sum over tokens by length": lambda x, m, b: token_losses(x, m, b.labels).sum(1).mean()
        / b.ids.shape[1],
        "sum by numel": lambda x, m, b: token_losses(x, m, b.labels).sum() / b.labels.numel(),
        "two terms": lambda x, m, b: m.loss(x, b.labels) + 0.1 * x.square().mean(),
        "z loss": lambda x, m, b: m.loss(x, b.labels) + m.head(x).logsumexp(-1).square().mean(),
        "decay": lambda x, m, b: m.loss(x, b.labels) + 0.1 * m.mix.weight.square().sum(),
        "moe balance": moe_balance,
        "moe z loss": lambda x, m, b: m.loss(x, b.labels) + m.router(x).logsumexp(-1).square(
        ).mean(),
        "preference": preference,
        "group advantages": group_advantages,
        "contrastive": contrastive,
        "barlow": barlow,
        "variance": variance_terms,
        "entropy": lambda x, m, b: -(
            m.head(x).softmax(-1) * m.head(x).log_softmax(-1)
        ).sum(-1).mean(),
        "entropy of mean": lambda x, m, b: torch.special.entr(
            m.head(x).softmax(-1).mean((0, 1))
        ).sum(),
        "accuracy": accuracy,
        "kl of tokens": lambda x, m, b: F.kl_div(
            m.head(x).log_softmax(-1).flatten(0, 1),
            m.head(m.norm(x)).softmax(-1).flatten(0, 1),
            reduction="batchmean",
        ),
        "mse": lambda x, m, b: F.mse_loss(x, m.embed(b.labels)),
        "rmse": lambda x, m, b: F.mse_loss(x, m.embed(b.labels)).sqrt(),
        "l1": lambda x, m, b: F.l1_loss(x, m.embed(b.labels)),
        "huber": lambda x, m, b: F.smooth_l1_loss(x, m.embed(b.labels)),
        "norm": lambda x, m, b: (x - m.embed(b.labels)).norm(),
        "norms of tokens": lambda x, m, b: (x - m.embed(b.labels)).norm(dim=-1).mean(),
        "norms of entries": lambda x, m, b: (x - m.embed(b.labels)).flatten(1).norm(dim=1).mean(),
        "norms of features": lambda x, m, b: (x - m.embed(b.labels)).norm(dim=1).mean(),
        "bce with logits": lambda x, m, b: F.binary_cross_entropy_with_logits(
            x @ m.cls, b.keep.to(x.dtype)
        ),
        "bce": lambda x, m, b: F.binary_cross_entropy((x @ m.cls).sigmoid(), b.keep.to(x.dtype)),
        "bce of positive weight": lambda x, m, b: F.binary_cross_entropy_with_logits(
            x @ m.cls, b.keep.to(x.dtype), pos_weight=x.new_tensor(2.0)
        ),
        "hinge": lambda x, m, b: F.multi_margin_loss(m.head(x).flatten(0, 1), b.labels.flatten()),
        "cosine": lambda x, m, b: 1 - F.cosine_similarity(x, m.embed(b.labels), -1).mean(),
        "cosine over tokens": lambda x, m, b: 1 - F.cosine_similarity(
            x, m.embed(b.labels), 1
        ).mean(),
        "gaussian": lambda x, m, b: F.gaussian_nll_loss(
            x, m.embed(b.labels), m.mix(x).square() + 0.1
        ),
        "poisson": lambda x, m, b: F.poisson_nll_loss(x, b.weights[..., None].expand_as(x)),
        "smoothness": lambda x, m, b: (x[:, 1:] - x[:, :-1]).square().mean(),
        "diff": lambda x, m, b: x.diff(dim=1).square().mean(),
        "correlation": lambda x, m, b: 1 - torch.corrcoef(
            torch.stack([x.mean(-1).flatten(), b.weights.flatten()])
        )[0, 1],
        "all pairs": lambda x, m, b: torch.cdist(x, x).mean() / 8,
        "mean of x": lambda x, m, b: x.mean() + x.square().mean(),
        "variance of x": lambda x, m, b: x.var(),
        "mean of square of mean": lambda x, m, b: x.mean(1).square().mean(),
        "logsumexp": lambda x, m, b: (x @ m.cls).logsumexp(1).mean(),
        "discounted": lambda x, m, b: (
            token_losses(x, m, b.labels) * 0.9 ** torch.arange(x.shape[1])
        ).mean(),
        "discounted by given": lambda x, m, b: (
            token_losses(x, m, b.labels) * 0.9 ** b.places
        ).mean(),
        "returns": lambda x, m, b: (
            pick(x, m, b.labels) * b.weights.flip(1).cumsum(1).flip(1)
        ).mean(),
        "two attentions": lambda x, m, b: m.loss(m.attend(x, m.second), b.labels)
        + 0.3 * m.loss(x, b.answers * 0 + b.labels),
        "first entry": lambda x, m, b: m.loss(x[:1], b.labels[:1]),
        "loop over entries": lambda x, m, b: sum(
            F.cross_entropy(m.head(one), labels) for one, labels in zip(x, b.labels, strict=True)
        ) / BATCH,
        "in chunks of the flat": lambda x, m, b: sum(
            F.cross_entropy(m.head(part), labels, reduction="sum")
            for part, labels in zip(x.flatten(0, 1).chunk(4), b.labels.flatten().chunk(4),
                                    strict=True)
        ) / b.labels.numel(),
        "next and next but one": lambda x, m, b: m.loss(x[:, :-1], b.ids[:, 1:])
        + m.loss(m.mix(x)[:, :-2], b.ids[:, 2:]),
        "to float32": lambda x, m, b: F.cross_entropy(
            m.head(x).flatten(0, 1).float(), b.labels.flatten()
        ).double(),
        "scaled by kept": lambda x, m, b: m.loss(x, b.labels) * b.keep.sum() / b.keep.numel(),
        "mean of kept labels": lambda x, m, b: m.loss(x, b.answers, reduction="sum")
        / (b.answers != IGNORED).sum(),
        "total by count": lambda x, m, b: m.loss(x, b.labels, reduction="sum")
        / b.labels.ne(IGNORED).sum(),
    },
    part=None,
)  # fmt: skip
# In float32 only the loss is rounded.
for _name in ("loss.to_float32", "loss.padded_shift"):
    PROGRAMS[_name] = replace(PROGRAMS[_name], tolerance=1e-5)

add_losses(
    {
        "sum": lambda x, m, b: m.loss(x, b.labels, reduction="sum"),
        "distilled": distilled,
        "in chunks": lambda x, m, b: sum(
            m.loss(part, labels) for part, labels in zip(x.split(8, 1), b.labels.split(8, 1),
                                                         strict=True)
        ) / 4,
        "sum, ignored": lambda x, m, b: m.loss(x, b.answers, reduction="sum"),
        "sum of kept": lambda x, m, b: (token_losses(x, m, b.labels) * b.keep).sum(),
        "sum of squares": lambda x, m, b: x.square().sum(),
        "square of sum": lambda x, m, b: x.sum().square(),
        "log of sum": lambda x, m, b: m.loss(x, b.labels, reduction="sum").log(),
        "sum of two": lambda x, m, b: x.square().sum() + 0.5 * x.sum(),
        "picked": lambda x, m, b: -pick(x, m, b.labels).sum(),
    },
    "sum",
    is_sum=True,
)  # fmt: skip

# --- Embeddings --------------------------------------------------------------------------------


def embedded(embed: OfBatch) -> OfBatch:
    return lambda m, b: m.loss(m.attend(embed(m, b)), b.labels)


EMBEDDINGS: dict[str, OfBatch] = {
    "by index": lambda m, b: m.embed.weight[b.ids],
    "one hot": lambda m, b: F.one_hot(b.ids, VOCAB).to(m.cls.dtype) @ m.embed.weight,
    "index_select": lambda m, b: m.embed.weight.index_select(0, b.ids.flatten()).view(
        *b.ids.shape, WIDTH
    ),
    "scaled table": lambda m, b: F.embedding(b.ids, m.embed.weight * 2),
    "tied": lambda m, b: F.embedding(b.ids, m.head.weight),
    "two tables": lambda m, b: m.embed(b.ids) + F.embedding(b.places, m.rows),
    "of distinct ids": lambda m, b: m.embed.weight[b.ids.unique()].sum(0) + m.embed(b.ids),
    "scaled by frequency": lambda m, b: F.embedding(b.ids, m.embed.weight, scale_grad_by_freq=True),
    "padding": lambda m, b: F.embedding(b.ids, m.embed.weight, padding_idx=3),
    "bags": lambda m, b: F.embedding_bag(b.ids.flatten()[:, None], m.embed.weight).view(
        *b.ids.shape, -1
    ),
    "bag of an entry": lambda m, b: (
        m.embed(b.ids) + F.embedding_bag(b.ids, m.embed.weight, mode="mean")[:, None]
    ),
    "summed bag of an entry": lambda m, b: (
        m.embed(b.ids) + F.embedding_bag(b.ids, m.embed.weight, mode="sum")[:, None]
    ),
    "largest of a bag": lambda m, b: (
        m.embed(b.ids) + F.embedding_bag(b.ids, m.embed.weight, mode="max")[:, None]
    ),
    "bags by frequency": lambda m, b: F.embedding_bag(
        b.ids.flatten()[:, None], m.embed.weight, scale_grad_by_freq=True
    ).view(*b.ids.shape, -1),
    "bags with offsets": lambda m, b: (
        m.embed(b.ids)
        + F.embedding_bag(
            b.ids.flatten(), m.embed.weight, torch.arange(0, b.ids.numel(), b.ids.shape[1])
        )[:, None]
    ),
    "of the future": lambda m, b: m.embed(b.ids.flip(1).cumsum(1).flip(1) % VOCAB),
    "hashed": lambda m, b: m.embed((b.ids * 7 + b.places) % VOCAB),
    "by gather": lambda m, b: m.embed.weight.gather(
        0, b.ids.flatten()[:, None].expand(-1, WIDTH)
    ).view(*b.ids.shape, WIDTH),
    "normalized table": lambda m, b: F.normalize(m.embed.weight, dim=-1)[b.ids],
    "centered table": lambda m, b: (m.embed.weight - m.embed.weight.mean(0))[b.ids],
    "no table": lambda m, b: b.ids[..., None].to(m.cls.dtype) * m.cls / VOCAB,
    "dense": lambda m, b: m.mix(b.image.repeat(1, 7, 1)[:, : b.ids.shape[1]]),
}
for _name, _embed in EMBEDDINGS.items():
    add("embedding", _name, embedded(_embed))
for _name, _how in {
    "module by frequency": {"scale_grad_by_freq": True},
    "module of bounded norm": {"max_norm": 1.0},
    "module with padding": {"padding_idx": 3},
    "sparse module": {"sparse": True},
}.items():
    add("embedding", _name, embedded(lambda m, b: m.part(b.ids)),
        part=lambda how=_how: nn.Embedding(VOCAB, WIDTH, **how))  # fmt: skip

# --- Random numbers ----------------------------------------------------------------------------


def drawn_beside(draw: OfX) -> OfBatch:
    """Return numbers drawn over the tokens, and let a gradient reach the parameters."""
    return lambda m, b: draw(torch.ones_like(m.embed(b.ids))) + 0 * m.attend(m.embed(b.ids))


for _name, _draw in {
    "dropout": lambda ones: F.dropout(ones, 0.5),
    "alpha dropout": lambda ones: F.alpha_dropout(ones, 0.5, training=True).clamp(min=0),
    "dropout of features": lambda ones: F.dropout1d(ones, 0.5),
    "bernoulli": lambda ones: torch.bernoulli(ones * 0.5),
    "rand_like": lambda ones: (torch.rand_like(ones) < 0.5).double(),
    "randn_like": lambda ones: F.relu(torch.randn_like(ones)),
    "uniform": lambda ones: F.relu(torch.empty_like(ones).uniform_(-1, 1)),
    "normal": lambda ones: F.relu(torch.normal(ones * 0, ones)),
    "exponential": lambda ones: F.relu(torch.empty_like(ones).exponential_() - 0.7),
    "randint_like": lambda ones: torch.randint_like(ones, 2),
    "multinomial": lambda ones: torch.multinomial(
        ones.flatten(0, 1)[:, :2], 1
    ).view(*ones.shape[:2], 1).expand_as(ones) * ones,
    "gumbel": lambda ones: F.gumbel_softmax(ones[..., :2], hard=True)[..., :1] * ones,
    "rrelu": lambda ones: F.relu(F.rrelu(-ones, 0.1, 0.9, training=True) + 0.5),
    "dropout of a checkpoint": lambda ones: checkpoint(
        lambda t: F.dropout(t, 0.5), ones, use_reentrant=False
    ),
    "dropout of the flat": lambda ones: F.dropout(ones.flatten(0, 1), 0.5).view_as(ones),
    "dropout of heads": lambda ones: F.dropout(ones.unflatten(-1, (2, 8)), 0.5).flatten(2),
}.items():  # fmt: skip
    add("random", _name, drawn_beside(_draw), is_drawn=True)

# --- Control, autograd and the rest ------------------------------------------------------------


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


def branch_on(condition: Callable[[Tensor], Any]) -> OfX:
    return lambda x: x.sin() if condition(x) else x.cos()


add_of_x(
    "control",
    {
        "mean": branch_on(lambda x: x.mean() > 0.05),
        "first value": branch_on(lambda x: x[0, 0, 0] > 0),
        "last value": branch_on(lambda x: x[0, -1, 0] > 0),
        "maximum": branch_on(lambda x: x.max().item() > 4),
        "nan": branch_on(lambda x: not torch.isnan(x).any()),
        "allclose": branch_on(lambda x: torch.allclose(x, x)),
        "equal": branch_on(lambda x: torch.equal(x[:, :1], x[:, :1])),
        "length": branch_on(lambda x: x.shape[1] > 20),
        "scaled by an item": lambda x: x * x.abs().mean().item(),
        "scaled by a float": lambda x: x / float(x.detach().abs().max()),
        "list": lambda x: x * sum(x[0, :, 0].tolist()) / 8,
        "loop while": lambda x: halve_while_large(x),
        "printed": lambda x: printed(x),
        "numpy": lambda x: x + torch.from_numpy(x.detach().numpy().mean(1, keepdims=True)),
        "graph break": lambda x: broken_graph(x).sin(),
    },
    is_whole_graph=False,
)


def halve_while_large(x: Tensor) -> Tensor:
    while x.abs().max() > 1.5:
        x = x / 2
    return x


def printed(x: Tensor) -> Tensor:
    print(x.mean(), file=io.StringIO())
    return x


def broken_graph(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 2


add_of_x(
    "control",
    {
        "cond": lambda x: torch.cond(x.mean() > 0.05, torch.sin, torch.cos, (x,)),
        "where of mean": lambda x: torch.where(x.mean() > 0.05, x.sin(), x.cos()),
        "assert": lambda x: asserted(x),
        "early exit": lambda x: x if x.shape[0] == BATCH else x.sin(),
    },
)


def asserted(x: Tensor) -> Tensor:
    torch._assert(x.shape[-1] == WIDTH, "width")
    return x.sin()


def hooked(x: Tensor) -> Tensor:
    y = x.clone()
    y.register_hook(lambda grad: grad * 2)
    return y


def hooked_over_tokens(x: Tensor) -> Tensor:
    y = x.clone()
    y.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
    return y


add_of_x(
    "autograd",
    {
        "function": Doubled.apply,
        "function over tokens": Centered.apply,
        "detached": lambda x: x + x.detach(),
        "straight through": lambda x: x + (x.round() - x).detach(),
        "checkpoint": lambda x: checkpoint(lambda t: t.sin() * t, x, use_reentrant=False),
        "checkpoint over tokens": lambda x: checkpoint(
            lambda t: t - t.mean(1, keepdim=True), x, use_reentrant=False
        ),
        "hook": hooked,
        "hook over tokens": hooked_over_tokens,
        "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x.detach(),))[1],
        "no_grad": lambda x: x * ungraded(x),
        "saved by hand": lambda x: torch.autograd.graph.saved_tensors_hooks and x.exp() / 4,
    },
)  # fmt: skip


def ungraded(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sigmoid()


def set_data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x.detach().roll(1, 1)
    return y


def copied_by_foreach(x: Tensor) -> Tensor:
    y = x.detach().clone()
    torch._foreach_copy_([y], [x.detach().roll(1, 1)])
    return x + y


def learned_inside(x: Tensor, m: Model, b: Batch) -> Tensor:
    """As layers do that are trained while they run."""
    out, pull = torch.func.vjp(lambda w: F.linear(x.detach(), w), m.mix.weight)
    return F.linear(x, m.mix.weight - 0.01 * pull(torch.ones_like(out))[0])


def reversed_gradient(x: Tensor) -> Tensor:
    y = x.clone()
    y.register_hook(torch.neg)
    return y


def closed_over(x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    return checkpoint(lambda t: t - mean, x, use_reentrant=False)


def torn_hook(x: Tensor, m: Model, b: Batch) -> Tensor:
    """A hook that knows the gradient of a module's output."""
    y = m.mix(x)
    y.register_hook(lambda grad: grad.flip(1))
    return y


add_of_x(
    "autograd",
    {
        "data set": set_data,
        "copied by foreach": copied_by_foreach,
        "reversed gradient": reversed_gradient,
        "reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
        "reentrant checkpoint over tokens": lambda x: checkpoint(
            lambda t: t.cumsum(1), x, use_reentrant=True
        ),
        "closed over": closed_over,
        "jvp over tokens": lambda x: torch.func.jvp(lambda t: t.cumsum(1), (x,), (x,))[1] / 8,
        "quantized": lambda x: x + (x.detach() * 4).round() / 4,
        "quantized by the largest": lambda x: x + (x.detach() / x.detach().abs().amax()).round(),
        "shared memory": lambda x: x + torch.from_dlpack(x.detach().mean(1))[:, None],
    },
)
add_hidden(
    "autograd",
    {
        "learned inside": learned_inside,
        "hook of a module's output": torn_hook,
        "vjp": lambda x, m, b: x + torch.func.vjp(m.mix, x)[1](x)[0],
        "gradient of tokens": lambda x, m, b: (
            x + torch.func.grad(lambda t: m.mix(t).sin().square().sum())(x)
        ),
        "gradient over tokens": lambda x, m, b: (
            x + torch.func.grad(lambda t: m.mix(t).mean(1).square().sum())(x)
        ),
        "ensemble": lambda x, m, b: torch.vmap(lambda w: F.linear(x, w))(
            torch.stack([m.mix.weight, m.mix.weight * 2])
        ).sum(0),
        "row of the largest": lambda x, m, b: x + m.rows[b.places.max()],
    },
)
add_losses(
    {
        "stacked list": lambda x, m, b: torch.stack(
            [m.loss(one[None], y[None]) for one, y in zip(x, b.labels, strict=True)]
        ).mean(),
        "largest of a list": lambda x, m, b: torch.stack(
            [m.loss(one[None], y[None]) for one, y in zip(x, b.labels, strict=True)]
        ).amax(),
        "focal": lambda x, m, b: (
            (1 - (-token_losses(x, m, b.labels)).exp()) ** 2 * token_losses(x, m, b.labels)
        ).mean(),
        "normalized by its sum": lambda x, m, b: (
            token_losses(x, m, b.labels).square() / token_losses(x, m, b.labels).sum().detach()
        ).sum(),
        "weighed by a parameter": lambda x, m, b: (
            m.loss(x, b.labels) * (-m.cls[0]).exp() + m.cls[0]
        ),
    }
)


def autocast(m: Model, b: Batch) -> Tensor:
    x = m.embed(b.ids).float()
    with torch.autocast("cpu", torch.bfloat16):
        projected = F.linear(x, m.first.weight.float(), m.first.bias.float())
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in projected.chunk(3, -1)]
        x = x + attention(*heads, is_causal=True)
    return m.loss(x.double(), b.labels)


def whole_checkpointed(m: Model, b: Batch) -> Tensor:
    x = checkpoint(m.attend, m.embed(b.ids), use_reentrant=False)
    return m.loss(checkpoint(m.attend, x, m.second, use_reentrant=False), b.labels)


def gradient_penalty(m: Model, b: Batch) -> Tensor:
    x = m.embed(b.ids)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        loss = m.loss(m.attend(x), b.labels)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


def steps_of_layers(m: Model, b: Batch) -> Tensor:
    x = m.embed(b.ids)
    for _ in range(3):
        x = m.norm(m.attend(x))
    return m.loss(x, b.labels)


def double_loss(m: Model, b: Batch) -> Tensor:
    x = m.attend(m.embed(b.ids))
    return m.loss(x, b.labels) + m.loss(m.attend(x, m.second), b.labels)


def siamese(m: Model, b: Batch) -> Tensor:
    one, other = m.attend(m.embed(b.ids)), m.attend(m.embed(b.labels), m.second)
    return (one - other).square().mean()


def nested_no_grad(m: Model, b: Batch) -> Tensor:
    with torch.no_grad():
        x = m.attend(m.embed(b.ids))
    return m.loss(m.attend(x, m.second), b.labels)


def cross_attention(m: Model, b: Batch) -> Tensor:
    x, memory = m.embed(b.ids), m.embed(b.labels)
    (query, _, _), (_, key, value) = m.heads(x), m.heads(memory, m.second)
    return m.loss(x + attention(query, key, value), b.labels)


def encoded(m: Model, b: Batch) -> Tensor:
    return m.loss(m.part(m.embed(b.ids)), b.labels)


def multi_head(m: Model, b: Batch) -> Tensor:
    x = m.embed(b.ids)
    return m.loss(m.part(x, x, x, need_weights=False)[0] + x, b.labels)


def multi_head_with_weights(m: Model, b: Batch) -> Tensor:
    x = m.embed(b.ids)
    out, weights = m.part(x, x, x, need_weights=True)
    return m.loss(out + x * weights.diagonal(dim1=1, dim2=2)[..., None], b.labels)


def without_attention(m: Model, b: Batch) -> Tensor:
    return m.loss(m.mix(m.embed(b.ids)), b.labels)


def inplace_parameter(m: Model, b: Batch) -> Tensor:
    with torch.no_grad():
        m.cls.mul_(0.5)
    return m.loss(m.attend(m.embed(b.ids) + m.cls), b.labels)


def functional_weights(m: Model, b: Batch) -> Tensor:
    weights = {"weight": m.mix.weight * 2, "bias": m.mix.bias}
    x = torch.func.functional_call(m.mix, weights, (m.attend(m.embed(b.ids)),))
    return m.loss(x, b.labels)


def image_first(m: Model, b: Batch) -> Tensor:
    x = m.attend(torch.cat([m.mix(b.image), m.embed(b.ids)], 1))
    return m.loss(x[:, 5:], b.labels)


def kept_only(m: Model, b: Batch) -> Tensor:
    x = m.embed(b.ids)
    return m.loss(torch.where(b.keep[..., None], m.attend(x), x), b.labels)


def two_batches(m: Model, b: Batch) -> Tensor:
    x = torch.cat([m.embed(b.ids), m.embed(b.labels)])
    return m.loss(m.attend(x)[:BATCH], b.labels)


def two_sequences(m: Model, b: Batch) -> Tensor:
    x = torch.cat([m.embed(b.ids), m.embed(b.labels)], 1)
    return m.loss(m.attend(x)[:, : b.ids.shape[1]], b.labels)


for _function in (
    whole_checkpointed, steps_of_layers, double_loss, siamese, nested_no_grad, cross_attention,
    without_attention, inplace_parameter, functional_weights, image_first, kept_only, two_batches,
    two_sequences,
):  # fmt: skip
    add("whole", _function.__name__, _function)
add("whole", "gradient_penalty", gradient_penalty, is_whole_graph=False)
add("whole", "autocast", autocast, tolerance=5e-2)
add("whole", "multi_head", multi_head,
    part=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))  # fmt: skip
add("whole", "multi_head_with_weights", multi_head_with_weights,
    part=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))  # fmt: skip
add("whole", "encoder", encoded,
    part=lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True))  # fmt: skip

for _name in (
    "control.length", "positions.scaled_by_length", "positions.scaled_by_log_of_length",
    "positions.scaled_by_numel", "positions.scaled_by_size_of_ids", "keys.scaled_by_length",
    "loss.last_half", "reduce.mean_of_parameters",
):  # fmt: skip
    PROGRAMS[_name] = replace(PROGRAMS[_name], reads_length=True)
