"""Which (query, key) pairs exist, and what is added to their scores: as expressions of indices.

    (k - q <= 0) & (Eq(t0(b, k), t0(b, q)))          causal within documents; t0 is a run-time table
    (k - q <= 0) & (q - k - 127 <= 0)                a sliding window of 128

Expressions are sympy's, in the indices b (batch), h (head), q (query) and k (key), which count from
the beginning of the whole tensor. What depends on run-time tensors is a table, `t0(b, k)`: a
function of which nothing is known but its arguments. A rule is asked about boxes of queries and
keys by interval arithmetic, for all boxes of a grid at once: whether all pairs of a box exist, or
none, or exactly those of the causal triangle.

Relations are kept as `expression <= 0`, equalities and their negations, so that one relation of
integers has one form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import sympy
from sympy import And, Expr, Not, Or
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue
from sympy.printing.str import StrPrinter

from cp_inductor.errors import InvalidText
from cp_inductor.plan.grammar import Function, Grammar, shortened

__all__ = [
    "BATCH",
    "CAUSAL",
    "FULL",
    "HEAD",
    "KEY",
    "QUERY",
    "Box",
    "Cell",
    "Rule",
    "Step",
    "at_most_zero",
    "bounds",
    "canonical",
    "compare",
    "describe",
    "evaluate",
    "is_of_pairs",
    "normal",
    "number_of",
    "rule_of_table",
    "sides",
    "table",
    "without_tables",
]

BATCH, HEAD, QUERY, KEY = sympy.symbols("b h q k", integer=True, nonnegative=True)
CAUSAL: Boolean = sympy.Le(KEY - QUERY, 0)
FULL: Boolean = sympy.true


class Step(sympy.Function):
    """Step(x, at): 1 where x >= at, else 0. Sums of them are what changes along a sequence."""

    nargs = 2
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, x: Expr, at: Expr) -> Expr | None:
        """Evaluate where x is a number, or cannot be less."""
        difference = x - at
        if difference.is_nonnegative:
            return sympy.Integer(1)
        if difference.is_negative:
            return sympy.Integer(0)
        return None


def table(index: int, *, is_integer: bool = True) -> Any:
    """Return the function that stands for a run-time table; apply it to indices.

    Integers, and truth values as 0 and 1, are called t0, t1, ...; other numbers x0, x1, ...
    """
    if is_integer:
        return sympy.Function(f"t{index}", integer=True)
    return sympy.Function(f"x{index}", real=True)


class Cell:
    """What a rule says of a box: of its pairs exist none, all, the causal ones, or some."""

    EMPTY, FULL, CAUSAL, PARTIAL = range(4)


# Inclusive bounds of an index, arrays that broadcast against each other.
Bounds = tuple[np.ndarray, np.ndarray]
Box = Mapping[sympy.Symbol, Bounds]


@dataclass(frozen=True)
class Rule:
    """A mask.

    Attributes:
        allowed: the pairs that exist.
        bias: added to their scores, in units of the scaled score.
        is_wide: the bias is in float32, and of an attention in a half type not rounded to that.
    """

    allowed: Boolean
    bias: Expr = sympy.S.Zero
    is_wide: bool = False

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Rule:
        """Return the rule that `format` wrote; also "causal" and "full".

        Raises:
            InvalidText: it is no rule; see `cp_inductor.plan.grammar`.
        """
        if text in ("causal", "full"):
            return Rule(CAUSAL if text == "causal" else FULL)
        allowed, _, bias = text.partition(";")
        is_wide = bias.endswith(_WIDE)
        bias = bias.removesuffix(_WIDE)
        added = _GRAMMAR.parse(bias) if bias else sympy.Integer(0)
        rule = Rule(_GRAMMAR.parse(allowed), added, is_wide)
        # An index is both to sympy.
        if isinstance(rule.allowed, Expr) or not isinstance(rule.bias, Expr):
            raise InvalidText(
                site=f"the mask {shortened(text)}",
                expected="a condition on q and k, and after ';' what is added to the scores",
                got="a number" if isinstance(rule.allowed, Expr) else "a condition after ';'",
                remedy="compare, as in 'k - q <= 0'",
            )
        return rule

    def format(self) -> str:
        """Return the rule as one word."""
        if not self.bias:
            if self.allowed == CAUSAL:
                return "causal"
            if self.allowed == FULL:
                return "full"
        write = _Writer().doprint
        text = write(self.allowed) + (f";{write(self.bias)}" if self.bias else "")
        return str(text).replace(" ", "") + (_WIDE if self.is_wide else "")

    @cached_property
    def tables(self) -> dict[int, tuple[Expr, ...]]:
        """The run-time tables, and the indices that each is read at; of the first mention."""
        found: dict[int, tuple[Expr, ...]] = {}
        for function in sorted(_tables_of(self.allowed) | _tables_of(self.bias), key=str):
            found.setdefault(number_of(function), function.args)
        return found

    @property
    def computed_with(self) -> set[sympy.Symbol]:
        """The indices that occur elsewhere than as an index of a table."""
        parts = [self.allowed, self.bias]
        plain = {f: sympy.Integer(0) for f in _tables_of(self.allowed) | _tables_of(self.bias)}
        found = set().union(*(_without(part, plain).free_symbols for part in parts))
        for function in plain:
            found |= {
                s for index in function.args if not index.is_Symbol for s in index.free_symbols
            }
        return found

    @property
    def reads_pairs(self) -> bool:
        """Whether a table has a value for every pair: a mask that somebody has made."""
        functions = _tables_of(self.allowed) | _tables_of(self.bias)
        return any(is_of_pairs(function.args) for function in functions)

    def cells(self, queries: Bounds, keys: Bounds) -> np.ndarray:
        """Say of every box of a grid which of its pairs exist, as `Cell` counts.

        Args:
            queries: first and last of each row of boxes, each (n,).
            keys: the same of each column, each (m,).

        Returns:
            (n, m) integers. Boxes of nothing, whose last is before their first, are empty.
        """
        box = {
            QUERY: (queries[0][:, None], queries[1][:, None]),
            KEY: (keys[0][None], keys[1][None]),
        }
        shape = (len(queries[0]), len(keys[0]))
        must, may = (np.broadcast_to(part, shape) for part in _decide(self.allowed, box))
        cells = np.where(may, Cell.PARTIAL, Cell.EMPTY)
        if not self.bias:
            causal_true, _ = _decide(self.allowed.xreplace({CAUSAL: sympy.true}), box)
            _, causal_false = _decide(self.allowed.xreplace({CAUSAL: sympy.false}), box)
            is_square = (box[QUERY][0] == box[KEY][0]) & (box[QUERY][1] == box[KEY][1])
            is_causal = may & ~must & is_square & causal_true & ~causal_false
            cells[is_causal] = Cell.CAUSAL
            cells[must] = Cell.FULL
        is_nothing = (box[QUERY][1] < box[QUERY][0]) | (box[KEY][1] < box[KEY][0])
        cells[np.broadcast_to(is_nothing, shape)] = Cell.EMPTY
        return cells


_WIDE = ";float32"


class _Writer(StrPrinter):
    """Writes floats so that they are read as what they are: sympy rounds to 15 digits.

    The greatest of float64, rounded so, is infinite.
    """

    def _print_Float(self, expression: sympy.Float) -> str:  # noqa: N802 - as sympy calls it
        return repr(float(expression))


def _make_table(name: str) -> Function:
    return Function(table(int(name[1:]), is_integer=name[0] == "t"), (1, 4))


def _step(x: Expr, at: Expr) -> Expr:
    if not isinstance(at, sympy.Integer):
        raise ValueError(f"{at}, where an integer was to come")
    return Step(x, at)


def _mod(x: Expr, divisor: Expr) -> Expr:
    if not isinstance(divisor, sympy.Integer) or divisor <= 0:
        raise ValueError(f"{divisor}, where a positive integer was to come")
    return sympy.Mod(x, divisor)


# What `Rule.format` writes, and `evaluate` and `bounds` read.
_GRAMMAR = Grammar(
    values={
        **{str(symbol): symbol for symbol in (BATCH, HEAD, QUERY, KEY)},
        **{"True": sympy.true, "False": sympy.false, "oo": sympy.oo},
    },
    functions={
        "Eq": Function(sympy.Eq, (2, 2), compares=True),
        "Ne": Function(sympy.Ne, (2, 2), compares=True),
        "Min": Function(sympy.Min, (2, 8), compares=True),
        "Max": Function(sympy.Max, (2, 8), compares=True),
        "floor": Function(sympy.floor, (1, 1)),
        "Mod": Function(_mod, (2, 2)),
        "Step": Function(_step, (2, 2)),
    },
    tables=(re.compile("[tx](0|[1-9][0-9]{0,3})"), _make_table),
)


def _without(expression: Any, replaced: Mapping[Any, Expr]) -> Any:
    if isinstance(expression, Relational):
        # Evaluated, a relation of nothing but numbers would be gone, which is well.
        return expression.func(*(part.xreplace(replaced) for part in expression.args))
    if isinstance(expression, (And, Or, Not)):
        return expression.func(*(_without(part, replaced) for part in expression.args))
    return expression.xreplace(replaced)


def _tables_of(expression: Any) -> set[Any]:
    return set(expression.atoms(AppliedUndef))


def without_tables(allowed: Boolean, *, otherwise: bool = True) -> Boolean:
    """Return the pairs that may exist, whatever run-time tables hold."""
    if isinstance(allowed, Not):
        return Not(without_tables(allowed.args[0], otherwise=not otherwise))
    if isinstance(allowed, (And, Or)):
        return allowed.func(*(without_tables(p, otherwise=otherwise) for p in allowed.args))
    return sympy.sympify(otherwise) if _tables_of(allowed) else allowed


def is_of_pairs(indices: Sequence[Expr]) -> bool:
    """Whether a table that is read at these indices has a value for every query and key."""
    return {QUERY, KEY} <= set(indices)


def rule_of_table(shape: Sequence[int], *, is_bool: bool) -> tuple[Rule, tuple[Expr, ...]]:
    """Return the rule that reads a mask as it is, and the indices at which it does.

    Args:
        shape: the last of (B | 1, H | 1, S | 1, T | 1).
        is_bool: whether it says which pairs exist; else it is added to their scores.
    """
    symbols = (BATCH, HEAD, QUERY, KEY)[4 - len(shape) :]
    where = tuple(
        sympy.Integer(0) if size == 1 else symbol
        for symbol, size in zip(symbols, shape, strict=True)
    )
    entry = table(0, is_integer=is_bool)(*where)
    rule = Rule(compare("ne", entry, sympy.Integer(0))) if is_bool else Rule(FULL, entry)
    return rule, where


def number_of(function: Any) -> int:
    """Return which run-time table an expression such as t3(b, k) reads."""
    return int(function.func.__name__[1:])


# --- One form for each relation ---------------------------------------------------------------


def at_most_zero(expression: Expr) -> Boolean:
    """Return `expression <= 0`, divided by the common factor of its integer coefficients."""
    constant, rest = sympy.expand(expression).as_coeff_Add()
    content, rest = rest.as_content_primitive()
    if content.is_integer and content > 1 and constant.is_integer:
        # c x + d <= 0  <=>  x <= floor(-d / c)
        constant = -((-constant) // content)
    elif content != 1:
        rest = content * rest
    return sympy.Le(rest + constant, 0)


def compare(word: str, left: Expr, right: Expr) -> Boolean:
    """Return a relation of integers: word is one of lt le gt ge eq ne."""
    difference = sympy.expand(left - right)
    match word:
        case "le":
            return at_most_zero(difference)
        case "lt":
            return at_most_zero(difference + 1)
        case "ge":
            return at_most_zero(-difference)
        case "gt":
            return at_most_zero(1 - difference)
    if difference.is_number:
        is_equal = sympy.sympify(bool(difference == 0))
        return is_equal if word == "eq" else Not(is_equal)
    # Of the two signs, the one that is written first.
    difference = max(difference, sympy.expand(-difference), key=str)
    constant, rest = difference.as_coeff_Add()
    equality = sympy.Eq(rest, -constant)
    return equality if word == "eq" else Not(equality)


_WORDS: Mapping[type, str] = {
    sympy.Le: "le",
    sympy.Lt: "lt",
    sympy.Ge: "ge",
    sympy.Gt: "gt",
    sympy.Eq: "eq",
    sympy.Ne: "ne",
}


def canonical(allowed: Boolean) -> Boolean:
    """Simplify what is known to hold together: bounds of one expression, and equal documents."""
    if isinstance(allowed, Or):
        return Or(*map(canonical, allowed.args))
    if not isinstance(allowed, And):
        return _without_negation(allowed)
    parts = [canonical(part) for part in allowed.args]
    for part in list(parts):
        if isinstance(part, sympy.Eq):
            equal = _what_equality_implies(part)
            parts = [other if other is part else _substitute(other, equal) for other in parts]
    return And(*_tightest(parts))


def _without_negation(allowed: Boolean) -> Boolean:
    """Return the one form of a relation, and move negations into what is negated."""
    if isinstance(allowed, Not):
        inner = allowed.args[0]
        if isinstance(inner, (And, Or)):
            opposite = Or if isinstance(inner, And) else And
            return canonical(opposite(*(Not(part) for part in inner.args)))
    # Of numbers that are no integers, x < 0 is not x + 1 <= 0.
    is_open = isinstance(allowed, (sympy.Lt, sympy.Ge, sympy.Gt))
    if is_open and (allowed.lhs - allowed.rhs).is_integer:
        return compare(_WORDS[type(allowed)], *allowed.args)
    return allowed


def normal(allowed: Boolean) -> Boolean:
    """Return the one form of a condition, however it was written: k <= q is k - q <= 0."""
    if isinstance(allowed, (And, Or, Not)):
        return canonical(allowed.func(*map(normal, allowed.args)))
    if isinstance(allowed, Relational) and (allowed.lhs - allowed.rhs).is_integer:
        return canonical(compare(_WORDS[type(allowed)], *allowed.args))
    return allowed


def _what_equality_implies(equality: sympy.Eq) -> dict[Expr, Expr]:
    """Where sums of steps up are equal for two indices, so is each of the steps."""
    difference = sympy.expand(equality.lhs - equality.rhs)
    if difference.as_coeff_Add()[0] or not difference.atoms(Step):
        return {}
    coefficients = difference.as_coefficients_dict()
    if any(not isinstance(term, Step) for term in coefficients):
        return {}
    of_query = {t.args[1]: c for t, c in coefficients.items() if t.args[0] == QUERY}
    of_key = {t.args[1]: -c for t, c in coefficients.items() if t.args[0] == KEY}
    signs = {bool(c > 0) for c in of_query.values()}
    if of_query != of_key or len(signs) != 1 or len(of_query) * 2 != len(coefficients):
        return {}
    return {Step(KEY, at): Step(QUERY, at) for at in of_query}


def _substitute(part: Boolean, equal: dict[Expr, Expr]) -> Boolean:
    if not equal or not part.atoms(Step):
        return part
    if isinstance(part, sympy.Le):
        return at_most_zero(part.xreplace(equal).lhs - part.rhs)
    if isinstance(part, (And, Or, Not)):
        return part.func(*(_substitute(inner, equal) for inner in part.args))
    return part


def _tightest(parts: Sequence[Boolean]) -> Iterator[Boolean]:
    """Of several upper bounds of one expression, keep the lowest."""
    bounds: dict[Expr, Expr] = {}
    for part in parts:
        if isinstance(part, sympy.Le) and part.rhs == 0:
            constant, rest = part.lhs.as_coeff_Add()
            bounds[rest] = max(bounds.get(rest, constant), constant)
        else:
            yield part
    for rest, constant in bounds.items():
        yield sympy.Le(rest + constant, 0)


# --- Intervals --------------------------------------------------------------------------------


def _decide(allowed: Boolean, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return of every box whether all its pairs are surely allowed, and whether any may be."""
    if isinstance(allowed, (BooleanTrue, BooleanFalse)):
        known = np.array(bool(allowed))
        return known, known
    if isinstance(allowed, (And, Or)):
        decided = [_decide(part, box) for part in allowed.args]
        combine = np.logical_and if isinstance(allowed, And) else np.logical_or
        must, may = decided[0]
        for other_must, other_may in decided[1:]:
            must, may = combine(must, other_must), combine(may, other_may)
        return must, may
    if isinstance(allowed, Not):
        must, may = _decide(allowed.args[0], box)
        return ~may, ~must
    assert isinstance(allowed, Relational), allowed
    low, high = bounds(sympy.expand(allowed.lhs - allowed.rhs), box)
    match type(allowed):
        case sympy.Le:
            return high <= 0, low <= 0
        case sympy.Lt:
            return high < 0, low < 0
        case sympy.Ge:
            return low >= 0, high >= 0
        case sympy.Gt:
            return low > 0, high > 0
        case sympy.Eq:
            return (low == 0) & (high == 0), (low <= 0) & (high >= 0)
    return (low > 0) | (high < 0), (low != 0) | (high != 0)


