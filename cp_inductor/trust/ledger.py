"""A list of entries that every rank of a process group writes, and a check that they are equal.

    rank 0: say(A)  settle      rank 1: say(A)  settle      =>  both go on
    rank 0: say(A)  settle      rank 1: say(B)  settle      =>  RanksDisagree on both
    rank 0: say(A)  settle      rank 1: nothing             =>  RanksDisagree, after the timeout

A rank that raises leaves the cause in its key for the ranks that come later. A rank that raises
because of that cause leaves the same cause, so that the last of many ranks names the first.

The ranks communicate through the group's store, not by a collective: ranks that disagree must not
start an exchange. Each rank writes one key, which it overwrites. Entry n of one rank is compared
with entry n of every other rank. The key holds the entries that others may still have to compare:
all since the settlement before last.

Ranks may settle different numbers of entries at a time: one rank may run a graph as a whole that
another runs in two parts. So a rank waits only until all others have written the entry that it is
about to run. Whichever of two ranks writes an entry later compares it with the other's. Neither
rank runs it before that.

Assumes: ranks that run the same program write the same entries in the same order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from torch.distributed import DistError

from cp_inductor.errors import ProcessGroupError, RanksDisagree
from cp_inductor.trust.board import Board, name_ranks
from cp_inductor.trust.bounded_store import BoundedStore

# A rank looks for missing entries at growing intervals: other ranks may be about to write them, or
# may compile for minutes.
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.05

# How often a rank that waits looks whether the others still run.
LOOK_EVERY_S = 1.0

# How long a rank that has seen a difference waits for the others to see it: the store goes away
# with the rank that holds it.
PATIENCE_S = 10.0

# An error names no more fields than this: one mistake shows in several.
MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """What a rank is about to run.

    Attributes:
        site: where it is in the user's program, on this rank; for the error.
        fields: values that must be equal on all ranks, by name. A field that one of two ranks
            leaves out is not compared between them. Every entry has the field "what".
        consequences: names of fields that follow from others. The error names them only if no
            other field differs.
        remedy: what to do if ranks have different values; empty for an attention. The other ranks
            are not told, because their entries have remedies of their own.
    """

    site: str
    fields: Mapping[str, str]
    consequences: tuple[str, ...] = ()
    remedy: str = ""

    def differs(self, other: Entry) -> bool:
        """Whether any field that both have is unequal."""
        return any(other.fields.get(name, value) != value for name, value in self.fields.items())


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks give up, as the first of them has seen it.

    Attributes:
        rank: the global rank of that first one.
        site, expected, got, remedy: of its error.
    """

    rank: int
    site: str
    expected: str
    got: str
    remedy: str


def _look_at_nothing() -> Mapping[int, str]:
    return {}


