"""What ranks tell each other beside their events: samples of gradients, and their hosts."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from functools import partial

from cp_inductor.errors import SequenceWarning
from cp_inductor.trust.agreement import agreed_of
from cp_inductor.trust.bounded_store import within
from cp_inductor.trust.log import Log
from cp_inductor.trust.record import name_ranks

# How often a rank looks for the notes of others.
INTERVAL_S = 0.005

# How long a rank waits for the hosts of the others. It may be the only one that plans.
HOSTS_S = 30.0


def swap_notes(group_name: str, name: str, text: str, patience_s: float) -> list[str] | None:
    """Leave a text for the other ranks of a group, and return theirs.

    Returns:
        None if some have not left one within the patience, or the store does not answer; none in
        groups of one rank.
    """
    group, texts = agreed_of(group_name), dict[int, str]()
    if group is None:
        return []
    log = group.log

    def ask() -> None:
        deadline = time.monotonic() + patience_s
        log.exchange()
        log.store.set(f"{name}/{log.rank}", text)
        while len(texts) < len(log.others) and time.monotonic() < deadline:
            for at in log.others:
                if at not in texts and log.store.check([f"{name}/{at}"]):
                    texts[at] = log.store.get(f"{name}/{at}").decode()
            time.sleep(INTERVAL_S)

    within(ask, patience_s)
    return list(texts.values()) if len(texts) == len(log.others) else None


def hosts_of(group_name: str) -> tuple[int, ...]:
    """Return the host of each rank of a group; see `exchange_hosts`.

    Raises:
        ProcessGroupError: this process was forked from the one that has made the group.
        DistError: the store does not answer.
    """
    group = agreed_of(group_name)
    return (0,) if group is None else exchange_hosts(group.log)


def exchange_hosts(log: Log) -> tuple[int, ...]:
    """Return the host of each rank, numbered as they appear; () if a rank did not come.

    Every rank returns the same: plans depend on it. Whoever comes last, or has waited for too
    long, tries to write the answer, and the first to do so decides for all.

    Raises:
        DistError: the store does not answer.
    """
    deadline = time.monotonic() + min(HOSTS_S, log.timeout_s / 2)
    log.ask(log.exchange)
    if not log.ask(partial(log.store.check, ["hosts"])):
        if log.ask(partial(log.store.add, "arrived", 1)) == len(log.ranks):
            records = log.ask(partial(log.read, range(len(log.ranks))))
            hosts = [record.host for record in records.values()]
            numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            _answer(log, [numbers[host] for host in hosts])
        while not log.ask(partial(log.store.check, ["hosts"])):
            if time.monotonic() > deadline:
                _answer(log, [])
            time.sleep(min(0.5, 0.005 + len(log.ranks) / 2000))  # all ranks ask one store
    decided = tuple(json.loads(log.ask(partial(log.store.get, "hosts"))))
    if not decided:
        warnings.warn(
            f"not all of {name_ranks(log.ranks)} have said within {HOSTS_S:g} s on which host"
            " they run; plans take the usual number of ranks for a node. Compile on all ranks"
            ' at the same time, or name the machine, as in options={"machine":'
            ' "8xh100:nvlink4 x ib400"}',
            SequenceWarning,
            stacklevel=2,
        )
    return decided


def _answer(log: Log, numbers: Sequence[int]) -> None:
    log.ask(partial(log.store.compare_set, "hosts", "", json.dumps(numbers)))
