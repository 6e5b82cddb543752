"""Which process a rank is, for others on its machine to see whether it still runs."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cp_inductor.kept import cache


@dataclass(frozen=True, slots=True)
class Fate:
    """What has become of another rank.

    Attributes:
        text: for people.
        is_missing: whether it was missing in an exchange that failed, as far as can be known.
        is_known: whether asking again would tell nothing more.
    """

    text: str
    is_missing: bool
    is_known: bool


def describe_process() -> str:
    """Describe this process for `look_at`."""
    pid = os.getpid()
    return json.dumps({"where": _machine(), "pid": pid, "began": _status_of(pid)[1]})


def look_at(process: str | None) -> Fate:
    """Say how another rank's process is, if that can be seen from here."""
    if process is None:
        return Fate("it has not said what it is, nor that it failed", True, False)
    told = json.loads(process)
    if told["where"] != _machine() or not told["began"]:
        where = told["where"].split()[0]
        return Fate(f"process {told['pid']} on {where} has not said that it failed", True, False)
    state, began = _status_of(told["pid"])
    if began != told["began"] or state in "ZX":
        return Fate(f"its process {told['pid']} has ended", True, True)
    if state in "Tt":
        return Fate(f"its process {told['pid']} is stopped", True, True)
    return Fate(f"its process {told['pid']} runs, and has not said that it failed", True, False)


@cache
def _machine() -> str:
    """Name the machine, and the namespace whose processes can be seen from here."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _status_of(pid: int) -> tuple[str, str]:
    """Return the state of a process and when it began; "" for what is not known."""
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
