"""One stage for all rehearsals of a run: what it has imported and compiled serves them all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest

from tests.rehearsal.rehearse import open_stage


@pytest.fixture(scope="session")
def stage() -> Iterator[Executor]:
    with open_stage() as stage:
        yield stage
