"""Plans of every rank of many worlds, without torch: proven, priced, and printed.

About 45 s of CPU: each proves plans of many ranks, or times them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lower_bound import lower_bound
from cp_inductor.errors import InvalidArgument, InvalidText, UnsupportedStrategy
from cp_inductor.mask.rule import Rule
from cp_inductor.plan import (
    Device,
    InvalidPlan,
    Level,
    Machine,
    Mask,
    Payload,
    Plan,
    Recipe,
    Span,
    Stage,
    forward_plan,
    plan_attention,
    resolve,
)
from cp_inductor.plan.ir import Transfers
from cp_inductor.plan.simulate import loads_of
from cp_inductor.plan.strategies import TABLE
from tests.support.plans import make_plan, received_bytes
from tests.support.processes import run_python

GROUPABLE = [row.name for row in TABLE.values() if row.is_groupable]
STRATEGIES = (*TABLE, *(f"heads2+{name}" for name in GROUPABLE), "heads2_own+blocks")
LENGTHS = (1, 5, 97, 1024)


def plan_or_none(**kwargs: object) -> Plan | None:
    """Return a plan, or None where the strategy does not fit."""
    sizes: dict[str, object] = {"num_heads": 12, "num_kv_heads": 6, "head_dim": 16, **kwargs}
    try:
        return plan_attention(**sizes)  # type: ignore[arg-type]
    except UnsupportedStrategy:
        return None


def prove(plan: Plan) -> None:
    plan.simulate()
    plan.backward().simulate()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_rank_of_every_small_world(world_size: int, strategy: str) -> None:
    num_proven = 0
    for mask, stages, seq_len in product(("causal", "full"), (1, 3), LENGTHS):
        plan = plan_or_none(
            seq_len=seq_len,
            kv_len=None if mask == "causal" else seq_len + 3,
            world_size=world_size,
            mask=mask,
            strategy=strategy,
            stages=stages,
            keep=stages // 2,
        )
        if plan is not None:
            prove(plan)
            num_proven += 1
    is_always_possible = not strategy.startswith("heads")
    assert num_proven or not is_always_possible


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["blocks", "heads2+blocks", "heads2_own+blocks", "auto"])
@given(
    st.fixed_dictionaries(
        {
            "world_size": st.integers(2, 160),
            "stages": st.integers(1, 8),
            "keep": st.integers(0, 8),
            "num_kv_heads": st.sampled_from([1, 2, 8]),
            "mask": st.sampled_from(["causal", "full"]),
        }
    ),
    st.integers(1, 512),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_random_worlds(strategy: str, sizes: dict[str, Any], tokens_per_rank: int) -> None:
    seq_len = sizes["world_size"] * tokens_per_rank - tokens_per_rank // 3
    plan = plan_or_none(seq_len=seq_len, strategy=strategy, num_heads=8, **sizes)
    if plan is not None:
        prove(plan)


def unit(plan: Plan) -> float:
    """One rank's keys and values, in bytes."""
    shape, grid = plan.shape, plan.grid
    tokens = grid.query_length / grid.world_size
    return 2 * tokens * shape.num_kv_heads * shape.head_dim * shape.itemsize


def mha(world_size: int, strategy: str, **kwargs: Any) -> Plan:
    return make_plan(world_size, 4096, 32, head_dim=128, strategy=strategy, **kwargs)


# Forward and backward, of the rank that receives most, in units: see benchmarks/traffic.py.
FIGURES = (
    ("rows", {2: 2.6, 4: 7.8, 8: 19.8}),
    ("blocks", {2: 2.5, 4: 7.0, 8: 11.0, 16: 17.5, 64: 39.0, 256: 85.5}),
    ("heads", {2: 3.0, 4: 4.5, 8: 5.3}),
)


