"""What this package is, in one word: the hash of its source."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


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
