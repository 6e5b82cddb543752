"""Name the exchange that failed: its attention, its step, the state of other ranks, what to do.

    RuntimeError: Connection closed by peer [127.0.0.1]:60631
      =>
    ExchangeFailed: attention (model.py:41): expected exchange 2 of 4 of its backward to end on
        ranks 0, 1 and 2, got a failure after 0.1 s: rank 1: its process 4242 has ended; ...

An exchange fails when a rank has ended, has stopped, or does not come within the timeout of the
group. The backend's own error names no rank. So each rank introduces itself once in the store of
its group: it writes on which machine it runs, and as which process. When an exchange has failed,
every rank writes into the store which one it was, and reads what the others wrote. It also looks
whether the processes of the others are alive, if they run on its own machine. Until then nothing
is written or read.

The ranks read which processes the others are when they first agree on something, because
the store may end with the rank that holds it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch.distributed as dist

from cp_inductor.errors import CPError, ExchangeFailed
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.run.attention import Attention
from cp_inductor.run.messages import StepFailed
from cp_inductor.trust.agreement import log_of, waiting_in
from cp_inductor.trust.log import Log, rounds
from cp_inductor.trust.profiler_ranges import count_ops, named_ranges
from cp_inductor.trust.record import Fate, name_ranks

# How long a rank looks for what has become of the others, which notice a failure at their next
# exchange.
PATIENCE_S = 3.0
# The same, once a rank is known that has ended or stopped.
PATIENCE_ONCE_KNOWN_S = 1.0


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
    log = log_of(group_name)
    fates = {} if log is None else _ask(log, f"{step}, {site}")
    if log is not None and log.cause is not None:  # others may have seen it meanwhile
        return log.give_up(site)
    gone = [rank for rank, fate in fates.items() if fate.is_missing and fate.is_known]
    # A rank that merely waits has not noticed the failure yet.
    missing = sorted(gone or (rank for rank, fate in fates.items() if fate.is_missing))
    ranks = sorted({*fates, dist.get_rank()}) if dist.is_initialized() else []
    told = "; ".join(f"rank {rank}: {fate.text}" for rank, fate in sorted(fates.items()))
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


def _ask(log: Log, step: str) -> dict[int, Fate]:
    """Tell that a step has failed here, unless ranks are known to have gone different ways.

    Returns:
        What is known of others, by global rank.
    """
    with suppress(RuntimeError):  # the store may be that of a rank that has ended
        log.ask(log.compare, is_hopeless=log.gone)
    if log.cause is not None:
        return {}
    log.record.failed, limit_s = step, PATIENCE_S
    for waited_s in rounds():
        # The store may be that of the rank that has stopped; processes can still be seen.
        with suppress(RuntimeError):
            log.ask(partial(log.exchange, log.others), PATIENCE_ONCE_KNOWN_S)
        fates = log.fates()
        known = [fate for fate in fates.values() if fate.is_known]
        if any(fate.is_missing for fate in known):
            limit_s = min(limit_s, waited_s + PATIENCE_ONCE_KNOWN_S)
        if log.cause is not None or len(known) == len(fates) or waited_s > limit_s:
            break
    return fates
