"""Which cases a run takes, and what it says of their costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tests.support import costs
from tests.support.costs import (
    COLLECTED,
    GRAPHS,
    ROOT,
    cpu_seconds,
    describe_costs,
    listed_long,
    prepare_cache,
)


def test_what_is_listed_exists(request: pytest.FixtureRequest) -> None:
    """In the files that this run has collected; and it is long."""
    collected, listed = request.config.stash[COLLECTED], listed_long()
    files = {case.partition("::")[0] for case in collected}
    assert not [case for case in listed - collected if case.partition("::")[0] in files]
    some = [item for item in request.session.items if item.nodeid in listed]
    assert all(item.get_closest_marker("long") for item in some)


@pytest.mark.parametrize(
    ("target", "expected"),
    [("check", [""]), ("test", ["", "slow"]), ("test-all", ["", "slow", "long", "slow long"])],
)
def test_what_make_runs(target: str, expected: list[str]) -> None:
    """Of cases with these marks, by what `make` gives to pytest behind -m, if anything."""
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(rf"^{target}: .*\n(?:.*\n)*?\t.*pytest (.*)$", makefile, re.MULTILINE)
    (text,) = re.findall(r"-m '([^']+)'", command) or ["True"]
    cases = ("", "slow", "long", "slow long")
    assert [c for c in cases if eval(text, {m: m in c for m in ("slow", "long")})] == expected


def test_the_dearest_are_named() -> None:
    said = describe_costs({"a.py::x": 91.0, "b.py::z": 2.0, "a.py::y": 1.0})
    assert said[0] == "   91.0 s  a.py::x"
    assert said[-3:] == ["   92.0 s  a.py", "", "   94.0 s  all of 3 cases"]


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
    monkeypatch.setattr(costs, "MOST_BYTES", 150)
    fill(prepare_cache(tmp_path), "ab/kernel.so", "fxgraph/ab/key/graph", "aotautograd/key/graph")
    assert files_in(prepare_cache(tmp_path)) == ["ab/kernel.so"]
    fill(prepare_cache(tmp_path), "cd/another.so")
    assert files_in(prepare_cache(tmp_path)) == [], "what has grown too large begins again"


def test_these_are_the_folders_of_graphs() -> None:
    folders = FxGraphCache._get_tmp_dir(), AOTAutogradCache._get_tmp_dir()
    assert folders == tuple(os.path.join(cache_dir(), name) for name in GRAPHS)
