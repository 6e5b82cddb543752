"""Ranks that share a cache and need one graph: one compiles it, whatever happens to that one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import FxGraphCache
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor.torch_private import single_compile
from cp_inductor.torch_private.single_compile import compiled_once
from tests.support.packed import in_documents
from tests.support.ranks import _processes, run_ranks, world_mesh

DEADLINE_S = 120


def compile_in(cache: Path, compile_graph: Callable[[], str | None]) -> str:
    """Look for a graph in a cache, compile it if it is not there; tell which."""

    def load(key: str) -> tuple[str | None, dict[str, Any]]:
        stored = cache / key
        return (stored.read_text() if stored.exists() else None), {}

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    with mock.patch.object(FxGraphCache, "load_with_key", staticmethod(load)), compiled_once():
        found, _ = FxGraphCache.load_with_key("graph")  # type: ignore[call-arg]
        if found is not None:
            return f"loaded {found}"
        made = compile_graph()
        if made is not None:
            (cache / "graph").write_text(made)
        return f"compiled {made}"


def take_a_while() -> str:
    time.sleep(1)
    return "it"


def fail() -> str:
    time.sleep(1)
    raise RuntimeError("no space left")


def start(function: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    return process, ours


def say(pipe: Any, cache: Path, compile_graph: Callable[[], str | None]) -> None:
    single_compile.LONGEST_S = 10.0
    try:
        pipe.send(compile_in(cache, compile_graph))
    except RuntimeError as error:
        pipe.send(f"failed: {error}")


def say_and_hold(pipe: Any, cache: Path) -> None:
    """Be at it, and say so, until somebody ends this process."""

    def hold() -> str:
        pipe.send("compiling")
        time.sleep(DEADLINE_S)
        return "too late"

    compile_in(cache, hold)


def hear(pipe: Any) -> str:
    assert pipe.poll(DEADLINE_S), "still waiting"
    said: str = pipe.recv()
    return said


def test_one_compiles_and_the_others_load(tmp_path: Path) -> None:
    started = [start(say, tmp_path, take_a_while) for _ in range(4)]
    said = sorted(hear(pipe) for _, pipe in started)
    assert said == ["compiled it", *["loaded it"] * 3]


def test_if_it_fails_the_others_compile(tmp_path: Path) -> None:
    started = [start(say, tmp_path, fail) for _ in range(3)]
    assert [hear(pipe) for _, pipe in started] == ["failed: no space left"] * 3


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_if_it_dies_or_stops_the_others_compile(tmp_path: Path, end: signal.Signals) -> None:
    holder, pipe = start(say_and_hold, tmp_path)
    assert hear(pipe) == "compiling"
    _, waits = start(say, tmp_path, take_a_while)
    assert not waits.poll(0.5)
    os.kill(holder.pid, end)
    assert hear(waits) == "compiled it"
    holder.kill()


def test_without_locks_every_rank_compiles(tmp_path: Path) -> None:
    (tmp_path / single_compile.FOLDER).write_text("a file where the folder would be")
    with mock.patch.dict(os.environ):
        assert compile_in(tmp_path, lambda: "it") == "compiled it"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ):
        look_up = FxGraphCache.load_with_key
        with pytest.raises(RuntimeError, match="no space left"):
            compile_in(tmp_path, fail)
        assert FxGraphCache.load_with_key is look_up
        assert compile_in(tmp_path, lambda: "it") == "compiled it"


def train_together(cache: Path) -> dict[str, int]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    mesh = world_mesh()
    whole = [torch.randn(1, heads, 96, 8) for heads in (4, 2, 2)]
    tokens = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in whole]
    documents = distribute_tensor(torch.arange(96)[None] // 20, mesh, [Replicate()])
    compiled = torch.compile(in_documents, backend="cp_inductor", fullgraph=True)
    with implicit_replication():
        compiled(*tokens, documents).sum().backward()
    found = counters["inductor"]
    return {name: found[f"fxgraph_cache_{name}"] for name in ("hit", "miss")}


@pytest.mark.long
def test_ranks_together_on_an_empty_cache_compile_each_graph_once(tmp_path: Path) -> None:
    found = run_ranks(3, train_together, tmp_path)
    # All look and miss; of forward and backward, those that waited look again.
    assert sum(one["hit"] for one in found) == 2 * 2
