"""How far off an attention is, by how far off one device is: cases, references, ratios.

Attention is run through the op pair on ranks that are threads, forward and backward, and held
against attention by the definition in float64, on one process, of the very inputs. So is the same
kernel on one device. The ratio of a result is

    error of the sharded one / max(error of the one on one device, rounding of float32)

once of the roots of mean squares, and once of the largest errors. What float32 rounds is no
constant: it is 2^-24 of the sum of the magnitudes that a result is the sum of. One device is right
to less than that by luck, or where nothing is to be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.ops.attention import attention
from cp_inductor.plan import Recipe, resolve
from cp_inductor.run import views
from cp_inductor.tiles.kernel_table import get_kernel
from cp_inductor.tiles.kernels import Gradients, Kernel, Partial, TileCall
from tests.support.random_attention import World
from tests.support.reference import shard

STRATEGIES = ("auto", "rows", "ring", "allgather", "blocks", "heads", "heads2+blocks")
RESULTS = ("out", "dq", "dk", "dv")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_DIM = 64
UNIT = 2.0**-24  # of float32, in which kernels sum


class Errors(NamedTuple):
    """Root of the mean square, and the largest; or ratios of them."""

    rms: float
    largest: float


Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What is unusual about the inputs, all of them normal otherwise, (B, H, S, D) in float64."""

    name: str
    change: Callable[[Inputs], object] = lambda inputs: None
    is_causal: bool = True
    blind: int = 0  # so many first rows see nothing; then a rule, not is_causal
    is_long: bool = False  # also of thousands of tokens


def scale_logits(factor: float) -> Callable[[Inputs], object]:
    return lambda t: (t["q"].mul_(factor**0.5), t["k"].mul_(factor**0.5))


def sink(t: Inputs) -> None:
    """The first key takes all: its score is 50, that of the others 0."""
    t["q"].zero_()[..., 0] = 20
    t["k"].zero_()[:, :, 0, 0] = 20


def sink_of_a_model(t: Inputs) -> None:
    """The first key takes most, as in trained language models: its score is 12, others' normal."""
    t["q"][..., 0] = 8
    t["k"][..., 0] = 0
    t["k"][:, :, 0, 0] = 12


def copy_itself(t: Inputs) -> None:
    """Each token takes all of itself."""
    t["k"].copy_(t["q"])
    scale_logits(10)(t)


def two_of_grad(t: Inputs) -> None:
    """Under a sink, the gradient has two coordinates."""
    sink(t)
    t["do"][..., 2:] = 0


CASES = (
    Case("logits x 1", is_long=True),
    Case("logits x 1, full", is_causal=False),
    Case("logits x 10", scale_logits(10)),
    Case("logits x 100", scale_logits(100)),
    Case("sink", sink, is_long=True),
    Case("sink of a model", sink_of_a_model, is_long=True),
    Case("each token itself", copy_itself),
    Case("uniform rows", lambda t: t["q"].zero_(), is_long=True),
    Case("one huge key", lambda t: t["k"][:, :, 7].mul_(100), is_long=True),
    Case("one huge value", lambda t: t["v"][:, :, 7].mul_(100)),
    Case("rows that see nothing", blind=50),
    Case("gradient of a sum", lambda t: t["do"].fill_(1)),
    Case("two of a gradient", two_of_grad),
    Case("no gradient at half", lambda t: t["do"][:, :, ::2].zero_()),
    Case("tiny gradient", lambda t: t["do"].mul_(1e-6)),
)


def case_of(name: str) -> Case:
    (case,) = (case for case in CASES if case.name == name)
    return case


@dataclass(frozen=True)
class Reference:
    """What is right, and how far off one device is.

    Attributes:
        inputs: query, key, value and the gradient of out, in the dtype of the case.
        exact: out, dq, dk and dv in float64.
        single: errors of one device's.
        rounding: what float32 rounds.
    """

    inputs: tuple[Tensor, ...]
    exact: tuple[Tensor, ...]
    single: tuple[Errors, ...]
    rounding: tuple[Errors, ...]


