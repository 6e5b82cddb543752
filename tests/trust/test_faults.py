"""Ranks that end, stop or raise while others wait for them: real processes, bounded in time.

One of three ranks is struck, in the compiler, before its forward, before its backward or before its
optimizer's step. The others must end within the timeout of the group and five seconds, by an error
that names the exchange and the rank. `tests/support/faults.py` draws such faults.

The long cases are the rest: through Inductor, beside torch's debugging, with the store in the first
rank, and faults that are drawn.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.support import faults
from tests.support.combinations import AOT, COMPILED, EAGER
from tests.support.faults import FAULTS, HARMLESS, NAMED, TIMES, Case, Outcome, launch, train


def assert_named(
    case: Case,
    fault_at: float,
    outcomes: list[Outcome],
    *parts: str,
    error: str = "ExchangeFailed",
    names_missing: bool = True,
) -> None:
    """Every rank but one was told in time what happened, and ended in its own way.

    Unless `names_missing` is False, they are told that it is missing.
    """
    assert fault_at > 0, outcomes
    for rank, outcome in enumerate(outcomes):
        if rank == case.odd:
            continue
        assert outcome.error == error, (rank, outcome)
        assert outcome.waited_s(fault_at) < case.limit_s, (outcome.waited_s(fault_at), outcome)
        assert outcome.exit_code == 0, (rank, outcome)
        for part in parts:
            assert part in outcome.text, (part, outcome)
        if error == "ExchangeFailed" and names_missing:
            assert outcome.missing == (case.odd,), outcome


def line_of(start: str) -> int:
    """Return which line of the model's file begins so."""
    lines = Path(faults.__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.strip().startswith(start))
    return number


# Of each kind, those that run in every run; whatever torch has for debugging, and wherever the
# store lives, the others are told the same. Who is struck in its optimizer's step is missed in the
# next forward.
IN_EVERY_RUN = [
    *(Case(EAGER, "kill", at) for at in ("backward", "optimizer")),
    Case(EAGER, "stop", "backward"),
    *(Case(AOT, fault, "compile", step=0) for fault in ("kill", "fail")),
    Case(AOT, "fail", "backward"),
    Case(AOT, "kill", "backward", odd=0, store="first"),
]
MORE = [
    *(Case(COMPILED, fault, at) for fault, at in zip(FAULTS, TIMES[1:] * 2, strict=False)),
    Case(COMPILED, "interrupt", "compile", step=0),
    *(Case(AOT, fault, "backward", debugging="detail") for fault in ("kill", "stop")),
    *(Case(AOT, fault, "backward", debugging="recorder") for fault in ("kill", "stop")),
    Case(AOT, "stop", "backward", odd=0, store="first"),
    Case(EAGER, "kill", "forward", odd=0, store="first"),
    *(Case(AOT, fault, "compile", odd=0, step=0, store="first") for fault in ("stop", "kill")),
]


def id_of(case: Case) -> str:
    more = case.debugging or (case.store if case.store != "file" else "")
    return "-".join(filter(None, [case.form, case.fault, case.at, more]))


def expected_of(case: Case) -> tuple[str, ...]:
    """Return the class of the error that the others are told, and parts of its text."""
    if case.at == "compile" and case.store == "first":
        # Nothing is known of the rank that holds it, but where it is.
        store = "expected the store of the process group, localhost:", "rank 0"
        return "ProcessGroupError", *store, "got no answer for 4 s" * (case.fault == "stop")
    if case.at == "compile" and case.fault == "fail":
        return "RanksDisagree", "rank 1, which refuses to: ", "the model of this rank is broken"
    if case.at == "compile":
        # No exchange has begun: the others wait for this rank to say what it will run.
        return "RanksDisagree", "nothing from rank 1"
    if case.fault in ("interrupt", "fail") and case.at != "backward":
        # Its program says that it has ended, so nobody begins the exchanges of the next attention.
        return "RanksDisagree", "rank 1: its program has ended, after"
    # Whoever is struck before its optimizer's step does not come to the next forward.
    direction = "backward" if case.at == "backward" else "forward"
    line = line_of("y = F.scaled" if direction == "forward" else "z = F.scaled")
    return (
        "ExchangeFailed",
        f"exchange 1 of 2 of its {direction} to end on ranks 0, 1 and 2",
        f"(faults.py:{line})",
        f"rank {case.odd}: its process",
        " is stopped" if case.fault == "stop" else " has ended",
    )


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=id_of(case), marks=pytest.mark.slow) for case in IN_EVERY_RUN),
        *(pytest.param(case, id=id_of(case), marks=pytest.mark.long) for case in MORE),
    ],
)
def test_the_others_are_told(case: Case) -> None:
    error, *parts = expected_of(case)
    assert_named(case, *launch(train, case), *parts, error=error)


