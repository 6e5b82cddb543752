"""Let one of several ranks compile a graph that all of them need; the others load what it made.

    rank 0    not in the cache . compiles . stores it
    rank 1    not in the cache . waits ....  loads it

Ranks that start together on an empty cache all miss, and each would compile the same graph: of
plans that the batch decides, all ranks have one text. Torch stores a graph when it is compiled, and
does not look again.

Whoever compiles holds a lock beside the cache, named after the graph's key. Waiting is never needed
for being right: who waits in vain compiles for itself.

    it fails, or dies              the lock is free, and nothing is stored
    it stops, or takes very long   `LONGEST_S`; autotuning over ranks might itself wait for others

Read in torch 2.13.0 and 2.15.0: `FxGraphCache.load_with_key` (torch._inductor.codecache),
which looks a graph up before it is compiled.
"""

from __future__ import annotations

import logging
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

# For how many seconds a process waits for another one that compiles.
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
            loaded = load(key, *args, **kwargs)
            if loaded[0] is not None:
                return loaded
            folder = Path(cache_dir()) / FOLDER
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = FileLock(folder / f"{key}.lock")
                lock.acquire(timeout=0)
            except Timeout:
                wait(lock)
                return load(key, *args, **kwargs)
            except (OSError, NotImplementedError) as error:
                log.debug("no lock in %s (%s): every rank compiles", folder, error)
            else:
                compiling.callback(lock.release)
            return loaded

        with mock.patch.object(FxGraphCache, "load_with_key", staticmethod(load_or_wait)):
            yield


def wait(lock: FileLock) -> None:
    """Wait until whoever compiles has given the lock back, no longer lives, or takes too long."""
    try:
        lock.acquire(timeout=LONGEST_S)
    except Timeout:
        log.warning(
            "another process has compiled the same graph for %.0f s; this process compiles it as"
            " well",
            LONGEST_S,
        )
    else:
        # Should nothing be stored, all who waited compile at the same time.
        lock.release()
