"""Name exchanges: one that failed, with the state of other ranks, and all in a profile of torch.

    RuntimeError: Connection closed by peer [127.0.0.1]:60631
      =>
    ExchangeFailed: attention (model.py:41): expected exchange 2 of 4 of its backward to end on
        ranks 0, 1 and 2, got a failure after 0.1 s: rank 1: its process 4242 has ended; ...

An exchange fails when a rank has ended, has stopped, or does not come within the timeout of the
group. The backend's own error names no rank. So every rank tells which exchange failed there, reads
what the others tell, and looks whether their processes are alive, if they run on its own machine.
It knows which processes they are since ranks first agreed on something: the store may end with the
rank that holds it.

    with torch.profiler.profile():
        with named_ranges(name_of): run a graph
      =>  attention (model.py:41), forward, exchange 1
          attention (model.py:41), forward, tile 1
          attention (model.py:41), forward, wait for exchange 1

A dispatch mode, while somebody profiles, sees the ops that a graph calls: starts and waits of
exchanges, and tiles but for the templates that Inductor generates for a GPU, which are no ops.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.errors import CPError, ExchangeFailed
from cp_inductor.graph.collectives import STARTS, WAIT
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.run.attention import Attention
from cp_inductor.run.messages import StepFailed
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.modes import OpWatcher, is_profiling
from cp_inductor.trust.agreement import log_of, waiting_in
from cp_inductor.trust.asking import rounds
from cp_inductor.trust.log import Log
from cp_inductor.trust.record import Record, name_ranks

# How long a rank looks for what has become of the others, which notice a failure at their next
# exchange.
PATIENCE_S = 3.0
# The same, once a rank is known that has ended or stopped.
PATIENCE_ONCE_KNOWN_S = 1.0

UNTOLD = "it has not said what it is, nor that it failed"


@contextmanager
def named_steps(attention: Attention, direction: str, site: str) -> Iterator[None]:
    """Name an exchange that fails inside the "forward" or "backward" of an eager attention.

    Raises:
        ExchangeFailed: an exchange has failed.
        RanksDisagree: one has failed because ranks have gone different ways.
    """
    started = time.monotonic()
    try:
        where = waiting_in(attention.group_name, f"the {direction} of {site}")
        with where, named_ranges(count_ops(site, direction)):
            yield
    except StepFailed as error:
        plan = (forward_plan if direction == "forward" else backward_plan)(attention.recipe)
        step = f"exchange {error.number} of {len(plan.exchange_bytes)} of its {direction}"
        reason, waited_s = error.__cause__ or error, time.monotonic() - started
        raise failure(attention.group_name, site, step, reason, waited_s) from reason


def failure(
    group_name: str, site: str, step: str, reason: BaseException, waited_s: float
) -> CPError:
    """Return the error about an exchange that has failed, after asking about the other ranks.

    If ranks are known to have gone different ways, the error says that.

    Args:
        group_name, site: of the attention.
        step: which exchange it was, as in "exchange 2 of 4 of its backward".
        reason: what the backend raised.
        waited_s: for how long this rank was in the forward or backward.
    """
    log, records = log_of(group_name), dict[int, Record | None]()
    if log is not None:
        _ask(log, f"{step}, {site}")
        if log.cause is not None:  # others may have seen it meanwhile
            return log.give_up(site)
        records = {log.ranks[at]: log.records.get(at) for at in log.others}
    # A rank that merely waits has not noticed the failure yet.
    silent = {rank: record for rank, record in records.items() if not (record and record.failed)}
    gone = [rank for rank, record in silent.items() if record and record.known_end()]
    missing = sorted(gone or silent)
    ranks = sorted({*records, dist.get_rank()}) if dist.is_initialized() else []
    fates = {rank: record.fate() if record else UNTOLD for rank, record in records.items()}
    told = "; ".join(f"rank {rank}: {fates[rank]}" for rank in sorted(fates))
    said = " ".join(str(reason).split())
    told = f"{told}; its error: {said}" if told else said
    whose = f"log of {name_ranks(missing)}" if missing else "logs of the other ranks"
    return ExchangeFailed(
        site=site,
        expected=f"{step} to end on {name_ranks(ranks)}" if ranks else f"{step} to end",
        got=f"a failure after {waited_s:.1f} s: {told}",
        remedy=f"see the {whose}; if a rank is only slow, raise the timeout of init_process_group;"
        " then start all ranks again, from a checkpoint, because the group has lost its place",
        step=step,
        ranks_missing=tuple(missing),
        waited_s=waited_s,
    )


def _ask(log: Log, step: str) -> None:
    """Tell that a step has failed here, and read what is known of the others.

    If ranks are known to have gone different ways, nothing is told.
    """
    with suppress(RuntimeError):  # the store may be that of a rank that has ended
        log.ask(log.compare, is_hopeless=log.gone)
    if log.cause is not None:
        return
    log.record.failed, limit_s = step, PATIENCE_S
    for waited_s in rounds():
        # The store may be that of the rank that has stopped; processes can still be seen.
        with suppress(RuntimeError):
            log.ask(partial(log.exchange, log.others), PATIENCE_ONCE_KNOWN_S)
        if any(record.known_end() and not record.failed for record in log.records.values()):
            limit_s = min(limit_s, waited_s + PATIENCE_ONCE_KNOWN_S)
        if log.cause is not None or len(log.gone()) == len(log.others) or waited_s > limit_s:
            return


# --- Profiles ------------------------------------------------------------------------------

# The attention and direction that an op belongs to, and which exchange or tile of it the op is,
# from 1; None if it is of no attention.
NameOf = Callable[[Any], tuple[str, int] | None]


def named_ranges(name_of: NameOf) -> AbstractContextManager[Any]:
    """Return the context that a graph, or an eager attention, runs in."""
    return _Watch(name_of) if is_profiling() else nullcontext()


class _Watch(OpWatcher):
    """Names the ops of one graph."""

    def __init__(self, name_of: NameOf) -> None:
        super().__init__()
        self.name_of = name_of
        # What arrives, until it is waited for, and how the wait is called.
        self.waits: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; within a range if it is an exchange, a wait for one, or a tile."""
        if op is WAIT:
            title = self.waits.pop(args[0], "")
            with torch.profiler.record_function(title) if title else nullcontext():
                return op(*args, **kwargs)
        is_start = op in STARTS
        name = self.name_of(op) if is_start or op in TILE_OPS else None
        if name is None:
            return op(*args, **kwargs)
        attention, number = name
        title = f"{attention}, {'exchange' if is_start else 'tile'} {number}"
        with torch.profiler.record_function(title):
            result = op(*args, **kwargs)
        if is_start:
            self.waits[result] = f"{attention}, wait for exchange {number}"
        return result


def count_ops(site: str, direction: str) -> NameOf:
    """Return what names the ops of one eager attention, which run in the order of its plan."""
    started: Counter[bool] = Counter()

    def name_of(op: Any) -> tuple[str, int]:
        started[op in STARTS] += 1
        return f"{site}, {direction}", started[op in STARTS]

    return name_of
