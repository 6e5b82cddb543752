"""Name the exchange that failed: its attention, its step, the state of other ranks, what to do.

    RuntimeError: Connection closed by peer [127.0.0.1]:60631
      =>
    ExchangeFailed: attention (model.py:41): expected exchange 2 of 4 of its backward to end on
        ranks 0, 1 and 2, got a failure after 0.1 s: rank 1: its process 4242 has ended; ...

An exchange fails when a rank has ended, has stopped, or does not come within the timeout of the
group. The backend's own error names no rank. So each rank introduces itself once in the store of
its group: it writes on which machine it runs, and as which process. When an exchange has failed,
every rank writes into the store which one it was, and reads what the others wrote. It also looks
whether the processes of the others are alive, if they run on its own machine. Until then nothing
is written or read.

After a failure the store is asked in a thread, because a store whose process has stopped never
answers. The ranks read which processes the others are when they first agree on something, because
the store may end with the rank that holds it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import DistError

from cp_inductor.errors import CPError, ExchangeFailed
from cp_inductor.kept import cache, on_reset
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.run.attention import Attention
from cp_inductor.run.receive import StepFailed
from cp_inductor.torch_private.groups import group_with_store
from cp_inductor.trust.board import Board, name_ranks
from cp_inductor.trust.bounded_store import BoundedStore, end_before_exit
from cp_inductor.trust.course import course_of, waiting_in
from cp_inductor.trust.profiler_ranges import count_ops, named_ranges

# How long a rank looks for what has become of the others, which notice a failure at their next
# exchange.
PATIENCE_S = 3.0
# The same, once a rank is found that has ended or stopped.
PATIENCE_ONCE_KNOWN_S = 1.0
INTERVAL_S, SHORT_INTERVAL_S = 0.05, 0.005

HERE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Step:
    """An exchange, in words for people.

    Attributes:
        site: the attention.
        text: which exchange, as in "exchange 2 of 4 of its backward".
    """

    site: str
    text: str


def step_of(site: str, direction: str, number: int, num_steps: int) -> Step:
    """Return the step of an exchange, counted from 1."""
    return Step(site, f"exchange {number} of {num_steps} of its {direction}")


@contextmanager
def named_steps(this: Attention, direction: str, site: str) -> Iterator[None]:
    """Name an exchange that fails inside, in eager.

    Args:
        this: the attention.
        direction: "forward" or "backward".
        site: of the attention.

    Raises:
        ExchangeFailed: an exchange has failed.
        RanksDisagree: one has failed because ranks have gone different ways.
    """
    started = time.monotonic()
    try:
        where = waiting_in(this.group_name, f"the {direction} of {site}")
        with where, named_ranges(count_ops(site, direction)):
            yield
    except StepFailed as error:
        plan = (forward_plan if direction == "forward" else backward_plan)(this.recipe)
        step = step_of(site, direction, error.number, len(plan.exchanges))
        reason = error.__cause__ or error
        raise failure(this.group_name, step, reason, time.monotonic() - started) from reason


def user_line() -> str:
    """Return `model.py:41`, from the innermost frame outside this package and its libraries."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_inside(name):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "source unknown"


