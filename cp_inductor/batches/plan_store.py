"""Plans that other processes make for this one, in a folder that they share.

    training process      which attentions there are       >  known
    worker of a loader    reads them, plans a batch        >  <digest of tables and rule>.npz
    training process      takes that plan, and removes it

Files are written under another name and then renamed, so that readers never see a part of one. They
hold JSON and arrays, never pickles. The folder is used only while no other user can reach it.

The training process makes a plan itself if it is not in the folder. So a missing or full folder, or
a damaged file, causes a warning in the log and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

import numpy as np

from cp_inductor.folders import make_folder, open_private
from cp_inductor.plan.batch_tables import RankTables

log = logging.getLogger("cp_inductor")

KNOWN = "known"

# How many plans wait to be taken. A plan that is not taken by then never is.
NUM_WAITING = 256

Result = TypeVar("Result")


def store_of_process() -> PlanStore:
    """Return the store whose plans this process uses; make it if there is none."""
    global _store
    if _store is None or _store.user != os.getpid():
        _store = PlanStore()
    return _store


def store_in_use() -> PlanStore | None:
    """Return the store whose plans this process uses, if there is one."""
    return _store if _store is not None and _store.user == os.getpid() else None


_store: PlanStore | None = None


def _or_nothing(use: Callable[..., Result]) -> Callable[..., Result | None]:
    """Return a method that logs what it would raise, once for each store, and returns None."""

    @wraps(use)
    def try_to_use(self: PlanStore, *args: Any) -> Result | None:
        try:
            return use(self, *args)
        except Exception as error:  # damaged files may make readers raise anything
            level = logging.DEBUG if self.has_warned else logging.WARNING
            self.has_warned = True
            log.log(level, "plans are not shared in %s: %s", self.folder, error)
            return None

    return try_to_use


class PlanStore:
    """A folder of plans.

    Args:
        folder: where; by default a new one, which goes with this process.

    Attributes:
        user: the id of the process that uses the plans, if it is this one, or one that forked it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.user = None if folder else os.getpid()
        self.has_warned = False
        if folder is None:
            try:
                folder = make_folder("cp_inductor_plans_")
            except OSError as error:
                log.warning("plans are not shared with workers: %s", error)
                folder = Path(os.devnull)  # in which there is nothing
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanStore, (self.folder,)

    @_or_nothing
    def publish(self, known: Sequence[Any]) -> None:
        """Say, as JSON, which attentions there are to plan for."""
        data = json.dumps(known).encode()
        self._write(KNOWN, lambda file: file.write(data))

    @_or_nothing
    def known(self) -> Any:
        """Return what was published last; None if nothing was."""
        with (
            open_private(self.folder) as folder,
            suppress(FileNotFoundError),
            _open_file(KNOWN, os.O_RDONLY, folder) as file,
        ):
            return json.load(file)

    @_or_nothing
    def put(self, key: str, found: RankTables) -> None:
        """Leave a plan for whoever takes it."""
        self._write(f"{key}.npz", partial(np.savez, sizes=found.sizes, numbers=found.numbers))

    @_or_nothing
    def take(self, key: str) -> RankTables | None:
        """Return a plan, and remove it; None if nobody has made it."""
        name = f"{key}.npz"
        with open_private(self.folder) as folder, suppress(FileNotFoundError):
            with _open_file(name, os.O_RDONLY, folder) as file:
                os.unlink(name, dir_fd=folder)
                with np.load(file, allow_pickle=False) as arrays:
                    found = RankTables(arrays["sizes"], arrays["numbers"])
            if any((one.dtype, one.ndim) != (np.int64, 1) for one in vars(found).values()):
                raise ValueError(f"{name} holds other arrays than those of a plan")
            return found
        return None

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Write a file that is seen whole or not at all."""
        with open_private(self.folder) as folder:
            beside = f"{uuid4()}.part"
            try:
                with _open_file(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as file:
                    write(file)
                os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(beside, dir_fd=folder)
                raise
            _drop_oldest(folder)


def _open_file(name: str, flags: int, folder: int) -> BinaryIO:
    """Open a file of a folder that is open; links are refused."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    return os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb")


def _drop_oldest(folder: int) -> None:
    """Remove plans that nobody has taken, and what writers that were killed have left."""
    waiting = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.name != KNOWN:
                    waiting.append((-entry.stat().st_mtime_ns, entry.name))
    for _, name in sorted(waiting)[NUM_WAITING:]:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
