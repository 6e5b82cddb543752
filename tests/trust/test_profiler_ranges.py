"""In a profile of torch, the exchanges and tiles of an attention have ranges of their names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity

from tests.support.ranks import on_ranks, world_mesh

RANGE = re.compile(r"\(test_profiler_ranges\.py:\d+\), (forward|backward), (.*)")


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return sdpa(query, key, value, is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["eager", "cp_aot_eager", pytest.param("cp_inductor", marks=pytest.mark.long)]
)
@on_ranks(2)
def test_stages_of_the_plan_are_named(backend: str) -> None:
    leaves = [
        distribute_tensor(torch.randn(2, 4, 65, 16), world_mesh(), [Shard(2)]).requires_grad_()
        for _ in range(3)
    ]
    run: Any = attend
    if backend != "eager":
        options = {"strategy": "blocks"}
        run = torch.compile(attend, backend=backend, fullgraph=True, options=options)
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
