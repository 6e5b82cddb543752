"""What importing the package changes in a process: nothing that a program without it computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_importing_changes_no_number_and_no_table_of_torch() -> None:
    """`tests/support/import_battery.py` in a process where nothing has imported the package."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.import_battery"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
