"""The one comparison of ranks: every rank tells where it is, and reads where the others are.

    rank 0    batch 1: attention, attention    batch 2: attention, attention
    rank 1    batch 1: attention, attention    batch 3: ...               => RanksDisagree on both

Each rank of a group has one key in the group's store, with its `Record`. Event n of one rank is
compared with event n of every other rank: attentions, batches that it cuts into shards, tables that
it has read. The ranks communicate through the store, not by a collective: ranks that disagree must
not start an exchange.

    come(entry, is_new=True)      wait until all others have come to as many events; compare fields
    come(entry, is_early=True)    the same with the next rank of the group: the ranks form a ring
    come(entry)                   go on; a thread compares with the next rank
    refuse(reason)                an event, too: whoever comes to another one there gives up

A rank that sees a difference, or waits in vain, leaves the cause in a key of its own. The first
cause counts. All ranks raise because of it, and begin a new epoch, in which nothing was said yet.
A rank that had refused was told its error before: it begins anew without another one.

Ranks may come to different numbers of events at a time: one rank may run a graph as a whole that
another runs in two parts. So a rank waits only until all others have come to the first of its
events. Whichever of two ranks comes to an event later compares it. Neither runs it before that.

The thread also prints where all ranks are, when its rank has waited for `REPORT_AFTER_S`.

Assumes: ranks that run the same program come to the same events in the same order.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from weakref import WeakSet, ref

from torch.distributed import DistError, PrefixStore

from cp_inductor.errors import CPError, ProcessGroupError, RanksDisagree, SequenceWarning
from cp_inductor.trust.bounded_store import (
    AT_EXIT_S,
    LOOK_EVERY_S,
    Answer,
    Asking,
    BoundedStore,
)
from cp_inductor.trust.processes import Fate, describe_process, look_at
from cp_inductor.trust.record import ATTENTIONS, REFUSED, Entry, Record, name_ranks, new_trails

# A rank that waits looks at growing intervals: others may be about to come, or compile for minutes.
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.05

# How often the thread looks; the part per rank keeps the store fast enough for a thousand ranks.
INTERVAL_S, INTERVAL_PER_RANK_S = 0.05, 0.003

# How long a rank that has seen a difference waits for the others to see it: the store goes away
# with the rank that holds it.
PATIENCE_S = 10.0

# For how long a rank asks what has become of the others, which may wait for each other.
LOOK_S = 1.0

# How long a rank waits for the hosts of the others. It may be the only one that plans.
HOSTS_S = 30.0

# A rank says after this time that it waits, and then again at intervals that grow by a factor.
REPORT_AFTER_S, REPORT_GROWTH = 10.0, 3

# An error names no more fields than this: one mistake shows in several.
MOST_NAMED = 4

REMEDY = (
    "run one program on all ranks that share a sequence: the same model, batches, input shapes,"
    " options, flags and versions, train() or eval() on all of them, the same weights frozen; shard"
    " a sequence as torch.chunk does; if its length does not divide by the ranks, name it in"
    " options['seq_len'], by a buffer of context_parallel, or by the shape of the DTensor"
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


class Log:
    """What this rank of a group tells the others, and what it knows of them.

    Args:
        store: of the group.
        rank: this process's position in the group.
        ranks: the global ranks of the group, by position.
        timeout_s: of the group.
        host: that this rank runs on; "" for the one that it sees.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        host: str = "",
    ) -> None:
        self.rank, self.ranks, self.timeout_s = rank, tuple(ranks), timeout_s
        self.others = [at for at in range(len(ranks)) if at != rank]
        self.next = [(rank + 1) % len(ranks)]
        self.root, self.store = store, PrefixStore("cp_inductor", store.store)
        self.record = Record(describe_process(), host or socket.gethostname())
        self.processes: dict[int, str] = {}
        self.lock, self.exchanging = threading.Lock(), threading.Lock()
        self.is_told, self.written, self.incarnation = False, "", -1
        self.causes: dict[int, Cause] = {}  # by epoch
        self.has_refused = False  # and it is not known what the others have made of it
        self.look_every_s = max(LOOK_EVERY_S, INTERVAL_PER_RANK_S * len(ranks))
        self.comparing: _Comparing | None = None
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
        name: str = ATTENTIONS,
        *,
        is_new: bool,
        is_early: bool = False,
        for_all: bool = False,
        is_whole: bool = False,
    ) -> list[Entry]:
        """Come to events, the first of them now.

        Args:
            entries: the events.
            name: of the trail.
            is_new: wait for all ranks. What is not new is sure to be run: if a rank has ended, an
                exchange will fail, and that error will say why.
            is_early: wait for the next rank of the group.
            for_all: wait for all ranks, although it is not new.
            is_whole: wait until the others have come to all events, not only to the first.

        Returns:
            What the others have come to, if all were waited for.

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
        self.add(name, entries)
        if self.comparing is None:
            self.comparing = _Comparing(self)
        if not (is_new or is_early or for_all):
            trail.run_on()
            return []
        try:
            needed = trail.count if is_whole else first
            positions = self.others if is_new or for_all else self.next
            with self.waiting(site, is_settling=True):
                records = self._settle(name, needed, site, positions, is_new=is_new)
        except (RanksDisagree, ProcessGroupError):
            raise
        except BaseException:  # interrupted by hand: it will come again
            with self.lock:
                trail.take_back(len(entries))
            raise
        trail.settle()
        told = [record.trails[name].entry_at(first) for record in records.values()]
        return [entry for entry in told if entry is not None]

    def add(self, name: str, entries: Sequence[Entry]) -> None:
        """Note events, without comparing anything now."""
        with self.lock:
            for entry in entries:
                self.record.trails[name].add(entry)
            self.is_told = False

    def refuse(self, reason: str) -> None:
        """Let the others know that this rank refuses what may be their next attention."""
        self.rejoin("a refusal")
        self.add(ATTENTIONS, [Entry(reason, {"what": "a refusal"}, kind=REFUSED)])
        self.has_refused = True
        with suppress(DistError, RuntimeError):  # the refusal is raised in any case
            self.ask(self.exchange)

    def rejoin(self, site: str) -> None:
        """After a refusal, wait for what the others make of it: they give up, or refuse as well.

        If they give up, this rank begins anew with them.
        """
        if self.has_refused:
            count = self.record.trails[ATTENTIONS].count
            with suppress(CPError), self.waiting(site, is_settling=True):
                self._settle(ATTENTIONS, count, site, self.others, is_new=True)
            self.has_refused = False

    @contextmanager
    def waiting(self, where: str, *, is_settling: bool = False) -> Iterator[None]:
        """Say where this rank is, while it waits for others inside."""
        record, before = self.record, (self.record.inside, self.record.is_waiting)
        record.inside, record.is_waiting = where, is_settling
        record.since, self.is_told = time.time(), False
        try:
            yield
        finally:
            record.inside, record.is_waiting = before
            record.since, self.is_told = time.time(), False

    # --- Waiting and comparing ---------------------------------------------------------------

    def _settle(
        self, name: str, needed: int, site: str, waiting: Sequence[int], *, is_new: bool
    ) -> dict[int, Record]:
        """Wait until other ranks have come to an event, and compare.

        Returns:
            Their records, by position. If it is not new, and a process has ended or the store does
            not answer, nothing is compared: the exchange fails with an error that says so.
        """
        started, delay = time.monotonic(), SHORTEST_WAIT_S
        deadline, look_at = started + self.timeout_s, started + self.look_every_s
        epoch, is_hopeless = self.record.epoch, None if is_new else self._is_one_gone
        records = dict[int, Record]()
        difference: tuple[str, int] | None = None
        while True:
            try:
                records |= self.ask(partial(self.exchange, waiting), is_hopeless)
            except DistError as error:
                if is_new:
                    raise self._store_error(site, error) from error
                return records
            if self.cause is not None:
                raise self.give_up(site)
            if difference is None:
                difference = self._difference(records.values())
                if difference is not None:  # the error names what all have
                    (name, needed), waiting = difference, self.others
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
            waiting = [at for at in waiting if self._count(name, records.get(at)) < needed]
            missing = [at for at in waiting if at in records and records[at].is_over]
            if not missing and time.monotonic() > look_at:
                gone = self.look()
                if gone and not is_new and difference is None:
                    return records
                missing = [at for at in waiting if self.ranks[at] in gone]
                look_at = time.monotonic() + self.look_every_s
            if missing or not waiting or time.monotonic() > deadline:
                break
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_WAIT_S)
        if difference is None and not waiting:
            return records
        cause = (
            self._describe(*difference, records)
            if difference
            else self._miss(missing or waiting, site)
        )
        try:
            self.ask(partial(self._decide, cause, epoch))
        except DistError as error:
            raise self._store_error(site, error) from error
        raise self.give_up(site)

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

    def _describe(self, name: str, number: int, records: Mapping[int, Record]) -> Cause:
        """Return the cause that an event differs: each value with the ranks that have it."""
        here = {at: one for at, one in records.items() if one.epoch == self.record.epoch}
        here = dict(sorted({**here, self.rank: self.record}.items()))
        entries = {at: record.trails[name].entry_at(number) for at, record in here.items()}
        known = {at: entry for at, entry in entries.items() if entry is not None}
        own = known.get(self.rank, Entry(f"event {number}", {}))
        refusing = [at for at, entry in known.items() if entry.fields.get("what") == "a refusal"]
        remedy = own.remedy or REMEDY
        if refusing:
            who = self._name(refusing[:1])
            got = f"{who}, which refuses to: {known[refusing[0]].site}"
            remedy = f"see the error on {who}"
        else:
            got = self._differing(known) or f"{name} that differ from number {number} on"
        return Cause(
            self.ranks[self.rank],
            own.site,
            f"{self._name(range(len(self.ranks)))} to run the same",
            got,
            remedy,
            () if refusing else [at for at, record in here.items() if record.is_waiting],
            is_shared=True,
        )

    def _differing(self, entries: Mapping[int, Entry]) -> str:
        names = list(dict.fromkeys(name for entry in entries.values() for name in entry.fields))
        differing = []
        for name in names:
            positions: dict[str, list[int]] = {}
            for at, entry in entries.items():
                if name in entry.fields:
                    positions.setdefault(entry.fields[name], []).append(at)
            if len(positions) > 1:
                values = ", ".join(
                    f"{value} on {self._name(at)}" for value, at in positions.items()
                )
                differing.append((name, f"{name}: {values}"))
        consequences = {name for entry in entries.values() for name in entry.consequences}
        causes = [text for name, text in differing if name not in consequences]
        return "; ".join((causes or [text for _, text in differing])[:MOST_NAMED])

    def _miss(self, waiting: Sequence[int], site: str) -> Cause:
        """Return the cause that some ranks do not come."""
        who = self._name(waiting)
        return Cause(
            self.ranks[self.rank],
            site,
            f"{self._name(range(len(self.ranks)))} to arrive within {self.timeout_s:g} s",
            f"nothing from {who}{self._what_became_of(waiting)}",
            f"see the log of {who}: an error may have been raised there, another model or batch"
            " run, an attention run that was agreed on before, or check_agreement=False set; if"
            " compiling takes longer, raise the timeout of init_process_group",
        )

    def give_up(self, site: str) -> RanksDisagree:
        """Begin anew because of the cause; return the error about it."""
        cause = self.cause
        assert cause is not None
        self._begin_anew(cause)
        expected, got = cause.expected, cause.got
        if not cause.is_shared and cause.rank != self.ranks[self.rank]:
            expected = f"{self._name(range(len(self.ranks)))} to run the same"
            got = (
                f"rank {cause.rank}, which has given up, because rank {cause.rank} at {cause.site}"
                f" expected {cause.expected}, got {cause.got}"
            )
        return RanksDisagree(site=site, expected=expected, got=got, remedy=cause.remedy)

    def _begin_anew(self, cause: Cause) -> None:
        """Forget all events, as every rank does that raises, and wait until the others do."""
        with self.lock:
            self.record.epoch, self.record.trails = self.record.epoch + 1, new_trails()
            self.is_told = False
        deadline, delay = time.monotonic() + PATIENCE_S, SHORTEST_WAIT_S
        waiting = [at for at in cause.seen_by if at != self.rank and self.record.is_waiting]
        with suppress(DistError, RuntimeError):
            while True:
                records = self.ask(partial(self.exchange, waiting))
                waiting = [
                    at
                    for at in waiting
                    if at not in records or records[at].epoch < self.record.epoch
                ]
                if not waiting or time.monotonic() > deadline:
                    return
                time.sleep(delay)
                delay = min(2 * delay, LONGEST_WAIT_S)

    def find_cause(self) -> Cause | None:
        """Return why ranks are known to have gone different ways, after an exchange has failed."""
        if self.cause is None:
            with suppress(DistError, RuntimeError):
                self.ask(self.compare, self._is_one_gone)
        return self.cause

    def _store_error(self, site: str, error: Exception) -> ProcessGroupError:
        """Return the error that says where the store was needed."""
        address = f", {self.root.address}," if self.root.address else ""
        return ProcessGroupError(
            site=site,
            expected=f"the store of the process group{address} to answer",
            got=f"{error}{self._what_became_of(self.others)}",
            remedy="find out why the process that holds the store, which is rank 0 unless a"
            " launcher holds it, has ended or is stopped; then start all ranks again, from a"
            " checkpoint",
        )

    # --- The store ---------------------------------------------------------------------------

    def ask(
        self, call: Callable[[], Answer], is_hopeless: Callable[[], bool] | None = None
    ) -> Answer:
        """Call what asks the store, and return its result; see `BoundedStore.answered`."""
        return self.root.answered(call, is_hopeless)

    def _is_one_gone(self) -> bool:
        return bool(self.look())

    def exchange(self, positions: Sequence[int] = ()) -> dict[int, Record]:
        """Tell the others where this rank is; return the records of some, by position."""
        with self.exchanging:  # otherwise an older record might be written last
            if self.incarnation < 0:
                # A store may outlive a group and serve another group of the same name. All ranks
                # of the first group have joined before any rank of the second does.
                self.incarnation = (self.store.add("joined", 1) - 1) // len(self.ranks)
                self.store = PrefixStore(str(self.incarnation), self.store)
            with self.lock:
                epoch, text, self.is_told = self.record.epoch, self.record.format(), True
            if text != self.written:
                self.store.set(str(self.rank), text)
                self.written = text
            self._read_cause(epoch)
            return self.read(positions)

    def read(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records of some ranks, by position, but of those that have told nothing."""
        keys = {at: str(at) for at in positions}
        if not self.store.check(list(keys.values())):
            keys = {at: key for at, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get(list(keys.values())) if keys else []
        records = {at: Record.parse(text) for at, text in zip(keys, texts, strict=True)}
        self.processes |= {at: record.process for at, record in records.items()}
        return records

    def _read_cause(self, epoch: int) -> None:
        key = f"cause/{epoch}"
        if epoch not in self.causes and self.store.check([key]):
            self.causes = {epoch: Cause(**json.loads(self.store.get(key)))}

    def _decide(self, cause: Cause, epoch: int) -> None:
        """Leave a cause for all ranks, unless one of them has left another."""
        self.store.compare_set(f"cause/{epoch}", "", json.dumps(asdict(cause)))
        self._read_cause(epoch)

    def compare(self) -> None:
        """Tell where this rank is, and compare its way with that of the next one."""
        epoch, records = self.record.epoch, self.exchange(self.next)
        if self.cause is not None or self.record.is_waiting:
            return  # who waits judges
        difference = self._difference(records.values())
        if difference is not None:
            self._decide(self._describe(*difference, self.read(self.others)), epoch)

    def swap(self, name: str, text: str, patience_s: float) -> list[str] | None:
        """Leave a text under a name, and return those of all other ranks.

        Returns:
            None if some have not left one within the patience, or the store does not answer.
        """
        found: dict[int, str] = {}

        def ask() -> None:
            deadline = time.monotonic() + patience_s
            self.exchange()
            self.store.set(f"{name}/{self.rank}", text)
            while len(found) < len(self.others) and time.monotonic() < deadline:
                for at in self.others:
                    if at not in found and self.store.check([f"{name}/{at}"]):
                        found[at] = self.store.get(f"{name}/{at}").decode()
                time.sleep(SHORTEST_WAIT_S)

        within(ask, patience_s)
        return list(found.values()) if len(found) == len(self.others) else None

    def hosts(self) -> tuple[int, ...]:
        """Return the host of each rank, numbered as they appear; () if a rank did not come.

        Every rank returns the same: plans depend on it. Whoever comes last, or has waited for too
        long, tries to write the answer, and the first to do so decides for all.

        Raises:
            DistError: the store does not answer.
        """
        deadline = time.monotonic() + min(HOSTS_S, self.timeout_s / 2)
        self.ask(self.exchange)
        if not self.ask(partial(self.store.check, ["hosts"])):
            if self.ask(partial(self.store.add, "arrived", 1)) == len(self.ranks):
                records = self.ask(partial(self.read, range(len(self.ranks))))
                hosts = [record.host for record in records.values()]
                numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
                self._answer_hosts([numbers[host] for host in hosts])
            while not self.ask(partial(self.store.check, ["hosts"])):
                if time.monotonic() > deadline:
                    self._answer_hosts([])
                time.sleep(min(0.5, 0.005 + len(self.ranks) / 2000))  # all ranks ask one store
        decided = tuple(json.loads(self.ask(partial(self.store.get, "hosts"))))
        if not decided:
            warnings.warn(
                f"not all of {name_ranks(self.ranks)} have said within {HOSTS_S:g} s on which host"
                " they run; plans take the usual number of ranks for a node. Compile on all ranks"
                ' at the same time, or name the machine, as in options={"machine":'
                ' "8xh100:nvlink4 x ib400"}',
                SequenceWarning,
                stacklevel=2,
            )
        return decided

    def _answer_hosts(self, numbers: Sequence[int]) -> None:
        self.ask(partial(self.store.compare_set, "hosts", "", json.dumps(numbers)))

    # --- The other ranks ---------------------------------------------------------------------

    def fates(self) -> dict[int, Fate]:
        """Say how the processes of the others are, by global rank."""
        return {self.ranks[at]: look_at(self.processes.get(at)) for at in self.others}

    def look(self) -> dict[int, str]:
        """Return what has become of other ranks that do not run as usual, by global rank."""
        found: dict[int, str] = {}

        def ask() -> None:
            found.update({rank: one.text for rank, one in self.fates().items() if one.is_known})
            records = self.read(self.others)
            found.update({rank: one.text for rank, one in self.fates().items() if one.is_known})
            failed = {self.ranks[at]: one.failed for at, one in records.items() if one.failed}
            found.update({rank: f"it failed in {step}" for rank, step in failed.items()})

        # The store may be that of a process that is stopped, and never answer.
        within(ask, LOOK_S, lambda: bool(found))
        return dict(found)

    def where(self) -> dict[int, str]:
        """Return where other ranks are, or what became of them, by global rank."""
        gone, records = self.look(), dict[int, Record]()
        with suppress(DistError, RuntimeError):
            records = self.ask(lambda: self.read(self.others))
        for at, record in records.items():
            rank = self.ranks[at]
            gone[rank] = record.describe() + (f", {gone[rank]}" if rank in gone else "")
        return gone

    def _what_became_of(self, positions: Sequence[int]) -> str:
        """Say, in parentheses, what has become of ranks, as far as that is known."""
        told = self.where()
        ranks = [self.ranks[at] for at in positions if self.ranks[at] in told]
        text = "; ".join(f"rank {rank}: {told[rank]}" for rank in ranks)
        return f" ({text})" if text else ""

    def _name(self, positions: Sequence[int]) -> str:
        return name_ranks([self.ranks[at] for at in positions])

    def report(self) -> str:
        """Say where all ranks are, if this one waits for another; else ""."""
        records, own = self.read(self.others), self.record
        count = own.trails[ATTENTIONS].count
        is_waiting = any(
            other.trails[ATTENTIONS].count < count or not other.inside for other in records.values()
        )
        if not is_waiting or not own.inside:
            return ""
        told = self.where() | {self.ranks[self.rank]: own.describe()}
        nothing = "has come to no attention yet"
        lines = [f"  rank {rank}: {told.get(rank, nothing)}" for rank in self.ranks]
        who = self._name([self.rank])
        return "\n".join([f"cp_inductor: {who} waits for others of its group", *lines])


def within(
    call: Callable[[], None],
    limit_s: float,
    is_enough: Callable[[], bool] = lambda: False,
    rest_s: float = 2 * INTERVAL_S,
) -> None:
    """Call what asks the store in a thread; go on after a time, or a while after it is enough."""

    def run() -> None:
        with suppress(RuntimeError):  # a store that has ended
            call()

    asking = Asking(target=run, daemon=True)
    asking.start()
    deadline = time.monotonic() + limit_s
    while asking.is_alive() and time.monotonic() < deadline:
        asking.join(INTERVAL_S)
        if is_enough():
            deadline = min(deadline, time.monotonic() + rest_s)


class _Comparing(Asking):
    """Compares beside the program, and says who waits."""

    def __init__(self, log: Log) -> None:
        super().__init__(name="cp_inductor_log", daemon=True)
        self.log = ref(log)
        self.interval_s = max(INTERVAL_S, INTERVAL_PER_RANK_S * len(log.ranks))
        self.stopping = threading.Event()
        self.seen, self.due = 0.0, REPORT_AFTER_S
        _comparing.add(self)
        self.start()

    def run(self) -> None:
        with suppress(DistError, RuntimeError):  # the group is gone
            while not self.stopping.wait(self.interval_s):
                log = self.log()
                if log is None:
                    return
                self._look(log)
                del log
        log = self.log()
        if log is not None:
            with suppress(DistError, RuntimeError):
                log.record.is_over = True
                log.exchange()

    def _look(self, log: Log) -> None:
        record = log.record
        if record.inside or not log.is_told:
            log.compare()
        if not record.inside or record.since != self.seen:
            self.seen, self.due = record.since, REPORT_AFTER_S
        elif time.time() - self.seen > self.due:
            self.due *= REPORT_GROWTH
            text = log.report()
            if text:
                print(text, file=sys.stderr, flush=True)


_comparing: WeakSet[_Comparing] = WeakSet()


@atexit.register
def stop_comparing() -> None:
    """End the threads, which say that this rank's program is over."""
    for thread in list(_comparing):
        thread.stopping.set()
    for thread in list(_comparing):
        thread.join(AT_EXIT_S)
        _comparing.discard(thread)
