"""What ranks say and hear, as data: several ledgers over one store, in threads or in turn."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

import cp_inductor.trust.failures
import cp_inductor.trust.ledger
from cp_inductor.errors import ProcessGroupError, RanksDisagree
from cp_inductor.trust.bounded_store import BoundedStore
from cp_inductor.trust.failures import Peers, step_of
from cp_inductor.trust.ledger import Entry, Ledger

# Global ranks of the group: not its positions.
RANKS = (4, 7, 9)


def entry(**fields: str) -> Entry:
    return Entry("here", {"what": "a test", **fields})


def ledgers(store: dist.Store, timeout_s: float = 20) -> list[Ledger]:
    bounded = BoundedStore(store, timeout_s)
    return [Ledger(bounded, "test", rank, RANKS, timeout_s) for rank in range(len(RANKS))]


def run(*programs: Callable[[], object]) -> list[object]:
    """Run programs at the same time; return what they return, or raise."""

    def outcome(program: Callable[[], object]) -> object:
        try:
            return program()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(programs)) as pool:
        return [future.result() for future in [pool.submit(outcome, p) for p in programs]]


def say_all(ledger: Ledger, batches: list[list[Entry]], *, is_whole: bool) -> None:
    for batch in batches:
        ledger.say(batch)
        ledger.settle(is_whole=is_whole)


def test_the_same_entries_in_batches_of_any_size() -> None:
    said = [entry(number=str(number)) for number in range(12)]
    first, second, third = ledgers(dist.HashStore())
    assert run(
        lambda: say_all(first, [said], is_whole=False),
        lambda: say_all(second, [[one] for one in said], is_whole=False),
        lambda: say_all(third, [said[:5], said[5:7], said[7:]], is_whole=False),
    ) == [None, None, None]
    # What all have compared is forgotten.
    assert [len(ledger.entries) for ledger in (first, second, third)] == [12, 1, 5]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_difference_is_raised_on_every_rank_alike(is_whole: bool) -> None:
    both = ("one", "two")
    others = [entry(size=size, plan=size) for size in both]
    odd = [others[0], entry(size="three", plan="other")]
    results = run(
        *(
            lambda ledger=ledger, said=said: say_all(ledger, [said], is_whole=is_whole)
            for ledger, said in zip(ledgers(dist.HashStore()), (others, odd, others), strict=True)
        )
    )
    assert all(isinstance(result, RanksDisagree) for result in results)
    assert {str(result) for result in results} == {
        "here: expected ranks 4, 7 and 9 to run the same, got size: two on ranks 4 and 9, three on"
        " rank 7; plan: two on ranks 4 and 9, other on rank 7; give all ranks the same model,"
        " input shapes, options, flags and versions, and shard a sequence as torch.chunk does; if"
        " its length does not divide by the ranks, name it in options['seq_len'], by a buffer of"
        " context_parallel, or by the shape of the DTensor"
    }


@pytest.mark.parametrize(
    ("size", "plan", "expected"), [("2", "y", "size: 1"), ("1", "y", "plan: x")]
)
def test_consequences_are_named_if_nothing_else_differs(
    size: str, plan: str, expected: str
) -> None:
    usual = Entry("here", {"size": "1", "plan": "x"}, ("plan",))
    odd = Entry("here", {"size": size, "plan": plan}, ("plan",))
    first, second, third = ledgers(dist.HashStore())
    results = run(
        lambda: say_all(first, [[usual]], is_whole=False),
        lambda: say_all(second, [[odd]], is_whole=False),
        lambda: say_all(third, [[usual]], is_whole=False),
    )
    assert all(f"got {expected} on ranks 4 and 9" in str(result) for result in results)


def test_what_one_rank_does_not_know_is_not_compared() -> None:
    first, second, third = ledgers(dist.HashStore())
    assert (
        run(
            lambda: say_all(first, [[entry(gradients="on")]], is_whole=False),
            lambda: say_all(second, [[entry()]], is_whole=False),
            lambda: say_all(third, [[entry(gradients="on")]], is_whole=False),
        )
        == [None] * 3
    )


def test_after_a_difference_ranks_agree_again() -> None:
    def disagree_then_agree(ledger: Ledger, word: str) -> None:
        with pytest.raises(RanksDisagree):
            say_all(ledger, [[entry(word=word)]], is_whole=False)
        say_all(ledger, [[entry(word="same")], [entry(word="other")]], is_whole=False)

    assert (
        run(
            *(
                lambda ledger=ledger, word=word: disagree_then_agree(ledger, word)
                for ledger, word in zip(ledgers(dist.HashStore()), "aab", strict=True)
            )
        )
        == [None] * 3
    )


def test_a_rank_that_does_not_come_is_named_and_hears_of_it() -> None:
    first, second, third = ledgers(dist.HashStore(), timeout_s=0.2)
    results = run(
        lambda: say_all(first, [[entry()]], is_whole=False),
        lambda: say_all(second, [[entry()]], is_whole=False),
    )
    for result in results:
        assert isinstance(result, RanksDisagree)
        assert result.got == "nothing from rank 9"
        assert result.expected == "ranks 4, 7 and 9 to arrive within 0.2 s"
    with pytest.raises(
        RanksDisagree, match=r"ranks 4 and 7, which have given up, because .* rank 9"
    ):
        say_all(third, [[entry()]], is_whole=False)


def leave_one_after_the_other() -> list[str]:
    """Return what ranks of 4 are told that come at four times, each late for the first."""
    told, store = [], BoundedStore(dist.HashStore(), 20)
    for rank in range(4):
        ledger = Ledger(store, "test", rank, (4, 7, 9, 12), 0.05, lambda: {12: "it has ended"})
        site = f"attention {rank}"
        with pytest.raises(RanksDisagree) as raised:
            say_all(ledger, [[Entry(site, {"what": "a test"})]], is_whole=False)
        told.append(str(raised.value))
    return told


def test_who_leaves_later_names_the_first_cause_once() -> None:
    """Not the reason of the reason of a reason."""
    with mock.patch.object(cp_inductor.trust.ledger, "PATIENCE_S", 0.05):
        first, *others = leave_one_after_the_other()
    ranks = "ranks 4, 7, 9 and 12"
    nothing = "nothing from ranks 7, 9 and 12 (rank 12: it has ended)"
    remedy = first.partition("; see ")[2]
    assert remedy.startswith("the log of ranks 7, 9 and 12: ")
    came = f"{ranks} to arrive within 0.05 s"
    assert first == f"attention 0: expected {came}, got {nothing}; see {remedy}"
    left = ("rank 4, which has", "ranks 4 and 7, which have", "ranks 4, 7 and 9, which have")
    for number, (message, who) in enumerate(zip(others, left, strict=True), 1):
        assert message == (
            f"attention {number}: expected {ranks} to run the same, got {who} given up, because"
            f" rank 4 at attention 0 expected {came} and got {nothing}; see {remedy}"
        )


def test_who_has_seen_the_same_is_named_with_the_first() -> None:
    """Two ranks give up by themselves, for one reason."""
    store = BoundedStore(dist.HashStore(), 20)
    group = [Ledger(store, "test", rank, (4, 7, 9, 12), 0.2) for rank in range(4)]
    run(*(lambda one=one: say_all(one, [[entry()]], is_whole=False) for one in group[:2]))
    with (
        mock.patch.object(cp_inductor.trust.ledger, "PATIENCE_S", 0.05),
        pytest.raises(RanksDisagree) as raised,
    ):
        say_all(group[2], [[entry()]], is_whole=False)
    assert "got ranks 4 and 7, which have given up, because rank 4 at here expected" in str(
        raised.value
    )


def test_what_became_of_who_does_not_come_is_named() -> None:
    """One has failed in an exchange, and one has ended; of one that runs nothing is said."""
    store, ranks = BoundedStore(dist.HashStore(), 20), (4, 7, 9, 12)
    ended = subprocess.Popen(["true"])
    others = []
    for rank in (0, 1, 3):
        others.append(Peers(store, rank, ranks))
    here = cp_inductor.trust.failures._describe_process()
    Peers(store, 2, ranks)._write("process", here.replace(str(os.getpid()), str(ended.pid)))
    ended.wait()
    with mock.patch.object(cp_inductor.trust.failures, "PATIENCE_S", 0.0):
        others[1].ask(step_of("attention (model.py:41)", "backward", 1, 2))
    ledger = Ledger(store, "test", 0, ranks, 0.1, others[0].look)
    with pytest.raises(RanksDisagree) as raised:
        say_all(ledger, [[entry()]], is_whole=False)
    assert raised.value.got == (
        "nothing from ranks 7, 9 and 12 (rank 7: it failed in exchange 1 of 2 of its backward,"
        f" attention (model.py:41); rank 9: its process {ended.pid} has ended)"
    )


def test_a_rank_that_refuses_is_not_waited_for_long() -> None:
    with mock.patch.object(cp_inductor.trust.ledger, "PATIENCE_S", 0.2):
        first, second, third = ledgers(dist.HashStore())
        second.refuse("such a mask")
        results = run(
            *(lambda one=one: say_all(one, [[entry()]], is_whole=False) for one in (first, third))
        )
        assert [str(result).partition("; ")[0] for result in results] == [
            "here: expected ranks 4, 7 and 9 to run the same, got rank 7, which refuses to:"
            " such a mask"
        ] * 2


def test_what_all_refuse_is_nothing_to_wait_for() -> None:
    with mock.patch.object(cp_inductor.trust.ledger, "PATIENCE_S", 0.01):
        group = ledgers(dist.HashStore())
        for ledger in group:
            ledger.refuse("such a mask")

        def come_late(ledger: Ledger) -> None:
            time.sleep(0.1)
            say_all(ledger, [[entry()]], is_whole=False)

        first, *others = group
        assert (
            run(
                lambda: say_all(first, [[entry()]], is_whole=False),
                *(lambda ledger=ledger: come_late(ledger) for ledger in others),
            )
            == [None] * 3
        )


def test_a_store_serves_groups_of_one_name_one_after_the_other() -> None:
    store = dist.HashStore()
    for word in ("first", "second"):
        group = ledgers(store)
        assert (
            run(
                *(
                    lambda ledger=ledger, word=word: say_all(
                        ledger, [[entry(word=word)], [entry(word=f"{word} again")]], is_whole=True
                    )
                    for ledger in group
                )
            )
            == [None] * 3
        )


def test_a_store_that_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, 1, is_master=False)
    where = f"expected the store of the process group, 127.0.0.1:{server.port}, to answer"
    look = mock.Mock(return_value={4: "its process 17 has ended"})
    ledger = Ledger(BoundedStore(client, 20), "test", 1, RANKS, 20, look)
    ledger.say([entry()])
    del server
    with pytest.raises(ProcessGroupError, match=rf"here: {where}, .* \(rank 4: .* 17 has ended\)"):
        ledger.settle(is_whole=False)
    with pytest.raises(ProcessGroupError, match=f"here: {where}"):
        ledger.say([entry()])


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
    bounded = BoundedStore(dist.HashStore(), 0.2)
    bounded.store = stopped
    with mock.patch.object(bounded, "under", return_value=bounded):
        ledger, peers = Ledger(bounded, "test", 0, RANKS, 0.2), Peers(bounded, 0, RANKS)
    assert stopped.asked == 1, "who introduces itself goes on"
    for asked in (1, 2):
        with pytest.raises(ProcessGroupError, match=r"here: .* got no answer for 0\.2 s; find"):
            ledger.say([entry()])
        assert stopped.asked == asked, "it is not asked again, unless it may answer"
        bounded.silence.clear()
    assert peers.look() == {}
    stopped.goes_on.set()


def test_what_all_have_said_costs_no_waiting() -> None:
    """A rank that comes last finds all there, and does not sleep."""
    first, second, third = ledgers(dist.HashStore())
    for ledger in (first, second, third):
        ledger.say([entry()])
    with mock.patch.object(cp_inductor.trust.ledger.time, "sleep", side_effect=AssertionError):
        for ledger in (third, first, second):
            ledger.settle(is_whole=True)
