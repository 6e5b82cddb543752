"""Ranks that end, stop or raise while others wait for them: real processes, bounded in time.

One of three ranks is struck, in the compiler, before its forward, before its backward or before its
optimizer's step. The others must end within the timeout of the group and five seconds, by an error
that names the exchange and the rank.

The long cases are the rest of the matrix: every fault at every time in every form.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_inductor
import cp_inductor.backend.compile
from tests.combinations import AOT, COMPILED, EAGER
from tests.ranks import _processes, forget_compiles

WORLD, ODD = 3, 1
MARGIN_S = 5.0
# Of the group. Where a C++ compiler runs, ranks are not ready at the same time.
TIMEOUT_S = {EAGER: 4.0, AOT: 4.0, COMPILED: 30.0}
# Until the fault: forks, process groups, and perhaps a compiler.
START_S = 240.0

LENGTH, STEPS, STRUCK_STEP = 24, 4, 1


@dataclass
class Outcome:
    """What became of a rank.

    Attributes:
        error: its class; "" if it ran to the end, None if the process ended without a word.
        text: of the error.
        at: when, by the clock that all processes share.
        exit_code: of the process; None if it had to be killed.
        missing: ranks that the error says were missing.
        loss: the last one.
    """

    error: str | None = None
    text: str = ""
    at: float = 0.0
    exit_code: int | None = None
    missing: tuple[int, ...] = ()
    loss: float = 0.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        z = F.scaled_dot_product_attention(y, key, value, is_causal=True)
        return z.square().mean()


Strike = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # where the signal arrives


def fail() -> None:
    raise ValueError("the model of this rank is broken")


FAULTS: dict[str, Strike] = {f.__name__: f for f in (kill, stop, interrupt, fail)}
TIMES = ("compile", "forward", "backward", "optimizer")


def prepare_debugging(debugging: str) -> None:
    if debugging == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    elif debugging == "recorder":
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
        os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "100"


def train(
    rank: int, note: Callable[[], None], form: str, fault: str | None, at: str, batch: int = 1
) -> float:
    """Train a model; on one rank something happens to it at some time, which it notes first."""

    def strike_if(moment: str, step: int = STRUCK_STEP) -> None:
        if fault is not None and (rank, at, step) == (ODD, moment, STRUCK_STEP):
            note()
            FAULTS[fault]()

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, LENGTH, 32).chunk(WORLD, 1)[rank]
    run: Any = model
    if form != EAGER:
        run = torch.compile(model, backend=form, fullgraph=True, options={"mesh": mesh})
    lower = cp_inductor.backend.compile.lower

    def lower_or_not(*args: Any) -> None:
        strike_if("compile")
        lower(*args)

    loss = torch.zeros(())
    with mock.patch.object(cp_inductor.backend.compile, "lower", lower_or_not):
        for step in range(STEPS):
            strike_if("forward", step)
            with region(mesh, form):
                loss = run(x)
            strike_if("backward", step)
            loss.backward()
            strike_if("optimizer", step)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def region(mesh: DeviceMesh, form: str) -> Any:
    return cp_inductor.context_parallel(mesh) if form == EAGER else nullcontext()


def serve(
    pipe: Connection,
    store: str,
    rank: int,
    timeout_s: float,
    debugging: str,
    function: Any,
    args: tuple[Any, ...],
) -> None:
    """Be a rank: run a function, and say how it ended."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = Outcome()
    try:
        prepare_debugging(debugging)
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=WORLD,
            store=dist.FileStore(store, WORLD),
            timeout=timedelta(seconds=timeout_s),
        )
        forget_compiles()
        outcome.loss = function(rank, lambda: pipe.send(Outcome(at=time.monotonic())), *args)
        outcome.error = ""
    except BaseException as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.missing = getattr(error, "ranks_missing", ())
    outcome.at = time.monotonic()
    pipe.send(outcome)
    pipe.close()


def launch(
    function: Any, form: str, *args: Any, debugging: str = ""
) -> tuple[float, list[Outcome]]:
    """Run a function on all ranks; return when the fault was, and what became of the ranks.

    A rank that has not ended a while after the fault is killed.
    """
    timeout_s = TIMEOUT_S[form]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = []
        for rank in range(WORLD):
            ours, theirs = _processes.Pipe()
            store = os.path.join(folder, "store")
            given = (theirs, store, rank, timeout_s, debugging, function, (form, *args))
            process = _processes.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return follow(started, limit_s(form) + 2)
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def limit_s(form: str, at: str = "compile") -> float:
    """Return after how long the others must have ended. Whoever compiles does so first."""
    is_compiling = form == COMPILED and at == "compile"
    return TIMEOUT_S[form] + MARGIN_S + 60 * is_compiling


def follow(started: list[tuple[Any, Connection]], others: float) -> tuple[float, list[Outcome]]:
    fault_at, outcomes = 0.0, [Outcome() for _ in started]
    deadline = time.monotonic() + START_S
    open_ones = set(range(len(started)))
    while open_ones and time.monotonic() < deadline:
        if fault_at and open_ones == {ODD}:
            deadline = min(deadline, time.monotonic() + 0.5)  # it may be stopped for ever
        for rank in sorted(open_ones):
            process, pipe = started[rank]
            try:
                if not pipe.poll(0.02):
                    continue
                said = pipe.recv()
            except (EOFError, OSError):
                open_ones.discard(rank)
                process.join(5)
                outcomes[rank].exit_code = process.exitcode
                continue
            if said.error is None:
                fault_at = said.at
                deadline = said.at + others
            else:
                outcomes[rank] = said
    return fault_at, outcomes


