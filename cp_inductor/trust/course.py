"""Compare which way ranks go, beside the program, and say who waits for whom.

    rank 0    batch 1: attention, attention    batch 2: attention, attention
    rank 1    batch 1: attention, attention    batch 3: ...               => RanksDisagree on both

A rank that skips a batch attends with numbers of the next batch, while the others attend with
numbers of this one. Their messages have the same sizes, so nothing else notices. Therefore every
rank records the events that it comes to: attentions, by their kinds, and batches that it cuts into
shards, by a few of their numbers. Each rank compares a digest of its events with the digest of the
next rank of the group, through the store of the group. The ranks form a ring.

A thread writes and reads, and the program does not wait for it, with two exceptions: the first
events, and an event that follows another event than before, such as the first attention of an
evaluation. Before such an attention a rank waits until the next rank has come to as many events, so
that both find out before they exchange anything.

The same positions tell where other ranks are. The thread prints them when its rank has waited for
`REPORT_AFTER_S`. A rank that waits here raises as soon as the next rank's program has ended. A rank
that waits in an exchange does not.

Two things are not noticed. A batch may be skipped before any rank has cut it into shards: ranks
find out when the first of them has no more batches. Batches of floating-point numbers, and batches
on a GPU, are not recorded.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError

from cp_inductor.errors import RanksDisagree
from cp_inductor.torch_private.groups import group_of
from cp_inductor.trust.board import Board
from cp_inductor.trust.bounded_store import AT_EXIT_S, LOOK_EVERY_S, Asking, BoundedStore
from cp_inductor.trust.trail import Position, Trail, sample_batch

# A rank waits for others at this many first events: about the attentions of a model's first step.
FIRST_EVENTS = 128

# How often the thread looks; the part per rank keeps the store fast enough for a thousand ranks. A
# rank that waits looks at growing intervals.
INTERVAL_S, INTERVAL_PER_RANK_S = 0.05, 0.003
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.02

# A rank says after this time that it waits, and then again at intervals that grow by a factor.
REPORT_AFTER_S, REPORT_GROWTH = 10.0, 3

# The kind of event that stands for an attention which this rank refused.
REFUSED = "refused"

REMEDY = (
    "let all ranks that share a sequence skip a batch, or none: agree on it by an all_reduce of a"
    " flag; evaluate on all of them; then start again from a checkpoint, because numbers of two"
    " batches may have met; if each rank's whole tensors differ outside of its own part, set"
    " config.check_agreement = False"
)


class Course:
    """The events of this rank, and what it knows of the other ranks of its group.

    Args:
        store: of the group.
        rank: this process's position in the group.
        ranks: the global ranks of the group, by position.
        timeout_s: of the group.
        look: returns what has become of other ranks, by global rank, as far as that is known.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        look: Callable[[], dict[int, str]],
    ) -> None:
        self.store, self.board = store, Board(store, "course", ranks)
        self.rank, self.ranks = rank, tuple(ranks)
        self.timeout_s, self.look = timeout_s, look
        self.lock, self.exchanging = threading.Lock(), threading.Lock()
        self.attentions, self.batches = Trail(), Trail()
        self.known: set[tuple[str, str]] = set()
        self.last = ""
        self.inside, self.since, self.is_over = "", time.time(), False
        self.is_told, self.written = True, ""
        self.cause: dict[str, str] | None = None
        self.comparing: _Comparing | None = None

    # --- The program -------------------------------------------------------------------------

    def come_to(self, kinds: Sequence[str], words: str) -> None:
        """Note attentions that are about to run, the first of them now.

        Raises:
            RanksDisagree: the next rank of the group has come to others, or will come to none.
        """
        self.pass_by_refusal(words)
        if self.cause is not None:
            raise self.error(words)
        with self.lock:
            needed, is_new = self.attentions.count + 1, self.attentions.count < FIRST_EVENTS
            for kind in kinds:
                is_new |= (self.last, kind) not in self.known
                self.known.add((self.last, kind))
                self.last = kind
                self.attentions.add(kind, words)
            self.is_told = False
        if is_new:
            with self.waiting(words):
                self._meet(needed, words)
        if self.comparing is None:
            self.comparing = _Comparing(self)

    def note_batch(self, tensor: Tensor) -> None:
        """Note a tensor that every rank has whole, and cuts its own shard out of."""
        with self.lock:
            self.batches.add(*sample_batch(tensor))
            self.is_told = False

    def refuse(self, reason: str) -> None:
        """Note that this rank refuses its next attention. All others may refuse it as well."""
        with self.lock:
            self.attentions.add(REFUSED, f"refused: {reason}")
            self.last = REFUSED
        with suppress(DistError, RuntimeError):  # the refusal is raised in any case
            self.store.answered(self.exchange)

    @contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Say where this rank is, while it waits for others inside."""
        before = self.inside
        self.inside, self.since, self.is_told = where, time.time(), False
        try:
            yield
        finally:
            self.inside, self.since, self.is_told = before, time.time(), False

    def pass_by_refusal(self, words: str) -> None:
        """Go on after a refusal: all ranks have refused, or the others raise because of it."""
        if self.last != REFUSED:
            return
        with self.lock:
            count = self.attentions.count
        with self.waiting(words), suppress(RanksDisagree):
            self._meet(count, words)
        self.last = ""

    def _meet(self, needed: int, site: str) -> None:
        """Wait until the next rank has come to as many attentions.

        If a process has ended or the store does not answer, this returns, and the exchange fails
        with an error that says so.
        """
        delay, started = SHORTEST_WAIT_S, time.monotonic()
        look_at = started + LOOK_EVERY_S
        while True:
            try:
                other = self.store.answered(self.exchange, self._is_one_gone)
            except DistError:
                return
            if self.cause is not None:
                raise self.error(site)
            if other is not None and other.attentions.count >= needed:
                return
            now, is_over = time.monotonic(), other is not None and other.is_over
            if now > look_at and not is_over:
                look_at = now + LOOK_EVERY_S
                if self._is_one_gone():
                    return
            if is_over or now > started + self.timeout_s:
                self._give_up(needed, site)
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_WAIT_S)

    def _give_up(self, needed: int, site: str) -> None:
        """Raise, because the next rank does not come."""
        rank = self.ranks[(self.rank + 1) % len(self.ranks)]
        said = self.where().get(rank, "nothing has been heard of it")
        with suppress(DistError):
            self.leave(site, f"attention {needed} of rank {rank} as well", f"rank {rank}: {said}")
        raise self.error(site)

    def error(self, site: str) -> RanksDisagree:
        """Return the error about the cause, and forget all events, as all ranks do then."""
        cause, own = self.cause, self.ranks[self.rank]
        assert cause is not None
        self.restart()
        got = cause["got"]
        if int(cause["rank"]) != own:
            got = f"rank {cause['rank']}, which has given up at {cause['site']}, because of {got}"
        return RanksDisagree(site=site, expected=cause["expected"], got=got, remedy=REMEDY)

    def restart(self) -> None:
        """Forget all events, as every rank does that raises."""
        with self.lock:
            self.board.epoch += 1
            self.attentions, self.batches = Trail(), Trail()
            self.known, self.last, self.cause = set(), "", None

    def found(self) -> bool:
        """Whether ranks are known to have gone different ways, after an exchange has failed."""
        if self.cause is None:
            with suppress(DistError, RuntimeError):
                self.store.answered(self.exchange, self._is_one_gone)
        return self.cause is not None

    def _is_one_gone(self) -> bool:
        return bool(self.look())

    # --- The store ---------------------------------------------------------------------------

    def position(self) -> Position:
        """Return where this rank is."""
        with self.lock:
            trails = (self.attentions.told(), self.batches.told())
            self.is_told = True
            return Position(*trails, self.inside, self.since, self.is_over)

    def exchange(self) -> Position | None:
        """Tell the others where this rank is, and compare its way with that of the next one."""
        with self.exchanging:  # otherwise an older position might be written last
            own = self.position()
            text = json.dumps(asdict(own))
            if text != self.written:
                self.board.write(str(self.rank), text)
                self.written = text
            cause = self.board.find("cause")
            if cause is not None:
                self.cause = self.cause or json.loads(cause)
            position = (self.rank + 1) % len(self.ranks)
            other = self._read([position]).get(position)
            if other is not None and self.cause is None:
                self._compare(own, other, self.ranks[position])
            return other

    def _compare(self, own: Position, other: Position, rank: int) -> None:
        for name in ("batches", "attentions"):
            one, another = getattr(own, name), getattr(other, name)
            number = one.first_difference(another)
            if number is not None:
                what = f"{'batch' if name == 'batches' else 'attention'} {number}"
                mine, theirs = one.words_at(number), another.words_at(number)
                got = f"{what}: {mine} on rank {self.ranks[self.rank]}, {theirs} on rank {rank}"
                expected = "ranks that share a sequence to come to the same batches and attentions"
                self.leave(own.inside or mine, expected, got)
                return

    def leave(self, site: str, expected: str, got: str) -> None:
        """Let all others know why this rank gives up."""
        cause = {"rank": str(self.ranks[self.rank]), "site": site, "expected": expected, "got": got}
        self.cause = self.cause or cause
        self.board.write("cause", json.dumps(cause))

    def give_up(self, error: RanksDisagree) -> None:
        """Let ranks that wait for this one know why it raises, and forget all events."""
        self.leave(error.site, error.expected, error.got)
        self.restart()

    def _read(self, positions: Sequence[int]) -> dict[int, Position]:
        read = self.board.read(positions)
        return {at: Position.parse(text) for at, text in read.items()}

    def where(self) -> dict[int, str]:
        """Return where other ranks are, or what became of them, by global rank."""
        gone = self.look()
        with suppress(DistError, RuntimeError):
            found = self.store.answered(self._read_others)
            for at, position in found.items():
                rank = self.ranks[at]
                told = f", {gone[rank]}" if rank in gone else ""
                gone[rank] = position.describe() + told
        return gone

    def over(self) -> set[int]:
        """Return the ranks, as the world numbers them, whose programs have ended."""
        with suppress(DistError, RuntimeError):
            found = self.store.answered(self._read_others)
            return {self.ranks[at] for at, position in found.items() if position.is_over}
        return set()

    def ahead(self) -> dict[int, str]:
        """Return where ranks are that have come to more attentions, by global rank."""
        with suppress(DistError, RuntimeError):
            found = self.store.answered(self._read_others)
            return {
                self.ranks[at]: position.describe()
                for at, position in found.items()
                if position.attentions.count > self.attentions.count
            }
        return {}

    def _read_others(self) -> dict[int, Position]:
        return self._read([at for at in range(len(self.ranks)) if at != self.rank])

    def report(self) -> str:
        """Say where all ranks are, if this one waits for another; else ""."""
        own, found = self.position(), self._read_others()
        is_waiting = any(
            other.attentions.count < own.attentions.count or not other.inside
            for other in found.values()
        )
        if not is_waiting or not own.inside:
            return ""
        told = self.where() | {self.ranks[self.rank]: own.describe()}
        nothing = "has come to no attention yet"
        lines = [f"  rank {rank}: {told.get(rank, nothing)}" for rank in self.ranks]
        rank = self.ranks[self.rank]
        return "\n".join([f"cp_inductor: rank {rank} waits for others of its group", *lines])


class _Comparing(Asking):
    """Exchanges positions beside the program, and says who waits."""

    def __init__(self, course: Course) -> None:
        super().__init__(name="cp_inductor_course", daemon=True)
        self.course = ref(course)
        self.interval_s = max(INTERVAL_S, INTERVAL_PER_RANK_S * len(course.ranks))
        self.stopping = threading.Event()
        self.seen, self.due = 0.0, REPORT_AFTER_S
        _comparing.add(self)
        self.start()

    def run(self) -> None:
        with suppress(DistError, RuntimeError):  # the group is gone
            while not self.stopping.wait(self.interval_s):
                course = self.course()
                if course is None:
                    return
                self._look(course)
                del course
        course = self.course()
        if course is not None:
            with suppress(DistError, RuntimeError):
                course.is_over = True
                course.exchange()

    def _look(self, course: Course) -> None:
        if course.inside or not course.is_told:
            course.exchange()
        if not course.inside or course.since != self.seen:
            self.seen, self.due = course.since, REPORT_AFTER_S
        elif time.time() - self.seen > self.due:
            self.due *= REPORT_GROWTH
            text = course.report()
            if text:
                print(text, file=sys.stderr, flush=True)


_comparing: WeakSet[_Comparing] = WeakSet()


@atexit.register
def stop_watching() -> None:
    """End the threads, which say that this rank's program is over."""
    for thread in list(_comparing):
        thread.stopping.set()
    for thread in list(_comparing):
        thread.join(AT_EXIT_S)
        _comparing.discard(thread)


_courses: WeakKeyDictionary[dist.ProcessGroup, Course] = WeakKeyDictionary()


def keep_course(group: dist.ProcessGroup, course: Course) -> None:
    """Let a course be found by the name of its group."""
    _courses[group] = course


def course_of(group_name: str) -> Course | None:
    """Return the course of a group, if its ranks have begun one."""
    with suppress(RuntimeError, KeyError):  # the group is gone
        return _courses.get(group_of(group_name))
    return None


@contextmanager
def waiting_in(group_name: str, where: str) -> Iterator[None]:
    """Let others know where this rank waits while it is in an exchange inside."""
    course = course_of(group_name)
    if course is None:
        yield
        return
    with course.waiting(where):
        yield
