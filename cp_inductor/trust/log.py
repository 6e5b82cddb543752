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

Assumes: ranks that run the same program come to the same events in the same order.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from cp_inductor.errors import CPError, ProcessGroupError, RanksDisagree
from cp_inductor.trust.asking import LOOK_EVERY_S, Asking, rounds
from cp_inductor.trust.record import (
    ATTENTIONS,
    REFUSAL,
    TABLES,
    WHY_ABSENT,
    Cause,
    Entry,
    Record,
    Trail,
    cause_of_difference,
    name_ranks,
    new_trails,
)

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
        self.has_refused = False  # and it is not known what the others have made of it
        self.look_every_s = max(LOOK_EVERY_S, INTERVAL_PER_RANK_S * len(ranks))
        self.reported, self.report_after_s = 0.0, REPORT_AFTER_S
        interval_s = max(INTERVAL_S, INTERVAL_PER_RANK_S * len(ranks))
        self.ask = Asking(self, timeout_s, interval_s).ask
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
        name: str = ATTENTIONS,
        *,
        is_new: bool = True,
    ) -> None:
        """Come to events of a trail, the first of them now, and wait for some ranks.

        What is not new is sure to be run. If a rank has ended then, or the store does not answer,
        nothing is compared: an exchange will fail, and that error will say why.

        Raises:
            RanksDisagree: other ranks have come to something else, or do not come.
            ProcessGroupError: the store does not answer.
        """
        site = entries[0].site
        self.rejoin()
        if self.cause is not None:
            raise self.give_up(site)
        trails = self.record.trails
        before = trails[name]
        trails[name] = before.extended(entries)
        if not waiting:
            return
        needed = trails[name].count if name == TABLES else before.count + 1
        try:
            self._settle(name, needed, site, waiting, is_new=is_new)
        except BaseException as error:
            if not isinstance(error, CPError):  # interrupted by hand: it will come again
                trails[name] = before
            raise

    def refuse(self, reason: str) -> None:
        """Let the others know that this rank refuses what may be next for them."""
        self.rejoin()
        refusal = Entry(reason, {"what": REFUSAL}, kind=REFUSAL)
        for name in (ATTENTIONS, TABLES):  # others may wait for either
            self.record.trails[name] = self.record.trails[name].extended([refusal])
        self.has_refused = True
        with suppress(RuntimeError):  # the refusal is raised in any case
            self.ask(self.exchange)

    def rejoin(self) -> None:
        """After a refusal, wait for what the others make of it: they give up, or refuse as well.

        If they give up, this rank begins anew with them.
        """
        if self.has_refused:
            with suppress(CPError):
                count, where = self.record.trails[ATTENTIONS].count, "what follows a refusal"
                self._settle(ATTENTIONS, count, where, self.others, is_new=True)
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
    ) -> None:
        """Wait until other ranks have come to an event, and compare."""
        cause = None
        try:
            with self.waiting(site, is_settling=True):
                cause = self._wait(name, needed, waiting, site, is_new=is_new)
                if cause is not None:
                    self.ask(partial(self._decide, cause, self.record.epoch))
                    raise self.give_up(site)
        except DistError as error:
            if is_new or cause is not None:
                raise self._store_error(site, error) from error

    def _wait(
        self, name: str, needed: int, waiting: Sequence[int], site: str, *, is_new: bool
    ) -> Cause | None:
        """Wait until other ranks have come to an event; return what is wrong, if anything."""
        limit_s, look_at_s = self.timeout_s, self.look_every_s
        ask = self.ask if is_new else partial(self.ask, is_hopeless=self.gone)
        compared, missing = waiting, list[int]()
        for waited_s in rounds():
            ask(partial(self.exchange, waiting))
            if self.cause is not None:
                return self.cause
            difference = self._difference(compared)
            if difference is not None:  # the error names what all have
                (name, needed), waiting = difference, self.others
                limit_s = min(limit_s, waited_s + PATIENCE_S)
            trails = self._trails(name)
            waiting = [r for r in waiting if r not in trails or trails[r].count < needed]
            missing = [r for r in waiting if r in self.records and self.records[r].is_over]
            if not missing and waited_s > look_at_s:
                gone = self.look()
                if gone and not is_new and difference is None:
                    return None
                missing = [rank for rank in waiting if rank in gone]
                look_at_s = waited_s + self.look_every_s
            if missing or not waiting or waited_s > limit_s:
                break
        if difference is not None:
            return self._cause_of_difference(*difference)
        if not waiting:
            return None
        absent = missing or waiting
        who = name_ranks(absent)
        expected = f"{name_ranks(self.ranks)} to arrive within {self.timeout_s:g} s"
        got, remedy = f"nothing from {who}", f"see the log of {who}: {WHY_ABSENT}"
        got += self._what_became_of(absent)
        return Cause(site, expected, got, remedy, alone=self.rank)

    def _trails(self, name: str) -> dict[int, Trail]:
        """Return the trails of one sort of all ranks that are in the same epoch, this one's too."""
        known, epoch = self.records | {self.rank: self.record}, self.record.epoch
        here = [rank for rank in self.ranks if rank in known and known[rank].epoch == epoch]
        return {rank: known[rank].trails[name] for rank in here}

    def _difference(self, ranks: Sequence[int]) -> tuple[str, int] | None:
        """Return the trail and number of the first event in which one of some ranks differs."""
        for name, own in self.record.trails.items():
            trails = self._trails(name)
            numbers = [own.first_difference(trails[rank]) for rank in ranks if rank in trails]
            first = min(filter(None, numbers), default=None)
            if first is not None:
                return name, first
        return None

    def events(self, name: str, number: int) -> dict[int, Entry]:
        """Return an event by rank, as far as ranks are known to have come to it in this epoch."""
        trails = self._trails(name).items()
        return {rank: trail[number] for rank, trail in trails if number in trail}

    def _cause_of_difference(self, name: str, number: int) -> Cause:
        what = f"number {number} of {name}"
        return cause_of_difference(self.events(name, number), self.rank, self.ranks, what)

    def give_up(self, site: str) -> RanksDisagree:
        """Forget all events, as every rank does that raises; return the error about the cause."""
        cause = self.cause
        assert cause is not None
        # A record with the old epoch and no events is one that waits for the cause.
        self.record.trails, self.last = new_trails(), {}
        self.record.epoch += 1
        is_awaited = self.record.is_waiting and cause.alone is None
        with suppress(RuntimeError):
            for waited_s in rounds():
                self.ask(partial(self.exchange, self.others))
                before = [r for r in self.records.values() if r.epoch < self.record.epoch]
                is_seen = not any(record.is_waiting for record in before)
                if is_seen or not is_awaited or waited_s > PATIENCE_S:
                    break
        return cause.error(site, self.rank, self.ranks)

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

    def exchange(self, ranks: Sequence[int] = ()) -> None:
        """Tell the others where this rank is; read the records of some."""
        epoch, told = self.record.epoch, pickle.dumps(self.record)
        if told != self.written:
            self.store.set(str(self.rank), told)  # type: ignore[arg-type]  # stubs know str alone
            self.written = told
        key = f"cause/{epoch}"
        if epoch not in self.causes and self.store.check([key]):
            self.causes = {epoch: pickle.loads(self.store.get(key))}
        self.read(ranks)

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

    def compare(self) -> None:
        """Tell where this rank is, and compare its way with that of the next one."""
        epoch = self.record.epoch
        self.exchange(self.next)
        if self.cause is not None or self.record.is_waiting:
            return  # who waits judges
        difference = self._difference(self.next)
        if difference is not None:
            self.read(self.others)
            self._decide(self._cause_of_difference(*difference), epoch)

    # --- The other ranks ---------------------------------------------------------------------

    def gone(self) -> dict[int, str]:
        """Return what has become of others that are known not to run as usual."""
        ends = {rank: record.known_end() for rank, record in self.records.items()}
        return {rank: end for rank, end in ends.items() if end}

    def look(self) -> dict[int, str]:
        """Return the same of what all others tell now, if the store answers soon."""
        limit_s = LOOK_ONCE_KNOWN_S if self.gone() else LOOK_S
        with suppress(RuntimeError):
            self.ask(partial(self.read, self.others), limit_s)
        return self.gone()

    def _what_became_of(self, ranks: Sequence[int]) -> str:
        """Say, in parentheses, where ranks are, or were last, as far as that is known."""
        self.look()
        known = [rank for rank in ranks if rank in self.records]
        text = "; ".join(f"rank {rank}: {self.records[rank].describe()}" for rank in known)
        return f" ({text})" if text else ""

    # --- Beside the program ------------------------------------------------------------------

    def compare_beside(self) -> None:
        """Compare, and print where all ranks are if this one has waited for long."""
        record = self.record
        if record.inside or pickle.dumps(record) != self.written:
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
        self.read(self.others)
        count = self.record.trails[ATTENTIONS].count
        others = self.records.values()
        if all(other.inside and other.trails[ATTENTIONS].count >= count for other in others):
            return
        records = self.records | {self.rank: self.record}
        told = dict.fromkeys(self.ranks, "has come to no attention yet")
        told |= {rank: record.describe() for rank, record in records.items()}
        lines = [f"cp_inductor: rank {self.rank} waits for others of its group"]
        lines += [f"  rank {rank}: {where}" for rank, where in told.items()]
        print("\n".join(lines), file=sys.stderr, flush=True)
