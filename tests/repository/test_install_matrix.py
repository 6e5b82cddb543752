"""The script that installs the package on several Pythons and torches, short of installing."""

from __future__ import annotations

from tests.support.install_matrix import (
    PAGE,
    ROOT,
    SCRIPT,
    TESTS,
    format_table,
    row_of,
)
from tests.support.pages import read_part


def test_rows_take_the_place_of_older_ones_of_their_key() -> None:
    old = row_of("3.11.7", "2.13.0+cpu", ["Error: a | b"])
    assert old.startswith("| 3.11.7 | 2.13.0+cpu | Error: a / b | not tried |")
    others = [row_of("3.14.0", "2.9.1+cu130", ["yes"]), row_of("3.9.2", "2.13.0", ["yes"])]
    new = row_of("3.11.9", "2.13.0+cu130", ["yes"])
    assert format_table([old, *others, new])[2:] == [others[1], new, others[0]]


def test_the_page_holds_a_table_of_the_script() -> None:
    lines = read_part(PAGE, SCRIPT)
    assert len(lines) > 2 and lines == format_table(lines[2:])


def test_the_tests_of_the_sdist_exist() -> None:
    assert all((ROOT / name).is_file() for name in TESTS.split())
