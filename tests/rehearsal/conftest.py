"""One stage for all rehearsals of a run: what it has imported and compiled serves them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rehearsal.stage import Stage


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with Stage(is_warm=True) as stage:
        yield stage