# --- One rank has no memory left, or another time of day ---------------------------------------


def train_without_memory(rank: int, note: Callable[[], None], case: Case) -> float:
    """Train on larger and larger batches; one rank may not have more memory than it has now."""
    loss = train(rank, lambda: None, case)
    if rank == case.odd:
        (used,) = (
            int(line.split()[1]) << 10
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmSize")
        )
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    for batch in (1 << n for n in range(8, 20)):
        note()
        loss = train(rank, lambda: None, case, batch)
    return loss


@pytest.mark.slow
def test_a_rank_without_memory() -> None:
    """It fails wherever it runs out of memory, also between exchanges, and ends."""
    case = Case(EAGER)
    fault_at, outcomes = launch(train_without_memory, case)
    assert outcomes[case.odd].error != "", "it had enough memory"
    if {outcomes[0].error, outcomes[2].error} == {"RanksDisagree"}:
        # It failed before it came to the attention of a new batch size, which ranks compare first.
        assert_named(case, fault_at, outcomes, "rank 1", error="RanksDisagree")
        return
    assert_named(case, fault_at, outcomes, "rank 1: it", names_missing=False)
    for outcome in (outcomes[0], outcomes[2]):
        # If it failed within an exchange, it said so itself, and is not missing.
        has_said = "rank 1: it failed as well" in outcome.text
        assert has_said or " has ended" in outcome.text, outcome
        assert outcome.missing == (() if has_said else (case.odd,)), outcome


def train_in_the_past(rank: int, note: Callable[[], None], case: Case) -> float:
    """Train; on one rank it is a minute earlier."""
    now = time.time
    moved = mock.patch("time.time", side_effect=lambda: now() - 60)
    with moved if rank == case.odd else nullcontext():
        return train(rank, note, case)


@pytest.mark.slow
def test_a_rank_whose_clock_is_late() -> None:
    case = Case(AOT, "kill", "backward")
    _, outcomes = launch(train_in_the_past, replace(case, fault=None))
    assert [outcome.error for outcome in outcomes] == [""] * case.world_size, outcomes
    fault_at, outcomes = launch(train_in_the_past, case)
    exchange = "exchange 1 of 2 of its backward"
    assert_named(case, fault_at, outcomes, exchange, " has ended")


# --- Random faults ----------------------------------------------------------------------------


def end_of(seed: int) -> str:
    case = faults.a_case(seed, compiled=0)
    said = faults.verdict(case, *launch(train, case))
    return said if said in (NAMED, HARMLESS) else f"{said}: {case}"


@pytest.mark.long
def test_random_faults() -> None:
    """Of any kind, at any time, on 2 to 4 ranks; `python -m tests.support.faults` draws more."""
    ends = Counter(map(end_of, range(100, 124)))
    assert ends[NAMED] + ends[HARMLESS] == 24, ends
    assert ends[NAMED] >= 18


GOOD = Outcome("ExchangeFailed", at=10.0, exit_code=0, missing=(1,))
ODD = Outcome(exit_code=-9)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(GOOD, at=5 + 100.0), "rank 2 is told late: after 100.0 s"),
        (replace(GOOD, at=5 + 100.0, ready_at=50.0), "rank 2 is told late: after 55.0 s"),
        (replace(GOOD, exit_code=-6), "rank 2 ends with -6 after ExchangeFailed"),
        (replace(GOOD, exit_code=None), "rank 2 does not end after ExchangeFailed"),
        (replace(GOOD, missing=(0,)), "rank 2 is not told: ExchangeFailed"),
        (replace(GOOD, error="RuntimeError"), "rank 2 is not told: RuntimeError"),
        (replace(GOOD, error=""), "rank 2 is not told: ran to the end"),
        (Outcome(), "rank 2 hangs"),
        (Outcome(exit_code=-11), "rank 2 ends with -11 after None"),
    ],
)
def test_what_ends_otherwise_is_found(wrong: Outcome, said: str) -> None:
    case = Case(EAGER, "kill", "forward")
    has_compiled = replace(GOOD, at=200.0, ready_at=195.0)
    assert faults.verdict(case, 5.0, [GOOD, ODD, has_compiled]) == NAMED
    assert faults.verdict(case, 5.0, [GOOD, ODD, wrong]) == said
