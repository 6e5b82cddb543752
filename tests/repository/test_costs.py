"""Which cases a run takes, and what it says of their costs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tests.support import kept_kernels
from tests.support.costs import COLLECTED, ROOT, cpu_seconds, listed_long
from tests.support.kept_kernels import GRAPHS, prepare_cache


def test_what_is_listed_exists(request: pytest.FixtureRequest) -> None:
    """In the files that this run has collected."""
    collected = request.config.stash[COLLECTED]
    files = {case.partition("::")[0] for case in collected}
    assert not [case for case in listed_long() - collected if case.partition("::")[0] in files]


def selected_by(target: str) -> str:
    """Return what `make` gives to pytest behind -m; "" if it runs every case."""
    (command,) = re.findall(rf"^{target}: .*\n(?:.*\n)*?\t.*pytest (.*)$", MAKEFILE, re.MULTILINE)
    found = re.search(r"-m '([^']+)'", command)
    return found[1] if found else ""


MAKEFILE = (ROOT / "Makefile").read_text()
SOME = """
import pytest

@pytest.mark.parametrize("n", range(2))
def test(n): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.long
def test_long(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("check", {"test[0]"}),
        ("test", {"test[0]", "test_slow"}),
        ("test-all", {"test[0]", "test[1]", "test_slow", "test_long"}),
    ],
)
def test_what_make_runs(target: str, expected: set[str], tmp_path: Path) -> None:
    """Of four cases, of which one is marked long and another is listed."""
    (tmp_path / "tests/support").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    for name in (
        "__init__",
        "conftest",
        "support/__init__",
        "support/kept_kernels",
        "support/costs",
    ):
        shutil.copy(ROOT / f"tests/{name}.py", tmp_path / f"tests/{name}.py")
    (tmp_path / "tests/support/long_cases.txt").write_text("# some\ntests/test_some.py::test[1]\n")
    (tmp_path / "tests/test_some.py").write_text(SOME)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", selected_by(target)], cwd=tmp_path, capture_output=True, text=True
    )
    assert {*re.findall(r"::(\S+) PASSED", done.stdout)} == expected, done.stdout
    assert f"all of {len(expected)} cases" in done.stdout


def test_children_are_counted() -> None:
    before = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert cpu_seconds() - before >= 0.45  # of 0.5, in ticks of 0.01


# --- What a run of the suite finds of the last one: kernels, and nothing that the passes made.


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(100))


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_kernels_are_kept_and_graphs_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_kernels, "MOST_BYTES", 150)
    fill(prepare_cache(tmp_path), "ab/kernel.so", "fxgraph/ab/key/graph", "aotautograd/key/graph")
    assert files_in(prepare_cache(tmp_path)) == ["ab/kernel.so"]
    fill(prepare_cache(tmp_path), "cd/another.so")
    assert files_in(prepare_cache(tmp_path)) == [], "what has grown too large begins again"


def test_these_are_the_folders_of_graphs() -> None:
    folders = FxGraphCache._get_tmp_dir(), AOTAutogradCache._get_tmp_dir()
    assert folders == tuple(os.path.join(cache_dir(), name) for name in GRAPHS)
