"""Plans that other processes make for this one, in a folder that they share.

    training process      which attentions there are       >  known
    worker of a loader    reads them, plans a batch        >  <digest of tables and rule>.npz
    training process      takes that plan, and removes it

Files are written beside, and then renamed: whoever sees one, sees all of it. The folder is this
user's alone, and goes with the process that made it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np

from cp_inductor.plan.batch_tables import RankTables

KNOWN = "known"

# Plans that wait for being taken; what has not been taken when so many were made since, never is.
NUM_WAITING = 256


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


class PlanStore:
    """A folder of plans.

    Args:
        folder: where; by default a new one, which is removed when this process ends.

    Attributes:
        user: the id of the process that uses the plans, if it is this one, or one that forked it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.user = None if folder else os.getpid()
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="cp_inductor_plans_"))
            # At the end of any process: those that multiprocessing has forked run no atexit, and
            # multiprocessing runs this in the process that made the folder alone.
            Finalize(self, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True})
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanStore, (self.folder,)

    def publish(self, known: Sequence[Any]) -> None:
        """Say which attentions there are to plan for; those that cannot be pickled are left out."""
        self._write(KNOWN, pickle.dumps([data for one in known if (data := _pickled(one))]))

    def known(self) -> list[Any]:
        """Return the attentions that were published last."""
        try:
            data = (self.folder / KNOWN).read_bytes()
        except FileNotFoundError:
            return []
        return [pickle.loads(one) for one in pickle.loads(data)]

    def put(self, key: str, found: RankTables) -> None:
        """Leave a plan for whoever takes it."""
        waiting = sorted(self.folder.glob("*.npz"), key=_age)
        for path in waiting[NUM_WAITING - 1 :]:
            path.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            np.savez(file, sizes=found.sizes, numbers=found.numbers)
        os.replace(file.name, self.folder / f"{key}.npz")

    def take(self, key: str) -> RankTables | None:
        """Return a plan, and remove it; None if nobody has made it."""
        path = self.folder / f"{key}.npz"
        with suppress(FileNotFoundError, zipfile.BadZipFile, ValueError):
            with np.load(path, allow_pickle=False) as arrays:
                found = RankTables(arrays["sizes"], arrays["numbers"])
            path.unlink(missing_ok=True)
            return found
        return None

    def _write(self, name: str, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(data)
        os.replace(file.name, self.folder / name)


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # a graph may have anything in it, whose pickling may raise anything
        return None


def _age(path: Path) -> float:
    """Return how old a file is, of files in one folder: the less, the newer."""
    try:
        return -path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
