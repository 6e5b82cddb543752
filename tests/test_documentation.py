"""What the documents say of the tests is what the tests are."""

from __future__ import annotations

from pathlib import Path

from tests.combinations import table

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_of_combinations_is_that_of_the_tests() -> None:
    assert (DOCS / "combinations.md").read_text() == table(), "run python -m tests.combinations"


def test_guides_name_their_scripts() -> None:
    from tests.test_example import GUIDES

    for script, guide in GUIDES.items():
        assert f"examples/{script}.py" in (DOCS / guide).read_text()
