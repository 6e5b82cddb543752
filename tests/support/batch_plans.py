"""Plans that batches decide, of packed documents, without ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_tables import RankTables, rank_tables

DOCUMENTS = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"
WINDOW = DOCUMENTS + "&(q-k-150<=0)"
BOTH_WAYS = "Eq(t0(b,q)-t0(b,k),0)"
Tables = Mapping[int, np.ndarray]


def plan(
    text: str,
    tables: Tables,
    lengths: Sequence[int],
    *,
    key_lengths: Sequence[int] | None = None,
    heads: tuple[int, int] = (4, 2),
    **how: Any,
) -> BatchPlan:
    """Plan one entry in two stages, unless `how` of `plan_batch` says otherwise."""
    return plan_batch(
        Rule.parse(text),
        tables,
        query_lengths=lengths,
        key_lengths=lengths if key_lengths is None else key_lengths,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        **{"batch": 1, "stages": 2, **how},
    )


def documents(generator: np.random.Generator, batch: int, length: int, mean: int) -> np.ndarray:
    """Return the document number of each token."""
    return np.cumsum(generator.random((batch, length)) < 1 / mean, axis=1)


def tables_of(
    found: BatchPlan, batch: int, lengths: Sequence[int], key_lengths: Sequence[int] | None = None
) -> list[RankTables]:
    """Return the numbers that the graphs of all ranks read."""
    pairs = zip(lengths, lengths if key_lengths is None else key_lengths, strict=True)
    return [
        rank_tables(found, rank, num_queries=batch * queries, num_keys=batch * keys)
        for rank, (queries, keys) in enumerate(pairs)
    ]