def assert_named(
    fault_at: float,
    outcomes: list[Outcome],
    *parts: str,
    within_s: float,
    error: str = "ExchangeFailed",
) -> None:
    """Every rank but one was told in time what happened, and ended in its own way."""
    assert fault_at > 0, outcomes
    for rank, outcome in enumerate(outcomes):
        if rank == ODD:
            continue
        assert outcome.error == error, (rank, outcome)
        assert outcome.at - fault_at < within_s, (outcome.at - fault_at, outcome)
        assert outcome.exit_code == 0, (rank, outcome)
        for part in parts:
            assert part in outcome.text, (part, outcome)
        if error == "ExchangeFailed":
            assert outcome.missing == (ODD,), outcome


def line_of(start: str) -> int:
    """Return which line of this file begins so."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.strip().startswith(start))
    return number


WHAT_BECAME_OF_IT = {
    "kill": " has ended",
    "stop": " is stopped",
    "interrupt": " has ended",
    "fail": " has ended",
}


def cases() -> Iterator[Any]:
    in_every_run = {
        *((EAGER, "kill", at) for at in ("forward", "backward", "optimizer")),
        (EAGER, "stop", "backward"),
        (AOT, "kill", "forward"),
        (AOT, "kill", "backward"),
        (AOT, "kill", "compile"),
        (AOT, "fail", "backward"),
        (AOT, "stop", "forward"),
        (COMPILED, "kill", "backward"),
    }
    for form in (EAGER, AOT, COMPILED):
        for fault in FAULTS:
            for at in TIMES:
                if (form, at) != (EAGER, "compile"):
                    is_short = (form, fault, at) in in_every_run
                    mark = pytest.mark.slow if is_short else pytest.mark.long
                    yield pytest.param(form, fault, at, marks=mark)


@pytest.mark.parametrize(("form", "fault", "at"), list(cases()))
def test_the_others_are_told(form: str, fault: str, at: str) -> None:
    fault_at, outcomes = launch(train, form, fault, at)
    within_s = limit_s(form, at)
    if at == "compile":
        # No exchange has begun: the others wait for this rank to say what it will run.
        told = "nothing from rank 1"
        assert_named(fault_at, outcomes, told, within_s=within_s, error="RanksDisagree")
        return
    # Whoever is struck before its optimizer's step does not come to the next forward.
    direction = "backward" if at == "backward" else "forward"
    exchange = f"exchange 1 of 2 of its {direction} to end on ranks 0, 1 and 2"
    line = line_of("y = F.scaled" if direction == "forward" else "z = F.scaled")
    became = WHAT_BECAME_OF_IT[fault]
    parts = (exchange, f"(test_faults.py:{line})", "rank 1: its process", became)
    assert_named(fault_at, outcomes, *parts, within_s=within_s)


@pytest.mark.parametrize(
    ("debugging", "fault"),
    [
        pytest.param("detail", "kill", marks=pytest.mark.slow),
        pytest.param("detail", "stop", marks=pytest.mark.long),
        pytest.param("recorder", "kill", marks=pytest.mark.slow),
        pytest.param("recorder", "stop", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_beside_what_torch_has_for_debugging(debugging: str, fault: str, at: str) -> None:
    fault_at, outcomes = launch(train, AOT, fault, at, debugging=debugging)
    exchange = f"exchange 1 of 2 of its {at} to end on ranks 0, 1 and 2"
    became = WHAT_BECAME_OF_IT[fault]
    assert_named(fault_at, outcomes, exchange, became, within_s=limit_s(AOT, at))


# --- One rank has no memory left, or another time of day ---------------------------------------


def train_without_memory(rank: int, note: Callable[[], None], form: str) -> float:
    """Train on larger and larger batches; one rank may not have more memory than it has now."""
    loss = train(rank, lambda: None, form, None, "")
    if rank == ODD:
        (used,) = (
            int(line.split()[1]) << 10
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmSize")
        )
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    for batch in (1 << n for n in range(8, 20)):
        note()
        loss = train(rank, lambda: None, form, None, "", batch)
    return loss


@pytest.mark.slow
def test_a_rank_without_memory() -> None:
    """It fails wherever it runs out of memory, also between exchanges, and ends."""
    fault_at, outcomes = launch(train_without_memory, EAGER)
    assert outcomes[ODD].error != "", "it had enough memory"
    assert_named(fault_at, outcomes, "rank 1: its process", " has ended", within_s=limit_s(EAGER))


def train_in_the_past(rank: int, note: Callable[[], None], form: str, fault: str | None) -> float:
    """Train; on one rank it is a minute earlier."""
    now = time.time
    moved = mock.patch("time.time", side_effect=lambda: now() - 60)
    with moved if rank == ODD else nullcontext():
        return train(rank, note, form, fault, "backward")


@pytest.mark.slow
def test_a_rank_whose_clock_is_late() -> None:
    _, outcomes = launch(train_in_the_past, AOT, None)
    assert [outcome.error for outcome in outcomes] == [""] * WORLD, outcomes
    fault_at, outcomes = launch(train_in_the_past, AOT, "kill")
    exchange = "exchange 1 of 2 of its backward"
    assert_named(fault_at, outcomes, exchange, " has ended", within_s=limit_s(AOT))
