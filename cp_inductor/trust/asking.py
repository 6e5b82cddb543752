"""One thread asks the store of a group: the store of a stopped process never answers.

    store.get(key)                    waits for ever, if the process that holds it is stopped
    asking.ask(lambda: ...get(key))   StoreSilent, a DistError, after the limit; then at once

Between questions, the thread calls what is to be done beside the program.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet, ref

from torch.distributed import DistError

# How often a rank that waits for an answer looks whether one may still come.
LOOK_EVERY_S = 0.3

# A rank that waits looks at growing intervals: others may be about to come, or compile for minutes.
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.0002, 0.05

# For how long, at most, a process that ends waits for a thread that asks a store: if a daemon
# thread returns from C++ while the interpreter ends, Python ends it in the middle of C++ code,
# which then calls abort.
AT_EXIT_S = 1.0

Answer = TypeVar("Answer")


def rounds() -> Iterator[float]:
    """Yield for how long this rank has waited, at growing intervals."""
    started, delay = time.monotonic(), SHORTEST_WAIT_S
    while True:
        yield time.monotonic() - started
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_WAIT_S)


class StoreSilent(DistError):
    """A store has not answered within the limit."""


class Asking(threading.Thread):
    """A thread that asks a store, and waits `limit_s` for each answer, until its owner is gone.

    It calls the owner's `compare_beside()` at intervals, until that raises what a store raises
    whose group is gone, and its `end()` when the program ends.
    """

    def __init__(self, owner: Any, limit_s: float, interval_s: float) -> None:
        super().__init__(name="cp_inductor_store", daemon=True)
        self.owner, self.limit_s, self.interval_s = ref(owner), limit_s, interval_s
        self.is_silent = self.is_ending = False
        self.questions = SimpleQueue[Callable[[], None]]()
        _threads.add(self)
        self.start()

    def run(self) -> None:
        """Answer questions."""
        is_comparing, next_at = True, time.monotonic() + self.interval_s
        while not self.is_ending:
            with suppress(Empty):
                self.questions.get(timeout=max(0.0, next_at - time.monotonic()))()
            if time.monotonic() < next_at:
                continue
            next_at = time.monotonic() + self.interval_s
            owner = self.owner()
            if owner is None:
                return
            if is_comparing:
                is_comparing = False
                with suppress(RuntimeError):
                    owner.compare_beside()
                    is_comparing = True
            del owner
        owner = self.owner()
        if owner is not None:
            with suppress(RuntimeError):
                owner.end()

    def ask(
        self,
        call: Callable[[], Answer],
        limit_s: float | None = None,
        is_hopeless: Callable[[], object] = lambda: False,
    ) -> Answer:
        """Call a function that asks the store, and return its result.

        Raises:
            StoreSilent: it has not returned within the limit, or waiting has become hopeless, which
                is looked at now and then. If the limit was the usual one, the store is not asked
                again.
        """
        limit = self.limit_s if limit_s is None else limit_s
        answer = Future[Answer]()

        def fill() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        if not self.is_silent:
            self.questions.put(fill)
            deadline = time.monotonic() + limit
            while not wait([answer], min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))).done:
                if time.monotonic() >= deadline:
                    self.is_silent = limit_s is None
                    break
                if is_hopeless():
                    break
        if not answer.done():
            raise StoreSilent(f"no answer for {limit:g} s")
        return answer.result()


_threads: WeakSet[Asking] = WeakSet()


@atexit.register
def _end_threads() -> None:
    threads = list(_threads)
    for thread in threads:
        thread.is_ending = True
        thread.questions.put(lambda: None)
    for thread in threads:
        thread.join(AT_EXIT_S)
