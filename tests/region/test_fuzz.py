"""The first random models of `tests/support/fuzz.py`, and that the fuzz finds what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from cp_inductor.run import merge
from tests.support.fuzz import EXPECTED_REFUSALS, KNOWN, a_case, check, kind_of, run_cases
from tests.support.ranks import RankError, run_ranks

AT_ONCE = 10
EAGER_AT_ONCE = 5


def assert_right(cases: list[Any], least: float) -> None:
    """Check cases; at least such a part of them must not be refused."""
    kinds: Counter[str] = Counter()
    for case, said in run_cases(cases):
        kind = kind_of(said)
        assert kind != "WRONG", f"seed {case.seed}: {said}\n{case}"
        assert kind == "right" or kind.removeprefix("refused: ") in EXPECTED_REFUSALS, said
        kinds[kind] += 1
    assert sum(kinds.values()) == len(cases)
    assert kinds["right"] >= least * len(cases), kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.long] * (first != 30))
        for first in range(0, 60, EAGER_AT_ONCE)
    ],
)
def test_random_models_in_eager_code(first: int) -> None:
    assert_right([a_case(seed, compiled=0) for seed in range(first, first + EAGER_AT_ONCE)], 0.4)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1040, AT_ONCE))
def test_random_models_that_are_compiled(first: int) -> None:
    seeds = [seed for seed in range(first, first + AT_ONCE) if seed not in KNOWN]
    assert_right([a_case(seed, compiled=1) for seed in seeds], 0.5)


def check_broken(case: Any) -> str:
    """Lose a hundredth of what is found in each attention."""
    original = merge.combine

    def lose(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return found._replace(out=found.out * 0.99)

    with mock.patch.object(merge, "combine", lose):
        return check(case)


@pytest.mark.slow
def test_a_broken_attention_is_found() -> None:
    case = replace(a_case(0, compiled=0), world_size=2, dtype="float64", lengths=(64, 64))
    layer = replace(case.layers[0], mask="causal", is_checkpointed=False)
    case = replace(case, layers=(layer,), strategy="ring", stages=1)
    assert run_ranks(2, check, case) == ["right"] * 2
    with pytest.raises(RankError, match=r"out 0: .* > "):
        run_ranks(2, check_broken, case)
