"""What is said of a long compile, and to whom."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr

import pytest

from cp_inductor.backend import progress
from tests.support.graphs import attend_causal, generate_code
from tests.support.ranks import fake_mesh
from tests.support.reference import make_qkv


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)


def said_of(num_attentions: int = 2, screen: io.StringIO | None = None) -> str:
    screen = screen or Terminal()
    with redirect_stderr(screen), progress.compile_announced(num_attentions):
        time.sleep(0.2)
    return screen.getvalue()


def test_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_of(0) == ""  # without attention
    assert said_of(screen=io.StringIO()) == ""  # into a file
    with redirect_stderr(None), progress.compile_announced(2):  # as under pythonw
        pass
    monkeypatch.setattr(progress, "PATIENCE_S", 0.3)
    assert said_of() == ""  # fast enough
    screen = Terminal()
    with (
        redirect_stderr(screen),
        pytest.raises(ValueError, match="refused"),
        progress.compile_announced(2),
    ):
        raise ValueError("refused")
    time.sleep(0.5)
    assert screen.getvalue() == ""


def test_of_a_compile() -> None:
    screen = Terminal()
    with redirect_stderr(screen), fake_mesh(0, 2) as mesh:
        generate_code(attend_causal, *make_qkv(8)[:3], options={"mesh": mesh})
    assert screen.getvalue().count("cp_inductor: compiling a graph with 1 attention.") == 1
