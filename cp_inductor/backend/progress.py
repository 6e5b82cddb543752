"""Say that a graph is being compiled, where that takes long and someone is watching.

    cp_inductor: compiling a graph with 2 attentions. This takes a minute or so on a CPU, and again
    for other lengths; graphs that were compiled before are read from Inductor's cache.

The first rank says it, once a compile has taken some seconds, on stderr, if that is a terminal. The
logger `cp_inductor` has when each compile begins and ends, at the level INFO, on every rank and
wherever it goes; where it is shown, nothing else is.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

log = logging.getLogger("cp_inductor")

PATIENCE_S = 5.0


@contextmanager
def compile_announced(num_attentions: int) -> Iterator[None]:
    """Within this context, a graph with so many attentions is compiled."""
    noun = "attention" if num_attentions == 1 else "attentions"
    what = f"a graph with {num_attentions} {noun}"
    log.info("compiling %s", what)
    started = time.monotonic()
    is_watched = (
        sys.stderr is not None and sys.stderr.isatty() and not log.isEnabledFor(logging.INFO)
    )
    timer = threading.Timer(PATIENCE_S, _announce, [what])
    timer.daemon = True
    if num_attentions and is_watched and (not dist.is_initialized() or dist.get_rank() == 0):
        timer.start()
    try:
        yield
        log.info("compiled %s in %.1f s", what, time.monotonic() - started)
    finally:
        timer.cancel()


def _announce(what: str) -> None:
    print(
        f"cp_inductor: compiling {what}. This takes a minute or so on a CPU, and again for other"
        " lengths; graphs that were compiled before are read from Inductor's cache.",
        file=sys.stderr,
        flush=True,
    )
