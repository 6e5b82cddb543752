"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1200


def run_python(*arguments: str | Path, **environment: str) -> str:
    """Run Python as `run` does; return what it printed."""
    return run(*arguments, **environment).stdout


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the repository, which must succeed.

    Args:
        arguments: such as "-c" and a program, or a script and its arguments.
        environment: variables besides those of this process.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
