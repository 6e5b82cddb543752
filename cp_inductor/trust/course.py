"""Compare which way ranks go, beside the program, and say who waits for whom.

    rank 0    batch 1: attention, attention    batch 2: attention, attention
    rank 1    batch 1: attention, attention    batch 3: ...               => RanksDisagree on both

A rank that skips a batch goes on to attend, with numbers of one batch, where the others attend with
numbers of another. Their messages have the same sizes, and nothing else notices. So every rank
counts what it comes to: attentions, by their kinds, and batches that it cuts into shards, by a few
of their numbers. A digest of all of it, one after the other, is compared with that of the next rank
of the group, in a ring, through the store of the group.

A thread writes and reads, and no step waits for it. Only the first events are waited for, and
events that follow on others than before, such as the first attention of an evaluation: before such
an attention a rank waits until the next rank has come to as many, and both find out at once.

The same positions say where others are while a rank waits: after `REPORT_AFTER_S` the thread prints
them. A rank that waits here, and not in an exchange that has begun, raises when the next rank's
program is over.

Not noticed: a batch that is skipped before anybody has cut it into shards, until the first rank has
no more batches; batches of numbers that are not whole, or on a GPU.
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
from cp_inductor.trust.bounded_store import LOOK_EVERY_S, Asking, BoundedStore
from cp_inductor.trust.trail import Position, Trail, sample_batch

# About the attentions of a model's first step: they are waited for.
FIRST_EVENTS = 128

# How often the thread looks, so that one store serves a thousand ranks; and how often a rank that
# waits does, which looks more and more rarely.
INTERVAL_S, INTERVAL_PER_RANK_S = 0.05, 0.003
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.02

# A rank says after this time that it waits, and again after thrice as long each time.
REPORT_AFTER_S = 10.0

# The kind of an event that was refused.
REFUSED = "refused"

REMEDY = (
    "let all ranks that share a sequence skip a batch, or none: agree on it by an all_reduce of a"
    " flag; evaluate on all of them; then start again from a checkpoint, because numbers of two"
    " batches may have met; if each rank's whole tensors differ outside of its own part, set"
    " config.check_agreement = False"
)


class Course:
    """The way of this rank, and what is known of others' in its group.

    Args:
        store: of the group.
        rank: this process's position in the group.
        ranks: the global ranks of the group, by position.
        timeout_s: of the group.
        look: returns what became of other ranks, by global rank, as far as it is known.
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
        self.watch: _Watch | None = None

    # --- The program -------------------------------------------------------------------------

    def come_to(self, kinds: Sequence[str], words: str) -> None:
        """Note attentions that are about to run, the first of them now.

        Raises:
            RanksDisagree: the next rank of the group has come to others, or will come to none.
        """
        if self.last == REFUSED:
            self._pass_by_refusal(words)
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
        if self.watch is None:
            self.watch = _Watch(self)

    def note_batch(self, tensor: Tensor) -> None:
        """Note a tensor that every rank has whole, and cuts its own shard out of."""
        with self.lock:
            self.batches.add(*sample_batch(tensor))
            self.is_told = False

    def refuse(self, reason: str) -> None:
        """Note that this rank refuses what would be its next attention; all others may do so."""
        with self.lock:
            self.attentions.add(REFUSED, f"refused: {reason}")
            self.last = REFUSED
        with suppress(DistError, RuntimeError):  # what is refused is raised at any rate
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

    def _pass_by_refusal(self, words: str) -> None:
        """Go on after a refusal: all have refused, or the others raise because of it."""
        with self.lock:
            count = self.attentions.count
        with self.waiting(words), suppress(RanksDisagree):
            self._meet(count, words)
        self.last = ""

    def _meet(self, needed: int, site: str) -> None:
        """Wait until the next rank has come to as many attentions.

        Where a process has ended, and where the store does not answer, the exchange says so.
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
        """Raise: the next rank does not come."""
        rank = self.ranks[(self.rank + 1) % len(self.ranks)]
        said = self.where().get(rank, "nothing has been heard of it")
        with suppress(DistError):
            self.leave(site, f"attention {needed} of rank {rank} as well", f"rank {rank}: {said}")
        raise self.error(site)

    def error(self, site: str) -> RanksDisagree:
        """Return the error about the cause, and begin anew, as all ranks do."""
        cause, own = self.cause, self.ranks[self.rank]
        assert cause is not None
        self.restart()
        got = cause["got"]
        if int(cause["rank"]) != own:
            got = f"rank {cause['rank']}, which has given up at {cause['site']}, because of {got}"
        return RanksDisagree(site=site, expected=cause["expected"], got=got, remedy=REMEDY)

    def restart(self) -> None:
        """Begin anew, as all ranks do that raise."""
        with self.lock:
            self.board.epoch += 1
            self.attentions, self.batches = Trail(), Trail()
            self.known, self.last, self.cause = set(), "", None

    def found(self) -> bool:
        """Whether ranks are known to have gone other ways, now that an exchange has failed."""
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
        with self.exchanging:  # or what is older might be written last
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


class _Watch(Asking):
    """Exchanges positions beside the program, and says who waits."""

    def __init__(self, course: Course) -> None:
        super().__init__(name="cp_inductor_course", daemon=True)
        self.course = ref(course)
        self.interval_s = max(INTERVAL_S, INTERVAL_PER_RANK_S * len(course.ranks))
        self.stopping = threading.Event()
        self.seen, self.due = 0.0, REPORT_AFTER_S
        _watches.add(self)
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
            self.due *= 3
            text = course.report()
            if text:
                print(text, file=sys.stderr, flush=True)


_watches: WeakSet[_Watch] = WeakSet()


@atexit.register
def stop_watching() -> None:
    """End the threads, which say that this rank's program is over."""
    for watch in list(_watches):
        watch.stopping.set()
    for watch in list(_watches):
        watch.join(1.0)
        _watches.discard(watch)


# Of this process, by group.
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
    """Say that this rank is in an exchange inside, should others not come to it."""
    course = course_of(group_name)
    if course is None:
        yield
        return
    with course.waiting(where):
        yield
