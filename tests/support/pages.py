"""The parts of pages that scripts write, between two comments that name the script.

<!-- tests/support/combinations.py writes this -->

* ...

<!-- until here -->
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def read_part(page: str, script: str) -> list[str]:
    """Return the lines that a script has written into a page of the docs."""
    _, part, _ = _split(page, script)
    return part.strip().splitlines()


def write_part(page: str, script: str, lines: list[str]) -> None:
    """Write lines in the place of those that the script wrote before."""
    before, _, after = _split(page, script)
    (DOCS / page).write_text(before + "\n\n" + "\n".join(lines) + "\n\n" + after)


def _split(page: str, script: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {script} writes this -->", "<!-- until here -->"
    before, found, rest = (DOCS / page).read_text().partition(begin)
    part, also, after = rest.partition(end)
    assert found and also, f"{page} has no {begin} and {end}"
    return before + begin, part, end + after
