"""Session-wide set-up: a compile cache of our own, no probing of the CPU's vector units, costs.

tests/support/costs.py says which cases are long, and what a run says of its costs.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.costs import COLLECTED, cpu_seconds, describe_costs, listed_long, prepare_cache

# Before torch is imported, here and in the processes that inherit the environment. There are as
# many processes as cores already: none of them needs threads, or a pool of compilers beside it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's flight recorder keeps the stacks of the last 2,000 collectives, and with their code what
# that belongs to: graphs, models, and the process groups of earlier tests, whose threads poll.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
# Kernels are compiled with less optimisation than Inductor asks for: the same C++, sooner. Where
# g++ is Inductor's compiler; it tells by the name whether precompiled headers are g++'s.
if sys.platform == "linux" and shutil.which("g++"):
    os.environ.setdefault("CXX", str(Path(__file__).parent / "support" / "cheaply" / "g++"))
# Compilers make many objects that live on: looking them all over for circles every 700 of them
# takes a fifth of their time. The ranks inherit it from tests/support/preload.py.
gc.set_threshold(50_000)
# What a process has read of our sources is kept for all that follow, whatever the shell says:
# else every process parses them anew, and takes half as long again to collect the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# One cache for the processes of a run: those of pytest-xdist inherit the first one's.
_cache = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="cp_inductor_tests_")
    # In a folder that is named, kernels of the last run are found; not by runs that tests start.
    _kept = os.environ.pop("TESTS_CACHE_DIR", "")
    _folder = prepare_cache(Path(_kept).absolute()) if _kept else _cache.name
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_folder)
for _name in [name for name in os.environ if name.startswith("CP_INDUCTOR_")]:
    del os.environ[_name]
# Plans of tests are those of any machine, whichever they run on.
os.environ["CP_INDUCTOR_MACHINE"] = ""


# The suite does the same whenever it runs; --hypothesis-profile=default looks for what it misses.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def ring() -> Iterator[None]:
    """The neighbour ring, whatever would be cheaper: its graphs are small and known by heart."""
    from cp_inductor import config

    with config.patch(strategy="ring"):
        yield


@pytest.fixture
def mesh() -> Iterator[Any]:
    """The last of two ranks, whose tokens are not the first ones."""
    from tests.support.ranks import fake_mesh

    with fake_mesh(1, 2) as mesh:
        yield mesh


@pytest.fixture
def first_mesh() -> Iterator[Any]:
    """The first of two ranks, which warns for all."""
    from tests.support.ranks import fake_mesh

    with fake_mesh(0, 2) as mesh:
        yield mesh


@pytest.fixture(autouse=True, scope="session")
def _stop_ranks() -> Iterator[None]:
    yield
    if "tests.support.ranks" in sys.modules:  # else there are none, and torch need not be imported
        cpu_seconds()  # what they have cost is forgotten with them
        sys.modules["tests.support.ranks"].stop_workers()


def pytest_unconfigure() -> None:
    if _cache is not None:
        _cache.cleanup()


_costs: dict[str, float] = {}


@pytest.hookimpl(tryfirst=True)  # before -m leaves out cases
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = {item.nodeid for item in items}
    listed = listed_long()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties.append(("cpu_s", -cpu_seconds()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    item.user_properties.append(("cpu_s", cpu_seconds()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _costs[report.nodeid] = sum(
            value for name, value in report.user_properties if name == "cpu_s"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _costs:
        return
    terminalreporter.section("slowest cases, in CPU seconds")
    for line in describe_costs(_costs):
        terminalreporter.write_line(line)
