"""The one comparison of ranks: every rank tells where it is, and reads where the others are.

    rank 0    batch 1: attention, attention    batch 2: attention, attention
    rank 1    batch 1: attention, attention    batch 3: ...               => RanksDisagree on both

Each rank of a group has one key in the group's store, with its `Record`. Event n of one rank is
compared with event n of the others: attentions, batches that it cuts, tables that it has read. The
store is no collective: ranks that disagree must not start one.

    come(entries, log.others)     wait until all others have come to as many events; compare fields
    come(entries, log.next)       the same with the next rank of the group: the ranks form a ring
    come(entries, ())             go on; the thread that asks the store compares with the next rank
    refuse(reason)                an event, too: whoever comes to another one there gives up

A rank that sees a difference, or waits in vain, leaves the cause in a key of its own. The first
cause counts: all ranks raise because of it, and begin a new epoch, in which nothing was said yet. A
rank that had refused begins anew without another error.

One rank may run a graph as a whole that another runs in two parts. So a rank waits only until all
others have come to the first of its events, or to all of its tables. Whichever of two ranks comes
to an event later compares it, before either runs it.

The store of a stopped process never answers. So one thread asks it, and the program waits for each
answer within a limit:

    log.store.get(key)                    waits for ever, if the process of the store is stopped
    log.ask(lambda: log.store.get(key))   StoreSilent after the limit, and then at once

Assumes: ranks that run the same program come to the same events in the same order.
"""

from __future__ import annotations

import atexit
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet, ref

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from cp_inductor.errors import CPError, ProcessGroupError, RanksDisagree
from cp_inductor.trust.record import (
    ATTENTIONS,
    REFUSAL,
    TABLES,
    WHY_ABSENT,
    Cause,
    Entry,
    Place,
    Record,
    cause_of_difference,
    name_ranks,
)

# How often the thread compares; the part per rank keeps the store fast enough for a thousand ranks.
INTERVAL_S, INTERVAL_PER_RANK_S = 0.05, 0.003

# A rank that waits looks at intervals that grow from this one to that of the thread: others may be
# about to come, or compile for minutes. After a while it looks at all others, and their processes.
SHORTEST_WAIT_S, LOOK_AFTER_S = 0.0002, 0.3

# A rank says after this time that it waits, and then again at intervals that grow by a factor.
REPORT_AFTER_S, REPORT_GROWTH = 10.0, 3

# How long a rank that has seen a difference waits for the others to see it: the store goes away
# with the rank that holds it.
PATIENCE_S = 10.0

# How long a rank asks what it can do without.
SOON_S = 1.0

# For how long, at most, a process that ends waits for a thread that asks a store: if a daemon
# thread returns from C++ while the interpreter ends, Python ends it in the middle of C++ code,
# which then calls abort.
AT_EXIT_S = 1.0


# What a rank is said to have told that has told nothing.
UNTOLD = "it has not said where it is"


class StoreSilent(DistError):
    """A store has not answered within a limit."""


