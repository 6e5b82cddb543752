"""Plans of batches: every pair is in a cell, every cell has a rank, and little moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest

from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import BATCH, HEAD, KEY, QUERY
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BLOCK, BatchPlan, plan_batch

DOCUMENTS = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"
Tables = Mapping[int, np.ndarray]


def pairs_of(
    rule: Rule, tables: Tables, *, batch: int, num_heads: int, query_length: int, key_length: int
) -> np.ndarray:
    """Return which (entry, query, key) exist for any head, pair by pair."""
    operations = Operations(
        read=lambda number, indices, _: tables[number][tuple(indices)],
        floor_divide=lambda value, by: value // by,
        minimum=np.minimum,
        maximum=np.maximum,
        choose=np.where,
        as_integer=lambda condition: np.asarray(condition).astype(np.int64),
        boolean=np.asarray,
    )
    shape = (batch, num_heads, query_length, key_length)
    grids = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij", sparse=True)
    values = dict(zip((BATCH, HEAD, QUERY, KEY), grids, strict=True))
    return np.broadcast_to(evaluate(rule.allowed, values, operations), shape).any(1)


def plan(
    text: str,
    tables: Tables,
    lengths: Sequence[int],
    *,
    key_lengths: Sequence[int] | None = None,
    batch: int = 1,
    heads: tuple[int, int] = (4, 2),
    stages: int = 2,
    size: int = 0,
) -> BatchPlan:
    return plan_batch(
        Rule.parse(text),
        tables,
        batch=batch,
        query_lengths=lengths,
        key_lengths=lengths if key_lengths is None else key_lengths,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        stages=stages,
        size=size,
    )


def check(found: BatchPlan) -> None:
    """Check what every plan promises."""
    cells = found.query * max(1, len(found.keys)) + found.key
    assert (np.diff(cells) > 0).all()
    assert (found.queries.entry[found.query] == found.keys.entry[found.key]).all()
    most = found.queries.num_blocks[found.query] * found.keys.num_blocks[found.key]
    assert ((found.weight >= 1) & (found.weight <= most)).all()
    assert ((found.rank >= 0) & (found.rank < found.world_size)).all()
    is_own = (found.queries.rank[found.query] == found.rank) & (
        found.keys.rank[found.key] == found.rank
    )
    assert ((found.stage == 0) == is_own).all()
    assert (found.stage <= found.stages).all()
    # What a cell needs has arrived by its stage.
    for arrivals, chunk in (found.query_stages, found.query), (found.key_stages, found.key):
        arrived = arrivals[found.rank, chunk]
        assert ((arrived >= 0) & (arrived <= found.stage)).all()


def check_pairs(found: BatchPlan, pairs: np.ndarray, *, is_exact: bool = False) -> None:
    """Check that every pair is in a cell, and what weighs how much."""
    weight = np.zeros((len(found.queries), len(found.keys)))
    weight[found.query, found.key] = found.weight
    for i, j in product(range(len(found.queries)), range(len(found.keys))):
        entry, q, m = (getattr(found.queries, name)[i] for name in ("entry", "first", "length"))
        other, k, n = (getattr(found.keys, name)[j] for name in ("entry", "first", "length"))
        part = pairs[entry, q : q + m, k : k + n] if entry == other else np.zeros((1, 1), bool)
        blocks = [
            part[a : a + BLOCK, c : c + BLOCK].any()
            for a, c in product(range(0, len(part), BLOCK), range(0, part.shape[1], BLOCK))
        ]
        assert weight[i, j] >= sum(blocks)
        if is_exact:
            assert weight[i, j] == sum(blocks)


def documents(generator: np.random.Generator, batch: int, length: int, mean: int) -> np.ndarray:
    """Return the document number of each token."""
    return np.cumsum(generator.random((batch, length)) < 1 / mean, axis=1)


WINDOW = DOCUMENTS + "&(q-k-150<=0)"
BOTH_WAYS = "Eq(t0(b,q)-t0(b,k),0)"


@pytest.mark.parametrize("text", [DOCUMENTS, WINDOW, BOTH_WAYS])
@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        (1, (512, 512, 512)),
        (2, (300, 0, 700, 5)),
        (3, (128, 128)),
        (1, (1, 2, 0, 900)),
        (1, (640,)),
    ],
)
def test_documents(text: str, batch: int, lengths: tuple[int, ...]) -> None:
    generator, total = np.random.default_rng(len(text)), sum(lengths)
    for mean, size in product((1, 40, 300, 10**9), (0, 256)):
        tables = {0: documents(generator, batch, total, mean)}
        found = plan(text, tables, lengths, batch=batch, size=size)
        pairs = pairs_of(
            Rule.parse(text),
            tables,
            batch=batch,
            num_heads=1,
            query_length=total,
            key_length=total,
        )
        check(found)
        # A window may end between two blocks, of which a document is only in a part.
        check_pairs(found, pairs, is_exact=sum(n % BLOCK for n in lengths) == 0)