@pytest.mark.parametrize(
    ("strategy", "world_size", "most"),
    [(strategy, p, most) for strategy, figures in FIGURES for p, most in figures.items()],
)
def test_traffic(strategy: str, world_size: int, most: float) -> None:
    plan = mha(world_size, strategy, stages=4)
    assert max(received_bytes(plan)) / unit(plan) <= most


@pytest.mark.parametrize(
    "mask",
    ["causal", "full", "k<=q and q-k<70", "q//32==k//32", "k<=q+30", "(k<=q)&(t0(b,k)==t0(b,q))"],
)
def test_no_plan_receives_less(mask: str) -> None:
    """Less than what `benchmarks/lower_bound.py` says that some rank must receive."""
    closest = math.inf
    for strategy, world_size, heads, keep in product(
        TABLE, (2, 3, 8), ((8, 8), (16, 4), (8, 1)), (0, 99)
    ):
        how: dict[str, Any] = {"mask": mask, "strategy": strategy, "stages": 2, "keep": keep}
        try:
            plan = make_plan(world_size, 512, *heads, seq_len=512 * world_size - 3, **how)
        except UnsupportedStrategy:
            continue
        received = max(received_bytes(plan))
        for splits_heads in {True, strategy.startswith("heads")}:
            bound = lower_bound(
                plan.shape,
                world_size,
                plan.grid.query_length,
                plan.rule or plan.mask.value,
                most_pairs=max(plan.head_pairs) / plan.shape.num_heads,
                is_kept=plan.num_kept > 0,
                splits_heads=splits_heads,
            )
            assert bound <= received, (plan.shape, strategy, keep)
            closest = min(closest, received / bound if bound else math.inf)
    assert closest < 2 or mask not in ("causal", "full")


@pytest.mark.parametrize(
    ("strategy", "stages", "world_size", "most"),
    [
        *(("blocks", 4, p, 1.02) for p in (2, 3, 4, 5, 7, 8, 16, 24, 64, 100, 256, 1024)),
        *(("rows", 3, p, 1.001) for p in (2, 3, 8, 17)),
        *(("heads_own", 2, p, 1.03) for p in (3, 4, 6, 12)),  # 32 heads: of groups of several sizes
    ],
)
def test_balance(strategy: str, stages: int, world_size: int, most: float) -> None:
    assert mha(world_size, strategy, stages=stages).balance <= most


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_ring_is_the_ring(world_size: int, is_causal: bool) -> None:
    plan = mha(world_size, "ring", mask="causal" if is_causal else "full")
    backward = plan.backward()
    assert sum(bool(s.fetch) + bool(s.home) for s in plan.stages) == world_size - 1
    assert sum(bool(s.fetch) + bool(s.home) for s in backward.stages) == 2 * (world_size - 1)
    for stage in plan.stages:
        assert all((t.source + 1) % world_size == t.destination for t in stage.fetch)


def test_gqa_moves_kv_heads_once() -> None:
    whole, grouped = (make_plan(4, 2048, 32, kv, strategy="allgather") for kv in (32, 4))
    assert max(received_bytes(whole)) == 8 * max(received_bytes(grouped))
    # Where queries are dear, blocks get wide: fewer queries travel, for more keys.
    wide = make_plan(16, 4096, 32, 4, head_dim=16, strategy="blocks")
    chunks = dict.fromkeys((Payload.QUERY, Payload.KEY_VALUE), 0)
    for stage in wide.stages:
        for transfer in stage.fetch:
            chunks[transfer.payload] += len(transfer.span)
    assert chunks[Payload.KEY_VALUE] > 2 * chunks[Payload.QUERY]


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_what_is_kept_is_not_fetched_again(keep: int) -> None:
    plan = mha(8, "blocks", stages=3, keep=keep)
    backward = plan.backward()
    backward.simulate()
    again = [t for stage in backward.stages for t in stage.fetch]
    keys = {(t.span, t.destination) for t in again if t.payload is Payload.KEY_VALUE}
    kept = {
        (t.span, t.destination)
        for stage in plan.stages[:keep]
        for t in stage.fetch
        if t.payload is Payload.KEY_VALUE
    }
    assert not keys & kept
    saved = sum(plan.bytes_of(stage.fetch).sum() for stage in plan.stages[:keep])
    nothing_kept = mha(8, "blocks", stages=3)
    assert sum(received_bytes(nothing_kept)) - sum(received_bytes(plan)) == saved


