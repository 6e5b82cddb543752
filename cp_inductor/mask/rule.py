"""A rule: which (query, key) pairs exist, and what becomes of their scores.

    (k - q <= 0) & (Eq(t0(b, k), t0(b, q)))          causal within documents; t0 is a run-time table
    (k - q <= 0) & (q - k - 127 <= 0)                a sliding window of 128
    k - q <= 0; x0(h)*(k - q)                        causal, and a bias that is added to the scores
    k - q <= 0; 50*Tanh(0.02*s)                      causal, and what takes the place of a score s

A rule is a sympy expression of the indices b (batch), h (head), q (query) and k (key), which count
from the beginning of the whole tensor. A run-time tensor appears as a table, `t0(b, k)`: a function
whose values are unknown. `Rule.cells` asks a rule about boxes of queries x keys: does every pair of
the box exist, no pair, or exactly the causal triangle? Interval arithmetic answers for all boxes of
a grid at once.

Relations have one of three forms: `expression <= 0`, an equality, or the negation of one. So each
relation of integers is written in one way only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import sympy
from sympy import And, Expr, Not, Or
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from sympy.printing.str import StrPrinter

from cp_inductor.kept import lru_cache
from cp_inductor.mask.grammar import MAX_CHARACTERS, check_text, parse
from cp_inductor.mask.intervals import Bounds, decide
from cp_inductor.mask.language import (
    BATCH,
    CAUSAL,
    FULL,
    HEAD,
    INDICES,
    KEY,
    QUERY,
    SCORE,
    Step,
    compare,
    is_of_pairs,
    number_of,
    table,
    tables_of,
)


class Cell:
    """What a rule says of a box of queries x keys: which of its pairs exist.

    EMPTY: no pair. FULL: every pair. CAUSAL: the pairs with key <= query, of a square box on the
    diagonal. PARTIAL: anything else, or unknown.

    These are integers, because cells are stored in numpy arrays of all boxes of a grid. A tile that
    is computed for a box has a `cp_inductor.plan.Mask`, which has no EMPTY.
    """

    EMPTY, FULL, CAUSAL, PARTIAL = range(4)


@dataclass(frozen=True)
class Rule:
    """A mask, as an expression of indices."""

    allowed: Boolean  # true for the pairs that exist
    bias: Expr = sympy.S.Zero  # added to their scores, after these are scaled
    # The bias stays in float32 when the attention is computed in half precision.
    is_wide: bool = False
    # What takes the place of a scaled score s, if it is more than a sum with a bias. Then the bias
    # is 0.
    score: Expr = SCORE

    @staticmethod
    def parse(text: str) -> Rule:
        """Return the rule of a text, as `format` writes it; "causal" and "full" are texts, too.

        Raises:
            InvalidText: the text is not a rule; `cp_inductor.mask.grammar` says what is.
        """
        check_text(text, 2 * MAX_CHARACTERS, site="a mask")
        return Rule._parse(text)

    @staticmethod
    @lru_cache(maxsize=256)
    def _parse(text: str) -> Rule:
        if text in ("causal", "full"):
            return Rule(CAUSAL if text == "causal" else FULL)
        allowed, _, bias = text.partition(";")
        is_wide = bias.endswith(_WIDE)
        bias = bias.removesuffix(_WIDE)
        added = parse(bias, of_scores=True) if bias else sympy.Integer(0)
        condition = parse(allowed)
        if SCORE in added.free_symbols:
            return Rule(condition, is_wide=is_wide, score=added)
        return Rule(condition, added, is_wide)

    def format(self) -> str:
        """Return the text of the rule, without spaces; `parse` reads it."""
        if self.is_mask and self.allowed in (CAUSAL, FULL):
            return "causal" if self.allowed == CAUSAL else "full"
        write = _Writer().doprint
        changed = self.bias if self.score == SCORE else self.score
        text = write(self.allowed) + ("" if self.is_mask else f";{write(changed)}")
        return str(text).replace(" ", "") + (_WIDE if self.is_wide else "")

    @property
    def slope(self) -> Expr:
        """The derivative of the changed score by the score."""
        return sympy.diff(self.score, SCORE)

    @property
    def is_mask(self) -> bool:
        """Whether it only says which pairs exist."""
        return not self.bias and self.score == SCORE

    @property
    def parts(self) -> tuple[Boolean, Expr, Expr]:
        """All expressions of the rule."""
        return self.allowed, self.bias, self.score

    @cached_property
    def reads(self) -> frozenset[Expr]:
        """Every read of a run-time table, such as t0(b, k)."""
        return frozenset().union(*map(tables_of, self.parts))

    @cached_property
    def tables(self) -> dict[int, tuple[Expr, ...]]:
        """The number of each run-time table, and at which indices it is read.

        If it is read at queries and at keys, one of the two is given.
        """
        reads = sorted(self.reads, key=lambda read: str(read.args))
        return {number_of(read): read.args for read in reads}

    @property
    def computed_with(self) -> set[sympy.Symbol]:
        """The indices that the rule computes with, rather than only read a table at them."""
        where = (index for read in self.reads for index in read.args if not index.is_Symbol)
        entries = {read: sympy.Dummy(real=True) for read in self.reads}
        outside = (part.xreplace(entries) for part in self.parts)
        symbols = set().union(*(part.free_symbols for part in (*where, *outside)))
        return symbols & set(INDICES)

    @property
    def knows_heads(self) -> bool:
        """Whether heads differ: in which pairs exist, or in what is done to their scores."""
        return any(HEAD in part.free_symbols for part in self.parts)

    @property
    def reads_pairs(self) -> bool:
        """Whether a table has a value for every pair: it is a mask tensor of (query, key)."""
        return any(is_of_pairs(function.args) for function in self.reads)

    def cells(self, queries: Bounds, keys: Bounds) -> np.ndarray:
        """Return a `Cell` for every box of a grid.

        A rule that changes scores has no FULL or CAUSAL cells: every box needs the change.

        Args:
            queries: first and last query of each row of boxes, (n,) each.
            keys: first and last key of each column of boxes, (m,) each.

        Returns:
            (n, m) integers. A box whose last index is before its first is EMPTY.
        """
        (first, last), (first_key, last_key) = queries, keys
        box = {QUERY: (first[:, None], last[:, None]), KEY: (first_key[None], last_key[None])}
        shape = (len(queries[0]), len(keys[0]))
        must, may = (np.broadcast_to(part, shape) for part in decide(self.allowed, box))
        cells = np.where(may, Cell.PARTIAL, Cell.EMPTY)
        if self.is_mask:
            causal_true, _ = decide(self.allowed.xreplace({CAUSAL: sympy.true}), box)
            _, causal_false = decide(self.allowed.xreplace({CAUSAL: sympy.false}), box)
            is_square = (box[QUERY][0] == box[KEY][0]) & (box[QUERY][1] == box[KEY][1])
            is_causal = may & ~must & is_square & causal_true & ~causal_false
            cells[is_causal] = Cell.CAUSAL
            cells[must] = Cell.FULL
        is_nothing = (box[QUERY][1] < box[QUERY][0]) | (box[KEY][1] < box[KEY][0])
        cells[np.broadcast_to(is_nothing, shape)] = Cell.EMPTY
        return cells


_WIDE = ";float32"


class _Writer(StrPrinter):
    """Writes floats with all digits. Sympy writes 15, which rounds the greatest float64 to oo."""

    def _print_Float(self, expression: sympy.Float) -> str:  # noqa: N802 - as sympy calls it
        return repr(float(expression))


def rule_of_table(shape: Sequence[int], *, is_bool: bool) -> Rule:
    """Return the rule that reads a whole mask tensor as a table.

    It has the last dims of (B | 1, H | 1, S | 1, T | 1). If it is not bool, it is added to scores.
    """
    symbols = INDICES[4 - len(shape) :]
    where = tuple(
        sympy.Integer(0) if size == 1 else symbol
        for symbol, size in zip(symbols, shape, strict=True)
    )
    entry = table(0, is_integer=is_bool)(*where)
    return Rule(compare("ne", entry, sympy.Integer(0))) if is_bool else Rule(FULL, entry)


def describe(rule: Rule) -> str:
    """Return a rule in words: "causal, window 128", "document equality, key padding", ..."""
    if isinstance(rule.allowed, Or):
        text = " or ".join(sorted(f"({describe(Rule(part))})" for part in rule.allowed.args))
    else:
        parts = rule.allowed.args if isinstance(rule.allowed, And) else [rule.allowed]
        text = ", ".join(sorted(map(_describe_part, parts), key=lambda word: word != "causal"))
    if rule.bias:
        # ALiBi is (k - q) times a slope, which may depend on the head.
        slope = sympy.cancel(rule.bias / (KEY - QUERY))
        text += ", bias" if slope.free_symbols - {HEAD} else ", ALiBi"
    if rule.score != SCORE:
        text += f", score {rule.score}"
    return text


def _describe_part(part: Any) -> str:
    if part == FULL:
        return "full"
    if isinstance(part, sympy.Le) and part.rhs == 0:
        constant, rest = part.lhs.as_coeff_Add()
        shift = f", {abs(constant)} {'ahead' if constant < 0 else 'behind'}" if constant else ""
        window = f"window {1 - constant}" if constant < 0 else f"not before {constant} ahead"
        words = {KEY - QUERY: f"causal{shift}", QUERY - KEY: window, KEY: f"prefix {1 - constant}"}
        if rest in words:
            return words[rest]
    if isinstance(part, (sympy.Eq, sympy.Ne, Not)):
        inner = part.args[0] if isinstance(part, Not) else part
        is_equality, reads = isinstance(part, sympy.Eq), tables_of(inner)
        of_keys = {read for read in reads if KEY in read.free_symbols}
        of_queries = {read for read in reads if QUERY in read.free_symbols}
        if is_equality and of_keys and {r.xreplace({KEY: QUERY}) for r in of_keys} == of_queries:
            return "document equality"
        if is_equality and (steps := inner.atoms(Step)):
            return f"{1 + len(steps) // 2} documents"
        if is_equality and (floors := inner.atoms(sympy.floor)):
            sizes = (sympy.fraction(sympy.together(whole.args[0]))[1] for whole in floors)
            return f"chunks of {min(map(int, sizes))}"
        if of_keys and not of_queries:
            return "key padding"
        if of_keys & of_queries:
            return "a mask tensor"
    return str(part)


# --- Rules on rows ----------------------------------------------------------------------------

# What a column holds, as a read of a table of the rule. t0(b, k): the values at the rows of keys,
# t0(b, q): at those of queries, (rows,), or (H, rows) if heads are among the indices. t0(): the
# whole table, which is read at computed indices.
Column: TypeAlias = Any

# The columns that every rule on rows has.
LANE_OF_QUERY, LANE_OF_KEY, POSITION_OF_QUERY, POSITION_OF_KEY = range(4)

# A pair is of one batch entry: that of its query. A row of none, which makes no pairs, computes as
# if it were of the first: a table may be read there.
_ENTRY = sympy.Max(table(LANE_OF_QUERY)(QUERY), 0)


@lru_cache(maxsize=256)
def rule_of_rows(text: str, num_groups: int) -> tuple[Rule, tuple[Column, ...]]:
    """Return a rule on rows: on tokens that a plan has gathered, wherever they come from.

        rule        (k - q <= 0) & Eq(t0(b, k), t0(b, q))
          =>
        on rows     (t3(k) - t2(q) <= 0) & Eq(t0(q), t1(k)) & Eq(t5(k), t4(q))
        columns     0, 1: the lanes of queries and keys              2, 3: their positions
                    4, 5: what t0 holds for them

    A rule speaks of positions in a whole sequence. A plan made at run time gathers rows of queries
    and of keys from several ranks, and from several batch entries, into one tile. There, q and k
    number the rows, and whatever the rule says of a token is read from a column that was gathered
    with the rows. A lane is a group of heads of a batch entry: lane = entry * groups + group. Rows
    of different lanes make no pairs; so a row of no lane makes none at all. Heads are cut into
    groups only if a rule does not tell them apart: `num_groups` is 1 if it does.

    Returns:
        The rule, which has the same pairs, biases and changed scores, and what its tables hold
        behind the four that every such rule has.
    """
    rule = Rule.parse(text)
    assert not rule.reads_pairs, text
    assert num_groups == 1 or not rule.knows_heads, text
    on_row = {
        BATCH: sympy.floor(_ENTRY / num_groups),
        QUERY: table(POSITION_OF_QUERY)(QUERY),
        KEY: table(POSITION_OF_KEY)(KEY),
    }
    columns: dict[Column, Any] = {}
    for read in sorted(rule.reads, key=str):
        number = 4 + len(columns)
        columns.setdefault(_column_of(read), table(number, is_integer=bool(read.is_integer)))

    def on_rows(expression: Any) -> Any:
        if isinstance(expression, AppliedUndef):
            column = _column_of(expression)
            if not column.args:
                return columns[column](*map(on_rows, expression.args))
            heads = (HEAD,) if HEAD in column.args else ()
            return columns[column](*heads, KEY if KEY in column.args else QUERY)
        if isinstance(expression, sympy.Symbol):
            return on_row.get(expression, expression)
        return expression.func(*map(on_rows, expression.args)) if expression.args else expression

    lanes = table(LANE_OF_QUERY)(QUERY), table(LANE_OF_KEY)(KEY)
    same_lane = sympy.Eq(*lanes, evaluate=False)
    allowed = sympy.And(same_lane, on_rows(rule.allowed))
    changed = Rule(allowed, on_rows(rule.bias), rule.is_wide, on_rows(rule.score))
    return changed, tuple(columns)


def _column_of(read: Any) -> Column:
    """Return a read if it is of one row, at plain indices; else the whole table, as t0().

    What depends on the batch entry alone is a value of the query's row.
    """
    symbols = [index for index in read.args if index.is_Symbol]
    are_plain = all(index.is_Symbol or index.is_Integer for index in read.args)
    is_of_row = not is_of_pairs(symbols) and not {BATCH, QUERY, KEY}.isdisjoint(symbols)
    return read if are_plain and is_of_row and len(symbols) == len(set(symbols)) else read.func()
