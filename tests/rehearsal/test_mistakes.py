"""A rehearsal notices mistakes: each is put into generated text, which then runs on two ranks."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch

from tests.rehearsal.mutated_programs import MISTAKES, WORLD, Mistake, Programs, programs_of, replay
from tests.rehearsal.rehearse import on_stage
from tests.support.ranks import RankError

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="read in torch 2.13"),
]
BOUND = 1e-2  # relative: bfloat16 through two tiles


@pytest.fixture(scope="module")
def programs() -> tuple[Programs, ...]:
    return tuple(programs_of(rank) for rank in range(WORLD))


def run(stage: Executor, programs: tuple[Programs, ...]) -> tuple[list[str], float]:
    findings, worst = on_stage(stage, WORLD, replay, programs)[0]
    return findings, worst


def test_programs_without_mistakes_are_fine(
    stage: Executor, programs: tuple[Programs, ...]
) -> None:
    findings, worst = run(stage, programs)
    assert not findings and worst < BOUND, (findings, worst)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_are_noticed(
    stage: Executor, programs: tuple[Programs, ...], mistake: Mistake
) -> None:
    changed = mistake.apply(programs)
    assert changed is not None and changed != programs, "there is no such place in the programs"
    try:
        findings, worst = run(stage, changed)
    except RankError as error:
        findings, worst = [str(error)], 0.0
    assert findings or not worst < BOUND, f"not noticed: {worst}"