_UNKNOWN: Bounds = (np.array(-np.inf), np.array(np.inf))


def bounds(expression: Expr, box: Box) -> Bounds:
    """Return bounds of an expression over boxes; of each variable by itself, so not the least."""
    if expression.is_number:
        value = np.array(float(expression))
        return value, value
    if isinstance(expression, sympy.Symbol):
        return box.get(expression, (np.array(0.0), np.array(np.inf)))
    parts = [bounds(part, box) for part in expression.args]
    match expression.func:
        case sympy.Add:
            return _fold(np.add, parts)
        case sympy.Mul:
            result = parts[0]
            for other in parts[1:]:
                with np.errstate(invalid="ignore"):
                    ends = [
                        np.nan_to_num(a * b, nan=0.0, posinf=np.inf, neginf=-np.inf)
                        for a in result
                        for b in other
                    ]
                result = _outermost(ends)
            return result
        case sympy.floor:
            return np.floor(parts[0][0]), np.floor(parts[0][1])
        case sympy.Min:
            return _fold(np.minimum, parts)
        case sympy.Max:
            return _fold(np.maximum, parts)
    if expression.func is Step:
        (low, high), at = parts[0], float(expression.args[1])
        return (low >= at).astype(float), (high >= at).astype(float)
    if expression.func is sympy.Mod and expression.args[1].is_number:
        return np.array(0.0), parts[1][1] - 1
    return _UNKNOWN


