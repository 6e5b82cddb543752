"""Attention by a plan of its batch, eager, against one process in float64."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.ops.attention import attention
from cp_inductor.ops.plan_batch import plan_batch
from cp_inductor.run.attention import ANY_RANK, Attention, PerBatch
from tests.support.ranks import run_ranks
from tests.support.reference import (
    assert_all_close,
    attend_with_grads,
    meaning_of,
    shard,
    with_grads,
)

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


class Case(NamedTuple):
    """Documents of each batch entry under a rule, and how they are planned."""

    kind: str
    packings: tuple[str, ...]
    length: int
    heads: int
    kv_heads: int
    stages: int
    dtype: torch.dtype


def random_case(seed: int) -> Case:
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
    return Case(kind, packings, length, heads, kv_heads, stages, dtype)


@pytest.mark.parametrize(
    ("world_size", "count", "nodes"),
    [
        (2, 12, ""),
        *(pytest.param(size, 60, "", marks=pytest.mark.long) for size in (3, 4)),
        *(pytest.param(6, 60, nodes, marks=pytest.mark.long) for nodes in ("2:8", "4:2")),
    ],
)
def test_random_packings(world_size: int, count: int, nodes: str) -> None:
    """Out and gradients are those of one process, and the same bits if some ranks come late."""
    of_ranks = run_ranks(world_size, _attend_to_many, count, world_size, nodes)
    for seed, of_rank in enumerate(zip(*of_ranks, strict=True)):
        case = random_case(seed)
        whole, tables, rule = tensors_of(case)
        (batch, heads, length, _), num_keys = whole[0].shape, whole[1].shape[2]
        allowed, bias = meaning_of(rule, (batch, heads, length, num_keys), tables)
        expected = attend_with_grads(*whole, allowed=allowed, bias=bias)
        found = [torch.cat(parts, 2) for parts in zip(*of_rank, strict=True)]
        assert_all_close(found, expected, case.dtype, str(case))


def tensors_of(case: Case) -> tuple[list[Tensor], list[Tensor], str]:
    """Return query, key, value and the gradient of out, the tables of the rule, and the rule."""
    torch.manual_seed(3)
    batch, head_dim = len(case.packings), 8
    of_keys = (batch, case.kv_heads, keys_of(case.kind, case.length), head_dim)
    of_queries = (batch, case.heads, case.length, head_dim)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    whole = [torch.randn(shape).to(case.dtype) for shape in shapes]
    tables = tables_of(case.kind, case.packings, case.length, case.heads, 5)
    return whole, tables, RULES[case.kind].replace("LAST", str(batch - 1))


def _attend_to_many(count: int, world_size: int, nodes: str) -> list[list[Tensor]]:
    """Return out, dq, dk and dv of this rank, for each case."""
    rank, found = dist.get_rank(), []
    for seed in range(count):
        torch.use_deterministic_algorithms(bool(seed % 2))
        one = _attend(random_case(seed), nodes)
        time.sleep(0.01 * (rank == seed % world_size))
        again = _attend(random_case(seed), nodes)
        assert all(map(torch.equal, one, again)), seed
        found.append(one)
    torch.use_deterministic_algorithms(False)
    return found


def _attend(case: Case, nodes: str) -> list[Tensor]:
    whole, tables, rule = tensors_of(case)
    *leaves, grad_out = (shard(one, dist.get_rank(), dist.get_world_size()) for one in whole)
    name = dist.group.WORLD.group_name
    shape = (len(case.packings), case.length, whole[1].shape[2], case.heads, case.kv_heads)
    sizes, numbers = plan_batch(
        tables, rule, *shape, case.stages, torch.device("cpu"), name, nodes=nodes
    )
    this = Attention(PerBatch(rule, case.stages, nodes), ANY_RANK, None, "flash_cpu", name)

    def run(*qkv: Tensor) -> Tensor:
        return attention(*qkv, [*tables, sizes, numbers], *this.arguments)[0]

    return list(with_grads(run, (*(leaf.clone() for leaf in leaves), grad_out)))
