"""The machine that `calibrate` measured, in a file of the cache folder, and back.

<cache folder>/cp_inductor_machine.json   {"machine": "4xcpu[...]:tcp[...]", "ranks": 4, ...}
"""

from __future__ import annotations

import json
import os
import platform
import socket
from importlib.metadata import version
from pathlib import Path

from cp_inductor.errors import InvalidArgument
from cp_inductor.plan.machine import Machine

CALIBRATED = "calibrated"
_NAME = "cp_inductor_machine.json"


def write_calibrated(machine: Machine, folder: str | Path, num_ranks: int) -> Path:
    """Write a machine to the cache folder, with the ranks, host and versions it was measured on."""
    path = Path(folder) / _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"machine": machine.format(), "ranks": num_ranks, **_where()}))
    beside.replace(path)  # readers never see a part of it
    return path


def read_calibrated(folder: str | Path) -> Machine:
    """Return the machine that was measured on this host.

    Raises:
        InvalidArgument: none was, or on another host or other versions.
    """
    path = Path(folder) / _NAME
    try:
        found = json.loads(path.read_text())
        there = {name: found[name] for name in _where()}
        machine = Machine.parse(found["machine"], site=str(path))
    except (OSError, ValueError, KeyError, TypeError):
        there, machine = {}, Machine()
    if there != _where():
        changed = [f"{name} {value}" for name, value in there.items() if _where()[name] != value]
        raise InvalidArgument(
            site=f"machine={CALIBRATED!r}",
            expected=f"{path}, of this host and these versions",
            got=", ".join(changed) or "no such file",
            remedy="call cp_inductor.calibrate(mesh), or run"
            " torchrun -m cp_inductor calibrate, on these ranks",
        )
    return machine


def _where() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "processor": platform.machine(),
        "torch": version("torch"),
    }