def _outermost(ends: Sequence[np.ndarray]) -> Bounds:
    low = high = ends[0]
    for end in ends[1:]:
        low, high = np.minimum(low, end), np.maximum(high, end)
    return low, high


def _fold(function: Callable[..., np.ndarray], parts: Sequence[Bounds]) -> Bounds:
    low, high = parts[0]
    for other_low, other_high in parts[1:]:
        low, high = function(low, other_low), function(high, other_high)
    return low, high


# --- Values -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operations:
    """What an expression is made of, on values of some kind; see `evaluate`.

    Attributes:
        read: (number of the table, values of its indices, their expressions) -> value.
        floor_divide, minimum, maximum: of two values.
        choose: (condition, value, other).
        as_integer: of a condition.
        boolean: of a constant.
    """

    read: Callable[[int, tuple[Any, ...], tuple[Expr, ...]], Any]
    floor_divide: Callable[[Any, int], Any]
    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]
    as_integer: Callable[[Any], Any]
    boolean: Callable[[bool], Any]


def evaluate(expression: Any, values: Mapping[sympy.Symbol, Any], with_: Operations) -> Any:
    """Return the value of an expression, be it boolean, on arrays or tensors of indices."""

    def of(part: Any) -> Any:
        return evaluate(part, values, with_)

    if isinstance(expression, (BooleanTrue, BooleanFalse)):
        return with_.boolean(bool(expression))
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if expression.is_number:
        return float(expression)
    if isinstance(expression, sympy.Symbol):
        return values[expression]
    if isinstance(expression, AppliedUndef):
        arguments = tuple(map(of, expression.args))
        return with_.read(number_of(expression), arguments, expression.args)
    if isinstance(expression, Relational):
        return _relate(expression, of)
    match expression.func:
        case sympy.Add:
            # Subtracting reads better in generated code than adding what was negated.
            first, *rest = sorted(map(_signed, expression.args), key=lambda part: part[0] < 0)
            total = of(first[1]) if first[0] > 0 else -of(first[1])
            for sign, part in rest:
                total = total + of(part) if sign > 0 else total - of(part)
            return total
        case sympy.Mul:
            product = of(expression.args[0])
            for part in expression.args[1:]:
                product = product * of(part)
            return product
        case sympy.And:
            return _reduce(lambda a, b: a & b, map(of, expression.args))
        case sympy.Or:
            return _reduce(lambda a, b: a | b, map(of, expression.args))
        case sympy.Not:
            return ~of(expression.args[0])
        case sympy.floor:
            numerator, denominator = sympy.fraction(sympy.together(expression.args[0]))
            return with_.floor_divide(of(numerator), int(denominator))
        case sympy.Mod:
            inner, divisor = of(expression.args[0]), int(expression.args[1])
            return inner - with_.floor_divide(inner, divisor) * divisor
        case sympy.Min:
            return _reduce(with_.minimum, map(of, expression.args))
        case sympy.Max:
            return _reduce(with_.maximum, map(of, expression.args))
        case sympy.Pow:
            return of(expression.args[0]) ** of(expression.args[1])
        case sympy.Piecewise:
            *others, (last, _) = expression.args
            value = of(last)
            for inner, condition in reversed(others):
                value = with_.choose(of(condition), of(inner), value)
            return value
    assert expression.func is Step, expression
    return with_.as_integer(of(expression.args[0]) >= int(expression.args[1]))


