"""What a rank tells the others of its group: where it is, and the events that it has come to.

    attention, attention, batch 2, attention
      =>  attentions: 3, digests "9f86d081 884c7d65 9a2feaa0", the last of them in full; batches: 1

The digest after an event covers all events before it. So two trails part at the first event whose
digests differ, or whose fields do.

A record is told pickled, as torchrun tells its state through the same kind of store.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cp_inductor.trust.processes import Fate, Process

# So many events are told by their digests, and so many that nobody waits for in full. No rank is
# further ahead of another.
MOST_TOLD, MOST_IN_FULL = 512, 16

# So many bytes of a digest are compared.
DIGEST_BYTES = 4

REFUSAL = "a refusal"


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

    def is_other(self, entry: Entry) -> bool:
        """Whether an entry says anything else; most entries share their fields with the last."""
        return self.fields is not entry.fields and self.fields != entry.fields

    def differs(self, other: Entry) -> bool:
        """Whether any field that both have is unequal."""
        return any(other.fields.get(name, value) != value for name, value in self.fields.items())

    @property
    def causes(self) -> dict[str, str]:
        """The fields that do not follow from others."""
        return {n: text for n, text in self.fields.items() if n not in self.consequences}

    @property
    def is_refusal(self) -> bool:
        """Whether its site is why a rank refuses what may be its next attention."""
        return self.fields.get("what") == REFUSAL


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


def fate_of(record: Record | None) -> Fate:
    """Say what has become of a rank, given what it told last."""
    if record is None:
        return Fate("it has not said what it is, nor that it failed")
    if record.failed:
        return Fate(f"it failed as well, in {record.failed}", is_known=True, is_missing=False)
    return record.process.look()


def name_ranks(ranks: Sequence[int]) -> str:
    """Name global ranks, as in "ranks 0, 1 and 2"."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
