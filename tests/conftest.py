"""Session-wide set-up: a compile cache of our own, and no probing of the CPU's vector units."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before torch is imported, here and in the processes that inherit the environment.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
_cache = tempfile.TemporaryDirectory(prefix="cp_inductor_tests_")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name
for _name in [name for name in os.environ if name.startswith("CP_INDUCTOR_")]:
    del os.environ[_name]


# The suite does the same whenever it runs; --hypothesis-profile=default looks for what it misses.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def ring() -> Iterator[None]:
    """The neighbour ring, whatever would be cheaper: its graphs are small and known by heart."""
    from cp_inductor import config

    with config.patch(strategy="ring"):
        yield


@pytest.fixture(autouse=True, scope="session")
def _stop_ranks() -> Iterator[None]:
    yield
    from tests.ranks import stop_workers

    stop_workers()
    _cache.cleanup()