def _signed(part: Expr) -> tuple[int, Expr]:
    return (-1, -part) if part.could_extract_minus_sign() else (1, part)


def sides(relation: Any) -> tuple[type, Expr, Expr]:
    """Return a relation as it is evaluated: (its class, left, right).

    a - b + c <= 0 becomes a + c <= b, which compares what it reads, and a - b + 1 <= 0 and
    b - a >= 1 become a < b: of the greatest number of an integer dtype, a + 1 would be the least.
    """
    if isinstance(relation, (sympy.Eq, sympy.Ne)):
        return (type(relation), *relation.args)
    # Of a relation the other way round, as sympy turns them: x >= 1 is 1 - x <= 0.
    difference = relation.lts - relation.gts
    constant, rest = difference.as_coeff_Add()
    kind: type = sympy.Lt if isinstance(relation, (sympy.Lt, sympy.Gt)) else sympy.Le
    if kind is sympy.Le and constant == 1 and rest.is_integer:
        kind, constant = sympy.Lt, sympy.Integer(0)
    signed = [_signed(part) for part in sympy.Add.make_args(rest + constant)]
    left = sympy.Add(*(part for sign, part in signed if sign > 0))
    return kind, left, sympy.Add(*(part for sign, part in signed if sign < 0))


def _relate(relation: Any, of: Callable[[Any], Any]) -> Any:
    kind, left, right = sides(relation)
    left, right = of(left), of(right)
    match kind:
        case sympy.Le:
            return left <= right
        case sympy.Lt:
            return left < right
        case sympy.Ge:
            return left >= right
        case sympy.Gt:
            return left > right
        case sympy.Eq:
            return left == right
    return left != right


