"""What importing the package changes in a process: nothing that a program without it computes."""

from __future__ import annotations

import pytest

from tests.support.processes import run_python


@pytest.mark.slow
def test_importing_changes_no_number_and_no_table_of_torch() -> None:
    """`tests/support/import_battery.py` in a process where nothing has imported the package."""
    run_python("-m", "tests.support.import_battery")
