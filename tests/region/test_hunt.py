"""What `tests/support/hunt.py` says of some of its programs, and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from unittest import mock

import pytest

from cp_inductor.run import merge
from tests.support.hunt import (
    FAILURES,
    MODES,
    Case,
    Verdict,
    check_drawn,
    difference,
    join,
    judge_in_turn,
    judge_on_rank,
    names_same_cause,
    run_whole,
    sample,
)
from tests.support.idioms import PROGRAMS
from tests.support.ranks import run_ranks

SEED = 1

# So many programs of each mode, drawn by a seed; tests/support/hunt.py runs all of them.
SAMPLES = {"region": 20, "eager": 12, "mesh": 6, "pieces": 8, "dtensors": 4}
LONG_SAMPLES = [(mode, first) for mode in MODES for first in range(100, 200, 20)]


def assert_right_or_refused(mode: str, names: list[str]) -> None:
    """Check that no program is silently wrong, and that all ranks refuse alike."""
    cases = [Case(name, mode, SEED, deadline_s=120) for name in names]
    every = run_ranks(2, judge_in_turn, cases, deadline_s=300)
    found = {case: join(list(verdicts)) for case, *verdicts in zip(cases, *every, strict=True)}
    assert {case: one for case, one in found.items() if one.kind in FAILURES} == {}
    kinds = Counter(one.kind for one in found.values())
    # Over plain shards most programs are refused: a draw of 20 may have two that are right.
    assert kinds["right"] >= len(names) / 20, kinds


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_of_programs(mode: str) -> None:
    assert_right_or_refused(mode, sample(PROGRAMS, SAMPLES[mode], SEED))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mode", "first"), LONG_SAMPLES)
def test_more_programs(mode: str, first: int) -> None:
    assert_right_or_refused(mode, sample(PROGRAMS, first + 20, SEED)[first:])


@pytest.mark.slow
def test_an_index_that_is_in_range_on_one_rank() -> None:
    """The other rank refuses it at once; the loss compared how many labels count, and waited."""
    case = Case("index.by_the_batch", "region", SEED)
    for (verdict,) in run_ranks(2, judge_in_turn, [case], deadline_s=60):
        assert verdict.kind == "refused", verdict


@pytest.mark.slow
def test_counts_over_ranks_that_the_first_rank_does_not_need() -> None:
    """The backward of the other rank gathered them again, and met another exchange."""
    case = Case("positions.cumsum_of_ids", "dtensors", SEED)
    for (verdict,) in run_ranks(2, judge_in_turn, [case], deadline_s=60):
        assert verdict.kind == "right", verdict


def judge_broken(case: Case) -> Verdict:
    """Lose a hundredth of what is found in each attention."""
    original = merge.combine

    def lose(*args: object, **kwargs: object) -> object:
        found = original(*args, **kwargs)
        return found._replace(out=found.out * 0.99)

    with mock.patch.object(merge, "combine", lose):
        return judge_on_rank(case)


@pytest.mark.slow
def test_a_broken_attention_is_found() -> None:
    found = run_ranks(2, judge_broken, Case("pointwise.sin", "region", seed=0))
    assert {verdict.kind for verdict in found} == {"wrong"}
    assert "loss: relative error" in found[0].why


def test_what_differs_is_named() -> None:
    program = PROGRAMS["loss.mean"]
    expected = run_whole(program, 8)
    assert difference(expected, expected, program) == ""
    grads = {**expected.grads, "head.bias": expected.grads["head.bias"] * 1.01}
    changed = dataclasses.replace(expected, grads=grads)
    assert difference(changed, expected, program).startswith("head.bias: relative error 0.01")
    lost = dataclasses.replace(expected, grads={**expected.grads, "cls": None, "head.bias": None})
    assert difference(lost, expected, program) == "head.bias: relative error 1"


def test_numbers_that_ranks_draw_alike_are_found() -> None:
    drawn = run_whole(PROGRAMS["random.dropout"], 32).out
    assert check_drawn(drawn) == ""
    drawn[:, 16:] = drawn[:, :16]
    assert check_drawn(drawn) == "both ranks drew the same numbers"
    assert check_drawn(drawn * 0) == "100% of what was drawn is 0"


def test_ranks_must_refuse_together() -> None:
    one, other = Verdict("refused", "A: 17 tokens"), Verdict("refused", "A: 16 tokens")
    assert join([one, other]) == one
    assert join([one, Verdict("refused", "B: 16 tokens")]).kind == "unalike"
    assert join([one, Verdict("right")]).kind == "unalike"
    assert join([Verdict("right"), Verdict("wrong", "loss")]) == Verdict("wrong", "loss")
    assert names_same_cause("A: x", "RanksDisagree: rank 0 said A: x")