@cache
def _is_inside(name: str) -> bool:
    libraries = {sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")}
    inside = (str(HERE), str(Path(dist.__file__).parents[1]), *libraries)
    return name.startswith((*inside, "<"))


def failure(group_name: str, step: Step, reason: BaseException, waited_s: float) -> CPError:
    """Return the error about an exchange that has failed, after asking about the other ranks.

    If ranks are known to have gone different ways, the error says that.

    Args:
        group_name: of the ranks that share the sequence.
        step: which exchange it was.
        reason: what the backend raised.
        waited_s: for how long this rank was in the forward or backward.
    """
    asked = time.monotonic()
    course = course_of(group_name)
    if course is not None and course.found():
        return course.error(step.site)
    peers = _peers_of(group_name)
    found = peers.ask(step) if peers is not None else {}
    gone = [rank for rank, one in found.items() if one.is_missing and one.is_known]
    # A rank that merely waits has not noticed the failure yet.
    missing = sorted(gone or (rank for rank, one in found.items() if one.is_missing))
    ranks = sorted({*found, dist.get_rank()}) if dist.is_initialized() else []
    told = "; ".join(f"rank {rank}: {one.text}" for rank, one in sorted(found.items()))
    said = " ".join(str(reason).split())
    told = f"{told}; its error: {said}" if told else said
    whose = f"log of {name_ranks(missing)}" if missing else "logs of the other ranks"
    return ExchangeFailed(
        site=step.site,
        expected=f"{step.text} to end on {name_ranks(ranks)}" if ranks else f"{step.text} to end",
        got=f"a failure after {waited_s:.1f} s: {told}",
        remedy=f"see the {whose}; if a rank is only slow, raise the timeout of init_process_group;"
        " then start all ranks again, from a checkpoint, because the group has lost its place",
        step=step.text,
        ranks_missing=tuple(missing),
        waited_s=waited_s,
        asked_s=time.monotonic() - asked,
    )


# --- The other ranks -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """What has become of another rank.

    Attributes:
        text: for people.
        is_missing: whether it was missing in the exchange, as far as can be known.
        is_known: whether asking again would tell nothing more.
    """

    text: str
    is_missing: bool
    is_known: bool


class Peers:
    """The ranks of a group, as they have introduced themselves in its store.

    Args:
        store: of the group.
        rank: this process's position in the group.
        ranks: the global ranks of the group, by position.
    """

    def __init__(self, store: BoundedStore, rank: int, ranks: Sequence[int]) -> None:
        self.store, self.board = store, Board(store, "peers", ranks)
        self.rank, self.ranks = rank, tuple(ranks)
        self.processes: dict[int, str] = {}
        with suppress(DistError):  # the next caller that needs the store says where
            self._write("process", _describe_process())

    def meet(self) -> None:
        """Read which processes the others are, once. All of them must have written it."""
        if not self.processes:
            with suppress(DistError):
                self.processes = self.store.answered(lambda: self._read("process"))

    def swap(self, name: str, text: str, patience_s: float) -> list[str] | None:
        """Leave a text under a name, and return those of all other ranks.

        Returns:
            None if some have not left one within the patience, or the store does not answer.
        """
        found: dict[int, str] = {}
        # A store whose process is stopped never returns from a call.
        asking = threading.Thread(target=self._swap, args=(name, text, found), daemon=True)
        end_before_exit(asking)
        asking.start()
        deadline = time.monotonic() + patience_s
        while asking.is_alive() and time.monotonic() < deadline:
            asking.join(INTERVAL_S)
        return None if len(found) < len(self.ranks) - 1 else list(found.values())

    def _swap(self, name: str, text: str, found: dict[int, str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        with suppress(DistError):
            self._write(name, text)
            while len(found) < len(self.ranks) - 1 and time.monotonic() < deadline:
                time.sleep(SHORT_INTERVAL_S)
                found |= self._read(name)

    def ask(self, step: Step) -> dict[int, _Found]:
        """Write that a step has failed here; return what is known of others, by global rank."""
        found: dict[int, _Found] = {}
        asking = threading.Thread(target=self._ask, args=(step, found), daemon=True)
        end_before_exit(asking)
        asking.start()
        deadline = time.monotonic() + PATIENCE_S + 1
        while asking.is_alive() and time.monotonic() < deadline:
            asking.join(INTERVAL_S)
            if any(one.is_known and one.is_missing for one in list(found.values())):
                # The store may be that of the rank that has stopped, and never answer.
                deadline = min(deadline, time.monotonic() + PATIENCE_ONCE_KNOWN_S + INTERVAL_S)
        nothing = _Found("nothing is known of it, because the store does not answer", False, False)
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        return {rank: found.get(rank, nothing) for rank in others}

    def look(self) -> dict[int, str]:
        """Return what has become of other ranks that do not run as usual, by global rank."""
        found: dict[int, str] = {}
        looking = threading.Thread(target=self._look_once, args=(found,), daemon=True)
        end_before_exit(looking)
        looking.start()
        deadline = time.monotonic() + PATIENCE_ONCE_KNOWN_S
        while looking.is_alive() and time.monotonic() < deadline:
            looking.join(INTERVAL_S)
            if found:  # the rest is in the store, whose process may have stopped
                deadline = min(deadline, time.monotonic() + 2 * INTERVAL_S)
        return dict(found)

    def _look_once(self, found: dict[int, str]) -> None:
        seen: dict[int, _Found] = {}
        self._look(self.processes, seen)
        found |= {rank: one.text for rank, one in seen.items() if one.is_known}
        with suppress(RuntimeError):
            self._look(self.processes or self._read("process"), seen)
            found |= {rank: one.text for rank, one in seen.items() if one.is_known}
            for position, note in self._read("failed").items():
                found[self.ranks[position]] = f"it failed in {note}"

    def _ask(self, step: Step, found: dict[int, _Found]) -> None:
        processes = self.processes
        self._look(processes, found)
        has_store, deadline = True, time.monotonic() + PATIENCE_S
        try:
            processes = processes or self._read("process")
            self._look(processes, found)
            self._write("failed", f"{step.text}, {step.site}")
        except RuntimeError:
            has_store = False
        while True:
            notes = {}
            if has_store:
                try:
                    notes = self._read("failed")
                except RuntimeError:  # the store has ended, but processes can still be looked at
                    has_store = False
            self._look(processes, found)
            for position, note in notes.items():
                text = f"it failed as well, in {note}"
                found[self.ranks[position]] = _Found(text, False, True)
            if any(one.is_known and one.is_missing for one in found.values()):
                deadline = min(deadline, time.monotonic() + PATIENCE_ONCE_KNOWN_S)
            if all(one.is_known for one in found.values()) or time.monotonic() > deadline:
                return
            time.sleep(INTERVAL_S)

    def _look(self, processes: dict[int, str], found: dict[int, _Found]) -> None:
        for position, rank in enumerate(self.ranks):
            if position != self.rank and not (rank in found and found[rank].is_known):
                found[rank] = _look_at(processes.get(position))

    def _write(self, name: str, text: str) -> None:
        self.board.write(f"{name}/{self.rank}", text)

    def _read(self, name: str) -> dict[int, str]:
        others = [place for place in range(len(self.ranks)) if place != self.rank]
        return {at: text.decode() for at, text in self.board.read(others, f"{name}/").items()}


_peers_in: WeakKeyDictionary[dist.ProcessGroup, Peers | None] = WeakKeyDictionary()


def introduce(group: dist.ProcessGroup, store: BoundedStore) -> Peers:
    """Let the other ranks of a group know which process this rank is."""
    ranks = dist.get_process_group_ranks(group)
    peers = _peers_in[group] = Peers(store, dist.get_rank(group), ranks)
    return peers


@on_reset
def forget_peers() -> None:
    """Drop what is known of the processes of other ranks."""
    _peers_in.clear()


def _peers_of(group_name: str) -> Peers | None:
    """Return the ranks of a group, if they have introduced themselves."""
    with suppress(RuntimeError, KeyError):  # the group is gone
        group, _ = group_with_store(group_name)
        return _peers_in.get(group)
    return None


def _describe_process() -> str:
    pid = os.getpid()
    return json.dumps({"where": _machine(), "pid": pid, "began": _status_of(pid)[1]})


@cache
def _machine() -> str:
    """Name the machine, and the namespace whose processes can be seen from here."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _status_of(pid: int) -> tuple[str, str]:
    """Return the state of a process and when it began; "" for what is not known."""
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _look_at(process: str | None) -> _Found:
    """Say how another rank's process is, if that can be seen from here."""
    if process is None:
        return _Found("it has not said what it is, nor that it failed", True, False)
    told = json.loads(process)
    if told["where"] != _machine() or not told["began"]:
        where = told["where"].split()[0]
        return _Found(f"process {told['pid']} on {where} has not said that it failed", True, False)
    state, began = _status_of(told["pid"])
    if began != told["began"] or state in "ZX":
        return _Found(f"its process {told['pid']} has ended", True, True)
    if state in "Tt":
        return _Found(f"its process {told['pid']} is stopped", True, True)
    return _Found(f"its process {told['pid']} runs, and has not said that it failed", True, False)