def _reduce(function: Callable[[Any, Any], Any], values: Any) -> Any:
    first, *rest = values
    for value in rest:
        first = function(first, value)
    return first


# --- Names ------------------------------------------------------------------------------------


def describe(rule: Rule) -> str:
    """Return what a rule is, for people: "causal, window 128", "document equality", ..."""
    if isinstance(rule.allowed, Or):
        text = " or ".join(sorted(f"({describe(Rule(part))})" for part in rule.allowed.args))
    else:
        parts = rule.allowed.args if isinstance(rule.allowed, And) else [rule.allowed]
        text = ", ".join(sorted(map(_describe_part, parts), key=lambda word: word != "causal"))
    if rule.bias:
        text += ", ALiBi" if _is_alibi(rule.bias) else ", bias"
    return text


def _describe_part(part: Any) -> str:
    if part == FULL:
        return "full"
    if isinstance(part, sympy.Le) and part.rhs == 0:
        constant, rest = part.lhs.as_coeff_Add()
        if rest == KEY - QUERY:
            return f"causal, {-constant} ahead" if constant < 0 else _before(constant)
        if rest == QUERY - KEY and constant < 0:
            return f"window {1 - constant}"
        if rest == QUERY - KEY:
            return f"not before {constant} ahead"
        if rest == KEY:
            return f"prefix {1 - constant}"
    if isinstance(part, (sympy.Eq, sympy.Ne, Not)):
        inner = part.args[0] if isinstance(part, Not) else part
        of_keys = {f for f in inner.atoms(AppliedUndef) if KEY in f.free_symbols}
        of_queries = {f for f in inner.atoms(AppliedUndef) if QUERY in f.free_symbols}
        swapped = {f.xreplace({KEY: QUERY}) for f in of_keys}
        if isinstance(part, sympy.Eq) and swapped and swapped == of_queries:
            return "document equality"
        if isinstance(part, sympy.Eq) and inner.atoms(Step):
            return f"{1 + len(inner.atoms(Step)) // 2} documents"
        if isinstance(part, sympy.Eq) and inner.atoms(sympy.floor):
            sizes = {
                int(sympy.fraction(sympy.together(f.args[0]))[1]) for f in inner.atoms(sympy.floor)
            }
            return f"chunks of {min(sizes)}"
        if of_keys and not of_queries:
            return "key padding"
        if of_keys & of_queries:
            return "a mask tensor"
    return str(part)


def _before(constant: Expr) -> str:
    return "causal" if constant == 0 else f"causal, {constant} behind"


def _is_alibi(bias: Expr) -> bool:
    """Whether it is a slope, of the head or none, times the distance."""
    slope = sympy.cancel(bias / (KEY - QUERY))
    return not slope.free_symbols - {HEAD}
