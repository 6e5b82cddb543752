"""Something happens to a rank while others wait for it: real processes, bounded in time.

    python -m tests.support.faults --count 100 --seed 0
    python -m tests.support.faults --count 1 --seed 17      a fault that did not end as it should

A rank is killed, stopped, interrupted or raises: in the compiler, in a forward, in a backward or
before its optimizer's step, of a step and after a delay that are drawn, as are the number of ranks,
which of them is struck, how the model is run, when its attentions are planned, and where the store
of the group lives. The others must end in time, by an error that names the rank, and their
processes must end by themselves, their interpreters' last steps included.

The command prints how the faults ended, by kind, and each that did not end as it should, with its
seed; it ends with 1 if there is any.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from random import Random
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
import cp_inductor.backend.compile
from cp_inductor.trust.log import Log
from tests.support.combinations import AOT, COMPILED, EAGER
from tests.support.ranks import _processes, forget_compiles

MARGIN_S = 5.0
# The group's. Where a C++ compiler runs, ranks are not ready at the same time.
TIMEOUT_S = {EAGER: 4.0, AOT: 4.0, COMPILED: 30.0}
# How long whoever survives may compile before it waits for the others: of two cores, four ranks
# and what else runs there have all.
COMPILE_S = 240.0
# How long a process may take to end: on a busy machine an interpreter unloads torch for seconds.
END_S = 60.0
# Until the fault: forks, process groups, and perhaps a compiler.
START_S = 240.0

LENGTH, STEPS = 24, 4

TIMES = ("compile", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Case:
    """What happens to whom, and when.

    Attributes:
        fault: one of FAULTS; None for nothing.
        at: in TIMES.
        odd: the rank that it happens to.
        delay_s: how long after it has come to that time; 0 for at once.
        plan: "static", or "runtime" for attentions under masks of documents.
        store: of the group: "file", "tcp" for one that lives in the process that launches, or
            "first" for one that lives in the first rank.
        debugging: "detail" or "recorder", of torch.
        patience: how many times longer than usual the group waits.
    """

    form: str
    fault: str | None = None
    at: str = ""
    world_size: int = 3
    odd: int = 1
    step: int = 1
    delay_s: float = 0.0
    plan: str = "static"
    store: str = "file"
    debugging: str = ""
    patience: float = 1.0

    @property
    def limit_s(self) -> float:
        """How long after the fault the others must have ended, if they have compiled by then."""
        return self.timeout_s + MARGIN_S

    @property
    def most_s(self) -> float:
        """How long after the fault who has not ended hangs."""
        is_compiling = self.form != EAGER and (self.at == "compile" or self.step == 0)
        return self.limit_s + 2 + COMPILE_S * is_compiling

    @property
    def timeout_s(self) -> float:
        """The timeout of the group."""
        return TIMEOUT_S[self.form] * self.patience


@dataclass
class Outcome:
    """What became of a rank.

    Attributes:
        error: its class; "" if it ran to the end, None if the process ended without a word.
        at: when, by the clock that all processes share.
        ready_at: when it was first to hear from the others: what it runs first was compiled.
        exit_code: of the process; None if it had to be killed.
        missing: ranks that the error says were missing.
    """

    error: str | None = None
    text: str = ""
    at: float = 0.0
    ready_at: float = 0.0
    exit_code: int | None = None
    missing: tuple[int, ...] = ()
    loss: float = 0.0

    def waited_s(self, fault_at: float) -> float:
        """Return for how long it did not know of a fault, without the time in which it compiled."""
        return self.at - max(fault_at, self.ready_at)


# --- What a rank does -------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        # The numbers are of the whole sequence: the program says so, where nobody reads a graph.
        is_traced = torch.compiler.is_compiling()
        with nullcontext() if is_traced else cp_inductor.per_rank():
            mask = None if documents is None else mask_of(documents)
        causal = mask is None
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        z = F.scaled_dot_product_attention(y, key, value, attn_mask=mask, is_causal=causal)
        return z.square().mean()


def mask_of(documents: Tensor) -> Tensor:
    """Return a mask (B, 1, S, S) of document numbers (B, S)."""
    place = torch.arange(documents.shape[1])
    same = documents[:, :, None] == documents[:, None]
    return ((place[:, None] >= place[None]) & same)[:, None]


# An exception has no delay: it is raised by a statement.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
FAULTS = (*SIGNALS, "fail")


def strike(case: Case, note: Callable[[], None]) -> None:
    """Do what happens to this rank, now or after the delay, and note it first."""

    def send() -> None:
        time.sleep(case.delay_s)
        note()
        os.kill(os.getpid(), SIGNALS[str(case.fault)])

    if case.fault == "fail":
        note()
        raise ValueError("the model of this rank is broken")
    if case.delay_s:
        threading.Thread(target=send, daemon=True).start()
    else:
        send()
        time.sleep(1)  # where an interrupt arrives


def train(rank: int, note: Callable[[], None], case: Case, batch: int = 1) -> float:
    """Train a model; on one rank something happens to it at some time, which it notes first."""

    def strike_if(moment: str, step: int) -> None:
        if case.fault is not None and (rank, case.at, case.step) == (case.odd, moment, step):
            strike(case, note)

    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, LENGTH, 32).chunk(case.world_size, 1)[rank]
    is_static = case.plan == "static"
    # Masks are of the whole sequence.
    documents = None if is_static else (torch.arange(LENGTH) // 7).expand(batch, -1).contiguous()
    run: Any = model
    needs_region = case.form == EAGER or not is_static
    if case.form != EAGER:
        options = {"mesh": mesh} if is_static else {"plan": "runtime"}
        run = torch.compile(model, backend=case.form, fullgraph=True, options=options)
    lower = cp_inductor.backend.captured.lower

    def lower_or_not(*args: Any) -> None:
        strike_if("compile", case.step)
        lower(*args)

    loss = torch.zeros(())
    # A graph that is found in a cache is not compiled.
    with (
        mock.patch.object(cp_inductor.backend.captured, "lower", lower_or_not),
        torch._inductor.config.patch(fx_graph_cache=case.at != "compile"),
        torch._functorch.config.patch(enable_autograd_cache=case.at != "compile"),
    ):
        for step in range(STEPS):
            strike_if("forward", step)
            with cp_inductor.context_parallel(mesh) if needs_region else nullcontext():
                loss = run(x, documents)
                strike_if("backward", step)
                loss.backward()
            strike_if("optimizer", step)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def prepare_debugging(debugging: str) -> None:
    if debugging == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    elif debugging == "recorder":
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
        os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "100"


def serve(
    pipe: Connection, address: str | int, rank: int, function: Any, case: Case, args: Any
) -> None:
    """Be a rank: run a function, say how it ended, and end as a program ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = Outcome()
    said = threading.Lock()

    def say(what: Outcome) -> None:
        with said:
            pipe.send(what)

    come = Log.come

    def note_and_come(self: Log, *args: Any, **kwargs: Any) -> Any:
        outcome.ready_at = outcome.ready_at or time.monotonic()
        return come(self, *args, **kwargs)

    try:
        Log.come = note_and_come  # type: ignore[method-assign]
        prepare_debugging(case.debugging)
        size = case.world_size
        is_host = case.store == "first" and rank == 0
        store: dist.Store = (
            dist.FileStore(address, size)
            if isinstance(address, str)
            else dist.TCPStore("localhost", address, is_master=is_host, wait_for_workers=False)
        )
        timeout = timedelta(seconds=case.timeout_s)
        dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=timeout)
        forget_compiles()
        outcome.loss = function(rank, lambda: say(Outcome(at=time.monotonic())), case, *args)
        outcome.error = ""
    except BaseException as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.missing = getattr(error, "ranks_missing", ())
    outcome.at = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(outcome)
    # A process of multiprocessing leaves out what a program does at its end.
    ctypes.pythonapi.Py_Exit(0)


