"""The long tail of the suite, in 240 parts; and what the cases cost.

    --tail=all      every long case; the default, so that a case that is named is run
    --tail=none     no long case
    --tail=commit   the part that is this commit's turn
    --tail=3        the fourth part, whatever the commit

A case marked `long` takes minutes, or compiles with Inductor what a case beside it shows through
cp_aot_eager; tests/support/long_cases.txt lists others that are dear. They are dealt out in the
order of collection, in which neighbours cost alike, so that the parts do, too; 240 commits in a
row run all of them, and a new case moves those behind it by one: a few wait for another round. The
commit's turn is the number of commits behind it, along first parents: whoever checks it out runs
the same cases.

Costs are CPU seconds of the test's process, its ranks and their compilers: on a machine that does
other things, too, they say more than wall time.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

NUM_PARTS = 240
ROOT = Path(__file__).parents[2]

# A file that takes longer than this, in CPU seconds, is named at the end of a run.
FILE_BUDGET_S = 90


def listed_long() -> frozenset[str]:
    """Return the node ids in tests/support/long_cases.txt."""
    lines = (ROOT / "tests/support/long_cases.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def parts_of(cases: Iterable[str]) -> dict[str, int]:
    """Return the part that each long case belongs to.

    Args:
        cases: node ids, in the order of collection.
    """
    return {case: place % NUM_PARTS for place, case in enumerate(cases)}


def read_tail(given: str) -> str:
    """Return "all", "none" or the number of a part.

    Raises:
        ValueError: it is none of those, and not "commit".
    """
    if given == "commit":
        return str(turn_of(ROOT))
    if given in ("all", "none") or given in map(str, range(NUM_PARTS)):
        return given
    raise ValueError(f"--tail={given}: expected all, none, commit or 0 to {NUM_PARTS - 1}")


def turn_of(folder: Path) -> int:
    """Return the part whose turn it is at the commit that is checked out.

    A shallow clone does not know how many commits there are: there the commit's hash decides.
    Outside of a repository the first part is taken.
    """
    try:
        if _git(folder, "rev-parse", "--is-shallow-repository") == "true":
            return int(_git(folder, "rev-parse", "HEAD"), 16) % NUM_PARTS
        return int(_git(folder, "rev-list", "--count", "--first-parent", "HEAD")) % NUM_PARTS
    except (OSError, subprocess.CalledProcessError):
        return 0


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def is_selected(tail: str, part: int) -> bool:
    """Whether a long case of this part runs; `tail` as `read_tail` returns it."""
    return tail == "all" or tail == str(part)


def describe_tail(tail: str, num_run: int, num_long: int) -> str:
    """Say what ran of the tail, and how to run it again."""
    if tail in ("all", "none"):
        return f"The long tail: {tail} of {num_long} cases."
    return (
        f"The long tail: {num_run} of {num_long} cases, part {tail} of 0 to {NUM_PARTS - 1}. "
        f"The same again: make test TAIL={tail}. All of it: make test-all."
    )


# Costs


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