# What each rule of the simulator is for: a plan that breaks it.


def first_stage(plan: Plan, **changes: object) -> Plan:
    stages = list(plan.stages)
    stages[1] = replace(stages[1], **changes)  # type: ignore[arg-type]
    return replace(plan, stages=tuple(stages))


def broken_plans() -> dict[str, tuple[Plan, str]]:
    plan = mha(4, "blocks", stages=2)
    stage = plan.stages[1]
    tile, *tiles = stage.tiles
    first, *others = stage.fetch
    future = replace(tile, queries=(Span(0, 1),), keys=(Span(200, 201),))
    fetches = {
        "data is missing": others,
        "sent to itself": [replace(first, destination=first.source), *others],
        "another order": [*others, first],
        "sent twice": [first, first, *others],
    }
    wrong = {what: first_stage(plan, fetch=Transfers.of(t)) for what, t in fetches.items()}
    homes = [index for index, s in enumerate(plan.stages) if s.home]
    without_home = list(plan.stages)
    without_home[homes[0]] = replace(without_home[homes[0]], home=Transfers())
    early, last = list(plan.stages), homes[-1]
    homeward = Transfers.joined((early[last - 1].home, early[last].home)).sorted()
    early[last - 1] = replace(early[last - 1], home=homeward)
    early[last] = replace(early[last], home=Transfers())
    ring = mha(4, "ring")
    passed = [
        ring.stages[0],
        Stage(Transfers(), (), Transfers()),
        replace(ring.stages[2], tiles=()),
        ring.stages[3],
    ]
    return {
        "a tile is missing": (first_stage(plan, tiles=tuple(tiles)), "not computed once"),
        "a tile is there twice": (
            first_stage(plan, tiles=(*stage.tiles, tile)),
            "not computed once",
        ),
        "a tile of the future": (
            first_stage(plan, tiles=(*tiles, future)),
            "sees pairs that do not exist",
        ),
        "data is missing": (wrong["data is missing"], "misses"),
        "sent to itself": (wrong["sent to itself"], "goes nowhere"),
        "another order": (wrong["another order"], "out of order"),
        "sent twice": (wrong["sent twice"], "out of order"),
        "not brought home": (replace(plan, stages=tuple(without_home)), "stay away from home"),
        "brought home early": (replace(plan, stages=tuple(early)), "are early or twice"),
        "sent on, but not received": (
            replace(ring, stages=tuple(passed)),
            "not computed once|sends what is not there",
        ),
        "causal, not square": (
            first_stage(plan, tiles=(replace(tile, mask=Mask.CAUSAL), *tiles)),
            "not square",
        ),
    }


@pytest.mark.parametrize("what", broken_plans())
def test_broken_plans_are_refused(what: str) -> None:
    plan, message = broken_plans()[what]
    with pytest.raises(InvalidPlan, match=message):
        plan.simulate()


# What is counted at once is the sum of what is counted one by one.


@pytest.mark.parametrize("strategy", [*TABLE, "heads2+blocks", "nodes2+blocks"])
def test_loads_are_those_of_tiles_and_transfers(strategy: str) -> None:
    plan = make_plan(4, 500, 12, 4, seq_len=4 * 500 - 123, strategy=strategy, keep=1)
    for one in (plan, plan.backward()):
        loads = loads_of(one)
        for rank in range(4):
            assert loads.flops[:, rank].sum() == one.flops(rank)
            for index, stage in enumerate(one.program(rank)):
                assert loads.calls[index, rank] == len(stage.tiles)
                for way, transfers in enumerate((stage.fetch, stage.home)):
                    for end, moved in enumerate(loads.moved[0, index, way, :, rank]):
                        ours = [t for t in transfers if (t.source, t.destination)[end] == rank]
                        assert moved == one.bytes_of(Transfers.of(ours)).sum()


