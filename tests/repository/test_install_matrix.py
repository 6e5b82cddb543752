"""The script that installs the package on several Pythons and torches, short of installing."""

from __future__ import annotations

import pytest

from tests.support.install_matrix import (
    BEGIN,
    END,
    ROOT,
    STEPS,
    TESTS,
    describe_problems,
    format_table,
    merge,
    read_table,
    row_of,
    what_went_wrong,
)

ALL = ["yes"] * len(STEPS)


def test_rows_take_the_place_of_older_ones_of_their_key() -> None:
    page = f"before\n{BEGIN}\n{END}\nafter\n"
    page = merge(page, [row_of("3.11.7", "2.13.0+cpu", ["Error: a | b"])])
    page = merge(page, [row_of("3.14.0", "2.9.1+cu130", ALL), row_of("3.9.2", "2.13.0", ALL)])
    first, second, third = read_table(page)
    assert (first.cells[0], second.cells[1]) == ("3.9.2", "2.13.0+cpu")
    assert second.cells[2:4] == ("Error: a \\| b", "not tried")
    assert third.cells[2:-1] == tuple(ALL)
    page = merge(page, [row_of("3.11.9", "2.13.0+cu130", ALL)])
    assert [row.cells[0] for row in read_table(page)] == ["3.9.2", "3.11.9", "3.14.0"]
    assert page.startswith("before\n") and page.endswith("\nafter\n")


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(SystemExit, match="has no"):
        merge("no markers", [])


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
    page = (ROOT / "docs" / "support.md").read_text()
    rows = read_table(page)
    assert rows
    assert f"{BEGIN}\n\n{format_table(rows)}\n\n{END}" in page


def test_the_tests_of_the_sdist_exist() -> None:
    assert all((ROOT / name).is_file() for name in TESTS.split())