def batch_of(length: int) -> int:
    """Some results hang on few rows: of short sequences there are several, against luck."""
    return max(1, 2000 // length)


@lru_cache(maxsize=2)
def make_reference(case: Case, dtype: torch.dtype, num_heads: int, length: int) -> Reference:
    generator = torch.Generator().manual_seed(length)
    shape = (batch_of(length), num_heads, length, HEAD_DIM)
    inputs = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name in ("q", "k", "v", "do")
    }
    case.change(inputs)
    rounded = tuple(tensor.to(dtype) for tensor in inputs.values())
    allowed = None
    if case.is_causal:
        allowed = torch.ones(length, length, dtype=torch.bool).tril(-case.blind)
    of_heads = [
        differentiate(*(t[:, head].double() for t in rounded), allowed) for head in range(num_heads)
    ]
    exact, roundings = (
        tuple(torch.stack(parts, 1) for parts in zip(*of_one, strict=True))
        for of_one in zip(*of_heads, strict=True)
    )
    single = run_single(case, rounded, allowed)
    return Reference(
        rounded,
        exact,
        tuple(size_of(a.double() - b) for a, b in zip(single, exact, strict=True)),
        tuple(map(size_of, roundings)),
    )


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, allowed: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return (out, dq, dk, dv) by the definition, (B, S, D), and what float32 rounds of each."""
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)
    out = p @ v
    delta = (out * do).sum(-1, keepdim=True)
    ds = p * (do @ v.mT - delta) * scale
    exact = (out, ds @ k, ds.mT @ q, p.mT @ do)
    terms = do.abs() @ v.abs().mT + (out * do).abs().sum(-1, keepdim=True)
    ds = p * terms * scale
    sums = (p @ v.abs(), ds @ k.abs(), ds.mT @ q.abs(), p.mT @ do.abs())
    return exact, tuple(UNIT * one for one in sums)


def run_single(case: Case, inputs: Sequence[Tensor], allowed: Tensor | None) -> tuple[Tensor, ...]:
    q, k, v, do = inputs
    kernel, call = get_kernel("flash_cpu"), TileCall(q, k, v, case.is_causal)
    if case.blind:
        assert allowed is not None
        bias = q.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
        call = TileCall(q, k, v, bias=bias)
    partial = kernel.forward(call)
    return partial.out, *kernel.backward(call, do, partial)


def size_of(error: Tensor) -> Errors:
    return Errors(error.square().mean().sqrt().item(), error.abs().max().item())


class ExactTiles(Kernel):
    """Computes in float32 and rounds nothing: what would be, if no kernel returned half types."""

    def forward(self, call: TileCall) -> Partial:
        return get_kernel("flash_cpu").forward(_widened(call))

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        wide = Partial(whole.out.float(), whole.lse.float())
        return get_kernel("flash_cpu").backward(_widened(call), grad_out.float(), wide)


def _widened(call: TileCall) -> TileCall:
    q, k, v = (tensor.float() for tensor in call.tensors)
    bias = None if call.bias is None else call.bias.float()
    return replace(call, query=q, key=k, value=v, bias=bias)


def run_rank(reference: Reference, recipe: Recipe, rank: int) -> tuple[Tensor, ...]:
    """Return a rank's out, dq, dk and dv."""
    *leaves, grad_out = (shard(t, rank, recipe.world_size).clone() for t in reference.inputs)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    how = (recipe.format(), rank, None, "flash_cpu", "world", 0.0, False)
    out, *_ = attention(*leaves, [], *how)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def measure(
    case: Case,
    dtype: str,
    world_size: int,
    length: int,
    strategies: Sequence[str] = STRATEGIES,
    *,
    has_exact_tiles: bool = False,
) -> dict[str, dict[str, Errors]]:
    """Return ratios by strategy and result."""
    reference = make_reference(case, DTYPES[dtype], 3 if world_size == 3 else 4, length)
    _, num_heads, _, head_dim = reference.inputs[0].shape
    rule = f"k-q+{case.blind}<=0" if case.blind else "causal" if case.is_causal else "full"
    sizes = (length, length, num_heads, num_heads, head_dim, DTYPES[dtype].itemsize)
    exact_tiles = mock.patch.object(views, "get_kernel", return_value=ExactTiles())
    ratios: dict[str, dict[str, Errors]] = {}
    for strategy in strategies:
        try:
            recipe = resolve(Recipe(world_size, *sizes, rule, strategy=strategy), site=case.name)
        except UnsupportedStrategy:
            continue
        with exact_tiles if has_exact_tiles else nullcontext():
            ranks = World(world_size).run(partial(run_rank, reference, recipe))
        ratios[strategy] = {}
        for index, result in enumerate(RESULTS):
            whole = torch.cat([of_rank[index] for of_rank in ranks], 2).double()
            assert whole.isfinite().all(), (case.name, strategy)
            bases = map(max, reference.single[index], reference.rounding[index])
            errors = size_of(whole - reference.exact[index])
            ratios[strategy][result] = Errors(*map(_ratio, errors, bases))
    return ratios


def _ratio(error: float, base: float) -> float:
    return error / base if base else float(error > 0)