@pytest.mark.parametrize("rule", ["causal", "full", "(k-q<=0)&(q-k-700<=0)"])
@pytest.mark.parametrize("strategy", ["rows", "blocks", "heads_own", "heads2_own+blocks"])
def test_half_of_the_own_tiles_may_come_last(strategy: str, rule: str) -> None:
    length = 4 * 500 - 123
    recipe = Recipe(4, length, length, 8, 4, 64, 2, rule, strategy=strategy, stages=3)
    late = forward_plan(replace(resolve(recipe, site="test"), late=1))
    assert not late.stages[-1].fetch and late.stages[-1].tiles
    prove(late)


@pytest.mark.parametrize(
    ("world_size", "num_heads", "num_kv_heads"),
    [
        *((3, 8, 8), (4, 64, 8)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((8, 28, 4), (12, 32, 8))),
    ],
)
def test_auto_is_as_fast_as_the_fastest(world_size: int, num_heads: int, num_kv_heads: int) -> None:
    """It is as fast as any strategy and stages that a user could name, by the simulator."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 128}
    for tokens, mask in product((512, 4096, 32768), ("causal", "full")):
        sizes |= {"seq_len": tokens * world_size, "world_size": world_size}
        # The ring passes keys on, which is another way to receive as much as by rows.
        names = [name for name in TABLE if name != "ring"]
        names += [f"heads{n}{own}+blocks" for n in (2, 3, 4, 6) for own in ("", "_own")]
        named = [
            plan
            for strategy, stages in product(names, (1, 2, 4, 8))
            for plan in [plan_or_none(mask=mask, strategy=strategy, stages=stages, **sizes)]
            if plan is not None and plan.balance <= 1.03
        ]
        auto = plan_or_none(mask=mask, **sizes)
        assert auto is not None and auto.balance <= 1.03

        def seconds(plan: Plan) -> float:
            both = (plan, plan.backward())
            return sum(loads_of(one).timeline(Machine()).total_s for one in both)

        assert seconds(auto) <= 1.031 * min(map(seconds, named))


def test_equally_fast_plans_are_chosen_by_their_bytes() -> None:
    """On a link that hides everything, what moves least is taken."""
    sizes = {"seq_len": 32768, "world_size": 8, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    machine = Machine((Level(0, 1e15, 0.0),), Device(launch_s=0.0))
    auto = plan_or_none(machine=machine, **sizes)
    assert auto is not None
    others = [plan_or_none(strategy=s, **sizes) for s in ("blocks", "rows", "heads_own", "heads")]
    assert max(received_bytes(auto)) <= min(max(received_bytes(other)) for other in others if other)


@pytest.mark.parametrize("rule", ["causal", "full", "(k-q<=0)&(q-k-700<=0)"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_own_tiles_in_the_forward_and_heads_in_the_backward(world_size: int, rule: str) -> None:
    """The backward reads nothing of q, k and v but what the forward fetched, and has few tiles."""
    length = world_size * 500 - 123
    recipe = Recipe(world_size, length, length, 16, 8, 64, 2, rule, strategy="heads_own_forward")
    resolved = resolve(recipe, site="test")
    for stages, late in product((1, 2), (0, 1)):
        forward = forward_plan(replace(resolved, stages=stages, late=late))
        prove(forward)
        backward = forward.backward()
        assert {t.payload for stage in backward.stages for t in stage.fetch} == {Payload.GRAD_OUT}
        heads = forward_plan(replace(resolved, strategy="heads", stages=stages)).backward()
        tiles = [stage.tiles for stage in backward.stages if stage.tiles]
        assert tiles == [stage.tiles for stage in heads.stages]
        assert not forward.stages[0].fetch and len(forward.stages[0].tiles) >= world_size
        assert backward.balance < 1.01 or rule not in ("causal", "full")


def test_a_timeline_hides_what_it_can() -> None:
    plan = mha(4, "blocks", stages=3)
    fast, slow = (plan.simulate(Machine((Level(0, s, 0.0),))) for s in (1e15, 1e9))
    assert fast.exposed_s < 0.01 * fast.total_s
    assert slow.compute_s == fast.compute_s
    assert slow.exposed_s > 0.5 * slow.exchange_s
    assert slow.total_s == pytest.approx(slow.compute_s + slow.exposed_s)


def test_exchanges_come_one_after_another() -> None:
    plan = mha(4, "heads", stages=4)
    assert any(stage.home for stage in plan.stages[:-1])
    timeline = plan.simulate(Machine(device=Device(flops_per_s=1e30)))
    assert timeline.total_s == pytest.approx(timeline.exchange_s)


def test_the_choice_follows_the_link() -> None:
    def num_fetches(link: Level, **how: Any) -> int:
        plan = make_plan(8, 1 << 14, 32, 8, head_dim=128, machine=Machine((link,)), **how)
        return len([stage for stage in plan.stages if stage.fetch])

    # Latency alone counts: one exchange. Nothing but bytes counts: several, to hide them.
    assert num_fetches(Level(0, 1e15, 1.0)) == 1
    assert num_fetches(Level(0, 20e9, 0.0), strategy="blocks") > 2


# Text


class TestGoldens(TestCase):
    def test_backward_of_blocks(self) -> None:
        sizes = {"seq_len": 512, "world_size": 2, "num_heads": 2, "head_dim": 8}
        plan = plan_attention(**sizes, strategy="blocks", stages=1)  # type: ignore[arg-type]
        self.assertExpectedInline(
            plan.backward().format(),
            """\
