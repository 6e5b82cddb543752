"""A rehearsal notices mistakes: each is put into generated text, which then runs on two ranks."""

from __future__ import annotations

import pytest
import torch

from cp_inductor import CPError
from tests.rehearsal.mutated_programs import MISTAKES, WORLD, Mistake, Programs, programs_of, replay
from tests.rehearsal.rank import Job
from tests.rehearsal.rehearse import rehearse
from tests.rehearsal.stage import Stage

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="read in torch 2.13"),
]
BOUND = 1e-2  # relative: bfloat16 through two tiles


@pytest.fixture(scope="module")
def programs() -> tuple[Programs, ...]:
    return tuple(programs_of(rank) for rank in range(WORLD))


def run(stage: Stage, programs: tuple[Programs, ...]) -> tuple[list[str], float]:
    job = Job(model=replay, args=(programs,), is_compiled=False, is_compared=False)
    findings, worst = rehearse(job, stage=stage, deadline_s=120).outputs
    return findings, worst


def test_programs_without_mistakes_are_fine(stage: Stage, programs: tuple[Programs, ...]) -> None:
    findings, worst = run(stage, programs)
    assert not findings and worst < BOUND, (findings, worst)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_are_noticed(
    stage: Stage, programs: tuple[Programs, ...], mistake: Mistake
) -> None:
    changed = mistake.apply(programs)
    assert changed is not None and changed != programs, "there is no such place in the programs"
    try:
        findings, worst = run(stage, changed)
    except CPError as error:
        findings, worst = [str(error)], 0.0
    assert findings or not worst < BOUND, f"not noticed: {worst}"


def test_there_are_at_least_twenty() -> None:
    assert len(MISTAKES) >= 20
