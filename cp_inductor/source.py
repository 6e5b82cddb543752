"""The hash of this package's source, and the line of the program that has called it."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType


@cache
def source_hash() -> str:
    """Hash every source file of this package, the passes included."""
    package = Path(__file__).parent
    sources = [*package.rglob("*.py"), *(package / "passes").rglob("*.py")]
    digest = hashlib.sha256()
    for source in sorted(set(sources)):
        digest.update(source.relative_to(package).as_posix().encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


def user_line() -> str:
    """Return `model.py:41`, from the innermost frame outside this package, torch and Python."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_inside(name):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "source unknown"


@cache
def _is_inside(name: str) -> bool:
    inside = [Path(__file__).parent, Path(str(sys.modules["torch"].__file__)).parent]
    if "-packages" not in name:
        inside.append(Path(sysconfig.get_path("stdlib")))
    return name.startswith("<") or any(map(Path(name).is_relative_to, inside))
