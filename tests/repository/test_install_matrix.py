"""The script that installs the package on several Pythons and torches, short of installing."""

from __future__ import annotations

import pytest

from tests.support.install_matrix import (
    PAGE,
    ROOT,
    SCRIPT,
    TESTS,
    describe_problems,
    format_table,
    row_of,
    what_went_wrong,
)
from tests.support.pages import read_part


def test_rows_take_the_place_of_older_ones_of_their_key() -> None:
    old = row_of("3.11.7", "2.13.0+cpu", ["Error: a | b"])
    assert old.startswith("| 3.11.7 | 2.13.0+cpu | Error: a / b | not tried |")
    others = [row_of("3.14.0", "2.9.1+cu130", ["yes"]), row_of("3.9.2", "2.13.0", ["yes"])]
    new = row_of("3.11.9", "2.13.0+cu130", ["yes"])
    assert format_table([old, *others, new])[2:] == [others[1], new, others[0]]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Collecting torch\nERROR: No matching distribution\n", "ERROR: No matching distribution"),
        ("Traceback\n  File\nKeyError: 1\nbye", "KeyError: 1"),
        ("Traceback\ntorch._dynamo.exc.InvalidBackend: x\n", "torch._dynamo.exc.InvalidBackend: x"),
        ("..F\nE AssertionError: no\nFAILED tests/x.py::y - no", "FAILED tests/x.py::y - no"),
        ("causal: AssertionError: out is off\nother", "causal: AssertionError: out is off"),
        ("WARNING: nothing\nkilled\n\n", "killed"),
        ("", "it printed nothing"),
    ],
)
def test_what_went_wrong(text: str, line: str) -> None:
    assert what_went_wrong(text) == line


def test_what_the_doctor_found() -> None:
    assert describe_problems('[{"name": "x", "state": "warning", "found": "y"}]') == "yes"
    assert describe_problems('[{"name": "x", "state": "problem", "found": "y"}]') == "x: y"
    assert describe_problems("ImportError: z") == "ImportError: z"


def test_the_page_holds_a_table_of_the_script() -> None:
    lines = read_part(PAGE, SCRIPT)
    assert len(lines) > 2 and lines == format_table(lines[2:])


def test_the_tests_of_the_sdist_exist() -> None:
    assert all((ROOT / name).is_file() for name in TESTS.split())
