"""Rules without tensors: what they say of boxes of pairs, and the plans made of it."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import And, Not, Or

from cp_inductor.plan import Mask, Plan, plan_attention
from cp_inductor.plan.rules import (
    BATCH,
    CAUSAL,
    KEY,
    QUERY,
    Cell,
    Rule,
    Step,
    at_most_zero,
    canonical,
    compare,
    describe,
    table,
)

LENGTH = 24

indices = st.sampled_from([QUERY, KEY])
constants = st.integers(-LENGTH, LENGTH).map(sympy.Integer)


@st.composite
def expressions(draw: st.DrawFn) -> sympy.Expr:
    """Integers that depend on query and key."""
    index = draw(indices)
    size = draw(st.integers(2, 7))
    return draw(
        st.sampled_from(
            [
                index,
                2 * index,
                KEY - QUERY,
                sympy.floor(index / size),
                sympy.Mod(index, size),
                Step(index, sympy.Integer(size)),
                sympy.Min(QUERY, KEY),
                3 * Step(index, sympy.Integer(5)) - 2 * Step(index, sympy.Integer(11)),
                sympy.Max(index, sympy.Integer(4)),
            ]
        )
    )


@st.composite
def relations(draw: st.DrawFn) -> sympy.Basic:
    left, right = draw(expressions()), draw(st.one_of(expressions(), constants))
    return compare(draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])), left, right)


rules = st.recursive(
    relations(),
    lambda inner: st.one_of(
        st.builds(And, inner, inner), st.builds(Or, inner, inner), inner.map(Not)
    ),
    max_leaves=5,
)


def grid_of(allowed: sympy.Basic) -> np.ndarray:
    """Evaluate a rule pair by pair, by sympy alone."""
    return np.array(
        [[bool(allowed.subs({QUERY: q, KEY: k})) for k in range(12)] for q in range(12)]
    )


@given(rules, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_what_boxes_hold(allowed: sympy.Basic, height: int, width: int) -> None:
    grid = grid_of(allowed)
    simplified = canonical(allowed)
    assert (grid_of(simplified) == grid).all()
    rule = Rule.parse(Rule(simplified).format())
    assert (grid_of(rule.allowed) == grid).all()
    starts = [np.arange(0, 12, size) for size in (height, width)]
    ends = [np.minimum(s + n, 12) - 1 for s, n in zip(starts, (height, width), strict=True)]
    cells = rule.cells(
        *((a.astype(float), b.astype(float)) for a, b in zip(starts, ends, strict=True))
    )
    for i, top in enumerate(starts[0]):
        for j, left in enumerate(starts[1]):
            box = grid[top : ends[0][i] + 1, left : ends[1][j] + 1]
            if cells[i, j] == Cell.EMPTY:
                assert not box.any()
            elif cells[i, j] == Cell.FULL:
                assert box.all()
            elif cells[i, j] == Cell.CAUSAL:
                assert (box == np.tri(*box.shape, dtype=bool)).all()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("causal", "causal"),
        ("full", "full"),
        ("(k-q<=0)&(q-k-127<=0)", "causal, window 128"),
        ("(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)", "causal, document equality"),
        ("(k-q<=0)&Eq(Step(q,70)-Step(k,70),0)", "causal, 2 documents"),
        ("Eq(floor(q/30)-floor(k/30),0)", "chunks of 30"),
        ("Ne(t0(b,k),0)", "key padding"),
        ("(k-q<=0)|(k-40<=0)", "(causal) or (prefix 41)"),
        ("Ne(t0(b,0,q,k),0)", "a mask tensor"),
        ("k-q<=0;(k-q)*x0(h)", "causal, ALiBi"),
        ("True;x0(b,h,q,k)", "full, bias"),
    ],
)
def test_names(text: str, expected: str) -> None:
    assert describe(Rule.parse(text)) == expected
    assert Rule.parse(Rule.parse(text).format()) == Rule.parse(text)


def test_one_form_for_each_relation() -> None:
    assert compare("le", KEY, QUERY) == compare("ge", QUERY, KEY) == CAUSAL
    assert compare("lt", KEY, QUERY + 1) == compare("gt", 2 * QUERY + 2, 2 * KEY) == CAUSAL
    assert compare("eq", KEY, QUERY) == compare("eq", QUERY, KEY)
    assert at_most_zero(sympy.Integer(1)) == sympy.false
    assert canonical(And(CAUSAL, at_most_zero(KEY - QUERY - 5))) == CAUSAL


def test_equal_documents_make_positions_indices() -> None:
    """Positions that begin anew with each document, compared within it."""
    documents = compare("eq", Step(QUERY, sympy.Integer(20)), Step(KEY, sympy.Integer(20)))
    positions = [index - 20 * Step(index, sympy.Integer(20)) for index in (QUERY, KEY)]
    rule = canonical(And(documents, compare("le", positions[1], positions[0])))
    assert rule == And(documents, CAUSAL)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("strategy", ["auto", "rows", "blocks", "heads", "allgather"])
@pytest.mark.parametrize(
    "rule",
    [
        "(k-q<=0)&(q-k-99<=0)",
        "(k-q<=0)&Eq(Step(q,300)-Step(k,300),0)",
        "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)",
        "(k-100<=0)|(k-q<=0)",
        "Eq(floor(q/100)-floor(k/100),0)",
        "(k-q+900<=0)",
        "k-q<=0;(k-q)*x0(h)",
    ],
)
def test_plans(rule: str, strategy: str, world_size: int) -> None:
    if strategy == "heads" and 8 % world_size:
        return
    plan = plan_attention(
        seq_len=1021, world_size=world_size, num_heads=8, head_dim=16, mask=rule, strategy=strategy
    )
    assert plan.mask is Mask.PARTIAL
    plan.simulate()
    backward = plan.backward()
    backward.simulate()
    assert Plan.parse(plan.format()) == plan and Plan.parse(backward.format()) == backward


@given(rules, st.integers(1, 5), st.sampled_from(["rows", "blocks"]), st.integers(3, 60))
@settings(max_examples=40, deadline=None)
def test_plans_of_any_rule(
    allowed: sympy.Basic, world_size: int, strategy: str, seq_len: int
) -> None:
    rule = Rule(canonical(allowed)).format()
    plan = plan_attention(
        seq_len=seq_len,
        kv_len=seq_len + 5,
        world_size=world_size,
        num_heads=2,
        head_dim=8,
        mask=rule,
        strategy=strategy,
        stages=2,
    )
    plan.simulate()
    plan.backward().simulate()


def received_tokens(plan: Plan) -> float:
    """Of the rank that receives most, in keys and values."""
    weight = 2 * plan.shape.num_kv_heads * plan.shape.head_dim * plan.shape.itemsize
    return max(map(plan.bytes_received, range(plan.grid.world_size))) / weight


def test_a_window_moves_neighbouring_chunks_only() -> None:
    world_size, tokens = 8, 16384
    plan = plan_attention(
        seq_len=world_size * tokens,
        world_size=world_size,
        num_heads=8,
        head_dim=64,
        mask="(k-q<=0)&(q-k-1023<=0)",
    )
    chunk = tokens // plan.grid.chunks_per_rank
    assert received_tokens(plan) <= 2 * max(chunk, 1024)
    assert plan.balance < 1.1
    # An attention without a mask computes 128 times as many pairs per query as this one needs.
    assert plan.flops(3) * 20 < plan_attention(
        seq_len=world_size * tokens, world_size=world_size, num_heads=8, head_dim=64, mask="full"
    ).flops(3)


@pytest.mark.parametrize("strategy", ["auto", "rows", "blocks"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_nothing_crosses_the_border_of_two_documents(world_size: int, strategy: str) -> None:
    length = 512 * world_size
    rule = f"(k-q<=0)&Eq(Step(q,{length // 2})-Step(k,{length // 2}),0)"
    plan = plan_attention(
        seq_len=length,
        world_size=world_size,
        num_heads=4,
        head_dim=16,
        mask=rule,
        strategy=strategy,
    )
    half = world_size // 2
    for tile in (tile for stage in plan.stages for tile in stage.tiles):
        spans = [*tile.queries, *tile.keys]
        sides = {plan.grid.owner(chunk) < half for s in spans for chunk in (s.start, s.stop - 1)}
        assert len(sides) == 1, tile
    if strategy != "blocks":
        for stage in plan.stages:
            for transfer in stage.fetch:
                assert (transfer.source < half) == (transfer.destination < half)


def test_documents_are_balanced() -> None:
    rule = "(k-q<=0)&Eq(Step(q,6000)-Step(k,6000),0)"
    how = {"seq_len": 8192, "world_size": 8, "num_heads": 4, "head_dim": 16, "mask": rule}
    assert plan_attention(strategy="blocks", **how).balance < 1.3
    assert plan_attention(strategy="rows", **how).balance > 1.6


def test_a_table_is_not_a_number() -> None:
    entry = table(0)(BATCH, KEY)
    cells = Rule(compare("ne", entry, sympy.Integer(0))).cells(
        (np.array([0.0]), np.array([3.0])), (np.array([0.0]), np.array([3.0]))
    )
    assert cells.tolist() == [[Cell.PARTIAL]]
