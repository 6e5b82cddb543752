"""How far off an attention is, by how far off one device is: cases, references, ratios.

Attention is run and held against float64 as tests/support/random_attention.py does it: forward and
backward, on ranks that are threads. So is the same kernel on one device. The ratio of a result is

    error of the sharded one / max(error of the one on one device, rounding of float32)

once of the roots of mean squares, and once of the largest errors. What float32 rounds is no
constant: it is 2^-24 of the sum of the magnitudes that a result is the sum of. One device is right
to less than that by luck, or where nothing is to be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.run import views
from cp_inductor.tiles.kernel_table import get_kernel
from cp_inductor.tiles.kernels import Gradients, Kernel, Partial, TileCall
from tests.support.random_attention import (
    PLAIN,
    RESULTS,
    Attention,
    Whole,
    attend_exactly,
    attend_on_one_device,
    attend_sharded,
    make_whole,
    plan_of,
)

DTYPES = ("float32", "bfloat16", "float16")
STRATEGIES = ("auto", "rows", "ring", "allgather", "blocks", "heads", "heads2+blocks")
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
    mask: str = "causal"
    is_long: bool = False  # also of thousands of tokens


def scale_logits(factor: float) -> Callable[[Inputs], object]:
    return lambda t: (t["query"].mul_(factor**0.5), t["key"].mul_(factor**0.5))


def sink(t: Inputs) -> None:
    """The first key takes all: its score is 50, that of the others 0."""
    t["query"].zero_()[..., 0] = 20
    t["key"].zero_()[:, :, 0, 0] = 20


def sink_of_a_model(t: Inputs) -> None:
    """The first key takes most, as in trained language models: its score is 12, others' normal."""
    t["query"][..., 0] = 8
    t["key"][..., 0] = 0
    t["key"][:, :, 0, 0] = 12


def copy_itself(t: Inputs) -> None:
    """Each token takes all of itself."""
    t["key"].copy_(t["query"])
    scale_logits(10)(t)


def two_of_grad(t: Inputs) -> None:
    """Under a sink, the gradient has two coordinates."""
    sink(t)
    t["grad_out"][..., 2:] = 0


CASES = (
    Case("logits x 1", is_long=True),
    Case("logits x 1, full", mask="full"),
    Case("logits x 10", scale_logits(10)),
    Case("logits x 100", scale_logits(100)),
    Case("sink", sink, is_long=True),
    Case("sink of a model", sink_of_a_model, is_long=True),
    Case("each token itself", copy_itself),
    Case("uniform rows", lambda t: t["query"].zero_(), is_long=True),
    Case("one huge key", lambda t: t["key"][:, :, 7].mul_(100), is_long=True),
    Case("one huge value", lambda t: t["value"][:, :, 7].mul_(100)),
    Case("rows that see nothing", mask="blind"),
    Case("gradient of a sum", lambda t: t["grad_out"].fill_(1)),
    Case("two of a gradient", two_of_grad),
    Case("no gradient at half", lambda t: t["grad_out"][:, :, ::2].zero_()),
    Case("tiny gradient", lambda t: t["grad_out"].mul_(1e-6)),
)


def case_of(name: str) -> Case:
    (case,) = (case for case in CASES if case.name == name)
    return case


@dataclass(frozen=True)
class Reference:
    """What is right, and how far off one device is.

    Attributes:
        whole: the inputs, in the dtype of the attention.
        exact: out, dq, dk and dv in float64.
        least: the errors that others are divided by.
    """

    whole: Whole
    exact: tuple[Tensor, ...]
    least: tuple[Errors, ...]


def batch_of(length: int) -> int:
    """Some results hang on few rows: of short sequences there are several, against luck."""
    return max(1, 2000 // length)


@lru_cache(maxsize=2)
def make_reference(case: Case, attention: Attention) -> Reference:
    whole = make_whole(attention, case.change)
    of_one = replace(attention, num_heads=1, num_kv_heads=1)
    # A head at a time: scores of all of them are large.
    of_heads = [attend_exactly(of_one, part) for part in heads_of(whole)]
    exact, sums = (
        tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))
        for results in zip(*((one.results[:4], one.sums[:4]) for one in of_heads), strict=True)
    )
    single = attend_on_one_device(attention, whole)
    errors = (size_of(a.double() - b) for a, b in zip(single, exact, strict=True))
    roundings = (size_of(UNIT * one) for one in sums)
    least = (Errors(*map(max, *both)) for both in zip(errors, roundings, strict=True))
    return Reference(whole, exact, tuple(least))


def heads_of(whole: Whole) -> list[Whole]:
    split = (tensor.split(1, 1) for tensor in (*whole.inputs, whole.allowed, whole.bias))
    return [
        Whole(tuple(inputs), None, allowed, bias)
        for *inputs, allowed, bias in zip(*split, strict=True)
    ]


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
    heads = 3 if world_size == 3 else 4
    sizes = {"batch": batch_of(length), "num_heads": heads, "num_kv_heads": heads}
    sizes |= {"head_dim": HEAD_DIM, "seq_len": length, "kv_len": length, "seed": length}
    attention = replace(PLAIN, dtype=dtype, mask=case.mask, stages=0, **sizes)
    reference = make_reference(case, attention)
    exact_tiles = mock.patch.object(views, "get_kernel", return_value=ExactTiles())
    ratios: dict[str, dict[str, Errors]] = {}
    for strategy in strategies:
        planned = replace(attention, strategy=strategy, world_size=world_size)
        try:
            recipe = plan_of(planned)
        except UnsupportedStrategy:
            continue
        with exact_tiles if has_exact_tiles else nullcontext():
            ranks = attend_sharded(planned, reference.whole, recipe)
        ratios[strategy] = {}
        for index, (exact, least) in enumerate(zip(reference.exact, reference.least, strict=True)):
            whole = torch.cat([of_rank[index] for of_rank in ranks], 2).double()
            assert whole.isfinite().all(), (case.name, strategy)
            ratios[strategy][RESULTS[index]] = Errors(*map(_ratio, size_of(whole - exact), least))
    return ratios


def _ratio(error: float, base: float) -> float:
    return error / base if base else float(error > 0)
