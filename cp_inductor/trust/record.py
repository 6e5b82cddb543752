"""What a rank tells the others of its group: its process, where it is, and what it has come to.

    attention, attention, batch 2, attention
      =>  attentions: 3, digests "9f86d081 884c7d65 9a2feaa0", the last of them in full; batches: 1

The digest after an event covers all events before it. So two trails part at the first event whose
digests differ, or whose fields do.

Others on its machine see by its process whether it still runs. Whoever has to give up leaves the
cause. Records and causes are told pickled, as torchrun tells its state through the same store.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cp_inductor.kept import cache

# So many events are told by their digests, and so many that nobody waits for in full. No rank is
# further ahead of another.
MOST_TOLD, MOST_IN_FULL = 512, 16

# So many bytes of a digest are compared.
DIGEST_BYTES = 4

# What an event is whose site is why a rank refuses what may be next.
REFUSAL = "a refusal"


@dataclass(frozen=True, slots=True)
class Fate:
    """What has become of another rank.

    Attributes:
        text: for people.
        is_known: whether asking again would tell nothing more.
        is_missing: whether it was missing in an exchange that failed, as far as can be known.
    """

    text: str
    is_known: bool = False
    is_missing: bool = True


@dataclass(frozen=True, slots=True)
class Process:
    """A process: its machine, its number there, and when it began; "" if that is not known."""

    machine: str
    pid: int
    began: str

    @staticmethod
    def own() -> Process:
        """Return this process."""
        return Process(_machine(), os.getpid(), _status_of(os.getpid())[1])

    def look(self) -> Fate:
        """Say how it is, if that can be seen from here."""
        if self.machine != _machine() or not self.began:
            where = self.machine.split()[0]
            return Fate(f"process {self.pid} on {where} has not said that it failed")
        state, began = _status_of(self.pid)
        if began != self.began or state in "ZX":
            return Fate(f"its process {self.pid} has ended", is_known=True)
        if state in "Tt":
            return Fate(f"its process {self.pid} is stopped", is_known=True)
        return Fate(f"its process {self.pid} runs, and has not said that it failed")


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


@dataclass(frozen=True, slots=True)
class Entry:
    """An event: what a rank is about to run, has cut, or has read.

    Attributes:
        site: where it is in the user's program, on this rank; for the error.
        fields: values that must be equal on all ranks, by name. A field that one of two ranks
            leaves out is not compared between them. Every entry has the field "what".
        consequences: names of fields that follow from others. The error names them only if no
            other field differs.
        remedy: what to do if ranks have different values; empty for an attention.
        kind: what the digest of the trail covers.
        begins: what inputs begin with, by name, where it is to differ between ranks.
    """

    site: str
    fields: Mapping[str, str]
    consequences: tuple[str, ...] = ()
    remedy: str = ""
    kind: str = ""
    begins: Mapping[str, str] = field(default_factory=dict)

    def differs(self, other: Entry) -> bool:
        """Whether any field that both have is unequal."""
        return any(other.fields.get(name, value) != value for name, value in self.fields.items())

    @property
    def causes(self) -> dict[str, str]:
        """The fields that do not follow from others."""
        return {n: text for n, text in self.fields.items() if n not in self.consequences}


class Trail:
    """The events of one sort that a rank has come to, counted from 1; the last ones in full."""

    def __init__(self) -> None:
        self.count = self.settled = 0
        self.digests: deque[str] = deque(maxlen=MOST_TOLD)
        self.entries: deque[Entry] = deque(maxlen=MOST_TOLD)

    def add(self, entry: Entry) -> None:
        """Add an event."""
        text = (self.digests[-1] if self.digests else "") + entry.kind
        self.digests.append(hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest())
        self.entries.append(entry)
        self.count += 1

    def take_back(self, count: int) -> None:
        """Take back the last events, as if this rank had not come to them."""
        self.count -= count
        for _ in range(count):
            self.entries.pop(), self.digests.pop()

    def settle(self) -> None:
        """Note that all events were compared: others may still have to compare the last few."""
        self._keep(self.count - self.settled)
        self.settled = self.count

    def run_on(self) -> None:
        """Note that nobody waits for what was added."""
        self._keep(MOST_IN_FULL)

    def _keep(self, count: int) -> None:
        while len(self.entries) > count:
            self.entries.popleft()

    def entry_at(self, number: int) -> Entry | None:
        """Return an event; None if it is not there in full."""
        at = number - self.count - 1
        return self.entries[at] if -len(self.entries) <= at < 0 else None

    def first_difference(self, other: Trail) -> int | None:
        """Return the first event in which two trails differ."""
        stop = min(self.count, other.count)
        start = max(trail.count - len(trail.entries) for trail in (self, other))
        if self._goes_apart(other, stop):
            start = stop - MOST_TOLD
        for number in range(max(0, start) + 1, stop + 1):
            own, theirs = self.entry_at(number), other.entry_at(number)
            if own is not None and theirs is not None and own.differs(theirs):
                return number
            if self._goes_apart(other, number):
                return number
        return None

    def _goes_apart(self, other: Trail, number: int) -> bool:
        at, to = number - self.count - 1, number - other.count - 1
        is_told = -len(self.digests) <= at < 0 and -len(other.digests) <= to < 0
        return is_told and self.digests[at] != other.digests[to]


# Batches first: attentions follow from them.
TRAILS = BATCHES, ATTENTIONS, TABLES = "batches", "attentions", "tables"


def new_trails() -> dict[str, Trail]:
    """Return the trails of a rank that has come to nothing yet."""
    return {name: Trail() for name in TRAILS}


@dataclass(slots=True)
class Record:
    """What a rank tells the others.

    Attributes:
        process: which process it is.
        epoch: how often its group has begun anew, after an error that all ranks have raised.
        failed: which exchange has failed; "" if none has.
        inside: the attention or graph that it is in; "" if in none.
        since: when it came there, in seconds since 1970.
        is_waiting: whether it waits for events of other ranks, and will see why they give up.
        is_over: whether its program has ended.
        trails: what it has come to in this epoch.
    """

    process: Process
    epoch: int = 0
    failed: str = ""
    inside: str = ""
    since: float = field(default_factory=time.time)
    is_waiting: bool = False
    is_over: bool = False
    trails: dict[str, Trail] = field(default_factory=new_trails)

    def describe(self) -> str:
        """Describe where the rank is, for people."""
        trail, waited = self.trails[ATTENTIONS], max(0.0, time.time() - self.since)
        done = f"{trail.count} attention{'s' * (trail.count != 1)}"
        if self.is_over:
            return f"its program has ended, after {done}"
        if self.inside:
            return f"in {self.inside}, since {waited:.0f} s, after {trail.count - 1} others"
        last = f", the last: {trail.entries[-1].site}" if trail.entries else ""
        return f"outside of any attention, since {waited:.0f} s, after {done}{last}"

    @property
    def fate(self) -> Fate:
        """What has become of the rank, as far as can be seen from here."""
        if self.failed:
            return Fate(f"it failed as well, in {self.failed}", is_known=True, is_missing=False)
        return self.process.look()


def name_ranks(ranks: Sequence[int]) -> str:
    """Name global ranks, as in "ranks 0, 1 and 2"."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


