"""A store that answers within a time, or raises: the store of a stopped process never answers.

    store.get(key)                          waits for ever, if the process that holds it is stopped
    bounded.answered(lambda: ...get(key))   StoreSilent, a DistError, after the limit; then at once

What asks the store runs in a thread of its own. If there is no answer, the thread stays there. The
store is then not asked again, because the waiting call has locked it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

from torch.distributed import DistError, PrefixStore, Store, TCPStore

# How often a rank that waits looks whether an answer may still come.
LOOK_EVERY_S = 0.3

# How often `within` looks.
INTERVAL_S = 0.05

# For how long, at most, a process that ends waits for its threads that ask the store.
AT_EXIT_S = 1.0

Answer = TypeVar("Answer")


class StoreSilent(DistError):
    """A store has not answered within the limit."""


# Threads that may be running C++ code when the interpreter ends.
_threads: WeakSet[threading.Thread] = WeakSet()


class Asking(threading.Thread):
    """A thread that may wait for the store, so that calls in it need no thread of their own.

    The process waits for it before it ends, no longer than `AT_EXIT_S`: if a daemon thread returns
    from C++ while the interpreter ends, Python ends it in the middle of C++ code, which then calls
    abort.
    """

    def start(self) -> None:
        """Start it, and have the process wait for it before it ends."""
        _threads.add(self)
        super().start()


@atexit.register
def _end_threads() -> None:
    deadline = time.monotonic() + AT_EXIT_S
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def within(
    call: Callable[[], None],
    limit_s: float,
    is_enough: Callable[[], bool] = lambda: False,
    rest_s: float = 2 * INTERVAL_S,
) -> None:
    """Call what asks a store in a thread; go on after a time, or a while after it is enough."""

    def run() -> None:
        with suppress(RuntimeError):  # a store that has ended
            call()

    asking = Asking(target=run, daemon=True)
    asking.start()
    deadline = time.monotonic() + limit_s
    while asking.is_alive() and time.monotonic() < deadline:
        asking.join(INTERVAL_S)
        if is_enough():
            deadline = min(deadline, time.monotonic() + rest_s)


class BoundedStore:
    """A `torch.distributed.Store` that is asked in threads.

    Args:
        store: that is asked.
        limit_s: for how long an answer is waited for.
    """

    def __init__(self, store: Store, limit_s: float) -> None:
        self.store, self.limit_s = store, limit_s
        self.silence = threading.Event()  # set after a call was not answered

    @property
    def address(self) -> str:
        """Where the store is, if it is a server; otherwise ""."""
        store: Any = self.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""

    def answered(
        self, call: Callable[[], Answer], is_hopeless: Callable[[], bool] | None = None
    ) -> Answer:
        """Call a function that asks the store, and return its result.

        Args:
            call: the function.
            is_hopeless: whether waiting has become useless; asked now and then.

        Raises:
            StoreSilent: it has not returned within the limit, or waiting is useless.
        """
        if isinstance(threading.current_thread(), Asking):
            return call()
        if self.silence.is_set():
            raise StoreSilent(self._silent)
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(call())
            except BaseException as error:
                errors.append(error)

        thread = Asking(target=ask, name="cp_inductor_store", daemon=True)
        thread.start()
        if is_hopeless is None:
            thread.join(min(self.limit_s, threading.TIMEOUT_MAX))
        else:
            self._join_unless(thread, is_hopeless)
        if errors:
            raise errors[0]
        if not answers:
            self.silence.set()
            raise StoreSilent(self._silent)
        return answers[0]

    def _join_unless(self, thread: threading.Thread, is_hopeless: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.limit_s
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(min(LOOK_EVERY_S, self.limit_s))
            if thread.is_alive() and is_hopeless():
                return

    @property
    def _silent(self) -> str:
        return f"no answer for {self.limit_s:g} s"
