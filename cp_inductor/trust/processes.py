"""Which process a rank is, for others on its machine to see whether it still runs."""

from __future__ import annotations

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
        is_known: whether asking again would tell nothing more.
        is_missing: whether it was missing in an exchange that failed, as far as can be known.
    """

    text: str
    is_known: bool = False
    is_missing: bool = True


@dataclass(frozen=True, slots=True)
class Process:
    """A process: its machine, its number there, and when it began; "" if that is not known."""

    machine: str
    pid: int
    began: str

    @staticmethod
    def own() -> Process:
        """Return this process."""
        return Process(_machine(), os.getpid(), _status_of(os.getpid())[1])

    def look(self) -> Fate:
        """Say how it is, if that can be seen from here."""
        if self.machine != _machine() or not self.began:
            where = self.machine.split()[0]
            return Fate(f"process {self.pid} on {where} has not said that it failed")
        state, began = _status_of(self.pid)
        if began != self.began or state in "ZX":
            return Fate(f"its process {self.pid} has ended", is_known=True)
        if state in "Tt":
            return Fate(f"its process {self.pid} is stopped", is_known=True)
        return Fate(f"its process {self.pid} runs, and has not said that it failed")


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
