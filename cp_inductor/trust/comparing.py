"""The threads that compare beside the program."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakMethod, WeakSet

from torch.distributed import DistError

from cp_inductor.trust.bounded_store import AT_EXIT_S, Asking


class Comparing(Asking):
    """Calls a method again and again, until its object is gone; and another when the program ends.

    Args:
        compare, end: the methods. They may raise what a store raises whose group is gone.
        interval_s: between calls.
    """

    def __init__(
        self, compare: Callable[[], Any], end: Callable[[], Any], interval_s: float
    ) -> None:
        super().__init__(name="cp_inductor_log", daemon=True)
        self.compare, self.end = WeakMethod(compare), WeakMethod(end)
        self.interval_s, self.stopping = interval_s, threading.Event()
        _comparing.add(self)
        self.start()

    def run(self) -> None:
        """Compare until the program ends."""
        with suppress(DistError, RuntimeError):
            while not self.stopping.wait(self.interval_s):
                compare = self.compare()
                if compare is None:
                    return
                compare()
                del compare
        end = self.end()
        if end is not None:
            with suppress(DistError, RuntimeError):
                end()


_comparing: WeakSet[Comparing] = WeakSet()


@atexit.register
def stop_comparing() -> None:
    """End the threads."""
    for thread in list(_comparing):
        thread.stopping.set()
    for thread in list(_comparing):
        thread.join(AT_EXIT_S)
        _comparing.discard(thread)
