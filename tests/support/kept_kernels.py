"""Kernels that one run of the suite leaves to the next: those alone, and not for ever.

    build/test-cache/kernels-<torch and compiler>/fxgraph, aotautograd    dropped before each run
                                                 /ab, cd, ...             kernels: kept

A run must see what the passes make of every graph today, so it finds no graph of the run before.
What a kernel computes follows from its C++ source and from the command that compiles it, by which
Inductor names its file, and from torch's headers and the tests' compiler, by which the folder is
named here.
"""

from __future__ import annotations

import hashlib
import shutil
from importlib.metadata import version
from pathlib import Path

# Below Inductor's cache, where graphs lie that were lowered and compiled.
GRAPHS = ("fxgraph", "aotautograd")

COMPILER = Path(__file__).parent / "cheaply" / "g++"

# What has grown larger is mostly kernels that no test makes any more.
MOST_BYTES = 2 << 30


def prepare_cache(folder: Path) -> Path:
    """Return the cache below a folder for this torch and compiler; drop what is not to be kept.

    Two runs at once share it: a graph that one drops the other compiles again.
    """
    cache = folder / f"kernels-{_fingerprint()}"
    cache.mkdir(parents=True, exist_ok=True)
    for other in folder.glob("kernels-*"):
        if other != cache:
            shutil.rmtree(other, ignore_errors=True)
    for name in GRAPHS:
        shutil.rmtree(cache / name, ignore_errors=True)
    if sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) > MOST_BYTES:
        shutil.rmtree(cache, ignore_errors=True)
    return cache


def _fingerprint() -> str:
    parts = version("torch").encode() + COMPILER.read_bytes()
    return hashlib.sha256(parts).hexdigest()[:16]
