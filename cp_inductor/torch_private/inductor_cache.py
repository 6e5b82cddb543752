"""Survive what is wrong with Inductor's cache folder: full, read-only, or with half-written files.

A process that is killed while it compiles leaves files that are cut off. Inductor (torch 2.11 to
2.15) trusts every file that exists: it imports half a Python file, fails at an empty library, and
links half an object file, in every later process that shares the folder. A library that is cut off
in the middle loads, and ends the process by SIGBUS when the missing part is touched.

    a text file (.py, .cpp)     compared with what would be written; written again if it differs
    a library                   not loaded unless the file is as long as its own header says
    anything that fails         what is cut off is removed, and the graph is loaded again
    a folder that cannot be written to, or is full      another folder, for this process

Cached graphs are pickles: those that cannot be read Inductor compiles again by itself.

Read in torch 2.11.0, 2.13.0 and 2.15.0: `write`, `PyCodeCache.load_by_key_path`,
`CppCodeCache._load_library` and the `cache_clear` of both C++ caches (torch._inductor.codecache),
`CompiledFxGraph.write_to_disk` (torch._inductor.output_code), `cache_dir`.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from unittest import mock

log = logging.getLogger("cp_inductor")

FOLDER = "TORCHINDUCTOR_CACHE_DIR"

# How often a graph is loaded at most. Another rank may be at the same repair.
ATTEMPTS = 4

# What a folder must have free to be compiled in: the kernels of a graph, and a precompiled header.
LEAST_FREE_BYTES = 256 << 20


class CutOff(OSError):
    """A library is shorter than its own header says."""


@contextmanager
def sound_cache() -> Iterator[None]:
    """Compile, and load compiled graphs, inside: whatever the state of the cache folder is."""
    from torch._inductor import codecache, output_code

    with (
        _writable_folder(),
        mock.patch.object(codecache, "write", _write_anew(codecache.write)),
        mock.patch.object(
            codecache.PyCodeCache, "load_by_key_path", _retried(codecache.PyCodeCache)
        ),
        mock.patch.object(codecache.CppCodeCache, "_load_library", _checked(codecache)),
        mock.patch.object(
            output_code.CompiledFxGraph,
            "write_to_disk",
            _to_disk_anew(output_code.CompiledFxGraph.write_to_disk),
        ),
    ):
        yield


# --- Files -----------------------------------------------------------------------------------


def _write_anew(write: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    """Return Inductor's `write`, which also replaces a file that has another content."""

    @wraps(write)
    def write_anew(content: str | bytes, *args: Any, **kwargs: Any) -> tuple[str, str]:
        try:
            key, path = write(content, *args, **kwargs)
        except OSError as error:
            _leave_folder(error)
            key, path = write(content, *args, **kwargs)
        _replace_other(path, content)
        return key, path

    return write_anew


def _to_disk_anew(write_to_disk: Callable[[Any], str]) -> Callable[[Any], str]:
    @wraps(write_to_disk)
    def write(self: Any) -> str:
        try:
            path = write_to_disk(self)
        except OSError as error:
            _leave_folder(error)
            path = write_to_disk(self)
        _replace_other(path, self.source_code)
        return path

    return write


def _replace_other(path: str, content: str | bytes) -> None:
    """Replace a file that has another content than it would be written with, in one step."""
    data = content.encode() if isinstance(content, str) else content
    there = Path(path)
    # The name is that of the content without the blanks around it.
    if there.read_bytes().strip() == data.strip():
        return
    log.warning("%s is not what was written there; it is written again", path)
    beside = there.with_name(f".{os.getpid()}.{threading.get_ident()}.whole")
    beside.write_bytes(data)
    beside.replace(there)


def is_cut_off(path: Path) -> bool:
    """Whether a library or an object file (ELF) is shorter than it should be.

    Linkers and assemblers write the table of sections last.
    """
    if sys.platform != "linux":
        return False
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return True
    (table,) = struct.unpack_from("<Q", header, 0x28)
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return path.stat().st_size < table + size * count


