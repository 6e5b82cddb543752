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
from dataclasses import dataclass, replace

from tests.rehearsal.memory import DeviceMemory
from tests.rehearsal.report import Finding, RankReport
from tests.rehearsal.triton_interpreter import Interpreter


@dataclass(frozen=True)
class Place:
    """A line of generated code.

    Attributes:
        file: name of the file, such as ``rank0_graph0_forward.py``.
        line: number of the line, from 1.
        text: of the line.
    """

    file: str
    line: int
    text: str

    def statement(self) -> ast.stmt | None:
        """Return the first statement of the line; None if the line is a part of one."""
        try:
            return ast.parse(self.text.strip()).body[0]
        except (SyntaxError, IndexError):
            return None


class Device:
    """What a rank's programs run on.

    Args:
        rank: the global rank.
    """

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
        place = self.place()
        kernel = self._working[-1] if self._working else ""
        where = f"{place.file}:{place.line}" if place else ""
        text = place.text.strip() if place else ""
        finding = Finding(self.rank, kind, kernel, buffer, where, text, what)
        key = (kind, kernel, buffer, where)
        known = self.report.findings.get(key)
        self.report.findings[key] = replace(known, count=known.count + 1) if known else finding

    def place(self) -> Place | None:
        """Return the line of generated code that is being run."""
        frame = sys._getframe()
        while frame is not None:
            lines = self.sources.get(frame.f_code.co_filename)
            if lines is not None:
                text = lines[frame.f_lineno - 1]
                return Place(frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno, text)
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def argument_at(self, index: int) -> str:
        """Return how the code writes an argument of the call that is being run."""
        place = self.place()
        statement = place.statement() if place else None
        call = getattr(statement, "value", None)
        if isinstance(call, ast.Call) and index < len(call.args):
            return ast.unparse(call.args[index])
        return f"argument {index}"

    def target(self) -> str:
        """Return the name of the variable that the line being run assigns to."""
        place = self.place()
        statement = place.statement() if place else None
        if isinstance(statement, ast.Assign):
            return ast.unparse(statement.targets[0])
        return "a result"
