"""The script that installs the package on several Pythons and torches, short of installing."""

from __future__ import annotations

from tests.support.install_matrix import (
    BEGIN,
    END,
    ROOT,
    STEPS,
    TESTS,
    format_table,
    merge,
    read_table,
    row_of,
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


def test_the_page_holds_a_table_of_the_script() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    rows = read_table(page)
    assert rows
    assert f"{BEGIN}\n\n{format_table(rows)}\n\n{END}" in page


def test_the_tests_of_the_sdist_exist() -> None:
    assert all((ROOT / name).is_file() for name in TESTS.split())
