"""Let one of several ranks compile a graph that all of them need; the others load what it made.

    rank 0    not in the cache . compiles . stores it
    rank 1    not in the cache . waits ....  loads it

Ranks that start together on an empty cache all miss, and each would compile the same graph: of
plans that the batch decides, all ranks have one text. Torch stores a graph when it is compiled, and
does not look again.

Whoever compiles holds a lock beside the cache, named after the graph's key, and shows every second
that it lives. Waiting is never needed for being right: who waits in vain compiles for itself.

    it fails, or dies         the lock is free, and nothing is stored
    it stops (SIGSTOP)        it no longer shows that it lives
    it takes very long        `LONGEST_S`; autotuning over ranks might itself wait for others

Read in torch 2.13.0 and 2.15.0: `FxGraphCache.load_with_key` (torch._inductor.codecache),
which looks a graph up before it is compiled.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

from filelock import FileLock, Timeout

log = logging.getLogger("cp_inductor")

# In the cache folder, which is what the ranks share.
FOLDER = "cp_inductor_locks"

# Every how many seconds a process that compiles shows that it lives; after how many without a sign,
# and after how many at the most, others stop waiting for it.
SIGN_OF_LIFE_S = 0.5
SILENT_S = 5.0
LONGEST_S = 600.0


@contextmanager
def compiled_once() -> Iterator[None]:
    """Compile a graph within; if another process is already compiling it, load what that stores."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    load = FxGraphCache.load_with_key

    with ExitStack() as compiling:

        @wraps(load)
        def load_or_wait(key: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            found = load(key, *args, **kwargs)
            if found[0] is not None:
                return found
            turn = _Turn(Path(cache_dir()) / FOLDER, key)
            if turn.taken():
                compiling.enter_context(turn.held())
                return found
            turn.wait()
            return load(key, *args, **kwargs)

        with mock.patch.object(FxGraphCache, "load_with_key", staticmethod(load_or_wait)):
            yield


class _Turn:
    """The turn to compile one graph.

    Args:
        folder: of the files that say whose it is.
        key: of the graph.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.lock: FileLock | None = None
        self.key, self.life = key, folder / f"{key}.alive"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(folder / f"{key}.lock", timeout=0)
        except OSError as error:
            log.debug("no lock in %s (%s): every rank compiles", folder, error)

    def taken(self) -> bool:
        """Take the turn if nobody has it, or if there are no locks here."""
        try:
            if self.lock is not None:
                self.lock.acquire()
        except Timeout:
            return False
        except (OSError, NotImplementedError) as error:
            log.debug("%s cannot be locked (%s): every rank compiles", self.key, error)
            self.lock = None
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Show that this process lives; at the end, give the turn back."""
        if self.lock is None:
            yield
            return
        is_over = threading.Event()
        shows = threading.Thread(
            target=self._show_life, args=(is_over,), name="cp_inductor_compiles", daemon=True
        )
        shows.start()
        try:
            yield
        finally:
            is_over.set()
            shows.join()
            self.lock.release()

    def _show_life(self, is_over: threading.Event) -> None:
        try:
            while True:
                self.life.touch()
                if is_over.wait(SIGN_OF_LIFE_S):
                    break
            self.life.unlink(missing_ok=True)
        except OSError as error:  # a disk that has become full: the others compile for themselves
            log.debug("%s: %s", self.life, error)

    def wait(self) -> None:
        """Wait until whoever has the turn has given it back, no longer lives, or takes too long."""
        assert self.lock is not None
        start = latest = time.monotonic()
        sign = self._sign()
        while True:
            try:
                self.lock.acquire(timeout=SIGN_OF_LIFE_S)
            except Timeout:
                pass
            else:
                # Should nothing be stored, all who waited compile at the same time.
                self.lock.release()
                return
            now, shown = time.monotonic(), self._sign()
            if shown != sign:
                sign, latest = shown, now
            if now - latest > SILENT_S or now - start > LONGEST_S:
                log.warning(
                    "another process has compiled the same graph for %.0f s, and last gave a sign"
                    " of life %.0f s ago; this process compiles it as well",
                    now - start,
                    now - latest,
                )
                return

    def _sign(self) -> int:
        """Return when life was last shown, by whatever clock; 0 if it was not."""
        try:
            return os.stat(self.life).st_mtime_ns
        except OSError:
            return 0
