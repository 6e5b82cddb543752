"""What ranks say and hear, as data: several logs over one store, in threads or in turn."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist

import cp_inductor.trust.log
from cp_inductor.errors import ProcessGroupError, RanksDisagree
from cp_inductor.trust.log import Log
from cp_inductor.trust.record import ATTENTIONS, TABLES, Entry

# Global ranks of the group.
RANKS = (4, 7, 9)


def entry(**fields: str) -> Entry:
    return Entry("here", {"what": "a test", **fields})


def logs(store: dist.Store, timeout_s: float = 20) -> list[Log]:
    return [Log(store, timeout_s, rank, RANKS) for rank in RANKS]


def run(*programs: Callable[[], object]) -> list[object]:
    """Run programs at the same time; return what they return, or raise."""

    def outcome(program: Callable[[], object]) -> object:
        try:
            return program()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(programs)) as pool:
        return [future.result() for future in [pool.submit(outcome, p) for p in programs]]


def say_all(log: Log, batches: list[list[Entry]], *, is_whole: bool = False) -> None:
    for batch in batches:
        log.come(batch, log.others, TABLES if is_whole else ATTENTIONS)


def say(group: Sequence[Log], *said: list[list[Entry]], is_whole: bool = False) -> list[object]:
    """Let each log say batches of its own, at the same time; return what comes of it."""
    pairs = zip(group, said, strict=True)
    return run(*(partial(say_all, log, batches, is_whole=is_whole) for log, batches in pairs))


def test_a_rank_that_does_not_come_is_named_and_hears_of_it() -> None:
    first, second, third = logs(dist.HashStore())
    for log in (first, second, third):
        log.timeout_s = 0.2
    results = say((first, second), [[entry()]], [[entry()]])
    for result in (*results, *say((third,), [[entry()]])):
        assert isinstance(result, RanksDisagree)
        assert "expected ranks 4, 7 and 9 to arrive within 0.2 s where rank " in str(result)
        assert "got nothing from rank 9 (rank 9: outside of any attention, " in str(result)


def test_who_leaves_later_names_the_first_cause_once() -> None:
    """Not the reason of the reason of a reason."""
    told, store = [], dist.HashStore()
    for number, rank in enumerate((4, 7, 9, 12)):
        log = Log(store, 20, rank, (4, 7, 9, 12))
        log.timeout_s = 0.05
        with pytest.raises(RanksDisagree) as raised:
            say_all(log, [[Entry(f"attention {number}", {"what": "a test"})]])
        told.append(str(raised.value))
    where = "ranks 4, 7, 9 and 12 to arrive within 0.05 s where rank 4 is, at attention 0"
    untold = "; ".join(f"rank {rank}: it has not said where it is" for rank in (7, 9, 12))
    got = f"nothing from ranks 7, 9 and 12 ({untold}); see the log of ranks 7, 9 and 12: "
    for number, message in enumerate(told):
        assert message.startswith(f"attention {number}: expected {where}, got {got}")
    assert len({message.partition(": ")[2] for message in told}) == 1


def test_what_became_of_who_does_not_come_is_named_at_once() -> None:
    """One has failed in an exchange, and one has ended; one that runs may still come."""
    store, ranks = dist.HashStore(), (4, 7, 9, 12)
    ended = subprocess.Popen(["true"])
    group = [Log(store, 60, rank, ranks) for rank in ranks]
    group[1].record.failed = "exchange 1 of its forward, attention (model.py:41)"
    group[2].record.pid = ended.pid
    ended.wait()
    for log in group:
        log.ask(log.exchange)
    with pytest.raises(RanksDisagree) as raised:
        say_all(group[0], [[entry()]])
    at = r"outside of any attention, since \d+ s, after 0 attentions"
    assert re.fullmatch(
        rf"nothing from ranks 7 and 9 \(rank 7: {at}, it failed as well, in exchange 1 of its"
        rf" forward, attention \(model.py:41\); rank 9: {at}, its process {ended.pid} has ended\)",
        raised.value.got,
    ), raised.value.got


def test_what_all_refuse_is_nothing_to_wait_for() -> None:
    with mock.patch.object(cp_inductor.trust.log, "PATIENCE_S", 0.01):
        group = logs(dist.HashStore())
        for log in group:
            log.refuse("such a mask")

        def come_late(log: Log) -> None:
            time.sleep(0.1)
            say_all(log, [[entry()]])

        first, *others = group
        late = [partial(come_late, log) for log in others]
        assert run(partial(say_all, first, [[entry()]]), *late) == [None] * 3


def test_a_store_serves_groups_of_one_name_one_after_the_other() -> None:
    store = dist.HashStore()
    for word in ("first", "second"):
        said = [[entry(word=word)], [entry(word=f"{word} again")]]
        assert say(logs(store), said, said, said, is_whole=True) == [None] * 3


def test_a_store_that_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, 1, is_master=False)
    where = f"expected the store of the process group, 127.0.0.1:{server.port}, to answer"
    log = Log(client, 20, 7, RANKS)
    ended = subprocess.Popen(["true"])
    log.records[4] = replace(log.record, pid=ended.pid)
    ended.wait()
    del server
    with pytest.raises(
        ProcessGroupError, match=rf"here: {where}, .* \(rank 4: .*, its process \d+ has ended; "
    ):
        say_all(log, [[entry()]])
    assert where in str(run(partial(say_all, log, [[entry()]]))[0])


class StoppedStore(dist.Store):
    """As one of a process that is stopped: it takes questions, and answers none."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.goes_on = 0, threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.asked += 1
        self.goes_on.wait(20)
        return 1


def test_a_store_that_does_not_answer_is_named_within_the_timeout() -> None:
    stopped = StoppedStore()
    log = Log(stopped, 0.2, 4, RANKS)
    assert stopped.asked == 1, "who introduces itself goes on"
    with pytest.raises(ProcessGroupError, match=r"here: .* got no answer for 0\.2 s \(rank 7: "):
        say_all(log, [[entry()]])
    assert stopped.asked == 1, "it is not asked again"
    stopped.goes_on.set()


def test_a_slow_store_lets_nobody_run_what_was_not_compared() -> None:
    group = logs(dist.HashStore())
    with mock.patch.object(cp_inductor.trust.log, "SOON_S", 0.05):
        for log in group:
            log.questions.put(partial(time.sleep, 0.3))
        said = zip(group, "abb", strict=True)
        come = (partial(log.come, [entry(word=w)], log.others, is_new=False) for log, w in said)
        assert [type(told) for told in run(*come)] == [RanksDisagree] * 3


def test_what_all_have_said_costs_no_waiting() -> None:
    """A rank that comes last finds all there, and does not sleep."""
    first, second, third = logs(dist.HashStore())
    for log in (first, second):
        log.come([entry()], ())
        log.ask(log.exchange)
    with mock.patch.object(cp_inductor.trust.log.time, "sleep", side_effect=AssertionError):
        say_all(third, [[entry()]])
