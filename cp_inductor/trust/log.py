"""The one comparison of ranks: every rank tells where it is, and reads where the others are.

    rank 0    batch 1: attention, attention    batch 2: attention, attention
    rank 1    batch 1: attention, attention    batch 3: ...               => RanksDisagree on both

Each rank of a group has one key in the group's store, with its `Record`. Event n of one rank is
compared with event n of every other rank: attentions, batches that it cuts into shards, tables that
it has read. The ranks communicate through the store, not by a collective: ranks that disagree must
not start an exchange.

    come(entries, log.others)     wait until all others have come to as many events; compare fields
    come(entries, log.next)       the same with the next rank of the group: the ranks form a ring
    come(entries, ())             go on; the thread that asks the store compares with the next rank
    refuse(reason)                an event, too: whoever comes to another one there gives up

A rank that sees a difference, or waits in vain, leaves the cause in a key of its own. The first
cause counts. All ranks raise because of it, and begin a new epoch, in which nothing was said yet.
A rank that had refused was told its error before: it begins anew without another one.

Ranks may come to different numbers of events at a time: one rank may run a graph as a whole that
another runs in two parts. So a rank waits only until all others have come to the first of its
events, or to all of its tables. Whichever of two ranks comes to an event later compares it. Neither
runs it before that.

Assumes: ranks that run the same program come to the same events in the same order.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from cp_inductor.errors import CPError, ProcessGroupError, RanksDisagree
from cp_inductor.trust.asking import LOOK_EVERY_S, Asking
from cp_inductor.trust.record import (
    ATTENTIONS,
    REFUSAL,
    REMEDY,
    TABLES,
    WHY_ABSENT,
    Cause,
    Entry,
    Fate,
    Process,
    Record,
    name_difference,
    name_ranks,
    new_trails,
)

# A rank that waits looks at growing intervals: others may be about to come, or compile for minutes.
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.05

# How often the thread looks; the part per rank keeps the store fast enough for a thousand ranks.
INTERVAL_S, INTERVAL_PER_RANK_S = 0.05, 0.003

# A rank says after this time that it waits, and then again at intervals that grow by a factor.
REPORT_AFTER_S, REPORT_GROWTH = 10.0, 3

# How long a rank that has seen a difference waits for the others to see it: the store goes away
# with the rank that holds it.
PATIENCE_S = 10.0

# For how long a rank asks what has become of the others, which may wait for each other; and for how
# long if it knows that one of them has ended.
LOOK_S, LOOK_ONCE_KNOWN_S = 1.0, 0.1


def rounds() -> Iterator[float]:
    """Yield for how long this rank has waited, at growing intervals."""
    started, delay = time.monotonic(), SHORTEST_WAIT_S
    while True:
        yield time.monotonic() - started
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_WAIT_S)


class Log:
    """What this rank of a group tells the others, and what it knows of them.

    Args:
        store: of the group.
        rank: this process's position in the group.
        ranks: the global ranks of the group, by position.
        timeout_s: of the group.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = rank, tuple(ranks), timeout_s
        self.others = [at for at in range(len(ranks)) if at != rank]
        self.next = [(rank + 1) % len(ranks)]
        self.root, self.store = store, PrefixStore("cp_inductor", store)
        self.record = Record(Process.own())
        self.records: dict[int, Record] = {}  # of others, as they were read last
        self.last: dict[Any, Entry] = {}  # what was agreed last in this epoch, by kinds
        self.lock = threading.Lock()
        self.written, self.incarnation = b"", -1
        self.causes: dict[int, Cause] = {}  # by epoch
        self.has_refused = False  # and it is not known what the others have made of it
        self.look_every_s = max(LOOK_EVERY_S, INTERVAL_PER_RANK_S * len(ranks))
        self.reported, self.report_after_s = 0.0, REPORT_AFTER_S
        interval_s = max(INTERVAL_S, INTERVAL_PER_RANK_S * len(ranks))
        self.asking = Asking(self, timeout_s, interval_s)
        self.ask = self.asking.ask
        with suppress(DistError):  # the next caller that needs the store says where
            self.ask(self.exchange)

    @property
    def cause(self) -> Cause | None:
        """Why this rank has to give up, if it has."""
        return self.causes.get(self.record.epoch)

    # --- The program -------------------------------------------------------------------------

    def come(
        self,
        entries: Sequence[Entry],
        waiting: Sequence[int],
        name: str = ATTENTIONS,
        *,
        is_new: bool = True,
    ) -> list[Entry]:
        """Come to events, the first of them now.

        Args:
            entries: the events.
            waiting: positions of the ranks to wait for.
            name: of the trail.
            is_new: what is not new is sure to be run: if a rank has ended, an exchange will fail,
                and that error will say why.

        Returns:
            What the others have come to that were waited for.

        Raises:
            RanksDisagree: other ranks have come to something else, or do not come.
            ProcessGroupError: the store does not answer.
        """
        site = entries[0].site
        self.rejoin(site)
        if self.cause is not None:
            raise self.give_up(site)
        trail = self.record.trails[name]
        first = trail.count + 1
        with self.lock:
            for entry in entries:
                trail.add(entry)
            if not waiting:
                trail.run_on()
                return []
        try:
            needed = trail.count if name == TABLES else first
            records = self._settle(name, needed, site, waiting, is_new=is_new)
        except CPError:
            raise
        except BaseException:  # interrupted by hand: it will come again
            with self.lock:
                trail.take_back(len(entries))
            raise
        with self.lock:
            trail.settle()
        told = [record.trails[name].entry_at(first) for record in records.values()]
        return [entry for entry in told if entry is not None]

    def refuse(self, reason: str) -> None:
        """Let the others know that this rank refuses what may be next for them."""
        self.rejoin("a refusal")
        with self.lock:
            refusal = Entry(reason, {"what": REFUSAL}, kind=REFUSAL)
            for name in (ATTENTIONS, TABLES):  # others may wait for either
                self.record.trails[name].add(refusal)
        self.has_refused = True
        with suppress(DistError, RuntimeError):  # the refusal is raised in any case
            self.ask(self.exchange)

    def rejoin(self, site: str) -> None:
        """After a refusal, wait for what the others make of it: they give up, or refuse as well.

        If they give up, this rank begins anew with them.
        """
        if self.has_refused:
            with suppress(CPError):
                count = self.record.trails[ATTENTIONS].count
                self._settle(ATTENTIONS, count, site, self.others, is_new=True)
            self.has_refused = False

    @contextmanager
    def waiting(self, where: str, *, is_settling: bool = False) -> Iterator[None]:
        """Say where this rank is, while it waits for others inside."""
        record, before = self.record, (self.record.inside, self.record.is_waiting)
        record.inside, record.is_waiting, record.since = where, is_settling, time.time()
        try:
            yield
        finally:
            record.inside, record.is_waiting = before
            record.since = time.time()

    # --- Waiting and comparing ---------------------------------------------------------------

    def _settle(
        self, name: str, needed: int, site: str, waiting: Sequence[int], *, is_new: bool
    ) -> dict[int, Record]:
        """Wait until other ranks have come to an event, and compare.

        Returns:
            Their records, by position. If it is not new, and a process has ended or the store does
            not answer, nothing is compared: the exchange fails with an error that says so.
        """
        try:
            with self.waiting(site, is_settling=True):
                records, cause = self._wait(name, needed, waiting, site, is_new=is_new)
                if cause is not None:
                    self.ask(partial(self._decide, cause, self.record.epoch))
                    raise self.give_up(site)
                return records
        except DistError as error:
            raise self._store_error(site, error) from error

    def _wait(
        self, name: str, needed: int, waiting: Sequence[int], site: str, *, is_new: bool
    ) -> tuple[dict[int, Record], Cause | None]:
        """Wait until other ranks have come to an event; return their records, and what is wrong."""
        limit_s, look_at_s = self.timeout_s, self.look_every_s
        ask = self.ask if is_new else partial(self.ask, is_hopeless=self.gone)
        records, missing = dict[int, Record](), list[int]()
        difference: tuple[str, int] | None = None
        for waited_s in rounds():
            try:
                records |= ask(partial(self.exchange, waiting))
            except DistError:
                if is_new:
                    raise
                return records, None
            if self.cause is not None:
                return records, self.cause
            if difference is None:
                difference = self._difference(records.values())
                if difference is not None:  # the error names what all have
                    (name, needed), waiting = difference, self.others
                    limit_s = min(limit_s, waited_s + PATIENCE_S)
            waiting = [at for at in waiting if self._count(name, records.get(at)) < needed]
            missing = [at for at in waiting if at in records and records[at].is_over]
            if not missing and waited_s > look_at_s:
                gone = self.look()
                if gone and not is_new and difference is None:
                    return records, None
                missing = [at for at in waiting if self.ranks[at] in gone]
                look_at_s = waited_s + self.look_every_s
            if missing or not waiting or waited_s > limit_s:
                break
        if difference is not None:
            return records, self._cause_of_difference(*difference, records)
        return records, self._cause_of_absence(missing or waiting, site) if waiting else None

    def _count(self, name: str, record: Record | None) -> int:
        """Return to how many events of this epoch another rank has come."""
        is_here = record is not None and record.epoch == self.record.epoch
        return record.trails[name].count if record is not None and is_here else 0

    def _difference(self, records: Iterable[Record]) -> tuple[str, int] | None:
        """Return the trail and number of the first event in which another rank differs."""
        here = [record for record in records if record.epoch == self.record.epoch]
        with self.lock:
            for name, trail in self.record.trails.items():
                numbers = [trail.first_difference(record.trails[name]) for record in here]
                differing = [number for number in numbers if number is not None]
                if differing:
                    return name, min(differing)
        return None

    def _cause_of_difference(self, name: str, number: int, records: Mapping[int, Record]) -> Cause:
        """Return the cause that an event differs."""
        here = {**records, self.rank: self.record}
        here = {at: here[at] for at in sorted(here) if here[at].epoch == self.record.epoch}
        entries = {at: record.trails[name].entry_at(number) for at, record in here.items()}
        known = {self.ranks[at]: entry for at, entry in entries.items() if entry is not None}
        own = entries[self.rank] or Entry(f"event {number}", {})
        got, remedy = name_difference(known)
        return Cause(
            self.ranks[self.rank],
            own.site,
            f"{name_ranks(self.ranks)} to run the same",
            got or f"{name} that differ from number {number} on",
            remedy or own.remedy or REMEDY,
            [at for at, record in here.items() if record.is_waiting],
            is_shared=True,
        )

    def _cause_of_absence(self, missing: Sequence[int], site: str) -> Cause:
        """Return the cause that ranks at some positions do not come."""
        who = name_ranks([self.ranks[at] for at in missing])
        expected = f"{name_ranks(self.ranks)} to arrive within {self.timeout_s:g} s"
        got = f"nothing from {who}{self._what_became_of(missing)}"
        return Cause(
            self.ranks[self.rank], site, expected, got, f"see the log of {who}: {WHY_ABSENT}"
        )

    def give_up(self, site: str) -> RanksDisagree:
        """Begin anew because of the cause; return the error about it."""
        cause = self.cause
        assert cause is not None
        self._begin_anew(cause)
        expected, got = cause.expected, cause.got
        if not cause.is_shared and cause.rank != self.ranks[self.rank]:
            expected = f"{name_ranks(self.ranks)} to run the same"
            got = (
                f"rank {cause.rank}, which has given up, because rank {cause.rank} at {cause.site}"
                f" expected {cause.expected}, got {cause.got}"
            )
        return RanksDisagree(site=site, expected=expected, got=got, remedy=cause.remedy)

    def _begin_anew(self, cause: Cause) -> None:
        """Forget all events, as every rank does that raises, and wait until the others do."""
        with self.lock:
            self.record.epoch, self.record.trails = self.record.epoch + 1, new_trails()
            self.last = {}
        waiting = [at for at in cause.seen_by if at != self.rank and self.record.is_waiting]
        with suppress(DistError, RuntimeError):
            for waited_s in rounds():
                records = self.ask(partial(self.exchange, waiting))
                waiting = [
                    at
                    for at in waiting
                    if at not in records or records[at].epoch < self.record.epoch
                ]
                if not waiting or waited_s > PATIENCE_S:
                    return

    def _store_error(self, site: str, error: Exception) -> ProcessGroupError:
        """Return the error that says where the store was needed."""
        store: Any = self.root
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        address = f", {store.host}:{store.port}," if isinstance(store, TCPStore) else ""
        return ProcessGroupError(
            site=site,
            expected=f"the store of the process group{address} to answer",
            got=f"{error}{self._what_became_of(self.others)}",
            remedy="find out why the process that holds the store, which is rank 0 unless a"
            " launcher holds it, has ended or is stopped; then start all ranks again, from a"
            " checkpoint",
        )

    # --- The store, which only the thread asks -----------------------------------------------

    def exchange(self, positions: Sequence[int] = ()) -> dict[int, Record]:
        """Tell the others where this rank is; return the records of some, by position."""
        if self.incarnation < 0:
            # A store may outlive a group and serve another group of the same name. All ranks
            # of the first group have joined before any rank of the second does.
            self.incarnation = (self.store.add("joined", 1) - 1) // len(self.ranks)
            self.store = PrefixStore(str(self.incarnation), self.store)
        epoch, told = self._pickled()
        if told != self.written:
            self.store.set(str(self.rank), told)  # type: ignore[arg-type]  # stubs know str alone
            self.written = told
        self._read_cause(epoch)
        return self.read(positions)

    def _pickled(self) -> tuple[int, bytes]:
        """Return what is to be told, and of which epoch it is."""
        with self.lock:
            return self.record.epoch, pickle.dumps(self.record)

    def read(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records of some ranks, by position, but of those that have told nothing."""
        keys = {at: str(at) for at in positions}
        if not self.store.check(list(keys.values())):
            keys = {at: key for at, key in keys.items() if self.store.check([key])}
        told = self.store.multi_get(list(keys.values())) if keys else []
        records = dict(zip(keys, map(pickle.loads, told), strict=True))
        self.records = {**self.records, **records}
        return records

    def _read_cause(self, epoch: int) -> None:
        key = f"cause/{epoch}"
        if epoch not in self.causes and self.store.check([key]):
            self.causes = {epoch: pickle.loads(self.store.get(key))}

    def _decide(self, cause: Cause, epoch: int) -> None:
        """Leave a cause for all ranks, unless one of them has left another."""
        self.store.compare_set(f"cause/{epoch}", "", pickle.dumps(cause))  # type: ignore[arg-type]
        self._read_cause(epoch)

    def compare(self) -> None:
        """Tell where this rank is, and compare its way with that of the next one."""
        epoch, records = self.record.epoch, self.exchange(self.next)
        if self.cause is not None or self.record.is_waiting:
            return  # who waits judges
        difference = self._difference(records.values())
        if difference is not None:
            self._decide(self._cause_of_difference(*difference, self.read(self.others)), epoch)

    def swap(self, name: str, value: object, limit_s: float) -> list[Any]:
        """Leave a value for the others, and return theirs; nothing if some leave none in time."""
        keys, told = [f"{name}/{at}" for at in self.others], list[bytes]()

        def read() -> list[bytes]:
            return self.store.multi_get(keys) if self.store.check(keys) else []

        with suppress(DistError):
            own: Any = pickle.dumps(value)
            self.ask(lambda: self.store.set(f"{name}/{self.rank}", own), limit_s)
            for waited_s in rounds():
                told = self.ask(read, limit_s)
                if told or waited_s > limit_s:
                    break
        return [pickle.loads(text) for text in told]

    # --- The other ranks ---------------------------------------------------------------------

    def fates(self) -> dict[int, Fate]:
        """Say what has become of the others, by global rank, as far as it is known by now."""
        untold = Fate("it has not said what it is, nor that it failed")
        known = {at: record.fate for at, record in self.records.items()}
        return {self.ranks[at]: known.get(at, untold) for at in self.others}

    def gone(self) -> dict[int, str]:
        """Return what has become of others that are known not to run as usual, by global rank."""
        return {rank: fate.text for rank, fate in self.fates().items() if fate.is_known}

    def look(self) -> dict[int, str]:
        """Return the same of what all others tell now, if the store answers soon."""
        limit_s = LOOK_ONCE_KNOWN_S if self.gone() else LOOK_S
        with suppress(DistError, RuntimeError):
            self.ask(partial(self.read, self.others), limit_s)
        return self.gone()

    def where(self, positions: Sequence[int]) -> dict[int, str]:
        """Say where ranks are, or were last, and what became of them, by global rank."""
        self.look()
        told = {}
        for at in positions:
            if at in self.records:
                record, fate = self.records[at], self.records[at].fate
                told[self.ranks[at]] = record.describe() + f", {fate.text}" * fate.is_known
        return told

    def _what_became_of(self, positions: Sequence[int]) -> str:
        """Say, in parentheses, what has become of ranks, as far as that is known."""
        text = "; ".join(f"rank {rank}: {said}" for rank, said in self.where(positions).items())
        return f" ({text})" if text else ""

    # --- Beside the program ------------------------------------------------------------------

    def compare_beside(self) -> None:
        """Compare, and print where all ranks are if this one has waited for long."""
        record = self.record
        if record.inside or self._pickled()[1] != self.written:
            self.compare()
        if not record.inside or record.since != self.reported:
            self.reported, self.report_after_s = record.since, REPORT_AFTER_S
        elif time.time() - self.reported > self.report_after_s:
            self.report_after_s *= REPORT_GROWTH
            self._report()

    def end(self) -> None:
        """Tell the others that this rank's program is over."""
        self.record.is_over = True
        self.exchange()

    def _report(self) -> None:
        """Print where all ranks are, if this one waits for another."""
        records, own = self.read(self.others), self.record
        count = own.trails[ATTENTIONS].count
        is_waiting = any(
            other.trails[ATTENTIONS].count < count or not other.inside for other in records.values()
        )
        if is_waiting and own.inside:
            told = self.where(self.others) | {self.ranks[self.rank]: own.describe()}
            nothing = "has come to no attention yet"
            lines = [f"  rank {rank}: {told.get(rank, nothing)}" for rank in self.ranks]
            title = f"cp_inductor: rank {self.ranks[self.rank]} waits for others of its group"
            print("\n".join([title, *lines]), file=sys.stderr, flush=True)
