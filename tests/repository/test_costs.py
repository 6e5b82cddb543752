"""Which cases a run takes, and what it says of their costs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.costs import ROOT, cpu_seconds, listed_long


def test_what_is_listed_exists() -> None:
    for case in listed_long():
        path, _, name = case.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / path).read_text(), case


def selected_by(target: str) -> str:
    """Return what `make` gives to pytest behind -m; "" if it runs every case."""
    (command,) = re.findall(rf"^{target}: .*\n(?:.*\n)*?\t.*pytest (.*)$", MAKEFILE, re.MULTILINE)
    found = re.search(r"-m '([^']+)'", command)
    return found[1] if found else ""


MAKEFILE = (ROOT / "Makefile").read_text()
SOME = """
import pytest

@pytest.mark.parametrize("n", range(2))
def test(n): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.long
def test_long(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("check", {"test[0]"}),
        ("test", {"test[0]", "test_slow"}),
        ("test-all", {"test[0]", "test[1]", "test_slow", "test_long"}),
    ],
)
def test_what_make_runs(target: str, expected: set[str], tmp_path: Path) -> None:
    """Of four cases, of which one is marked long and another is listed."""
    (tmp_path / "tests/support").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    for name in (
        "__init__",
        "conftest",
        "support/__init__",
        "support/kept_kernels",
        "support/costs",
    ):
        shutil.copy(ROOT / f"tests/{name}.py", tmp_path / f"tests/{name}.py")
    (tmp_path / "tests/support/long_cases.txt").write_text("# some\ntests/test_some.py::test[1]\n")
    (tmp_path / "tests/test_some.py").write_text(SOME)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", selected_by(target)], cwd=tmp_path, capture_output=True, text=True
    )
    assert {*re.findall(r"::(\S+) PASSED", done.stdout)} == expected, done.stdout
    assert f"all of {len(expected)} cases" in done.stdout


def test_children_are_counted() -> None:
    before = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert cpu_seconds() - before >= 0.45  # of 0.5, in ticks of 0.01
