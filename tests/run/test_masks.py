"""Attention under rules, tables, biases and dropout, held against float64: what ranks execute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.mask.rule import Rule
from cp_inductor.ops.attention import attention
from cp_inductor.plan import Recipe, forward_plan, resolve
from tests.support.ranks import run_ranks
from tests.support.reference import (
    assert_shards_close,
    attend_with_grads,
    make_qkv,
    shard,
    with_grads,
)


@dataclass(frozen=True)
class Case:
    """A mask and the attention under it.

    Attributes:
        tables: shapes by letters b, h, q, k, and how many values they take.
    """

    name: str
    rule: str
    seq_len: int = 131
    kv_len: int | None = None
    dtype: torch.dtype = torch.float64
    tables: tuple[tuple[str, int], ...] = ()
    shape: dict[str, Any] = field(default_factory=dict)


DOCUMENTS = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"
CASES = (
    Case("window", "(k-q<=0)&(q-k-9<=0)"),
    Case("window, long", "(k-q<=0)&(q-k-99<=0)", 521, shape={"batch": 1}),
    Case("window, both sides, gqa", "(k-q-4<=0)&(q-k-9<=0)", shape={"num_kv_heads": 2}),
    Case("chunks", "(k-q<=0)&Eq(floor(q/30)-floor(k/30),0)"),
    Case("prefix", "(k-q<=0)|(k-40<=0)", dtype=torch.float32),
    Case("static documents", "(k-q<=0)&Eq(Step(q,70)-Step(k,70),0)", shape={"num_kv_heads": 1}),
    Case("documents", DOCUMENTS, tables=(("bk", 3),)),
    Case("documents, bfloat16", DOCUMENTS, dtype=torch.bfloat16, tables=(("bk", 3),)),
    Case("padding", "Ne(t0(b,k),0)", tables=(("bk", 2),)),
    Case("padding, few keys", "Ne(t0(b,k),0)", 67, 19, tables=(("bk", 2),)),
    Case("causal, more keys", "(k-q<=0)", 67, 99),
    Case("causal, fewer keys", "(k-q<=0)", 67, 19),
    Case("rows that see nothing", "(k-q+50<=0)"),
    Case("nobody sees anything", "(k-q+500<=0)", dtype=torch.float32),
    Case("a mask tensor", "(k-q<=0)&Ne(t0(b,h,q,k),0)", tables=(("bhqk", 2),)),
    Case("a mask tensor of all", "Ne(t0(q,k),0)", tables=(("qk", 2),), dtype=torch.bfloat16),
    Case("ALiBi", "k-q<=0;(k-q)*t0(h)/8", tables=(("h", 4),)),
    Case("distance bias", "True;t0(h,k-q+130)/4", tables=(("hd", 9),), shape={"batch": 1}),
    Case("fewer tokens than ranks", "(k-q<=0)&(q-k-1<=0)", 2),
)

PLANS = (
    {"strategy": "auto"},
    {"strategy": "allgather"},
    {"strategy": "rows", "stages": 2, "chunks": 4, "keep": 1},
    {"strategy": "blocks", "stages": 2, "chunks": 6, "keep": 1},
    {"strategy": "blocks", "stages": 1, "chunks": 16},
    {"strategy": "heads", "stages": 1, "chunks": 4},
)


def make_tables(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = {"b": case.shape.get("batch", 2), "h": 4, "q": case.seq_len, "d": 2 * case.seq_len}
    lengths["k"] = case.kv_len or case.seq_len
    return [
        torch.randint(0, num_values, [lengths[letter] for letter in letters], generator=generator)
        for letters, num_values in case.tables
    ]


def grid_of(case: Case, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Evaluate a rule the slow way, on the whole grid: (allowed, bias)."""
    lengths = (case.shape.get("batch", 2), 4, case.seq_len, case.kv_len or case.seq_len)
    b, h, q, k = (
        torch.arange(n).view([-1 if d == dim else 1 for d in range(4)])
        for dim, n in enumerate(lengths)
    )
    names: dict[str, Any] = {"b": b, "h": h, "q": q, "k": k, "True": torch.tensor(True)}
    names["Eq"] = lambda left, right: left == right
    names["Ne"] = lambda left, right: left != right
    names["Step"] = lambda x, at: (x >= at).long()
    names["floor"] = torch.floor
    names |= {f"t{i}": lambda *where, t=table: t[where] for i, table in enumerate(tables)}
    allowed, _, bias = case.rule.partition(";")
    values = [eval(text or "b * 0.0", names) for text in (allowed, bias)]
    return tuple(torch.as_tensor(value).expand(lengths) for value in values)  # type: ignore[return-value]


def rows_of(table: Tensor, letters: str) -> Tensor:
    """What a rank is given of a table: of a table of pairs, its own queries."""
    if {"q", "k"} <= set(letters):
        return shard(table, dist.get_rank(), dist.get_world_size(), dim=letters.index("q"))
    return table


def recipe_of(case: Case, whole: tuple[Tensor, ...], plan: dict[str, Any]) -> Recipe:
    recipe = Recipe(
        world_size=dist.get_world_size(),
        query_length=whole[0].shape[2],
        key_length=whole[1].shape[2],
        num_heads=whole[0].shape[1],
        num_kv_heads=whole[1].shape[1],
        head_dim=whole[0].shape[3],
        itemsize=case.dtype.itemsize,
        rule=Rule.parse(case.rule).format(),
        **plan,
    )
    return resolve(recipe, site=case.name)


def run_cases() -> None:
    failures = []
    for case in CASES:
        whole = make_qkv(case.seq_len, kv_len=case.kv_len, dtype=case.dtype, **case.shape)
        tables = make_tables(case)
        allowed, bias = grid_of(case, tables)
        expected = attend_with_grads(*whole, allowed=allowed, bias=bias)
        for plan in PLANS:
            try:
                run_plan(case, plan, whole, tables, expected)
            except UnsupportedStrategy:
                is_made = "tensor" in case.name and plan["strategy"] in ("blocks", "heads")
                assert is_made or plan["strategy"] == "heads", case.name
            except (AssertionError, RuntimeError) as error:
                failures.append(f"{case.name}, {plan}: {error}")
    assert not failures, "\n".join(failures)


def run_plan(
    case: Case,
    plan: dict[str, Any],
    whole: tuple[Tensor, ...],
    tables: list[Tensor],
    expected: tuple[Tensor, ...],
) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recipe = recipe_of(case, whole, plan)
    forward_plan(recipe).simulate()
    extras = [rows_of(t, letters) for t, (letters, _) in zip(tables, case.tables, strict=True)]
    group_name = dist.group.WORLD.group_name
    how = (recipe.format(), rank, None, "flash_cpu", group_name, 0.0, False)
    given = (shard(tensor, rank, world_size).contiguous() for tensor in whole)
    found = with_grads(lambda *qkv: attention(*qkv, extras, *how)[0], given)
    assert_shards_close(found, expected, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_against_float64(world_size: int) -> None:
    run_ranks(world_size, run_cases)
