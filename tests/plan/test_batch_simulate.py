"""The simulator of batch plans finds every wrong number; right ones pass in test_batch_plan.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cp_inductor.plan.batch import BatchPlan
from cp_inductor.plan.batch_tables import COLUMNS, Kind, Layout, Part, RankTables, Side
from cp_inductor.plan.simulate import InvalidPlan
from tests.support.batch_simulate import DOCUMENTS, documents, plan, simulate_batch, tables_of

LENGTHS = (512, 300, 512, 400)
LAYOUT = Layout(stages=2, world_size=len(LENGTHS))


@pytest.fixture(scope="module")
def planned() -> tuple[BatchPlan, list[RankTables]]:
    """Return a plan in which every rank sends, computes and gets home rows of both sides."""
    ids = documents(np.random.default_rng(3), 1, sum(LENGTHS), 2000)
    found = plan(DOCUMENTS, {0: ids}, LENGTHS, heads=(4, 2))
    tables = tables_of(found, 1, LENGTHS)
    simulate_batch(found, tables)
    return found, tables


def place_in(tables: RankTables, part: Part) -> slice:
    place = LAYOUT.place(part)
    start, length = tables.sizes[place : place + 2].tolist()
    return slice(start, start + length)


def change(
    tables: Sequence[RankTables], rank: int, part: Part, how: Callable[[np.ndarray], None]
) -> list[RankTables]:
    """Return the tables with other numbers in one part of one rank."""
    numbers = tables[rank].numbers.copy()
    how(numbers[place_in(tables[rank], part)])
    return [replace(t, numbers=numbers) if r == rank else t for r, t in enumerate(tables)]


def change_counts(
    tables: Sequence[RankTables], rank: int, part: Part, how: Callable[[np.ndarray], None]
) -> list[RankTables]:
    """Return the tables with other counts of rows of an exchange of one rank."""
    sizes, place = tables[rank].sizes.copy(), LAYOUT.place_of_rows(part)
    how(sizes[place : place + 2 * LAYOUT.world_size + 1])
    return [replace(t, sizes=sizes) if r == rank else t for r, t in enumerate(tables)]


def ranks_with(tables: Sequence[RankTables], part: Part) -> list[int]:
    return [r for r, t in enumerate(tables) if len(t.numbers[place_in(t, part)])]


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.HOME])
@pytest.mark.parametrize("side", Side)
def test_rows_sent_to_the_wrong_rank_are_found(
    planned: tuple[BatchPlan, list[RankTables]], kind: Kind, side: Side
) -> None:
    found, tables = planned
    part = Part(kind, side, 1)
    for rank in ranks_with(tables, part):

        def divert(counts: np.ndarray, rank: int = rank) -> None:
            sent = counts[: LAYOUT.world_size]
            to = int(sent.argmax())
            other = next(r for r in range(LAYOUT.world_size) if r not in (rank, to))
            sent[to] -= 1
            sent[other] += 1

        with pytest.raises(InvalidPlan, match="and expects"):
            simulate_batch(found, change_counts(tables, rank, part, divert))
    assert ranks_with(tables, part)


def test_a_rank_that_takes_all_for_idle_is_found(
    planned: tuple[BatchPlan, list[RankTables]],
) -> None:
    """It would leave the exchange out, in which the others wait for it."""
    found, tables = planned

    def idle(counts: np.ndarray) -> None:
        counts[-1] = 0

    with pytest.raises(InvalidPlan, match="takes 0 rows for all that move"):
        simulate_batch(found, change_counts(tables, 2, Part(Kind.SEND, Side.KEY, 1), idle))


def test_every_wrong_number_is_found(planned: tuple[BatchPlan, list[RankTables]]) -> None:
    """One in each part of each rank, each number of a block. Slots are left out: another may do."""
    found, tables = planned
    generator = np.random.default_rng(0)
    num_changed = dict.fromkeys(Kind, 0)
    for part in LAYOUT.parts:
        for rank in ranks_with(tables, part):
            cells = place_in(tables[rank], replace(part, kind=Kind.CELLS, side=Side.QUERY))
            if part.kind in (Kind.TILE, Kind.CELLS) and not tables[rank].numbers[cells].any():
                continue
            for column in range(len(COLUMNS) - 1 if part.kind is Kind.TILE else 1):

                def spoil(numbers: np.ndarray, part: Part = part, column: int = column) -> None:
                    at = int(generator.integers(len(numbers)))
                    if part.kind is Kind.TILE:
                        at += column - at % len(COLUMNS)
                    numbers[at] = 1 - numbers[at] if part.kind is Kind.CELLS else numbers[at] + 1

                num_changed[part.kind] += 1
                with pytest.raises(InvalidPlan):
                    simulate_batch(found, change(tables, rank, part, spoil))
    assert min(num_changed.values()) >= 4