class Ledger:
    """The entries that this rank has written for a group, and those that it has read.

    Args:
        store: of the group.
        name: of the ledger, and of the group for people.
        rank: this process's position in the group.
        ranks: the global ranks of the group, by position.
        timeout_s: of the group.
        look: returns what has become of other ranks, by global rank, as far as that is known.
        over: returns the global ranks that will write nothing more.
        ahead: returns where ranks are, by global rank, that must have written by now whatever this
            rank waits for.
        tell: lets these ranks know the error that is raised because of them.
    """

    def __init__(
        self,
        store: BoundedStore,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        look: Callable[[], Mapping[int, str]] = _look_at_nothing,
        over: Callable[[], Collection[int]] = tuple,
        ahead: Callable[[], Mapping[int, str]] = _look_at_nothing,
        tell: Callable[[RanksDisagree], None] = lambda _: None,
    ) -> None:
        self.store, self.board = store, Board(store, name, ranks)
        self.rank, self.ranks, self.timeout_s = rank, tuple(ranks), timeout_s
        self.look, self.over = look, over
        self.ahead, self.tell = ahead, tell
        self.start = 0  # of the entries: the number of the first that is still here
        self.pending = 0  # the number of the first that is not settled
        self.entries: list[Entry] = []
        self.refused = (0, 0)  # at which entry something was refused last, and how often there
        self.has_refused = False  # and it is not known what the others have made of it

    @property
    def stop(self) -> int:
        """The number of the next entry."""
        return self.start + len(self.entries)

    @property
    def is_pending(self) -> bool:
        """Whether this rank has said something that is not settled."""
        return self.pending < self.stop

    def say(self, entries: Sequence[Entry]) -> None:
        """Let the others know, without waiting for them.

        Raises:
            ProcessGroupError: the store does not answer.
        """
        self.entries += entries
        with self._named_store(entries[0].site):
            self._write()

    def refuse(self, reason: str) -> None:
        """Let the others know that this rank refuses what may be their next entry.

        If all ranks refuse the same, no rank waits, and this has no effect.
        """
        number, times = self.refused
        self.refused = (self.stop, times + 1 if number == self.stop else 1)
        self.has_refused = True
        text = json.dumps([*self.refused, reason])
        with suppress(DistError):  # the refusal is raised in any case
            self.board.write(f"{self.rank}/refused", text)

    def follow(self) -> bool:
        """Begin anew as others do that have given up; return whether one has.

        Raises:
            DistError: the store does not answer.
        """
        said = self.store.answered(lambda: self._read(self._others))
        has_left = any(other.left is not None for other in said.values())
        if has_left:
            self._begin_anew()
        return has_left

    def is_refused_by_all(self) -> bool:
        """Whether the others have refused what this rank has refused last.

        Raises:
            DistError: the store does not answer.
        """
        number, times = self.refused
        for position in self._others:
            key = f"{position}/refused"
            found = self.store.answered(partial(self.board.find, key))
            at, count = (-1, 0) if found is None else json.loads(found)[:2]
            if at != number or count < times:
                return False
        return True

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]

    def settle(self, *, is_whole: bool) -> None:
        """Compare what was said since the last settlement with what the others say.

        Args:
            is_whole: wait until the others have said all of it; if false, until they have said the
                first entry of it. Whatever else they have said by then is compared as well.

        Raises:
            RanksDisagree: they say something else, or nothing within the timeout.
            ProcessGroupError: the store does not answer.
        """
        if not self.is_pending:
            return
        with self._named_store(self.entries[self.pending - self.start].site):
            self._settle(is_whole)

    @contextmanager
    def _named_store(self, site: str) -> Iterator[None]:
        """Say where the store was needed, if it fails inside."""
        try:
            yield
        except DistError as error:
            others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
            address = f", {self.store.address}," if self.store.address else ""
            raise ProcessGroupError(
                site=site,
                expected=f"the store of the process group{address} to answer",
                got=f"{error}{self._what_became_of(others)}",
                remedy="find out why the process that holds the store, which is rank 0 unless a"
                " launcher holds it, has ended or is stopped; then start all ranks again, from a"
                " checkpoint",
            ) from error

    def _settle(self, is_whole: bool) -> None:
        needed = self.stop if is_whole else self.pending + 1
        started, delay = time.monotonic(), SHORTEST_WAIT_S
        deadline, look_at = started + self.timeout_s, started + LOOK_EVERY_S
        said = dict[int, _Said]()
        refused: dict[int, str] = {}
        ahead: Mapping[int, str] = {}
        waiting = self._others
        while True:
            if time.monotonic() > look_at:
                ahead = self.ahead()  # before it is read what they have written
            news, refused = self.store.answered(partial(self._hear, waiting, needed))
            said |= news
            waiting = [rank for rank in waiting if not _is_there(said.get(rank), needed)]
            ahead = {rank: ahead[rank] for at in waiting if (rank := self.ranks[at]) in ahead}
            if not waiting or ahead:
                break
            has_left = any(other.left is not None for other in said.values())
            if has_left or refused or self._first_difference(said) is not None:
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
            if time.monotonic() > look_at:
                look_at, over = time.monotonic() + LOOK_EVERY_S, self.over()
                if any(self.ranks[rank] in over for rank in waiting):
                    break
            if time.monotonic() > deadline:
                break
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_WAIT_S)
        cause = self._judge(said, waiting, refused, ahead)
        if cause is not None:
            error = self._error(cause)
            self._leave(cause, is_alone=bool(waiting))
            if ahead or refused:
                self.tell(error)
            raise error
        stop = self.stop
        del self.entries[: self.pending - self.start]
        self.start, self.pending = self.pending, stop

    def _hear(self, waiting: Sequence[int], needed: int) -> tuple[dict[int, _Said], dict[int, str]]:
        """Return what some ranks have said, and why ranks that are missing refuse to go on."""
        said = self._read(waiting)
        missing = [rank for rank in waiting if not _is_there(said.get(rank), needed)]
        return said, self._read_refusals({rank: said.get(rank) for rank in missing})

    def _first_difference(self, said: Mapping[int, _Said]) -> int | None:
        """Return the number of the first entry that differs on another rank."""
        return next(
            (
                number
                for number in range(self.pending, self.stop)
                for other in said.values()
                if number in other and self.entries[number - self.start].differs(other[number])
            ),
            None,
        )

    def _judge(
        self,
        said: Mapping[int, _Said],
        missing: Sequence[int],
        refused: Mapping[int, str],
        ahead: Mapping[int, str],
    ) -> Cause | None:
        """Return why this rank must give up, if it must. Another rank may have given the cause."""
        everyone = self._name(range(len(self.ranks)))
        to_run = f"{everyone} to run the same"
        number = self._first_difference(said)
        if number is not None:
            entry = self.entries[number - self.start]
            found = {rank: other[number] for rank, other in said.items() if number in other}
            return Cause(
                rank=self.ranks[self.rank],
                site=entry.site,
                expected=to_run,
                got=self._describe({self.rank: entry, **found}),
                remedy=entry.remedy
                or "give all ranks the same model, input shapes, options, flags and"
                " versions, and shard a sequence as torch.chunk does; if its length"
                " does not divide by the ranks, name it in options['seq_len'], by a"
                " buffer of context_parallel, or by the shape of the DTensor",
            )
        left = [other.left for other in said.values() if other.left is not None]
        if left:
            return min(left, key=lambda cause: cause.rank)
        site = self.entries[self.pending - self.start].site
        if refused and missing:
            rank, reason = min(refused.items())
            return Cause(
                rank=self.ranks[self.rank],
                site=site,
                expected=to_run,
                got=f"{self._name([rank])}, which refuses to: {reason}",
                remedy=f"see the error on {self._name([rank])}",
            )
        if ahead:
            where = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(ahead.items()))
            return Cause(
                rank=self.ranks[self.rank],
                site=site,
                expected=to_run,
                got=f"it on {self._name([self.rank])}, and ranks that ran on without it: {where}",
                remedy="let all ranks that share a sequence run it, or none: the same batches and"
                " lengths, and an evaluation on all; then start again from a checkpoint",
            )
        if missing:
            who = self._name(missing)
            return Cause(
                rank=self.ranks[self.rank],
                site=site,
                expected=f"{everyone} to arrive within {self.timeout_s:g} s",
                got=f"nothing from {who}{self._what_became_of(missing)}",
                remedy=f"see the log of {who}: an error may have been raised there, another"
                " model or batch run, an attention run that was agreed on before, or"
                " check_agreement=False set; if compiling takes longer, raise the timeout"
                " of init_process_group",
            )
        return None

    def _what_became_of(self, positions: Sequence[int]) -> str:
        """Say, in parentheses, what has become of ranks, as far as that is known."""
        found = self.look()
        ranks = [self.ranks[position] for position in positions]
        told = "; ".join(f"rank {rank}: {found[rank]}" for rank in ranks if rank in found)
        return f" ({told})" if told else ""

    def _error(self, cause: Cause) -> RanksDisagree:
        """Return the error about a cause that this rank, or another, has seen first."""
        if cause.rank == self.ranks[self.rank]:
            return RanksDisagree(
                site=cause.site, expected=cause.expected, got=cause.got, remedy=cause.remedy
            )
        # Ranks may have written their entries before they left, or may have seen the same.
        heard = self.store.answered(lambda: self._read(self._others))
        causes = {at: other.left for at, other in heard.items()}
        left = [at for at, one in causes.items() if one is not None and one.got == cause.got]
        have = "has" if len(left) == 1 else "have"
        return RanksDisagree(
            site=self.entries[self.pending - self.start].site,
            expected=f"{self._name(range(len(self.ranks)))} to run the same",
            got=f"{self._name(left)}, which {have} given up, because rank {cause.rank} at"
            f" {cause.site} expected {cause.expected} and got {cause.got}",
            remedy=cause.remedy,
        )

    def _describe(self, entries: Mapping[int, Entry]) -> str:
        """Name what differs, each value with the ranks that have it."""
        names = list(dict.fromkeys(name for entry in entries.values() for name in entry.fields))
        differing = []
        for name in names:
            ranks_of: dict[str, list[int]] = {}
            for rank, entry in sorted(entries.items()):
                if name in entry.fields:
                    ranks_of.setdefault(entry.fields[name], []).append(rank)
            if len(ranks_of) > 1:
                values = ", ".join(f"{value} on {self._name(r)}" for value, r in ranks_of.items())
                differing.append((name, f"{name}: {values}"))
        consequences = {name for entry in entries.values() for name in entry.consequences}
        causes = [text for name, text in differing if name not in consequences]
        return "; ".join((causes or [text for _, text in differing])[:MOST_NAMED])

    def _name(self, positions: Sequence[int]) -> str:
        return name_ranks([self.ranks[position] for position in positions])

    def _leave(self, cause: Cause, *, is_alone: bool) -> None:
        """Tell ranks that come later, wait until the others have seen it, and begin anew."""
        self._write(left=cause)
        deadline = time.monotonic() + PATIENCE_S
        num_seen = self.board.add("seen", 1)
        delay = SHORTEST_WAIT_S
        while not is_alone and num_seen < len(self.ranks) and time.monotonic() < deadline:
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_WAIT_S)
            num_seen = self.board.add("seen", 0)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.board.epoch += 1
        self.refused, self.has_refused = (0, 0), False
        self.start = self.pending = 0
        self.entries = []

    # --- The store -------------------------------------------------------------------------

    def _write(self, left: Cause | None = None) -> None:
        entries = [(entry.site, dict(entry.fields), entry.consequences) for entry in self.entries]
        cause = None if left is None else astuple(left)
        text = json.dumps({"start": self.start, "entries": entries, "left": cause})
        self.board.write(str(self.rank), text)

    def _read(self, positions: Sequence[int]) -> dict[int, _Said]:
        """Return what some ranks have said; those that have said nothing are not in it."""
        read = self.board.read(positions)
        return {position: _Said.parse(text) for position, text in read.items()}

    def _read_refusals(self, said: Mapping[int, _Said | None]) -> dict[int, str]:
        """Return why ranks do not go on that have refused more often than this one."""
        found = {}
        for position, other in said.items():
            refusal = self.board.find(f"{position}/refused")
            if refusal is not None:
                number, times, reason = json.loads(refusal)
                own = self.refused[1] if self.refused[0] == number else 0
                if number == (other.stop if other is not None else 0) and times > own:
                    found[position] = reason
        return found


@dataclass(frozen=True, slots=True)
class _Said:
    """What another rank has said.

    Attributes:
        start: the number of the first entry.
        entries: from there.
        left: why it has given up; None if it has not.
    """

    start: int
    entries: tuple[Entry, ...]
    left: Cause | None

    @staticmethod
    def parse(text: bytes) -> _Said:
        """Return what `Ledger._write` wrote."""
        read: dict[str, Any] = json.loads(text)
        entries = (Entry(site, fields, tuple(names)) for site, fields, names in read["entries"])
        left = None if read["left"] is None else Cause(*read["left"])
        return _Said(read["start"], tuple(entries), left)

    @property
    def stop(self) -> int:
        return self.start + len(self.entries)

    def __contains__(self, number: int) -> bool:
        return self.start <= number < self.stop

    def __getitem__(self, number: int) -> Entry:
        return self.entries[number - self.start]


def _is_there(said: _Said | None, needed: int) -> bool:
    return said is not None and (said.stop >= needed or said.left is not None)
