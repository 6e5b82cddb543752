"""On which host each rank of a group runs, where no launcher says it.

    rank 0: "one"    rank 1: "one"    rank 2: "two"    rank 3: "two"    =>    (0, 0, 1, 1) on all

Each rank writes the name of its host into the store of the group, once. Plans depend on the answer,
so ranks must have the same one: whoever sees all names, or has waited for too long, tries to write
the answer, and the first to do so decides for all.
"""

from __future__ import annotations

import json
import socket
import time
import warnings
from weakref import WeakKeyDictionary

import torch.distributed as dist

from cp_inductor.errors import SequenceWarning
from cp_inductor.kept import on_reset
from cp_inductor.torch_private.groups import group_with_store
from cp_inductor.trust.agreement import refuse_fork
from cp_inductor.trust.board import Board, name_ranks
from cp_inductor.trust.bounded_store import BoundedStore

# How long a rank waits for the names of the others. It may be the only one that plans.
PATIENCE_S = 30.0

_hosts_in: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()


@on_reset
def forget_hosts() -> None:
    """Drop what is known of the hosts of ranks."""
    _hosts_in.clear()


def hosts_of(group_name: str) -> tuple[int, ...]:
    """Return the host of each rank of a group, numbered as they appear; () if a rank did not come.

    Every rank of the group returns the same. The first call of a rank waits for the others, up to
    `PATIENCE_S`.

    Raises:
        ProcessGroupError: this process was forked from the one that has made the group.
        DistError: the store does not answer.
    """
    group, ask = group_with_store(group_name)
    if group not in _hosts_in:
        ranks = dist.get_process_group_ranks(group)
        name = socket.gethostname()
        _hosts_in[group] = (
            exchange(name, ranks, dist.get_rank(group), *ask()) if ranks[1:] else (0,)
        )
    return _hosts_in[group]


def exchange(
    name: str, ranks: list[int], rank: int, store: dist.Store, timeout_s: float
) -> tuple[int, ...]:
    """Tell the ranks of a group the name of this one's host, and return the hosts of all.

    Args:
        name: of the host.
        ranks: the global ranks of the group, by position.
        rank: this process's position.
        store: of the group.
        timeout_s: of the group.
    """
    refuse_fork()
    board = Board(BoundedStore(store, timeout_s), "hosts", ranks)
    board.write(f"name/{rank}", name)
    if board.add("arrived", 1) == len(ranks):
        names = board.read(range(len(ranks)), "name/")
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
        board.decide("answer", json.dumps([numbers[name] for name in names.values()]))
    deadline = time.monotonic() + min(PATIENCE_S, timeout_s / 2)
    while (answer := board.find("answer")) is None:
        if time.monotonic() > deadline:
            board.decide("answer", "[]")
        # All ranks ask one store.
        time.sleep(min(0.5, 0.005 + len(ranks) / 2000))
    hosts = tuple(json.loads(answer))
    if not hosts:
        warnings.warn(
            f"not all of {name_ranks(ranks)} have said within {PATIENCE_S:g} s on which host they"
            " run; plans take the usual number of ranks for a node. Compile on all ranks at the"
            ' same time, or name the machine, as in options={"machine": "8xh100:nvlink4 x ib400"}',
            SequenceWarning,
            stacklevel=2,
        )
    return hosts
