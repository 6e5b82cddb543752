"""What cases cost, and which are dear: these run by `make test-all`, all others by `make test`.

A case is dear if it takes minutes, or more than 7 CPU seconds to show through Inductor, on a larger
scale or at another corner what a cheaper case shows as well. It is marked `long`, or listed in
tests/support/long_cases.txt.

Costs are CPU seconds of the test's process, its ranks and their compilers: on a machine that does
other things, too, they say more than wall time.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The node ids that a run has found, before any is left out.
COLLECTED = pytest.StashKey[set[str]]()

# A file that takes longer than this, in CPU seconds, is named at the end of a run.
FILE_BUDGET_S = 90


def listed_long() -> frozenset[str]:
    """Return the node ids in tests/support/long_cases.txt."""
    lines = (ROOT / "tests/support/long_cases.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


_of_ranks: dict[int | None, float] = {}  # by process id, of those that have ended, too


def cpu_seconds() -> float:
    """Return what this process, its ranks and all they started have used so far."""
    own = os.times()
    of_children = 0.0  # that are alive; those that have ended are in `own`
    for rank in multiprocessing.active_children():
        parent, seconds = _cpu_seconds_of(rank.pid)
        if parent == os.getpid():
            of_children += seconds
        else:  # a child of the fork server
            _of_ranks[rank.pid] = max(seconds, _of_ranks.get(rank.pid, 0.0))
    total = own.user + own.system + own.children_user + own.children_system
    return total + of_children + sum(_of_ranks.values())


def _cpu_seconds_of(pid: int | None) -> tuple[int, float]:
    """Return a process's parent, and its seconds."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has just ended, or the system has no /proc
        return 0, 0.0
    # The name before them may contain spaces.
    fields = text.rpartition(")")[2].split()
    # User, system, and both of children.
    return int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def slowest(costs: Mapping[str, float], count: int = 10) -> list[tuple[str, float]]:
    """Return the `count` dearest, dearest first."""
    return sorted(costs.items(), key=lambda item: (-item[1], item[0]))[:count]


def describe_costs(costs: Mapping[str, float]) -> Sequence[str]:
    """Return lines: the slowest cases, and the files that are over their budget."""
    lines = [f"{seconds:7.1f} s  {case}" for case, seconds in slowest(costs)]
    files: defaultdict[str, float] = defaultdict(float)
    for case, seconds in costs.items():
        files[case.partition("::")[0]] += seconds
    over = [(file, seconds) for file, seconds in slowest(files) if seconds > FILE_BUDGET_S]
    if over:
        lines += ["", f"Files of more than {FILE_BUDGET_S} s:"]
        lines += [f"{seconds:7.1f} s  {file}" for file, seconds in over]
    return [*lines, "", f"{sum(costs.values()):7.1f} s  all of {len(costs)} cases"]


# --- Kernels that one run of the suite leaves to the next: those alone, and not for ever.

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
