"""What a run of the suite finds of the last one: kernels, and nothing that the passes made."""

from __future__ import annotations

import os
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
