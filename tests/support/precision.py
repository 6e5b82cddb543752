"""How far off an attention is, by how far off one device is: cases, references, ratios.

Attention is run and held against float64 as tests/support/random_attention.py does it: forward and
backward, on ranks that are threads. So is the same kernel on one device. The ratio of a result is

    error of the sharded one / max(error of the one on one device, rounding of float32)

once of the roots of mean squares, and once of the largest errors. What float32 rounds is no
constant: it is 2^-24 of the sum of the magnitudes that a result is the sum of. One device is right
to less than that by luck, or where nothing is to be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
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


# What is unusual about an attention, by name: its inputs, or its mask.
CASES: dict[str, dict[str, str]] = {
    "logits x 1": {},
    "logits x 1, full": {"mask": "full"},
    "rows that see nothing": {"mask": "blind"},
    **{
        name: {"inputs": name}
        for name in (
            *("logits x 10", "logits x 100", "sink", "sink of a model", "each token itself"),
            *("uniform rows", "one huge key", "one huge value", "gradient of a sum"),
            *("two of a gradient", "no gradient at half", "tiny gradient"),
        )
    },
}
# Those that are also of thousands of tokens.
LONG = {"logits x 1", "sink", "sink of a model", "uniform rows", "one huge key"}


def batch_of(length: int) -> int:
    """Some results hang on few rows: of short sequences there are several, against luck."""
    return max(1, 2000 // length)


@lru_cache(maxsize=2)
def make_reference(attention: Attention) -> tuple[Whole, list[Tensor], list[Errors]]:
    """Return the inputs, out, dq, dk and dv in float64, and the errors that others are divided by.

    The latter are those of one device.
    """
    whole = make_whole(attention)
    of_one = replace(attention, num_heads=1, num_kv_heads=1)
    # A head at a time: scores of all of them are large.
    of_heads = [attend_exactly(of_one, part) for part in heads_of(whole)]
    exact, sums = (
        [torch.cat(parts, 1) for parts in zip(*results, strict=True)]
        for results in zip(*((one.results[:4], one.sums[:4]) for one in of_heads), strict=True)
    )
    single = attend_on_one_device(attention, whole)
    errors = (size_of(a.double() - b) for a, b in zip(single, exact, strict=True))
    roundings = (size_of(UNIT * one) for one in sums)
    least = [Errors(*map(max, *both)) for both in zip(errors, roundings, strict=True)]
    return whole, exact, least


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

    def _attend(self, call: TileCall) -> Partial:
        return get_kernel("flash_cpu").forward(_widened(call))

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        wide = Partial(whole.out.float(), whole.lse.float())
        return get_kernel("flash_cpu").backward(_widened(call), grad_out.float(), wide)


def _widened(call: TileCall) -> TileCall:
    q, k, v = (tensor.float() for tensor in call.tensors)
    bias = None if call.bias is None else call.bias.float()
    return replace(call, query=q, key=k, value=v, bias=bias)


def measure(
    case: str,
    dtype: str,
    world_size: int,
    length: int,
    strategies: Sequence[str] = STRATEGIES,
    *,
    has_exact_tiles: bool = False,
) -> dict[str, dict[str, Errors]]:
    """Return ratios of one of CASES, by strategy and result."""
    heads = 3 if world_size == 3 else 4
    sizes: dict[str, Any] = {"batch": batch_of(length), "num_heads": heads, "num_kv_heads": heads}
    sizes |= {"head_dim": HEAD_DIM, "seq_len": length, "kv_len": length, "seed": length}
    attention = replace(PLAIN, dtype=dtype, stages=0, **{**sizes, **CASES[case]})
    inputs, *right = make_reference(attention)
    exact_tiles = mock.patch.object(views, "get_kernel", return_value=ExactTiles())
    ratios: dict[str, dict[str, Errors]] = {}
    for strategy in strategies:
        planned = replace(attention, strategy=strategy, world_size=world_size)
        try:
            recipe = plan_of(planned)
        except UnsupportedStrategy:
            continue
        with exact_tiles if has_exact_tiles else nullcontext():
            ranks = attend_sharded(planned, inputs, recipe)
        ratios[strategy] = {}
        for index, (exact, least) in enumerate(zip(*right, strict=True)):
            whole = torch.cat([of_rank[index] for of_rank in ranks], 2).double()
            assert whole.isfinite().all(), (case, strategy)
            ratios[strategy][RESULTS[index]] = Errors(*map(_ratio, size_of(whole - exact), least))
    return ratios


def _ratio(error: float, base: float) -> float:
    return error / base if base else float(error > 0)
