"""Inductor's and AOTAutograd's caches: shared by ranks, across processes, safely."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._inductor import config as inductor_config

import cp_inductor
from cp_inductor import source
from cp_inductor.backend import cache_key
from cp_inductor.backend import compile as backend
from cp_inductor.backend.captured import Captured
from cp_inductor.backend.partition import Partition
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.passes.pipeline import PostGrad
from cp_inductor.passes.settings import Settings
from cp_inductor.sequence.wholes import count_labels
from tests.support.graphs import AttentionBlock
from tests.support.processes import run_python
from tests.support.ranks import fake_mesh, run_ranks, stop_workers, world_mesh


def train_alone() -> None:
    """Train in a process group of one's own, and print what caches did."""
    dist.init_process_group("gloo")
    print(f"{train_once()}\n", end="", flush=True)
    dist.destroy_process_group()


def train_in(cache: Path) -> dict[str, int]:
    """Train in a folder of kernels."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return train_once()


def train_once() -> dict[str, int]:
    """Compile, run and check one step against the unsharded model; return what caches did."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference, x = AttentionBlock(), torch.randn(2, 6 * world_size, 32)
    model = cp_inductor.parallelize(copy.deepcopy(reference), world_mesh(), seq_dims={"x": 1})
    out = torch.compile(model, backend="cp_inductor", fullgraph=True)(x)
    expected = reference(x)
    for result in (out, expected):
        result.square().sum().backward()
    close = partial(torch.testing.assert_close, rtol=1e-4)
    close(out.to_local(), expected.chunk(world_size, 1)[rank], atol=1e-5)
    for weight, other in zip(model.parameters(), reference.parameters(), strict=True):
        close(weight.grad, other.grad, atol=1e-4)
    return {
        "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
        "fx_miss": counters["inductor"]["fxgraph_cache_miss"],
        "aot_hit": counters["aot_autograd"]["autograd_cache_hit"],
        "aot_miss": counters["aot_autograd"]["autograd_cache_miss"],
    }


def launch(cache: Path) -> list[dict[str, int]]:
    """Run `train_alone` in two new processes that share a cache directory."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    said = run_python("-m", *torchrun, __name__, TORCHINDUCTOR_CACHE_DIR=str(cache))
    return [ast.literal_eval(line) for line in said.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_two_ranks_share_a_cache_cold_and_warm(tmp_path: Path) -> None:
    # Ranks that have compiled nothing yet; and processes that hash strings otherwise.
    stop_workers()
    cold_ranks = run_ranks(2, train_in, tmp_path)
    stop_workers()  # the folder of kernels is theirs
    for cold in cold_ranks:
        assert cold == {"fx_hit": 0, "fx_miss": 2, "aot_hit": 0, "aot_miss": 1}
    warm_ranks = launch(tmp_path)
    assert len(warm_ranks) == 2
    for warm in warm_ranks:
        assert warm == {"fx_hit": 2, "fx_miss": 0, "aot_hit": 1, "aot_miss": 0}


def test_a_mean_over_labels_of_plain_shards_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts the labels is a function of ours, in a graph that AOTAutograd may not know."""

    def check(
        gm: fx.GraphModule, inputs: object, settings: Settings, mode: str | None
    ) -> Callable[..., Any]:
        Captured.of(gm, settings)
        assert count_labels in [node.target for node in gm.graph.nodes]
        with inductor_config.patch(
            backend._inductor_patches(settings, None, PostGrad(""), Partition())
        ):
            check_cacheable(gm)
        return gm.forward

    monkeypatch.setattr(backend, "compile_through_inductor", check)
    with fake_mesh(0, 2) as mesh:
        compiled = torch.compile(
            lambda scores, labels: F.cross_entropy(scores.flatten(0, 1), labels.flatten()),
            backend="cp_inductor",
            fullgraph=True,
            options={"mesh": mesh},
        )
        compiled(torch.randn(3, 6, 5), torch.zeros(3, 6, dtype=torch.int64))


def key_of(**settings: Any) -> str:
    plan_options = PlanOptions("auto", stages=0, keep_bytes=0)
    values = {
        "enabled": True,
        "plan_options": plan_options,
        "axis": None,
        "inductor_options": {},
        **settings,
    }
    return cache_key.cache_key(Settings(**values))


def test_the_key_changes_with_rank_world_config_and_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for rank, world_size in ((0, 2), (1, 2), (0, 4)):
        with fake_mesh(rank, world_size) as mesh:
            keys.append(key_of())
            axis = cp_inductor.dtensor.axis.axis_of_mesh(mesh, site="here")
            keys.append(key_of(axis=axis))
            keys.append(key_of(enabled=False))
            keys.append(key_of(plan_options=PlanOptions("auto", stages=3, keep_bytes=0)))
            keys.append(key_of(plan_options=PlanOptions("auto", 0, 0, schedule="none")))
    keys.append(key_of())
    monkeypatch.setattr(cache_key, "source_hash", lambda: "another source")
    keys.append(key_of())
    assert len(set(keys)) == len(keys)


def test_the_source_of_every_pass_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cp_inductor"
    (package / "passes").mkdir(parents=True)
    file = package / "passes" / "lower_attention.py"
    (package / "source.py").write_text("")
    monkeypatch.setattr(source, "__file__", str(package / "source.py"))
    hashes = []
    for text in ("one", "two"):
        file.write_text(text)
        source.source_hash.cache_clear()
        hashes.append(source.source_hash())
    source.source_hash.cache_clear()
    assert hashes[0] != hashes[1]


if __name__ == "__main__":
    train_alone()