# An error names no more fields than this: one mistake shows in several.
MOST_NAMED = 4

REMEDY = (
    "run one program on all ranks that share a sequence: the same model, batches, input shapes,"
    " options, flags and versions, train() or eval() on all of them, the same weights frozen; shard"
    " a sequence as torch.chunk does; if its length does not divide by the ranks, name it in"
    " options['seq_len'], by a buffer of context_parallel, or by the shape of the DTensor"
)
WHY_ABSENT = (
    "an error may have been raised there, another model or batch run, an attention run that was"
    " agreed on before, or check_agreement=False set; if compiling takes longer, raise the timeout"
    " of init_process_group"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks give up, as the first of them has seen it.

    Attributes:
        rank: the global rank of that first one.
        site, expected, got, remedy: of its error.
        seen_by: positions of ranks that wait, and will raise as soon as they see this.
        is_shared: all ranks raise this as it is; otherwise the others quote it.
    """

    rank: int
    site: str
    expected: str
    got: str
    remedy: str
    seen_by: Sequence[int] = ()
    is_shared: bool = False


def name_difference(entries: Mapping[int, Entry]) -> tuple[str, str]:
    """Say what differs between events, by global rank, and what to do; "" for what is not known."""
    for rank, entry in entries.items():
        if entry.fields.get("what") == REFUSAL:
            return f"rank {rank}, which refuses to: {entry.site}", f"see the error on rank {rank}"
    differing = {}
    for name in dict.fromkeys(name for entry in entries.values() for name in entry.fields):
        ranks_of: dict[str, list[int]] = {}
        for rank, entry in entries.items():
            if name in entry.fields:
                ranks_of.setdefault(entry.fields[name], []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {name_ranks(r)}" for value, r in ranks_of.items())
            differing[name] = f"{name}: {values}"
    consequences = {name for entry in entries.values() for name in entry.consequences}
    causes = [text for name, text in differing.items() if name not in consequences]
    return "; ".join((causes or list(differing.values()))[:MOST_NAMED]), ""