# --- Who launches it --------------------------------------------------------------------------


def launch(function: Any, case: Case, *args: Any) -> tuple[float, list[Outcome]]:
    """Run a function on all ranks; return when the fault was, and what became of the ranks.

    A rank that has not ended a while after the fault is killed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        address: str | int = os.path.join(folder, "store")
        if case.store == "tcp":
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            address = store.port
        elif case.store == "first":
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                address = probe.getsockname()[1]
        started = []
        for rank in range(case.world_size):
            ours, theirs = _processes.Pipe()
            given = (theirs, address, rank, function, case, args)
            process = _processes.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return follow(started, case)
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def follow(started: list[tuple[Any, Connection]], case: Case) -> tuple[float, list[Outcome]]:
    fault_at, outcomes = 0.0, [Outcome() for _ in started]
    deadline = time.monotonic() + START_S
    open_ones = set(range(len(started)))
    while open_ones and time.monotonic() < deadline:
        if fault_at and open_ones == {case.odd}:
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
                deadline = said.at + case.most_s
            else:
                outcomes[rank] = said
                deadline = max(deadline, said.at + END_S)
    return fault_at, outcomes


# --- Random faults ----------------------------------------------------------------------------


def a_case(seed: int, compiled: float) -> Case:
    """Draw a fault.

    Args:
        compiled: which part of all runs through Inductor: it takes a minute instead of seconds.
    """
    random = Random(seed)
    form = COMPILED if random.random() < compiled else random.choice([EAGER, AOT])
    world_size = random.choice([2, 3, 4])
    fault = random.choice(FAULTS)
    at = random.choice(TIMES[form == EAGER :])
    longest_s = 1.0 if at == "compile" else 0.01
    return Case(
        form=form,
        fault=fault,
        at=at,
        world_size=world_size,
        odd=random.randrange(world_size),
        # A graph is compiled in the first step. The last has a next one, so that it is missed.
        step=0 if at == "compile" else random.randrange(STEPS - 1),
        delay_s=random.choice([0.0, random.uniform(0, longest_s)]) if fault in SIGNALS else 0.0,
        plan=random.choice(["static", "runtime"]),
        store=random.choice(["file", "tcp"]),
        # Four ranks that compile on a busy machine are seconds apart.
        patience=4.0 if form == AOT else 1.0,
    )


NAMED, HARMLESS = "named in time", "nobody noticed, and all ran to the end"


def verdict(case: Case, fault_at: float, outcomes: list[Outcome]) -> str:
    """Say how a fault ended: NAMED or HARMLESS, or what is wrong."""
    others = [(rank, one) for rank, one in enumerate(outcomes) if rank != case.odd]
    if all(one.error == "" and one.exit_code == 0 for one in outcomes):
        return HARMLESS
    if not fault_at:
        return "it did not come to the fault"
    for rank, one in others:
        if one.error is None and one.exit_code is None:
            return f"rank {rank} hangs"
        if one.exit_code is None:
            return f"rank {rank} does not end after {one.error}"
        if one.exit_code != 0:
            return f"rank {rank} ends with {one.exit_code} after {one.error}"
        is_named = (one.error == "ExchangeFailed" and one.missing == (case.odd,)) or (
            one.error == "RanksDisagree"
            and re.search(rf"nothing from rank {case.odd}|rank {case.odd}, which refuses", one.text)
        )
        if not is_named:
            return f"rank {rank} is not told: {one.error or 'ran to the end'}"
        if one.waited_s(fault_at) > case.limit_s:
            return f"rank {rank} is told late: after {one.waited_s(fault_at):.1f} s"
    return NAMED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first fault")
    parser.add_argument("--compiled", type=float, default=0.1, help="part through Inductor")
    given = parser.parse_args()
    ends: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.count):
        case = a_case(seed, given.compiled)
        fault_at, outcomes = launch(train, case)
        said = verdict(case, fault_at, outcomes)
        ends[said if said in (NAMED, HARMLESS) else "OTHERWISE"] += 1
        if said not in (NAMED, HARMLESS):
            print(f"seed {seed}: {said}\n  {case}", *outcomes, sep="\n  ", flush=True)
    print(f"{given.count} faults from seed {given.seed}: {dict(ends.most_common())}")
    sys.exit(1 if ends["OTHERWISE"] else 0)


if __name__ == "__main__":
    main()
