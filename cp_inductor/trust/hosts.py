"""Ranks learn from each other which of them share a host."""

from __future__ import annotations

import json
import warnings
from functools import partial

from cp_inductor.errors import SequenceWarning
from cp_inductor.trust.agreement import agreed_of
from cp_inductor.trust.log import Log, rounds
from cp_inductor.trust.record import name_ranks

# How long a rank waits for the hosts of the others. It may be the only one that plans.
HOSTS_S = 30.0


def hosts_of(group_name: str) -> tuple[int, ...]:
    """Return the host of each rank of a group; see `exchange_hosts`.

    Raises:
        ProcessGroupError: this process was forked from the one that has made the group.
        DistError: the store does not answer.
    """
    group = agreed_of(group_name)
    return (0,) if group is None else exchange_hosts(group)


def exchange_hosts(log: Log) -> tuple[int, ...]:
    """Return the host of each rank, numbered as they appear; () if a rank did not come.

    Every rank returns the same: plans depend on it. Whoever comes last, or has waited for too
    long, tries to write the answer, and the first to do so decides for all.

    Raises:
        DistError: the store does not answer.
    """
    limit_s = min(HOSTS_S, log.timeout_s / 2)

    def arrive() -> None:
        log.exchange()
        if not log.store.check(["hosts"]) and log.store.add("arrived", 1) == len(log.ranks):
            hosts = [record.host for record in log.read(range(len(log.ranks))).values()]
            numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            answer([numbers[host] for host in hosts])

    def answer(numbers: list[int]) -> None:
        log.store.compare_set("hosts", "", json.dumps(numbers))

    log.ask(arrive)
    # All ranks ask one store.
    for waited_s in rounds(longest_s=min(0.5, 0.005 + len(log.ranks) / 2000)):
        if log.ask(partial(log.store.check, ["hosts"])):
            break
        if waited_s > limit_s:
            log.ask(partial(answer, []))
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
