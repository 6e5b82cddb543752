"""Plans that batches decide, of packed documents, without ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_tables import RankTables, rank_tables
from cp_inductor.plan.ir import DESTINATION, IS_OF_KEYS, PAYLOAD, SOURCE, START, Transfers

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


def chunks_moved(transfers: Transfers, *, of_keys: bool) -> tuple[np.ndarray, ...]:
    """Return the source, the destination and the chunk of each transfer of one side."""
    columns = transfers.columns[IS_OF_KEYS[transfers.columns[:, PAYLOAD]] == of_keys]
    return columns[:, SOURCE], columns[:, DESTINATION], columns[:, START]


def tables_of(
    found: BatchPlan, batch: int, lengths: Sequence[int], key_lengths: Sequence[int] | None = None
) -> list[RankTables]:
    """Return the numbers that the graphs of all ranks read."""
    pairs = zip(lengths, lengths if key_lengths is None else key_lengths, strict=True)
    return [
        rank_tables(found, rank, num_queries=batch * queries, num_keys=batch * keys)
        for rank, (queries, keys) in enumerate(pairs)
    ]


def lognormal(seed: int, length: int, log_mean: float, sigma: float) -> np.ndarray:
    """Return the document number of each token, of a batch packed with lognormal lengths."""
    generator = np.random.default_rng(seed)
    lengths = np.maximum(16, generator.lognormal(log_mean, sigma, length // 16).astype(np.int64))
    ends = np.cumsum(np.minimum(lengths, length))
    return np.searchsorted(ends, np.arange(length), side="right")[None]


def digest(found: BatchPlan) -> str:
    arrays = (found.query, found.key, found.weight, found.rank, found.stage)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
