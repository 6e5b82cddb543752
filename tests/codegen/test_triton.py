"""The Triton and C++ code of ranks: order, flags and number of tiles.

What must be in the code is read from the plan, which knows nothing of graphs: its program is
turned into the sequence of starts, tiles and waits here, independently of what executes it. That
nobody reads what has not arrived, tests/rehearsal sees; that partials are combined by one kernel,
test_kernel_count.py.
"""

from __future__ import annotations

from argparse import Namespace
from functools import cache

import pytest
import torch

from benchmarks.kernel_count import measure
from cp_inductor import CrossCompiled, Plan, cross_compile
from cp_inductor.passes.pipeline import PostGrad
from cp_inductor.plan import Mask
from tests.support.graphs import attend_causal, attend_full
from tests.support.plans import make_plan
from tests.support.wrapper import START, TILE, Wrapper, allocations, causal_flags

pytest.importorskip("triton")

HEADS, TOKENS, HEAD_DIM = 4, 64, 32
MODELS = {"causal": attend_causal, "full": attend_full}


@cache
def code_of(
    rank: int,
    world_size: int,
    mask: str,
    kv_heads: int,
    *,
    is_training: bool,
    strategy: str,
    target: str = "cuda:sm_90",
) -> CrossCompiled:
    shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": is_training}
    query = torch.empty(1, HEADS, TOKENS, HEAD_DIM, **shape)
    key = torch.empty(1, kv_heads, TOKENS, HEAD_DIM, **shape)
    return cross_compile(
        MODELS[mask],
        (query, key, key),
        world_size=world_size,
        rank=rank,
        target=target,
        options={"strategy": strategy, "schedule": "local"},
    )


def plan_of(world_size: int, mask: str, kv_heads: int, strategy: str) -> Plan:
    how = {"head_dim": HEAD_DIM, "mask": mask, "strategy": strategy}
    return make_plan(world_size, TOKENS, HEADS, kv_heads, **how)


def expected_order(plan: Plan, rank: int) -> list[str]:
    """Return the collectives and tiles of a rank: one exchange in flight over each stage."""
    has_fetch = [bool(stage.fetch) for stage in plan.stages]
    has_home = [bool(stage.home) for stage in plan.stages]
    order = ["start", "wait"] if has_fetch[0] else []
    for index, stage in enumerate(plan.program(rank)):
        is_next = index + 1 < len(has_fetch) and has_fetch[index + 1]
        order += ["start"] * is_next + ["tile"] * len(stage.tiles)
        order += ["wait"] * (index > 0 and has_home[index - 1]) + ["start"] * has_home[index]
        order += ["wait"] * is_next
    return order + ["wait"] * has_home[-1]


def check(plan: Plan, rank: int, code: str) -> Wrapper:
    """Check what holds for every direction, rank, strategy and target."""
    wrapper = Wrapper.read(code)
    assert wrapper.order == expected_order(plan, rank)
    tiles = [tile for stage in plan.program(rank) for tile in stage.tiles]
    assert causal_flags(wrapper) == [tile.mask is Mask.CAUSAL for tile in tiles]
    # Nobody materialises partials, or gradients, (B, H, S, D), in float32. A number per row may be.
    wide = [shape for shape, dtype in allocations(code) if dtype == "float32"]
    assert not any(len(shape) >= 4 and shape[-1] == HEAD_DIM for shape in wide)
    return wrapper


