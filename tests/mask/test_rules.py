"""Rules without tensors: what they say of boxes of pairs, and the plans made of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import And, Not, Or

from cp_inductor.errors import InvalidText
from cp_inductor.mask.evaluate import sides
from cp_inductor.mask.language import (
    BATCH,
    CAUSAL,
    HEAD,
    KEY,
    QUERY,
    SCORE,
    Step,
    at_most_zero,
    compare,
    normal,
    table,
)
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan import Mask, Recipe, resolve
from tests.support.plans import make_plan

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
    of_queries = [allowed.subs(QUERY, q) for q in range(12)]
    return np.array([[bool(row.subs(KEY, k)) for k in range(12)] for row in of_queries])


@pytest.mark.slow
@given(rules, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_what_boxes_hold(allowed: sympy.Basic, height: int, width: int) -> None:
    grid = grid_of(allowed)
    rule = Rule.parse(Rule(normal(allowed)).format())
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


def test_equal_documents_make_positions_indices() -> None:
    """Positions that begin anew with each document, compared within it."""
    documents = compare("eq", Step(QUERY, sympy.Integer(20)), Step(KEY, sympy.Integer(20)))
    positions = [index - 20 * Step(index, sympy.Integer(20)) for index in (QUERY, KEY)]
    rule = normal(And(documents, compare("le", positions[1], positions[0])))
    assert rule == And(documents, CAUSAL)


def test_equal_sums_of_steps_up_and_down_say_nothing_of_each() -> None:
    up, down = ([Step(index, sympy.Integer(at)) for index in (QUERY, KEY)] for at in (3, 6))
    equal = compare("eq", up[0] - down[0], up[1] - down[1])
    rule = And(equal, at_most_zero(up[1]))
    assert (grid_of(normal(rule)) == grid_of(rule)).all()


def test_division_is_exact() -> None:
    """49 * (1 / 49) is less than 1 in float64: queries to 49 would miss the keys of 49 to 97."""
    for divisor in range(1, 200):
        rule = Rule.parse(f"Eq(floor(q/{divisor})-floor(k/{divisor}),0)")
        first, last = np.array([0.0]), np.array([float(divisor)])
        assert rule.cells((first, last), (last + 1, last + 2)) != Cell.EMPTY or divisor == 1


@given(rules, st.integers(1, 5), st.sampled_from(["rows", "blocks"]), st.integers(3, 60))
@settings(max_examples=40, deadline=None)
def test_plans_of_any_rule(
    allowed: sympy.Basic, world_size: int, strategy: str, seq_len: int
) -> None:
    rule = Rule(normal(allowed)).format()
    sizes = {"seq_len": seq_len, "kv_len": seq_len + 5}
    plan = make_plan(world_size, 0, 2, mask=rule, strategy=strategy, stages=2, **sizes)
    plan.simulate()
    plan.backward().simulate()


def test_a_window_moves_neighbouring_chunks_only() -> None:
    tokens = 16384
    plan = make_plan(8, tokens, 8, mask="(k-q<=0)&(q-k-1023<=0)")
    chunk = tokens // plan.grid.chunks_per_rank
    bytes_of_a_token = 2 * plan.shape.num_kv_heads * plan.shape.head_dim * plan.shape.itemsize
    received = max(map(plan.bytes_received, range(plan.grid.world_size))) / bytes_of_a_token
    assert received <= 2 * max(chunk, 1024)
    assert plan.balance < 1.1
    # An attention without a mask computes 128 times as many pairs per query as this one needs.
    assert plan.flops(3) * 20 < make_plan(8, tokens, 8, mask="full").flops(3)


@pytest.mark.parametrize("strategy", ["auto", "rows", "blocks"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_nothing_crosses_the_border_of_two_documents(world_size: int, strategy: str) -> None:
    length = 512 * world_size
    rule = f"(k-q<=0)&Eq(Step(q,{length // 2})-Step(k,{length // 2}),0)"
    plan = make_plan(world_size, 512, 4, mask=rule, strategy=strategy)
    half = world_size // 2
    for tile in (tile for stage in plan.stages for tile in stage.tiles):
        spans = [*tile.queries, *tile.keys]
        sides = {
            chunk // plan.grid.chunks_per_rank < half
            for s in spans
            for chunk in (s.start, s.stop - 1)
        }
        assert len(sides) == 1, tile
    if strategy != "blocks":
        for stage in plan.stages:
            for transfer in stage.fetch:
                assert (transfer.source < half) == (transfer.destination < half)


def test_documents_are_balanced() -> None:
    rule = "(k-q<=0)&Eq(Step(q,6000)-Step(k,6000),0)"
    assert make_plan(8, 1024, 4, mask=rule, strategy="blocks").balance < 1.3
    assert make_plan(8, 1024, 4, mask=rule, strategy="rows").balance > 1.6


WINDOW, STRICT = "(k-q<=0)&(q-k-99<=0)", "k-q+1<=0"


def test_many_ranks_take_rows_where_these_are_balanced() -> None:
    assert make_plan(32, 4096, 4, mask=WINDOW).strategy == "rows"
    strict = make_plan(32, 4096, 4, mask=STRICT)
    assert strict.strategy != "rows" and strict.balance < 1.1
    assert make_plan(32, 4096, 4, mask=STRICT, strategy="rows").balance > 1.5


@pytest.mark.parametrize(("world_size", "chunks"), [(2, 16), (512, 4)])
def test_chunks_under_a_rule_are_no_more_than_calls_of_kernels_may_be(
    world_size: int, chunks: int
) -> None:
    length = 2048 * world_size
    recipe = Recipe(world_size, length, length, 4, 4, 16, 2, WINDOW, strategy="rows", stages=1)
    assert resolve(recipe, site="test").chunks == chunks


def test_a_table_is_not_a_number() -> None:
    entry = table(0)(BATCH, KEY)
    cells = Rule(compare("ne", entry, sympy.Integer(0))).cells(
        (np.array([0.0]), np.array([3.0])), (np.array([0.0]), np.array([3.0]))
    )
    assert cells.tolist() == [[Cell.PARTIAL]]


@pytest.mark.parametrize(
    "text",
    ["k<=q", "q >= k", "~(k > q)", "not k > q", "q + 1 > k", "2*k <= 2*q", "(k <= q) & (0 <= k)"],
)
def test_one_rule_gets_one_plan(text: str) -> None:
    plan, expected = (make_plan(4, 0, 4, seq_len=1003, mask=mask) for mask in (text, "causal"))
    assert plan == expected
    assert plan.mask is Mask.CAUSAL


def test_one_form_of_a_window() -> None:
    texts = ("(k - q <= 0) & (q - k - 127 <= 0)", "k <= q < k + 128", "k <= q and q - k < 128")
    rules = {normal(Rule.parse(text).allowed) for text in texts}
    assert len(rules) == 1


def test_numbers_that_are_no_integers_are_not_rounded() -> None:
    """x < 0 is x + 1 <= 0 of integers alone."""
    slope = table(0, is_integer=False)(KEY)
    assert normal(slope < 0) == (slope < 0)
    assert normal(sympy.Or(slope < 0, KEY <= 0)) == sympy.Or(slope < 0, KEY <= 0)


@pytest.mark.parametrize(("read", "cell"), [("x0(k)", Cell.PARTIAL), ("t0(k)", Cell.FULL)])
def test_a_remainder_of_floats_reaches_beyond_that_of_integers(read: str, cell: Cell) -> None:
    """9.5 modulo 5 is 4.5: more than 4, the greatest remainder of integers."""
    first, last = np.array([0, 8]), np.array([7, 15])
    cells = Rule.parse(f"Mod({read},5)-4<=0").cells((first, last), (first, last))
    assert (cells == cell).all()


def test_a_relation_at_the_end_of_the_integers() -> None:
    """Nothing is added to what is read: of the greatest number of a dtype it would be the least."""
    at_query, at_key = (table(0)(BATCH, index) for index in (QUERY, KEY))
    for relation in (compare("lt", at_query, at_key), compare("gt", at_key, at_query)):
        assert sides(relation) == (sympy.Lt, at_query, at_key)
    assert sides(compare("le", at_query, at_key)) == (sympy.Le, at_query, at_key)


def test_operators_bind_as_in_python() -> None:
    for text in ("-q**2 + k <= 0", "q - k - 1 <= 0", "q*2 - k*3 + 4 < 5", "q % 5 == k % 5"):
        expected = np.array([[eval(text, {"q": q, "k": k}) for k in range(12)] for q in range(12)])
        assert (grid_of(Rule.parse(text).allowed) == expected).all(), text
    both = Rule.parse("k <= q and q - k < 3 or k < 2").allowed
    assert both == Rule.parse("((k <= q) & (q - k < 3)) | (k < 2)").allowed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__import__('os').system('touch {0}')", "\"'{0}"),
        ("().__class__.__base__.__subclasses__()", "'().__class__"),
        ("exec(q)", "the name 'exec'"),
        ("lambda: 0", "': 0'"),
        ("[q for q in k]", "'[q for q in k]'"),
        ("'a' <= q", "\"'a' <= q\""),
        ("", "the end of the text"),
        ("k - q", "the number 'k - q'"),
        ("k <= q; k <= q", "the condition 'k <= q'"),
        ("9**9**9 <= q", "the exponent"),
        ("(q+1)**64 <= k", "the exponent"),
        ("(q+k+b+h)**6 <= 0", "products of more than"),
        ("(" * 5000 + "q" + ")" * 5000, "too many nested parentheses"),
        ("1" * 30 + " <= q", "the number '111"),
        ("1e999 <= q", "the number"),
        ("oo - oo <= q", "what is not a number"),
        ("q/0 <= 1", "a division by '0'"),
        ("Mod(q, 0) <= 1", "Mod of 0"),
        ("Step(q, k) <= 1", "Step of k"),
        ("t0 <= 1", "the name 't0', which is no value"),
        ("t0(q, k, b, h, q) <= 1", "t0 of 5 arguments"),
        ("floor(q, k) <= 1", "floor of 2 arguments"),
        ("~q", "the number 'q'"),
        ("-(q <= k) <= 1", "the condition 'q <= k'"),
        ("Piecewise((q, k <= 1)) <= 0", "whose last condition is not True"),
        ("k <= q # as ever", "'# as ever'"),
        ("q in k", "'in' or 'is'"),
        ("Eq(*q, k)", "'*q'"),
        ("(q, k)", "'(q, k)'"),
    ],
)
def test_text_that_is_no_rule(text: str, words: str, tmp_path: Path) -> None:
    witness = tmp_path / "w"
    text = text.replace("{0}", str(witness))
    with pytest.raises(InvalidText) as refused:
        make_plan(2, 32, 2, mask=text)
    assert words.replace("{0}", "") in refused.value.got
    assert not witness.exists()


def test_nothing_of_a_recipe_is_evaluated(tmp_path: Path) -> None:
    """What a program that somebody has saved says, the op reads as it is."""
    witness = tmp_path / "w"
    text = Recipe(2, 64, 64, 2, 2, 8, 4, f"open('{witness}','w')<=q").format()
    with pytest.raises(InvalidText):
        Rule.parse(Recipe.parse(text).rule)
    assert not witness.exists()


@pytest.mark.parametrize(
    "text",
    [
        "&".join(f"(k*{n + 2}-q<={n})" for n in range(2000)),
        "+".join(["q"] * 40_000) + " <= 0",
        "*".join(f"t{n}(q)" for n in range(3000)) + " <= 0",
        "Min(" + ",".join(f"t{n}(q)" for n in range(500)) + ") <= 0",
        "q" + "//7" * 5000 + " <= 1",
        "~" * 10_000 + "(k <= q)",
        "Piecewise(" + ",".join(f"(q,k<={n})" for n in range(255)) + ",(1,True)) <= 0",
    ],
    ids=lambda text: text[:8],
)
def test_too_much_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidText, match=r"more than|arguments"):
        Rule.parse(text)


def test_a_chain_may_be_as_long_as_documents_make_it() -> None:
    steps = [f"Step({index},{9 * n})" for n in range(1, 257) for index in "qk"]
    rule = Rule.parse("Eq(" + "+".join(steps[::2]) + "-" + "-".join(steps[1::2]) + ",0)")
    assert Rule.parse(rule.format()) == rule


@pytest.mark.parametrize("number", [1.7976931348623157e308, -3.4028234663852886e38, 1 / 3, 5e-324])
def test_numbers_are_written_as_they_are(number: float) -> None:
    """The greatest of float64, rounded to 15 digits, is infinite."""
    rule = Rule(CAUSAL, sympy.Max(sympy.Float(number), table(0, is_integer=False)(KEY)))
    assert float(Rule.parse(rule.format()).bias.args[0]) == number


@pytest.mark.parametrize(
    "text",
    [
        "k-q<=0;50*Tanh(0.02*s)",
        "True;s*Power(0.5,h)",
        "(k-q<=0)&(-k+q-8<=0);Exp(0.1*s)*Sigmoid(s)+x0(h,k)",
        "k-q<=0;Piecewise((0.5*s,k-q<=-8),(s,True))",
    ],
)
def test_what_becomes_of_scores(text: str) -> None:
    rule = Rule.parse(text)
    assert Rule.parse(rule.format()) == rule
    assert not rule.bias
    assert not rule.is_mask
    edges = np.array([0, 8, 16])
    cells = rule.cells((edges[:-1], edges[1:] - 1), (edges[:-1], edges[1:] - 1))
    # Every box needs the change.
    assert set(cells.flat) <= {Cell.EMPTY, Cell.PARTIAL}
    step = 1e-6
    for s in (-3.0, 0.25, 2.0):
        at = {read: sympy.Float(0.3) for read in rule.reads} | {HEAD: 2, QUERY: 9, KEY: 4}
        low, high = (rule.score.subs({**at, SCORE: s + d}) for d in (-step, step))
        slope = float(rule.slope.subs({**at, SCORE: s}))
        assert float(high - low) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "computed_with"),
    [
        ("True;x0(h)*(k-q)", {QUERY, KEY}),
        ("True;x0(k)*h", {HEAD}),
        ("Eq(h*t0(b,k),1);s*x1(b)", {HEAD}),
        ("True;x0(h+1,b)", {HEAD}),
        ("Eq(t0(b,q)-t0(b,k),0)", set()),
    ],
)
def test_what_a_rule_computes_with(text: str, computed_with: set[sympy.Symbol]) -> None:
    """A factor that is read from a table may be 0, but need not be."""
    assert Rule.parse(text).computed_with == computed_with


@pytest.mark.parametrize("text", ["s<=0", "k-q<=0;s<=0", "k-q<=0;Power(q,k)", "k-q<=0;Tanh(s,s)"])
def test_what_is_no_score(text: str) -> None:
    with pytest.raises(InvalidText):
        Rule.parse(text)
