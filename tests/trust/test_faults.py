"""Ranks that end, stop or raise while others wait for them: real processes, bounded in time.

One of three ranks is struck, in the compiler, before its forward, before its backward or before its
optimizer's step. The others must end within the timeout of the group and five seconds, by an error
that names the exchange and the rank. `tests/support/faults.py` draws such faults.

The long cases are the rest: through Inductor, beside torch's debugging, with the store in the first
rank, and faults that are drawn.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support import faults
from tests.support.combinations import AOT, COMPILED, EAGER
from tests.support.examples import check_against_unsharded, command_of
from tests.support.faults import FAULTS, HARMLESS, NAMED, TIMES, Case, Outcome, launch, train
from tests.support.processes import DEADLINE_S


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


# --- Trainings that are killed at random times end as those that nobody disturbed, bit for bit.

# Long enough that it is not over before the last kill, which comes in its first half.
NUM_STEPS = 30

ARGUMENTS = {
    "train_text": ("--check-every", "10", "--batch-size", "1", "--dim", "16"),
    "hf_long_context": ("--dim", "16"),
}
# The last number that `hf_long_context` notes of a step is the time that it took.
NUMBERS = {"train_text": slice(None), "hf_long_context": slice(-1)}


def train_example(example: str, folder: Path, *, kill_at: Sequence[int] = (), seed: int = 0) -> str:
    """Run an example with checkpoints in a folder; return what it printed.

    Args:
        kill_at: a rank is killed for each of these: once the checkpoint of that step is begun.
    """
    command = [sys.executable, *command_of(example, 2, "--max-restarts", str(len(kill_at)))]
    command += arguments_of(example, folder)
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder.with_suffix(".log"), "w+") as log:
        training = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            kill_ranks(training, example, folder, kill_at, random.Random(seed))
            training.wait(DEADLINE_S)
        finally:
            for process in (*ranks_of(training, example), training.pid):
                if training.poll() is None:
                    os.kill(process, signal.SIGKILL)
            training.wait()
        log.seek(0)
        said = log.read()
    assert training.returncode == 0, said[-8000:]
    return said


def arguments_of(example: str, folder: Path) -> list[str]:
    arguments = [*ARGUMENTS[example], "--backend", "cp_aot_eager"]
    arguments += ["--layers", "1", "--seq-len", "50", "--steps", str(NUM_STEPS)]
    arguments += ["--checkpoints", str(folder), "--checkpoint-every", "1"]
    return arguments + ["--out", str(folder / "out")] * (example == "train_text")


def kill_ranks(
    training: subprocess.Popen[Any],
    example: str,
    folder: Path,
    kill_at: Sequence[int],
    draw: random.Random,
) -> None:
    was_killed: set[int] = set()
    deadline = time.monotonic() + DEADLINE_S
    for step in kill_at:
        ranks: list[int] = []
        while not ranks or was_killed & set(ranks) or newest(folder) < step:
            assert training.poll() is None, f"it ended before step {step}"
            assert time.monotonic() < deadline, f"it has not come to step {step}"
            time.sleep(0.005)
            ranks = ranks_of(training, example)
        time.sleep(draw.uniform(0, 0.1))
        killed = draw.choice(ranks)
        os.kill(killed, signal.SIGKILL)
        # The others are those of the same start: they end as well.
        was_killed.update(ranks)


def ranks_of(training: subprocess.Popen[Any], example: str) -> list[int]:
    """Return the processes that torchrun has started and that run."""
    found = []
    for path in Path(f"/proc/{training.pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and example in command.read_text():
                found.append(child)
    return found


def newest(folder: Path) -> int:
    """Return the last step of which a checkpoint was begun; 0 before the first."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)


def last_of(folder: Path) -> dict[str, Any]:
    """Return what the last checkpoint holds, whole."""
    path = folder / f"step-{NUM_STEPS}"
    assert (path / ".metadata").exists()
    dcp_to_torch_save(path, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


def notes_of(state: dict[str, Any], example: str) -> list[Any]:
    notes = state["notes"]
    return [note[NUMBERS[example]] for note in notes] if isinstance(notes[0], list) else notes


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves_with_path(state)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("example", ARGUMENTS)
def test_killed_five_times(example: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1000)
    draw = random.Random(seed)
    kill_at = sorted(draw.randrange(NUM_STEPS // 2) for _ in range(5))
    what = f"seed {seed}: killed at {kill_at}"
    for name in ("killed", "undisturbed"):
        (tmp_path / name).mkdir()
    train_example(example, tmp_path / "undisturbed")
    said = train_example(example, tmp_path / "killed", kill_at=kill_at, seed=seed)
    if example == "train_text":
        check_against_unsharded(said)
    expected, found = (last_of(tmp_path / name) for name in ("undisturbed", "killed"))
    losses = notes_of(expected, example)
    assert len(losses) == NUM_STEPS and losses[-1] != losses[0]
    assert notes_of(found, example) == losses, what
    wanted, tensors = tensors_of(expected), tensors_of(found)
    assert tensors.keys() == wanted.keys() and len(wanted) > 20
    for name, tensor in wanted.items():
        assert torch.equal(tensors[name], tensor), f"{name}, {what}"
