"""A store that answers within a time, or raises: that of a rank that has stopped never answers.

    store.get(key)          waits for ever, if the process that holds the store is stopped
    bounded.get(key)        StoreSilent, a DistError, after the limit; from then on at once

Each call is made in a thread of its own, which stays behind in the call if there is no answer. The
store is not asked again then: the call that waits has locked it. A thread takes longer than a call:
who asks several things, asks them in one `answered`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore

Answer = TypeVar("Answer")


class StoreSilent(DistError):
    """A store has not answered within the limit."""


class _Asking(threading.Thread):
    """A thread that may wait for the store: what it calls needs no other."""


class BoundedStore:
    """The part of a `torch.distributed.Store` that ranks need to tell each other something.

    Args:
        store: that is asked.
        limit_s: for how long each call is waited for.
        silence: set once a call was not answered; shared by all prefixes of a store.
    """

    def __init__(
        self, store: Store, limit_s: float, silence: threading.Event | None = None
    ) -> None:
        self.store, self.limit_s = store, limit_s
        self.silence = silence or threading.Event()

    def under(self, prefix: str) -> BoundedStore:
        """Return the same store, whose keys begin with a prefix."""
        return BoundedStore(PrefixStore(prefix, self.store), self.limit_s, self.silence)

    @property
    def address(self) -> str:
        """Where the store is, if it is a server; otherwise ""."""
        store: Any = self.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.answered(lambda: self.store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return self.answered(lambda: self.store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys were written."""
        return self.answered(lambda: self.store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """Return a value that was written."""
        return self.answered(lambda: self.store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values that were written."""
        return self.answered(lambda: self.store.multi_get(list(keys)))

    def answered(self, call: Callable[[], Answer]) -> Answer:
        """Return what a function returns that asks the store.

        Raises:
            StoreSilent: it has not returned within the limit.
        """
        if isinstance(threading.current_thread(), _Asking):
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

        thread = _Asking(target=ask, name="cp_inductor_store", daemon=True)
        thread.start()
        thread.join(min(self.limit_s, threading.TIMEOUT_MAX))
        if errors:
            raise errors[0]
        if not answers:
            self.silence.set()
            raise StoreSilent(self._silent)
        return answers[0]

    @property
    def _silent(self) -> str:
        return f"no answer for {self.limit_s:g} s"
