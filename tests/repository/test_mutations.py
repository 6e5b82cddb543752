"""The table of careless changes: each stands where it says, and says what came of it."""

from __future__ import annotations

import shlex

import pytest

from tests.support.mutations import ROOT, TABLE


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_a_row_is_of_the_tree(number: int) -> None:
    row = TABLE[number]
    text = (ROOT / row.path).read_text()
    assert text.count(row.old) == 1, "the text has changed: change the row with it"
    compile(text.replace(row.old, row.new), row.path, "exec")
    files = {word.partition("::")[0] for word in shlex.split(row.tests) if ".py" in word}
    assert files and all((ROOT / "tests" / file).exists() for file in files)
    assert row.verdict.startswith(("killed by ", "open: "))
