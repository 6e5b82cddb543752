"""Name exchanges: one that failed, with the state of other ranks, and all in a profile of torch.

    RuntimeError: Connection closed by peer [127.0.0.1]:60631
      =>
    ExchangeFailed: attention (model.py:41): expected exchange 2 of 4 of its backward to end on
        ranks 0, 1 and 2, got a failure after 0.1 s: rank 1: its process 4242 has ended; ...

An exchange fails when a rank has ended, has stopped, or does not come within the timeout of the
group; the backend's own error names no rank. So every rank tells which exchange failed there, reads
what the others tell, and looks whether their processes are alive, if they run on its own machine:
the store may end with the rank that holds it.

    with torch.profiler.profile():
        with exchanging(groups, where, name_of, step_of): run a graph
      =>  attention (model.py:41), forward, exchange 1
          attention (model.py:41), forward, tile 1
          attention (model.py:41), forward, wait for exchange 1

A dispatch mode, while somebody profiles, sees the ops that a graph calls: starts and waits of
exchanges, and tiles but for the templates that Inductor generates for a GPU, which are no ops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.errors import CPError, ExchangeFailed
from cp_inductor.graph.collectives import STARTS, WAIT
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.run.attention import Attention
from cp_inductor.run.messages import StepFailed
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.modes import OpWatcher, is_profiling
from cp_inductor.trust.agreement import agreed_of
from cp_inductor.trust.log import SOON_S, Log
from cp_inductor.trust.record import name_ranks

# How long a rank looks for what has become of the others, which notice a failure at their next
# exchange.
PATIENCE_S = 2.0

# The attention and direction that an op belongs to, and which exchange or tile of it the op is,
# from 1; None if it is of no attention.
NameOf = Callable[[Any], tuple[str, int] | None]

# The group, attention and exchange that failed, as in "exchange 2 of 4 of its backward"; None if an
# error is of no exchange.
StepOf = Callable[[RuntimeError], tuple[str, str, str] | None]


def named_steps(attention: Attention, direction: str, site: str) -> AbstractContextManager[None]:
    """Return the context of the "forward" or "backward" of an eager attention; see `exchanging`."""
    numbers = {True: count(1), False: count(1)}

    def name_of(op: Any) -> tuple[str, int]:
        return f"{site}, {direction}", next(numbers[op in STARTS])  # in the order of the plan

    def step_of(error: RuntimeError) -> tuple[str, str, str] | None:
        if not isinstance(error, StepFailed):
            return None
        plan = (forward_plan if direction == "forward" else backward_plan)(attention.recipe)
        step = f"exchange {error.number} of {len(plan.exchange_bytes)} of its {direction}"
        return attention.group_name, site, step

    return exchanging([attention.group_name], f"the {direction} of {site}", name_of, step_of)


@contextmanager
def exchanging(
    group_names: Iterable[str], where: str, name_of: NameOf, step_of: StepOf
) -> Iterator[None]:
    """Run a graph, or an eager attention, inside: ranks of groups, and profiles, are told where.

    Raises:
        ExchangeFailed: an exchange has failed.
        RanksDisagree: one has failed because ranks have gone different ways.
    """
    started, logs = time.monotonic(), dict[str, Log | None]()
    with suppress(RuntimeError, KeyError):  # a group is gone
        logs = {name: agreed_of(name) for name in group_names}
    try:
        with ExitStack() as around:
            for log in filter(None, logs.values()):
                around.enter_context(log.waiting(where))
            if is_profiling():
                around.enter_context(_Watch(name_of))
            yield
    except CPError:
        raise
    except RuntimeError as error:
        failed = step_of(error)
        if failed is None:
            raise
        group_name, site, step = failed
        reason = error.__cause__ or error if isinstance(error, StepFailed) else error
        waited_s = time.monotonic() - started
        raise _failure(logs.get(group_name), site, step, reason, waited_s) from reason


def _failure(
    log: Log | None, site: str, step: str, reason: BaseException, waited_s: float
) -> CPError:
    """Return the error about an exchange that has failed, after asking about the other ranks.

    If ranks are known to have gone different ways, the error says that. `waited_s` is for how long
    this rank was in the forward or backward, and `reason` what the backend raised.
    """
    fates, missing, whose = list[str](), list[int](), "logs of the other ranks"
    if log is not None:
        _ask(log, f"{step}, {site}")
        if log.cause is not None:  # others may have seen it meanwhile
            return log.give_up(site)
        others, gone = sorted(log.others), log.gone()
        fates = [f"rank {r}: {gone[r]}" if r in gone else log.describe([r])[0] for r in others]
        # A rank that merely waits has not noticed the failure yet.
        silent = [r for r in others if r not in log.records or not log.records[r].failed]
        missing = [r for r in silent if r in gone] or silent
        whose = f"log of {name_ranks(missing)}" if missing else whose
    said = " ".join(str(reason).split())
    got = "; its error: ".join(filter(None, ["; ".join(fates), said]))
    return ExchangeFailed(
        site=site,
        expected=f"{step} to end" + (f" on {name_ranks(log.ranks)}" if log else ""),
        got=f"a failure after {waited_s:.1f} s: {got}",
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
    for waited_s in log.rounds():
        # The store may be that of the rank that has stopped; processes can still be seen.
        with suppress(RuntimeError):
            log.ask(partial(log.compare, log.others), SOON_S)
        is_known = log.record.failed and len(log.gone()) == len(log.others)
        if log.cause is not None or is_known or waited_s > PATIENCE_S:
            return
        log.record.failed = step


# --- Profiles ------------------------------------------------------------------------------


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