@pytest.mark.parametrize(
    ("rank", "world_size"), [(0, 2), (1, 4), pytest.param(3, 4, marks=pytest.mark.long)]
)
def test_ring(rank: int, world_size: int) -> None:
    plan = plan_of(world_size, "causal", 2, "ring")
    trained, served = (
        code_of(rank, world_size, "causal", 2, is_training=is_training, strategy="ring")
        for is_training in (True, False)
    )
    assert [*trained.code, *served.code] == ["forward", "backward", "inference"]
    for code in (trained.code["forward"], served.code["inference"]):
        check(plan, rank, code)
    check(plan.backward(), rank, trained.code["backward"])


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_ring_in_cpp(mask: str) -> None:
    plan, how = plan_of(3, mask, HEADS, "ring"), {"strategy": "ring", "target": "cpu"}
    trained = code_of(2, 3, mask, HEADS, is_training=True, **how).code
    check(plan, 2, trained["forward"])
    check(plan.backward(), 2, trained["backward"])
    check(plan, 2, code_of(2, 3, mask, HEADS, is_training=False, **how).code["inference"])


def test_without_the_pin_the_order_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pin_order is for: the day Inductor keeps the order by itself, it can go."""
    monkeypatch.setattr(PostGrad, "__call__", lambda self, graph: None)
    how = {"is_training": False, "strategy": "ring", "target": "cpu"}
    code = code_of.__wrapped__(2, 3, "causal", 1, **how).code["inference"]
    assert Wrapper.read(code).order != expected_order(plan_of(3, "causal", 1, "ring"), 2)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["blocks", "heads", "allgather"])
def test_other_strategies(strategy: str) -> None:
    plan = plan_of(4, "causal", HEADS, strategy)
    compiled = code_of(3, 4, "causal", HEADS, is_training=True, strategy=strategy)
    check(plan, 3, compiled.code["forward"])
    check(plan.backward(), 3, compiled.code["backward"])


def test_what_is_checked_can_fail() -> None:
    """The checks above see a late start and a float32 copy."""
    code = code_of(2, 4, "causal", 4, is_training=False, strategy="ring").code["inference"]
    plan = plan_of(4, "causal", 4, "ring")
    check(plan, 2, code)
    lines = code.splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if START in line)
    tile = next(number for number, line in enumerate(lines) if TILE in line)
    late = [*lines[:start], *lines[start + 1 : tile + 1], lines[start], *lines[tile + 1 :]]
    with pytest.raises(AssertionError):
        check(plan, 2, "".join(late))
    shape = (1, HEADS, TOKENS, HEAD_DIM)
    indent = lines[tile].removesuffix(lines[tile].lstrip())
    copied = f"{indent}buf999 = empty_strided_cuda({shape}, (1, 1, 1, 1), torch.float32)\n"
    with pytest.raises(AssertionError):
        check(plan, 2, "".join([*lines[:tile], copied, *lines[tile:]]))


# --- How many kernels an attention is beside flash calls and collectives, and what they move.

pytest.importorskip("triton")

# (strategy, heads of keys, ranks) -> kernels forward, backward, and MB of both: at most 12 and 20,
# and a little more than the MB of today. What needs more kernels has today's number.
LIMITS = {
    ("auto", 32, 8): (12, 20, 1000),
    ("auto", 8, 8): (12, 20, 640),
    ("heads_own_forward", 32, 8): (12, 20, 1000),
    ("heads_own", 32, 8): (14, 20, 1500),
    ("heads2_own+blocks", 32, 8): (12, 20, 1900),
    ("ring", 32, 8): (12, 20, 1400),
    ("blocks", 32, 8): (12, 20, 2700),
    ("auto", 32, 1024): (12, 20, 5700),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case[0] == "ring" else pytest.mark.long, id="-".join(map(str, case))
        )
        for case in LIMITS
    ],
)
def test_kernels_are_few(case: tuple[str, int, int]) -> None:
    (strategy, kv_heads, world_size), (forward, backward, megabytes) = case, LIMITS[case]
    sizes = {"heads": 32, "kv_heads": kv_heads, "head_dim": 128, "tokens": 4096}
    found = measure(Namespace(rank=-1, kernels=False, **sizes), strategy, world_size)
    assert 0 < found["forward kernels"] <= forward
    assert 0 < found["backward kernels"] <= backward
    # Each is rounded by a half at the most.
    assert found["forward MB"] + found["backward MB"] + 1 <= megabytes
