"""Folders that go with the process that made them, however it ends.

    make_folder("cp_inductor_plans_")  =>  /tmp/cp_inductor_plans_x1y2, this user's alone

A process that ends normally removes its folder. A process that is killed cannot: the next process
that makes a folder of the same kind removes it. A process locks its folder, and the lock ends with
the process, so that no folder in use is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path


def make_folder(prefix: str, place: Path | None = None) -> Path:
    """Return a new folder.

    Args:
        prefix: of its name.
        place: the folder that it is in; by default that for temporary files.

    Raises:
        OSError: it cannot be made.
    """
    place = place or Path(tempfile.gettempdir())
    _remove_abandoned(prefix, place)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with suppress(OSError):  # where locks do not work, no folder looks abandoned
            # It stays open until the process ends. Another process may hold the lock for a moment.
            fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
        if folder.exists():
            break
    # Finalize also runs in processes that multiprocessing forked, which run no atexit. It does so
    # only with a priority.
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=0)
    return folder


def _remove_abandoned(prefix: str, place: Path) -> None:
    """Remove folders whose processes have ended."""
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError), open_private(folder) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_private(folder: Path) -> Iterator[int]:
    """Open a folder that only this user may read and write.

    Yields:
        Its descriptor.

    Raises:
        OSError: it does not exist, is a link, or other users may reach it.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{folder} is not this user's alone")
        yield opened
    finally:
        os.close(opened)
