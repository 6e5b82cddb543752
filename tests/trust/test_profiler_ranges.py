"""In a profile of torch, the exchanges and tiles of an attention have ranges of their names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity

from tests.support.graphs import attend_causal
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import make_qkv, on_mesh

RANGE = re.compile(r"\(graphs\.py:\d+\), (forward|backward), (.*)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["eager", "cp_aot_eager", pytest.param("cp_inductor", marks=pytest.mark.long)]
)
@on_ranks(2)
def test_stages_of_the_plan_are_named(backend: str) -> None:
    leaves = [one.requires_grad_() for one in on_mesh(make_qkv(65)[:3], world_mesh(), Shard(2))]
    run: Any = attend_causal
    if backend != "eager":
        options = {"strategy": "blocks"}
        run = torch.compile(attend_causal, backend=backend, fullgraph=True, options=options)
    run(*leaves).sum().backward()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            run(*leaves).sum().backward()
    run(*leaves).sum().backward()  # outside
    counts = {event.key: event.count for event in profile.key_averages()}
    ranges = {m.groups(): count for key, count in counts.items() if (m := RANGE.search(key))}
    assert set(ranges.values()) == {3}
    for direction in ("forward", "backward"):
        names = {name for way, name in ranges if way == direction}
        assert {"exchange 1", "wait for exchange 1", "tile 1", "tile 2"} <= names
