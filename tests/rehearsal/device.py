"""A device that is pretended while code runs: its memory, its kernels, and what came to notice.

    device = Device(rank=2)
    call = load_program(code, path, device, ...)    # generated for cuda:sm_90, loaded on the CPU
    call([x, weight])                               # device.report has what happened

Where a finding happened is read from the Python stack: generated code is loaded from a file of its
own, and the innermost frame of that file is the line that launched the kernel.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.rehearsal.memory import DeviceMemory
from tests.rehearsal.report import Finding, RankReport
from tests.rehearsal.triton_interpreter import Interpreter


class Device:
    """What a rank's programs run on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.report = RankReport(rank)
        self.memory = DeviceMemory(self.note)
        self.interpreter = Interpreter(self.memory)
        self.sources: dict[str, list[str]] = {}
        self._working: list[str] = []

    @contextmanager
    def at_work(self, name: str) -> Iterator[None]:
        """Within this context, findings are of this kernel or op."""
        self._working.append(name)
        try:
            yield
        finally:
            self._working.pop()

    def note(self, kind: str, buffer: str, what: str) -> None:
        """Note a finding; the same one again is counted."""
        where, text = self.place()
        kernel = self._working[-1] if self._working else ""
        finding = Finding(self.rank, kind, kernel, buffer, where, text, what)
        key = (kind, kernel, buffer, where)
        known = self.report.findings.get(key)
        self.report.findings[key] = replace(known, count=known.count + 1) if known else finding

    def place(self) -> tuple[str, str]:
        """Return where generated code is run, ``rank0_forward.py:12``, and the line; or nothing."""
        frame: Any = sys._getframe()
        while frame is not None:
            path, number = frame.f_code.co_filename, frame.f_lineno
            if path in self.sources:
                name = path.rpartition("/")[2]
                return f"{name}:{number}", self.sources[path][number - 1].strip()
            frame = frame.f_back
        return "", ""

    def statement(self) -> Any:
        """Return the statement of the line that is being run; None if the line is a part of one."""
        try:
            return ast.parse(self.place()[1]).body[0]
        except (SyntaxError, IndexError):
            return None

    def argument_at(self, index: int) -> str:
        """Return how the code writes an argument of the call that is being run."""
        call = getattr(self.statement(), "value", None)
        if isinstance(call, ast.Call) and index < len(call.args):
            return ast.unparse(call.args[index])
        return f"argument {index}"

    def target(self) -> str:
        """Return the name of the variable that the line being run assigns to."""
        statement = self.statement()
        is_assigned = isinstance(statement, ast.Assign)
        return ast.unparse(statement.targets[0]) if is_assigned else "a result"