plan blocks causal backward kept=0
grid world_size=2 chunks_per_rank=4 query_length=512 key_length=512
shape batch=1 num_heads=2 num_kv_heads=2 head_dim=8 itemsize=2
stage 0
  rank 0: tile q[0:4] x kv[0:4] h[0:2] causal
  rank 1: tile q[4:8] x kv[4:8] h[0:2] causal
stage 1
  fetch: kv[0:2] h[0:2] 0 -> 1
  fetch: q+do[4:8] h[0:2] 1 -> 0
  rank 0: tile q[4:8] x kv[2:4] h[0:2] full
  rank 1: tile q[4:8] x kv[0:2] h[0:2] full
  home: dq[4:8] h[0:2] 0 -> 1
  home: dkv[0:2] h[0:2] 1 -> 0
""",
        )


# Refusals


@pytest.mark.parametrize(
    ("words", "kwargs"),
    [
        ("one of auto, ring", {"strategy": "stripes"}),
        (r"use 'heads2\+blocks'", {"strategy": "heads2"}),
        (r"headsN\+blocks", {"strategy": "heads2+heads"}),
        ("12 KV heads and 5 ranks evenly", {"strategy": "heads", "world_size": 5}),
        ("12 KV heads and 4 ranks evenly", {"strategy": "heads3+blocks", "world_size": 4}),
        ("which cannot", {"strategy": "nodes3+blocks", "world_size": 6, "num_heads": 8}),
        ("which cannot", {"strategy": "nodes4+blocks"}),  # a node of one rank: that is "heads"
        ("1 to 8 stages", {"stages": 9}),
        *(
            ("headsN", {"strategy": f"heads{text}"})
            for text in ("0+blocks", "-1+blocks", "²+blocks", "+")
        ),
    ],
)
def test_refusals(words: str, kwargs: dict[str, object]) -> None:
    sizes: dict[str, object] = {"seq_len": 64, "world_size": 4, "num_heads": 12, "head_dim": 8}
    with pytest.raises(UnsupportedStrategy, match=words):
        plan_attention(**(sizes | kwargs))  # type: ignore[arg-type]


# All ranks must find the same plan, and nothing of torch is needed to find it.

_SCRIPT = """
import sys, types
package = types.ModuleType("cp_inductor")
package.__path__ = ["cp_inductor"]
sys.modules["cp_inductor"] = package
from cp_inductor.plan import plan_attention
from tests.support.batch_simulate import DOCUMENTS, digest, lognormal, plan
static = plan_attention(seq_len=9999, world_size=12, num_heads=24, head_dim=64, strategy="blocks")
found = digest(plan(DOCUMENTS, {0: lognormal(3, 16384, 7.5, 1.0)}, (4096,) * 4))
assert "torch" not in sys.modules
print(static.format(), static.backward().format(), found)
"""


def test_processes_find_the_same_plan_without_torch() -> None:
    """A plan that is known when compiling, and that of a batch."""
    texts = {run_python("-c", _SCRIPT, PYTHONHASHSEED=seed, PYTHONPATH=".") for seed in ("1", "2")}
    assert len(texts) == 1
    assert "stage 1" in texts.pop()


SIZES = {"seq_len": 96, "world_size": 4, "num_heads": 8, "head_dim": 16}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seq_len", value) for value in (0, -1, 96.0, math.nan, "96", True, 10**30, 10**9999)),
        *(("kv_len", value) for value in (0, -5)),
        *(("world_size", value) for value in (0, -2, True, 10**9)),
        *(("num_heads", value) for value in (0, -8, 10**9)),
        *(("num_kv_heads", value) for value in (0, -1, 3)),
        *(("head_dim", value) for value in (0, -16, 2.5)),
        *(("itemsize", value) for value in (0, -2, 10**9)),
        *(("stages", value) for value in (-1, True, 1.0)),
        *(("keep", value) for value in (-1, 10**9, False)),
        *((name, 5) for name in ("mask", "strategy", "machine")),
    ],
    ids=lambda value: "large" if isinstance(value, int) and value > 10**12 else str(value),
)
def test_what_no_attention_has_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        plan_attention(**SIZES | {name: value})
    assert name in refused.value.expected
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0, True, "fast", None])
def test_speeds_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="bytes_per_s"):
        Level(bytes_per_s=value)
    with pytest.raises(InvalidArgument, match="flops_per_s"):
        Device(flops_per_s=value)
    if value != 0.0:
        with pytest.raises(InvalidArgument, match="latency_s"):
            Level(latency_s=value)


RECIPE = Recipe(4, 100, 100, 8, 2, 64, 2, "causal").format()


@pytest.mark.parametrize("parse", [Recipe.parse, Rule.parse])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((value, "; pass what format") for value in (None, 7, b"full", ["full"], {})),
        ("", "expected"),
        ("q" * 200_000, r"expected a text of at most (196608|131072) characters"),
        *((RECIPE + more, "expected") for more in (" more=1", " stages=2")),
        *((text, "expected") for text in ("world_size=4", RECIPE.replace("=4", "=²"))),
    ],
)
def test_texts_that_are_none(parse: Callable[[Any], object], text: Any, words: str) -> None:
    with pytest.raises(InvalidText, match=words):
        parse(text)


def test_a_recipe_of_no_rank() -> None:
    with pytest.raises(InvalidArgument):
        Recipe.parse(RECIPE.replace("world_size=4", "world_size=0"))


def test_a_trace_has_the_predicted_times(tmp_path: Path) -> None:
    plan = plan_attention(seq_len=8192, world_size=4, num_heads=8, head_dim=64, strategy="blocks")
    plan.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(4))
    ends = max(event["ts"] + event["dur"] for event in spans)
    assert ends == pytest.approx(plan.simulate().total_s * 1e6)
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"tiles", "exchange"}
    assert {event["tid"] for event in spans if event["name"].startswith("tiles")} == {0}