class Log:
    """What this rank of a group tells the others, and what it knows of them.

    Args:
        store, timeout_s: of the group.
        rank: of this process, as all ranks here a global one.
        ranks: of the group, in its order.
    """

    def __init__(self, store: Store, timeout_s: float, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks, self.timeout_s = rank, tuple(ranks), timeout_s
        self.others = [other for other in ranks if other != rank]
        self.next = [ranks[(ranks.index(rank) + 1) % len(ranks)]]
        self.root, self.written = store, b""
        self.record = Record()
        self.records: dict[int, Record] = {}  # of others by rank, as they were read last
        self.last: dict[Any, Entry] = {}  # what was agreed last in this epoch, by kinds
        self.num_runs: Counter[str] = Counter()  # of what is compared in the first runs, by kind
        self.causes: dict[int, Cause] = {}  # by epoch
        self.report_after_s = REPORT_AFTER_S
        self.interval_s = max(INTERVAL_S, INTERVAL_PER_RANK_S * len(ranks))
        self.silent_after_s, self.is_silent = timeout_s, False
        self.questions = SimpleQueue[Callable[[], object]]()
        serve = partial(_serve, ref(self), self.questions, self.interval_s)
        self.thread = threading.Thread(target=serve, name="cp_inductor_store", daemon=True)
        self.thread.start()
        _logs.add(self)
        with suppress(DistError):  # the next caller that needs the store says where
            self.ask(self.exchange)

    @cached_property
    def store(self) -> Store:
        """This group's part of the store, which is joined when it is first used."""
        common = PrefixStore("cp_inductor", self.root)
        # A store may outlive a group and serve another group of the same name. All ranks of the
        # first group have joined before any rank of the second does.
        return PrefixStore(str((common.add("joined", 1) - 1) // len(self.ranks)), common)

    @property
    def cause(self) -> Cause | None:
        """Why this rank has to give up, if it has."""
        return self.causes.get(self.record.epoch)

    # --- The program -------------------------------------------------------------------------

    def come(
        self,
        entries: Sequence[Entry],
        waiting: Sequence[int],
        sort: str = ATTENTIONS,
        *,
        is_new: bool = True,
    ) -> None:
        """Come to events of a sort, the first of them now, and wait for some ranks.

        What is not new is sure to be run. If a rank has ended then, or the store has gone, nothing
        is compared: an exchange will fail, and that error will say why.

        Raises:
            RanksDisagree: other ranks have come to something else, or do not come.
            ProcessGroupError: the store does not answer.
        """
        site = entries[0].site
        self.rejoin()
        if self.cause is not None:
            raise self.give_up(site)
        before, count = self.record.events, self.record.count(sort)
        self.record.come(sort, entries)
        if not waiting:
            return
        place = sort, count + (len(entries) if sort == TABLES else 1)
        try:
            self._settle(place, site, waiting, is_new=is_new)
        except BaseException as error:
            if not isinstance(error, CPError):  # interrupted by hand: it will come again
                self.record.events = before
            raise

    def refuse(self, reason: str) -> None:
        """Let the others know that this rank refuses what may be next for them."""
        self.rejoin()
        refusal = Entry(reason, {"what": REFUSAL}, kind=REFUSAL)
        for sort in (ATTENTIONS, TABLES):  # others may wait for either
            self.record.come(sort, [refusal])
        with suppress(RuntimeError):  # the refusal is raised in any case
            self.ask(self.exchange)

    def rejoin(self) -> None:
        """After a refusal, wait for what the others make of it: they give up, or refuse as well.

        If they give up, this rank begins anew with them.
        """
        place = ATTENTIONS, self.record.count(ATTENTIONS)
        if place in self.record.events and self.record.events[place].kind == REFUSAL:
            with suppress(CPError):
                self._settle(place, "what follows a refusal", self.others, is_new=True)

    @contextmanager
    def waiting(self, where: str, *, is_settling: bool = False) -> Iterator[None]:
        """Say where this rank is, while it waits for others inside."""
        record, before = self.record, (self.record.inside, self.record.is_waiting)
        record.inside, record.is_waiting, record.since = where, is_settling, time.time()
        self.report_after_s = REPORT_AFTER_S
        try:
            yield
        finally:
            record.inside, record.is_waiting = before
            record.since = time.time()

    # --- Waiting and comparing ---------------------------------------------------------------

    def rounds(self) -> Iterator[float]:
        """Yield for how long this rank has waited, at growing intervals."""
        started, delay = time.monotonic(), SHORTEST_WAIT_S
        while True:
            yield time.monotonic() - started
            time.sleep(delay)
            delay = min(2 * delay, self.interval_s)

    def _settle(self, place: Place, site: str, waiting: Sequence[int], *, is_new: bool) -> None:
        """Wait until other ranks have come to an event, and compare."""
        try:
            with self.waiting(site, is_settling=True):
                cause = self._wait(place, site, waiting, is_new=is_new)
                if cause is not None:
                    self.ask(partial(self._decide, cause, self.record.epoch))
                    raise self.give_up(site)
        except DistError as error:
            raise self._store_error(site, error) from error

    def _wait(
        self, place: Place, site: str, waiting: Sequence[int], *, is_new: bool
    ) -> Cause | None:
        """Wait until other ranks have come to an event; return what is wrong, if anything."""
        limit_s, difference = self.timeout_s, None
        for waited_s in self.rounds():
            is_long = waited_s > LOOK_AFTER_S
            ranks = self.others if is_long else waiting  # who is awaited may wait for another
            try:
                self.ask(partial(self.exchange, ranks), None if is_new else SOON_S)
            except DistError as error:
                # It may be slow: an attention that is not compared may be another one.
                is_slow = isinstance(error, StoreSilent) and not self.gone()
                if is_new or (is_slow and waited_s > limit_s):
                    raise
                if is_slow:
                    continue
                return None
            if self.cause is not None:
                return self.cause
            if difference is None and (difference := self._difference(waiting)) is not None:
                place, waiting = difference, self.others  # the error names what all have
                limit_s = min(limit_s, waited_s + PATIENCE_S)
            here = self._in_this_epoch()
            sort, needed = place
            waiting = [r for r in waiting if r not in here or here[r].count(sort) < needed]
            over = [r for r in waiting if r in self.records and self.records[r].is_over]
            gone = self.gone() if is_long else {}
            if gone and not (over or is_new or difference):
                return None
            missing = over or [rank for rank in waiting if rank in gone]
            if missing or not waiting or waited_s > limit_s:
                break
        if difference is not None:
            return cause_of_difference(self.events(place), self.ranks, place)
        if not waiting:
            return None
        absent = missing or waiting
        who, places = name_ranks(absent), "; ".join(self.describe(absent))
        return {
            "expected": f"{name_ranks(self.ranks)} to arrive within {self.timeout_s:g} s where rank"
            f" {self.rank} is, at {site}",
            "got": f"nothing from {who} ({places})",
            "remedy": f"see the log of {who}: {WHY_ABSENT}",
        }

    def _in_this_epoch(self) -> dict[int, Record]:
        """Return the records of all ranks that are in the epoch of this one, its own too."""
        known, epoch = self.records | {self.rank: self.record}, self.record.epoch
        return {r: known[r] for r in self.ranks if r in known and known[r].epoch == epoch}

    def _difference(self, ranks: Sequence[int]) -> Place | None:
        """Return the place of the first event in which one of some ranks differs."""
        here = self._in_this_epoch()
        others = [here[rank].events for rank in ranks if rank in here]
        for place, event in self.record.events.items():
            if any(place in events and event.differs(events[place]) for events in others):
                return place
        return None

    def events(self, place: Place) -> dict[int, Entry]:
        """Return an event by rank, as far as ranks are known to have come to it in this epoch."""
        known = {rank: record.events for rank, record in self._in_this_epoch().items()}
        return {rank: events[place] for rank, events in known.items() if place in events}

    def give_up(self, site: str) -> RanksDisagree:
        """Forget all events, as every rank does that raises; return the error about the cause."""
        cause = self.cause
        assert cause is not None
        # A record with the old epoch and no events is one that waits for the cause.
        self.record.events, self.last = {}, {}
        self.record.epoch += 1
        with suppress(RuntimeError):
            for waited_s in self.rounds():
                self.ask(partial(self.exchange, self.others))
                gone, epoch = self.gone(), self.record.epoch
                unseen = [r for r, told in self.records.items() if told.epoch < epoch]
                is_awaited = any(self.records[r].is_waiting and r not in gone for r in unseen)
                if not (self.record.is_waiting and is_awaited) or waited_s > PATIENCE_S:
                    break
        return RanksDisagree(site=site, **cause)

    def _store_error(self, site: str, error: Exception) -> ProcessGroupError:
        """Return the error that says where the store was needed."""
        store: Any = self.root
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        address = f", {store.host}:{store.port}," if isinstance(store, TCPStore) else ""
        return ProcessGroupError(
            site=site,
            expected=f"the store of the process group{address} to answer",
            got=f"{error} ({'; '.join(self.describe(self.others))})",
            remedy="find out why the process that holds the store, which is rank 0 unless a"
            " launcher holds it, has ended or is stopped; then start all ranks again, from a"
            " checkpoint",
        )

    # --- The store, which only the thread asks -----------------------------------------------

    def ask(self, call: Callable[[], Any], limit_s: float | None = None) -> Any:
        """Let the thread call a function that asks the store, and return its result.

        Raises:
            StoreSilent: it has not returned within the limit. If that was the usual one, the store
                is not asked again.
            DistError: there is no store any more.
        """
        limit = self.silent_after_s if limit_s is None else limit_s
        answer = Future[Any]()

        def fill() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        if not self.is_silent:
            self.questions.put(fill)
            if wait([answer], limit).done:
                return answer.result()
            self.is_silent = limit_s is None
        raise StoreSilent(f"no answer for {limit:g} s")

    def exchange(self, ranks: Sequence[int] = ()) -> None:
        """Tell the others where this rank is; read the records of some.

        If this rank has waited for long, print where all are.
        """
        record, epoch, told = self.record, self.record.epoch, pickle.dumps(self.record)
        if told != self.written:
            self.store.set(str(self.rank), told)  # type: ignore[arg-type]  # stubs know str alone
            self.written = told
        key = f"cause/{epoch}"
        if epoch not in self.causes and self.store.check([key]):
            self.causes = {epoch: pickle.loads(self.store.get(key))}
        self.read(ranks)
        if record.inside and time.time() - record.since > self.report_after_s:
            self.report_after_s *= REPORT_GROWTH
            self._report()

    def read(self, ranks: Sequence[int]) -> None:
        """Read the records of some ranks, but of those that have told nothing."""
        self.records = self.records | self.told(ranks)

    def told(self, ranks: Sequence[int], prefix: str = "") -> dict[int, Any]:
        """Return what some ranks have told, as far as they have told anything."""
        keys = {rank: f"{prefix}{rank}" for rank in ranks}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        told = self.store.multi_get(list(keys.values())) if keys else []
        return dict(zip(keys, map(pickle.loads, told), strict=True))

    def _decide(self, cause: Cause, epoch: int) -> None:
        """Leave a cause for all ranks, unless one of them has left another."""
        own: Any = pickle.dumps(cause)
        self.causes = {epoch: pickle.loads(self.store.compare_set(f"cause/{epoch}", "", own))}

    def compare(self, ranks: Sequence[int]) -> None:
        """Tell where this rank is, and compare its way with that of others."""
        epoch = self.record.epoch
        self.exchange(ranks)
        if self.cause is not None or self.record.is_waiting:
            return  # who waits judges
        place = self._difference(ranks)
        if place is not None:
            self.read(self.others)
            self._decide(cause_of_difference(self.events(place), self.ranks, place), epoch)

    # --- The other ranks ---------------------------------------------------------------------

    def gone(self) -> dict[int, str]:
        """Return what has become of others that are known not to run as usual."""
        known = self.records.items()
        return {rank: end for rank, record in known if (end := record.known_end())}

    def describe(self, ranks: Sequence[int]) -> list[str]:
        """Say where ranks are, or were last."""
        known = self.records | {self.rank: self.record}
        return [f"rank {r}: {known[r].describe() if r in known else UNTOLD}" for r in ranks]

    # --- Beside the program ------------------------------------------------------------------

    def end(self) -> None:
        """Tell the others that this rank's program is over."""
        self.record.is_over = True
        with suppress(RuntimeError):
            self.exchange()

    def _report(self) -> None:
        """Print where all ranks are, if this one waits for another."""
        self.read(self.others)
        count = self.record.count(ATTENTIONS)
        others = self.records.values()
        if all(other.inside and other.count(ATTENTIONS) >= count for other in others):
            return
        lines = [f"cp_inductor: rank {self.rank} waits for others of its group"]
        lines += self.describe(self.ranks)
        print("\n  ".join(lines), file=sys.stderr, flush=True)


def _serve(
    log_of_thread: Callable[[], Log | None],
    questions: SimpleQueue[Callable[[], object]],
    interval_s: float,
) -> None:
    """Answer questions; between them compare beside the program, until the log is gone."""
    is_comparing = True
    while True:
        with suppress(Empty):
            questions.get(timeout=interval_s)()
            continue
        log = log_of_thread()
        if log is None:
            return
        if is_comparing:
            is_comparing = False
            with suppress(RuntimeError):  # the store has gone with the group
                # It may wait for others, or has come to something.
                if log.record.inside or pickle.dumps(log.record) != log.written:
                    log.compare(log.next)
                is_comparing = True
        del log


_logs: WeakSet[Log] = WeakSet()


@atexit.register
def _end_threads() -> None:
    logs = list(_logs)
    for log in logs:
        log.questions.put(log.end)
        log.questions.put(sys.exit)
    for log in logs:
        log.thread.join(AT_EXIT_S)
