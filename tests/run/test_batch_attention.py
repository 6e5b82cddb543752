"""Attention by a plan of its batch, eager, against one process in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.ops.attention import attention
from cp_inductor.ops.plan_batch import plan_batch
from cp_inductor.run.attention import ANY_RANK, Attention, PerBatch
from tests.support.ranks import run_ranks
from tests.support.reference import TOLERANCE, attend_with_grads, meaning_of, shard

DOCUMENTS = "(k - q <= 0) & Eq(t0(b, k), t0(b, q))"
RULES = {
    "causal": DOCUMENTS,
    "bidirectional": "Eq(t0(b, k), t0(b, q))",
    "window": f"{DOCUMENTS} & (q - k - 99 <= 0)",
    "padding": "(k - q <= 0) & Ne(t0(b, k), 0)",
    "alibi": f"{DOCUMENTS}; x1(h)*(k - q)",
    "lengths": "(k - q <= 0) & (k - t0(b) < 0)",
    "cross": "Eq(t0(b, q), t1(b, k))",
    "flipped": "(k - q <= 0) & Ne(t0(-b + LAST, k), 0)",
}


def documents(length: int, kind: str, seed: int) -> Tensor:
    """Return document numbers of one sequence."""
    draw = random.Random(f"{kind} {seed}")
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(
            {
                "ones": 1,
                "one": length,
                "equal": 96,
                "short": draw.randint(1, 200),
                "long": min(length, int(draw.paretovariate(1.0) * 40)),
            }[kind]
        )
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return numbers[:length]


def tables_of(
    kind: str, packings: Sequence[str], length: int, heads: int, seed: int
) -> list[Tensor]:
    rows = torch.stack([documents(length, one, seed + n) for n, one in enumerate(packings)])
    if kind == "cross":
        longer = [documents(keys_of(kind, length), one, seed + n) for n, one in enumerate(packings)]
        return [rows, torch.stack(longer)]
    if kind in ("padding", "flipped"):
        rows = (rows > 0).long()
    if kind == "lengths":
        return [torch.tensor([length // (n + 2) for n in range(len(packings))])]
    return [rows] + [torch.arange(1, heads + 1) * 0.01] * (kind == "alibi")


def keys_of(kind: str, length: int) -> int:
    """Return how many keys there are for so many queries."""
    return length + 77 if kind == "cross" else length


def random_case(seed: int, world_size: int) -> tuple:
    """Return a case, of lengths that are not round."""
    draw = random.Random(seed)
    kind = draw.choice([*RULES])
    packing = ("ones", "one", "equal", "short", "long")
    packings = tuple(draw.choice(packing) for _ in range(draw.randint(1, 3)))
    # Heads are cut in groups of one and of two, or stay together where a rule knows them.
    heads, kv_heads = draw.choice([(2, 2), (4, 2), (4, 1), (3, 3), (4, 4), (10, 5), (8, 4), (8, 8)])
    dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16])
    # Of few tokens, some rank has none.
    length = draw.choice([draw.randint(1, 9), *[draw.randint(1, 900)] * 5])
    stages = draw.randint(1, 3)
    return kind, packings, length, world_size, heads, kv_heads, stages, dtype


@pytest.mark.parametrize(
    ("world_size", "count", "nodes"),
    [
        (2, 12, ""),
        *(pytest.param(size, 60, "", marks=pytest.mark.long) for size in (3, 4)),
        *(pytest.param(6, 60, nodes, marks=pytest.mark.long) for nodes in ("2:8", "4:2")),
    ],
)
def test_random_packings(world_size: int, count: int, nodes: str) -> None:
    for errors in run_ranks(world_size, _run_many, count, world_size, nodes):
        assert not errors, errors


def _run_many(count: int, world_size: int, nodes: str) -> list[str]:
    wrong = []
    for seed in range(count):
        case = random_case(seed, world_size)
        for name, (error, limit) in _run(case, nodes).items():
            if not error <= limit:
                wrong.append(f"{seed} {case} {name} {error} > {limit}")
    return wrong


def _run(case: tuple, nodes: str) -> dict[str, tuple[float, float]]:
    kind, packings, length, world_size, heads, kv_heads, stages, dtype = case
    torch.manual_seed(3)
    batch, head_dim, rank = len(packings), 8, dist.get_rank()
    num_keys = keys_of(kind, length)
    shapes = [(batch, heads, length, head_dim)] + [(batch, kv_heads, num_keys, head_dim)] * 2
    whole = [torch.randn(shape).to(dtype) for shape in (*shapes, shapes[0])]
    tables = tables_of(kind, packings, length, heads, 5)
    rule = RULES[kind].replace("LAST", str(batch - 1))
    allowed, bias = meaning_of(rule, (batch, heads, length, num_keys), tables)
    expected = attend_with_grads(*whole, allowed=allowed, bias=bias)
    query, key, value, grad_out = (shard(one, rank, world_size) for one in whole)
    leaves = [one.clone().requires_grad_() for one in (query, key, value)]
    name = dist.group.WORLD.group_name
    shape = (batch, length, num_keys, heads, kv_heads)
    sizes, numbers = plan_batch(
        tables, rule, *shape, stages, torch.device("cpu"), name, nodes=nodes
    )
    this = Attention(PerBatch(rule, stages, nodes), ANY_RANK, None, "flash_cpu", name)
    out, _ = attention(*leaves, [*tables, sizes, numbers], *this.arguments)
    grads = torch.autograd.grad(out, leaves, grad_out)
    errors = {}
    for part, got, want in zip(("out", "dq", "dk", "dv"), (out, *grads), expected, strict=True):
        mine = shard(want, rank, world_size)
        # For rows with one key, dq is nothing but rounding.
        scale = max(float(want.abs().max()), 1.0)
        difference = float((got.detach().double() - mine).abs().max()) if mine.numel() else 0.0
        errors[part] = (difference / scale, TOLERANCE[dtype])
    return errors