def _checked(codecache: Any) -> classmethod[Any, Any, Any]:
    """Return Inductor's `_load_library`, which does not load what is cut off."""
    load = codecache.CppCodeCache._load_library.__func__

    def load_whole(cls: Any, path: str, key: str) -> Any:
        if is_cut_off(Path(path)):
            raise CutOff(f"{path} is cut off")
        return load(cls, path, key)

    return classmethod(load_whole)


def _retried(cache: Any) -> classmethod[Any, Any, Any]:
    """Return `load_by_key_path`, which compiles again what turns out to be broken."""
    load = cache.load_by_key_path.__func__

    def load_again(cls: Any, key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return load(cls, key, path, *args, **kwargs)
            except (OSError, ImportError, RuntimeError) as error:
                # A compiler's error is a RuntimeError, and so is one in the text of the module.
                if attempt == ATTEMPTS or not _repair(error):
                    raise
        raise AssertionError

    return classmethod(load_again)


def _repair(error: BaseException) -> bool:
    """Remove files that are cut off, and leave a folder that is full; return whether it helps."""
    from torch._inductor import codecache

    folder = Path(os.environ[FOLDER])
    broken = [path for path in _compiled_in(folder) if _is_broken(path)]
    for path in broken:
        log.warning("%s is cut off; it is compiled again", path)
        path.unlink(missing_ok=True)
    helps = bool(broken) or isinstance(error, CutOff | FileNotFoundError)
    if not helps and _free_bytes(folder) < LEAST_FREE_BYTES:
        helps = _leave_folder(error)
    if helps:
        # What failed to load is half in memory, under its name.
        codecache.CppCodeCache.cache_clear()
        codecache.CppPythonBindingsCodeCache.cache_clear()
    return helps


def _compiled_in(folder: Path) -> Iterator[Path]:
    for pattern in ("*/*.so", "*/*.o"):
        yield from folder.glob(pattern)


def _is_broken(path: Path) -> bool:
    with suppress(FileNotFoundError):  # another rank has removed it
        return is_cut_off(path)
    return False


# --- Folders ---------------------------------------------------------------------------------


@contextmanager
def _writable_folder() -> Iterator[None]:
    """Have a cache folder inside that can be written to; it is the given one if that can."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    given = os.environ.get(FOLDER) or default_cache_dir()
    try:
        _try_folder(Path(given))
        cache_dir()  # Inductor notes in the environment which it is
    except OSError as error:
        os.environ[FOLDER] = given
        if not _leave_folder(error):
            raise
    try:
        yield
    finally:
        if _others and os.environ.get(FOLDER) == str(_others[0]):
            os.environ[FOLDER] = given


def _try_folder(folder: Path) -> None:
    """Write a file, of a size for which a full disk has no room."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 12))


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


_others: list[Path] = []  # the folder that this process compiles in, where it cannot in its own


def _leave_folder(error: BaseException) -> bool:
    """Let Inductor compile in a folder of this process; return whether there is one."""
    given = os.environ.get(FOLDER, "")
    if _others and given == str(_others[0]):
        return False
    if not _others:
        places = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path.cwd()]
        for place in places:
            with suppress(OSError):
                if _free_bytes(place) >= LEAST_FREE_BYTES:
                    _others.append(Path(tempfile.mkdtemp(prefix="cp_inductor_cache_", dir=place)))
                    break
        else:
            return False
        # At the end of any process: those that multiprocessing has forked run no atexit.
        kwargs = {"ignore_errors": True}
        Finalize(None, shutil.rmtree, args=(_others[0],), kwargs=kwargs, exitpriority=0)
    log.warning(
        "the compile cache %s cannot be written to (%s); this process compiles in %s, which ends"
        " with it",
        given,
        error,
        _others[0],
    )
    _others[0].mkdir(exist_ok=True)
    os.environ[FOLDER] = str(_others[0])
    return True
