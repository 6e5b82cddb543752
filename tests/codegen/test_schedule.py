"""The schedule in generated code, Triton and C++: what is in flight over what, and what is alive.

One model throughout: two layers whose weights have shapes of their own, so that every matrix
multiplication can be told from the others in the code.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.testing import FileCheck

from cp_inductor import CrossCompiled, cross_compile
from cp_inductor.plan import Payload
from tests.support.graphs import Layer
from tests.support.plans import make_plan
from tests.support.wrapper import START, Call, Wrapper

pytest.importorskip("triton")

DIM, HEADS, KV_HEADS, HEAD_DIM, TOKENS, LAYERS = 96, 4, 2, 32, 64, 2
pytestmark = pytest.mark.slow

WORLD = 4
GPU = "cuda:sm_90"
PLAN = make_plan(WORLD, TOKENS, HEADS, KV_HEADS, head_dim=HEAD_DIM, strategy="ring")


# Weights as the forward pass reads them, transposed: (in, out).
QUERY = f"({DIM}, {HEADS * HEAD_DIM})"
KEY_OR_VALUE = f"({DIM}, {KV_HEADS * HEAD_DIM})"


@cache
def code_of(
    rank: int, target: str, schedule: str, *, inductor: tuple[tuple[str, object], ...] = ()
) -> CrossCompiled:
    with torch.device("meta"):
        sizes = (DIM, HEADS, KV_HEADS, HEAD_DIM, 5 * DIM)
        layers = [Layer(*sizes, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).to(torch.bfloat16)
        x = torch.empty(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
    # An exchange takes as long as a few of the matrix multiplications.
    options = {
        "strategy": "ring",
        "schedule": schedule,
        "link_bytes_per_s": 5e7,
        "device_flops_per_s": 1e10,
        **dict(inductor),
    }
    return cross_compile(model, (x,), world_size=WORLD, rank=rank, target=target, options=options)


def read(rank: int, target: str, kind: str, schedule: str, **options: object) -> Wrapper:
    return Wrapper.read(code_of(rank, target, schedule, **options).code[kind])


def flights(wrapper: Wrapper) -> list[tuple[Call, Call]]:
    """Every start with its wait, in the order of the starts."""
    waits = {call.arguments.split(")")[0]: call for call in wrapper.of("wait")}
    return [(start, waits[start.result]) for start in wrapper.of("start")]


def between(wrapper: Wrapper, start: Call, wait: Call) -> list[str]:
    return [call.kind for call in wrapper.calls if start.line < call.line < wait.line]


def test_keys_leave_before_queries_are_projected() -> None:
    code = code_of(1, GPU, "global").code["forward"]
    check = FileCheck().check("def call(")
    for _ in range(LAYERS):
        check = check.check(KEY_OR_VALUE).check(KEY_OR_VALUE).check(START).check(QUERY)
    check.run(code)


def test_gradients_travel_home_behind_matrix_multiplications() -> None:
    wrapper = read(1, GPU, "backward", "global")
    stages = PLAN.backward().stages
    # The fetch of a stage starts before the results of the stage before it go home.
    exchanges = [stages[0].fetch]
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        exchanges += [following.fetch, stage.home] if following else [stage.home]
    payloads = [next(iter(exchange)).payload for exchange in exchanges if exchange] * LAYERS
    all_flights = flights(wrapper)
    assert len(all_flights) == len(payloads)
    homeward = [
        flight
        for flight, payload in zip(all_flights, payloads, strict=True)
        if payload is Payload.KEY_VALUE_GRAD
    ]
    assert len(homeward) == LAYERS * (WORLD - 1)
    for start, wait in homeward:
        work = between(wrapper, start, wait)
        assert "tile" in work or "mm" in work
    per_layer = WORLD - 1
    last_of_layers = homeward[per_layer - 1 :: per_layer]
    assert all("mm" in between(wrapper, start, wait) for start, wait in last_of_layers)


def test_keys_are_fetched_again_behind_the_layers_above() -> None:
    """In the backward they are at hand long before a layer's turn has come."""
    wrapper = read(1, GPU, "backward", "global")
    per_layer = len(PLAN.backward().exchange_bytes)
    over = []
    for start, wait in flights(wrapper)[::per_layer]:
        first_tile = next(c for c in wrapper.of("tile") if c.line > start.line)
        work = between(wrapper, start, min(wait, first_tile, key=lambda call: call.line))
        over.append(work.count("mm"))
    # No earlier than it takes: what cuDNN's tiles need besides, a copy of the gradient, hides some.
    assert len(over) == LAYERS and min(over) >= 1 and sum(over) >= 3


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_none_overlaps_nothing(kind: str) -> None:
    wrapper = read(2, GPU, kind, "none")
    for start, wait in flights(wrapper):
        assert not {"tile", "mm"} & set(between(wrapper, start, wait))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_schedules_change_order_alone(kind: str) -> None:
    """As many kernels, tiles and collectives."""
    wrappers = [read(2, GPU, kind, schedule) for schedule in ("none", "local", "global")]
    for kinds in (["start"], ["wait"], ["tile"], ["mm"]):
        counts = [sum(call.kind in kinds for call in wrapper.calls) for wrapper in wrappers]
        assert len(set(counts)) == 1 and counts[0] > 0
    num_kernels = [len(wrapper.kernels) for wrapper in wrappers]
    assert max(num_kernels) - min(num_kernels) <= LAYERS  # fusions across a wait or a start
    starts = [[call.arguments.partition(",")[2] for call in w.of("start")] for w in wrappers]
    assert starts[0] == starts[1] == starts[2]
    if kind == "forward":
        # The model itself projects queries first: the test of keys above can fail.
        of_itself = code_of(2, GPU, "local").code[kind]
        FileCheck().check("def call(").check(QUERY).check(START).run(of_itself)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "reorder_for_compute_comm_overlap",
        "aten_distributed_optimizations.enable_overlap_scheduling",
    ],
)
def test_what_inductor_reorders_is_not_ours(name: str) -> None:
    """Its own overlap passes find every exchange where it was put."""
    ours = read(1, GPU, "backward", "global")
    both = read(1, GPU, "backward", "global", inductor=((name, True),))
    kinds = ("start", "wait", "tile")

    def order(wrapper: Wrapper) -> list[tuple[str, str]]:
        found = [c for c in wrapper.calls if c.kind in kinds]
        return [(c.kind, c.arguments.partition(",")[2] * (c.kind == "start")) for c in found]

    assert order(ours) == order(both)
    mms = [len(between(w, *f)) for w in (ours, both) for f in flights(w)[:1]]
    assert min(mms) > 0
