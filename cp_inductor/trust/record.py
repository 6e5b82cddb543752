"""What a rank tells the others of its group: its process, where it is, and what it has come to.

    attention, attention, batch 2, attention
      =>  attentions: 1, 2 and 3, with digests 9f86d081, 884c7d65, 9a2feaa0;  batches: 1

The digest of an event covers all before it, so two ranks part at the first event whose digests
differ, or whose fields do. Whoever has to give up leaves the cause. Records and causes are told
pickled, as torchrun tells its state through the same store.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cp_inductor.kept import cache

# So many events are told before those that a rank has come to last: no rank is further ahead.
MOST_BEFORE = 32

# As many digits of a digest tell texts apart, and can be read aloud.
NUM_DIGITS = 12

# What an event is whose site is why a rank refuses what may be next.
REFUSAL = "a refusal"


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


def digest(said: object) -> str:
    """Return the first digits of a digest of bytes, or of what something is written as."""
    told = said if isinstance(said, bytes) else repr(said).encode()
    return hashlib.sha256(told).hexdigest()[:NUM_DIGITS]


@dataclass(frozen=True, slots=True)
class Entry:
    """An event: what a rank is about to run, has cut, or has read."""

    site: str  # where it is in the user's program, on this rank; for the error
    # Values that must be equal on all ranks, by name. A field that one of two ranks leaves out is
    # not compared between them. Every entry has the field "what".
    fields: Mapping[str, str]
    # Names of fields that follow from others. The error names them only if no other field differs.
    consequences: tuple[str, ...] = ()
    remedy: str = ""  # what to do if ranks have different values; empty for an attention
    kind: str = ""  # what the digest covers
    # What inputs begin with, by name, where it is to differ between ranks.
    begins: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""  # of this event and all of its sort before it, once a rank has come to it

    def differs(self, other: Entry) -> bool:
        """Whether any field that both have is unequal, or what came before."""
        return self.digest != other.digest or (
            self.fields != other.fields
            and any(other.fields.get(name, value) != value for name, value in self.fields.items())
        )

    @property
    def causes(self) -> dict[str, str]:
        """The fields that do not follow from others."""
        return {n: text for n, text in self.fields.items() if n not in self.consequences}


BATCHES, ATTENTIONS, TABLES = "batches", "attentions", "tables"

# The sort of an event and its number among those of the sort, from 1.
Place = tuple[str, int]


@dataclass(slots=True)
class Record:
    """What a rank tells the others."""

    # machine, pid, began: its process: where, which, and since when; "" if that is not known.
    machine: str = field(default_factory=_machine)
    pid: int = field(default_factory=os.getpid)
    began: str = field(default_factory=lambda: _status_of(os.getpid())[1])
    epoch: int = 0  # how often its group has begun anew, after an error that all ranks have raised
    failed: str = ""  # which exchange has failed; "" if none has
    inside: str = ""  # the attention or graph that it is in; "" if in none
    since: float = field(default_factory=time.time)  # when it came there, in seconds since 1970
    # Whether it waits for events of other ranks, and will see why they give up.
    is_waiting: bool = False
    is_over: bool = False  # whether its program has ended
    # The last of what it has come to in this epoch, in the order in which it came.
    events: dict[Place, Entry] = field(default_factory=dict)

    def count(self, sort: str) -> int:
        """Return how many events of a sort there were."""
        return max((number for known, number in self.events if known == sort), default=0)

    def come(self, sort: str, entries: Sequence[Entry]) -> None:
        """Add events of a sort."""
        count = self.count(sort)
        least = count - MOST_BEFORE
        events = {at: e for at, e in self.events.items() if at[0] != sort or at[1] > least}
        for number, entry in enumerate(entries, count + 1):
            before = events[sort, number - 1].digest if number > 1 else ""
            events[sort, number] = replace(entry, digest=digest([before, entry.kind]))
        self.events = events

    def describe(self) -> str:
        """Describe where the rank is, and what became of it, for people."""
        count, waited = self.count(ATTENTIONS), max(0.0, time.time() - self.since)
        done = f"{count} attention{'s' * (count != 1)}"
        if self.is_over:
            where = f"its program has ended, after {done}"
        elif self.inside:
            where = f"in {self.inside}, since {waited:.0f} s, after {count - 1} others"
        else:
            last = f", the last: {self.events[ATTENTIONS, count].site}" if count else ""
            where = f"outside of any attention, since {waited:.0f} s, after {done}{last}"
        is_here = self.machine == _machine()
        elsewhere = "" if is_here else f"process {self.pid} on {self.machine.split()[0]}"
        return ", ".join(filter(None, [where, self.known_end() or elsewhere]))

    def known_end(self) -> str:
        """Say why the rank does not run as usual; "" if it may run."""
        if self.failed:
            return f"it failed as well, in {self.failed}"
        if self.machine == _machine() and self.began:
            state, began = _status_of(self.pid)
            if began != self.began or state in "ZX":
                return f"its process {self.pid} has ended"
            if state in "Tt":
                return f"its process {self.pid} is stopped"
        return ""


def name_ranks(ranks: Sequence[int]) -> str:
    """Name global ranks, as in "ranks 0, 1 and 2"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


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


# Why ranks give up, as the first of them has seen it: what the error says, which all of them raise.
Cause = dict[str, str]


def cause_of_difference(known: Mapping[int, Entry], ranks: Sequence[int], place: Place) -> Cause:
    """Return the cause that an event differs, as far as a rank knows what all have come to."""
    expected = f"{name_ranks(ranks)} to run the same"
    for other, entry in known.items():
        if entry.fields.get("what") == REFUSAL:
            got = f"rank {other}, which refuses to: {entry.site}"
            return {"expected": expected, "got": got, "remedy": f"see the error on rank {other}"}
    differing = {}
    for name in dict.fromkeys(name for entry in known.values() for name in entry.fields):
        ranks_of: dict[str, list[int]] = {}
        for other, entry in known.items():
            if name in entry.fields:
                ranks_of.setdefault(entry.fields[name], []).append(other)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {name_ranks(r)}" for value, r in ranks_of.items())
            differing[name] = f"{name}: {values}"
    consequences = {name for entry in known.values() for name in entry.consequences}
    causes = [text for name, text in differing.items() if name not in consequences]
    got = "; ".join((causes or list(differing.values()))[:MOST_NAMED])
    return {
        "expected": expected,
        "got": got or f"others before number {place[1]} of {place[0]}",
        "remedy": next((entry.remedy for entry in known.values() if entry.remedy), REMEDY),
    }
