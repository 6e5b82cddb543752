"""What expressions of rules are made of, and the one form of their relations.

q, k, s, t0(b, k), Step(q, 5), Tanh(s)     indices, scores, run-time tables, steps, functions
k <= q, k < q + 1                          k - q <= 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
from sympy import And, Expr, Not, Or
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

# The indices of a score (B, H, S, T), by dim.
INDICES = BATCH, HEAD, QUERY, KEY = sympy.symbols("b h q k", integer=True, nonnegative=True)

# The scaled product of a query and a key.
SCORE = sympy.Symbol("s", real=True)

CAUSAL: Boolean = sympy.Le(KEY - QUERY, 0)
FULL: Boolean = sympy.true

# What each relation is called, by `operator` and by aten.
WORDS: Mapping[type, str] = {
    getattr(sympy, word.title()): word for word in ("le", "lt", "ge", "gt", "eq", "ne")
}


class Step(sympy.Function):
    """Step(x, at): 1 where x >= at, else 0. A sum of steps numbers documents of known lengths."""

    nargs = 2
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, x: Expr, at: Expr) -> Expr | None:
        """Return 0 or 1 if x is known to be below `at`, or not to be."""
        difference = x - at
        if difference.is_nonnegative:
            return sympy.Integer(1)
        if difference.is_negative:
            return sympy.Integer(0)
        return None


class _Opaque(sympy.Function):
    """A function that sympy computes for numbers, and leaves alone otherwise.

    Sympy rewrites its own functions: exp(x)*exp(y) becomes exp(x + y), which is rounded in another
    way than the program rounds.

    Attributes:
        compute: numbers -> the value there.
        slope: arguments -> the derivative.
    """

    is_real = True
    compute: Callable[..., float]
    slope: Callable[..., Expr]

    @classmethod
    def eval(cls, *arguments: Expr) -> Expr | None:
        if not all(argument.is_Number and argument.is_finite for argument in arguments):
            return None
        try:
            return sympy.Float(cls.compute(*map(float, arguments)))
        except (ValueError, OverflowError, ZeroDivisionError):
            return None

    def fdiff(self, argindex: int = 1) -> Expr:
        """Return the derivative by an argument."""
        return self.slope(*self.args)


class Tanh(_Opaque):
    """The hyperbolic tangent."""

    nargs = 1
    compute = staticmethod(math.tanh)
    slope = staticmethod(lambda x: 1 - Tanh(x) ** 2)


class Exp(_Opaque):
    """The exponential function."""

    nargs = 1
    compute = staticmethod(math.exp)
    slope = staticmethod(lambda x: Exp(x))


class Sigmoid(_Opaque):
    """1 / (1 + exp(-x))."""

    nargs = 1
    compute = staticmethod(lambda x: 1 / (1 + math.exp(-x)))
    slope = staticmethod(lambda x: Sigmoid(x) * (1 - Sigmoid(x)))


class Power(_Opaque):
    """Power(x, y): x to the power of y, at least one of them a number."""

    nargs = 2
    compute = staticmethod(math.pow)

    def fdiff(self, argindex: int = 1) -> Expr:
        """Return the derivative by the base, or by the exponent; the other is a number."""
        base, exponent = self.args
        if argindex == 1:
            return exponent * Power(base, exponent - 1)
        return sympy.Float(math.log(float(base))) * self


# What a rule may compute from numbers, beside sums, products and the like.
FUNCTIONS = (Tanh, Exp, Sigmoid, Power)


def table(index: int, *, is_integer: bool = True) -> Any:
    """Return the function that stands for a run-time table. Apply it to indices.

    Tables of integers and of bools (as 0 and 1) are called t0, t1, ...; of floats x0, x1, ...
    """
    if is_integer:
        return sympy.Function(f"t{index}", integer=True)
    return sympy.Function(f"x{index}", real=True)


def tables_of(expression: Any) -> set[Any]:
    """Return every read of a run-time table, such as t0(b, k)."""
    return set(expression.atoms(AppliedUndef))


def is_of_pairs(indices: Sequence[Expr]) -> bool:
    """Whether a table that is read at these indices has a value for every (query, key) pair."""
    return {QUERY, KEY} <= set(indices)


def number_of(function: Any) -> int:
    """Return the number of the run-time table that a read such as t3(b, k) reads: 3."""
    return int(function.func.__name__[1:])


# --- One form for each relation ---------------------------------------------------------------


def at_most_zero(expression: Expr) -> Boolean:
    """Return `expression <= 0`, divided by the greatest common divisor of its coefficients."""
    constant, rest = sympy.expand(expression).as_coeff_Add()
    content, rest = rest.as_content_primitive()
    if content.is_integer and content > 1 and constant.is_integer:
        # c x + d <= 0  <=>  x <= floor(-d / c)
        constant = -((-constant) // content)
    elif content != 1:
        rest = content * rest
    return sympy.Le(rest + constant, 0)


def compare(word: str, left: Expr, right: Expr) -> Boolean:
    """Return a relation of integers in its one form; word is one of lt le gt ge eq ne."""
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
    # a - b and b - a are equally good; take the one whose text is greater.
    difference = max(difference, sympy.expand(-difference), key=str)
    constant, rest = difference.as_coeff_Add()
    equality = sympy.Eq(rest, -constant)
    return equality if word == "eq" else Not(equality)


def canonical(allowed: Boolean) -> Boolean:
    """Simplify a conjunction: keep the tightest of several bounds, and use equal documents."""
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
    """Move a negation into And and Or, and return relations of integers in their one form."""
    if isinstance(allowed, Not):
        inner = allowed.args[0]
        if isinstance(inner, (And, Or)):
            opposite = Or if isinstance(inner, And) else And
            return canonical(opposite(*(Not(part) for part in inner.args)))
    # x < 0 is x + 1 <= 0 for integers only.
    is_open = isinstance(allowed, (sympy.Lt, sympy.Ge, sympy.Gt))
    if is_open and (allowed.lhs - allowed.rhs).is_integer:
        return compare(WORDS[type(allowed)], *allowed.args)
    return allowed


def substitute(expression: Any, replaced: Mapping[Expr, Expr]) -> Any:
    """Replace parts of an expression, and bring relations back to their one form."""
    if isinstance(expression, (And, Or, Not)):
        return expression.func(*(substitute(part, replaced) for part in expression.args))
    found = expression.xreplace(replaced)
    if isinstance(found, sympy.Le) and found != expression:
        return at_most_zero(found.lhs - found.rhs)
    if isinstance(found, (sympy.Eq, sympy.Ne)) and found != expression:
        return compare(WORDS[type(found)], *found.args)
    return found


def normal(allowed: Boolean) -> Boolean:
    """Return a condition in its one form, however it was written: k <= q is k - q <= 0."""
    if isinstance(allowed, (And, Or, Not)):
        return canonical(allowed.func(*map(normal, allowed.args)))
    if isinstance(allowed, Relational) and (allowed.lhs - allowed.rhs).is_integer:
        return canonical(compare(WORDS[type(allowed)], *allowed.args))
    return allowed


def _what_equality_implies(equality: sympy.Eq) -> dict[Expr, Expr]:
    """Return which steps of the key equal steps of the query, if sums of such steps are equal.

    A sum of steps that all go up (or all down) is monotonic. If it is equal for two indices, no
    step lies between them.
    """
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
    """Keep the lowest of several upper bounds of one expression."""
    bounds: dict[Expr, Expr] = {}
    for part in parts:
        if isinstance(part, sympy.Le) and part.rhs == 0:
            constant, rest = part.lhs.as_coeff_Add()
            bounds[rest] = max(bounds.get(rest, constant), constant)
        else:
            yield part
    for rest, constant in bounds.items():
        yield sympy.Le(rest + constant, 0)
