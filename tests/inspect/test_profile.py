"""`cp_inductor.profile`: what it sees of a step is what the plan says, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity

import cp_inductor
from cp_inductor import InvalidArgument
from tests.support.ranks import run_ranks, world_mesh


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return sdpa(query, key, value, is_causal=True)


def check(backend: str, folder: Path) -> list[tuple[Any, ...]]:
    mesh, rank = world_mesh(), dist.get_rank()
    leaves = [
        distribute_tensor(torch.randn(2, 4, 65, 16), mesh, [Shard(2)]).requires_grad_()
        for _ in range(3)
    ]
    run: Any = attend
    if backend != "eager":
        options = {"strategy": "blocks"}
        run = torch.compile(attend, backend=backend, fullgraph=True, options=options)
    run(*leaves).sum().backward()
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU]) as by_torch,
        cp_inductor.profile(batch=2) as p,
    ):
        for _ in range(3):
            run(*leaves).sum().backward()
    run(*leaves).sum().backward()  # outside
    p.write_trace(folder / "trace.json")
    dist.barrier()
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    lanes = {(event["pid"], event["tid"]) for event in trace if event["ph"] == "X"}
    assert lanes == {(other, lane) for other in range(2) for lane in range(2)}
    ranges = {event.key for event in by_torch.key_averages()}
    for step in p.steps:
        assert step.calls == 3 and re.search(r"\(test_profile\.py:\d+\)$", step.site)
        assert 0 <= step.waited_s <= step.measured_s and step.predicted_s is not None
        assert bool(step.waited_s) == step.is_exchange
        named = f"{step.site}, {step.direction}"
        assert any(key.startswith(named) for key in ranges), ranges
        assert f"  {step.name} " in str(p)
    own = [event for event in trace if event["ph"] == "X" and event["pid"] == rank]
    assert len(own) == sum(step.calls for step in p.steps)  # one tile for each stage
    return [(step.direction, step.name, step.is_exchange) for step in p.steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    ["eager", "cp_aot_eager", pytest.param("cp_inductor", marks=pytest.mark.long)],
)
def test_stages_of_the_plan_are_seen(backend: str, tmp_path: Path) -> None:
    for steps in run_ranks(2, check, backend, tmp_path):
        for direction in ("forward", "backward"):
            of_one = {name: is_exchange for way, name, is_exchange in steps if way == direction}
            assert {name for name in of_one if name.startswith("tiles")} == {"tiles 0", "tiles 1"}
            assert of_one["fetch 1"] and not of_one["tiles 0"]


def test_nothing_ran() -> None:
    with cp_inductor.profile() as p:
        torch.ones(3).sin()
    assert not p.steps and str(p) == "no attention of cp_inductor ran"


def test_a_batch_of_none_is_refused() -> None:
    with cp_inductor.profile(), pytest.raises(InvalidArgument, match="one profile at a time"):
        cp_inductor.profile().__enter__()
    with pytest.raises(InvalidArgument, match="batch, at least 1"), cp_inductor.profile(batch=0):
        pass
