"""What a run of the suite finds of the last one: kernels, and nothing that the passes made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tests.support import kept_kernels
from tests.support.kept_kernels import GRAPHS, prepare_cache

ROOT = Path(__file__).parents[2]


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


def test_another_compiler_or_torch_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_cache(tmp_path)
    fill(first, "ab/kernel.so")
    monkeypatch.setattr(kept_kernels, "version", lambda name: "0.1")
    second = prepare_cache(tmp_path)
    compiler = tmp_path.with_name("another g++")
    compiler.write_text("exec g++ -O2")
    monkeypatch.setattr(kept_kernels, "COMPILER", compiler)
    fill(tmp_path, "somebody's")
    third = prepare_cache(tmp_path)
    assert len({first, second, third}) == 3
    assert set(tmp_path.iterdir()) == {third, tmp_path / "somebody's"}


def test_a_run_uses_the_folder_and_hides_it_from_runs_of_its_tests(tmp_path: Path) -> None:
    code = "import os, tests.conftest; print(*map(os.environ.get, ('TORCHINDUCTOR_CACHE_DIR',"
    code += " 'TESTS_CACHE_DIR')), sep='\\n')"
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}
    for given, expected in ((str(tmp_path), str(prepare_cache(tmp_path))), ("", None)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**environment, "TESTS_CACHE_DIR": given},
            capture_output=True,
            text=True,
            check=True,
        )
        cache, hidden = done.stdout.split()
        assert hidden == "None"
        assert cache == expected if expected else "cp_inductor_tests_" in cache
