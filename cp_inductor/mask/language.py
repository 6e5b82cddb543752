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
        slopes: by each argument: arguments -> the derivative.
    """

    is_real = True
    compute: Callable[..., float]
    slopes: Sequence[Callable[..., Expr]]

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
        return self.slopes[argindex - 1](*self.args)


def _function(name: str, run: Callable[..., float], *slopes: Callable[..., Expr]) -> type[_Opaque]:
    attributes = {"nargs": len(slopes), "compute": staticmethod(run), "slopes": slopes}
    return type(name, (_Opaque,), attributes | {"__module__": __name__})


Tanh: type[_Opaque] = _function("Tanh", math.tanh, lambda x: 1 - Tanh(x) ** 2)
Exp: type[_Opaque] = _function("Exp", math.exp, lambda x: Exp(x))
Sigmoid: type[_Opaque] = _function(
    "Sigmoid", lambda x: 1 / (1 + math.exp(-x)), lambda x: Sigmoid(x) * (1 - Sigmoid(x))
)
# Power(x, y): x to the power of y, at least one of them a number.
Power: type[_Opaque] = _function(
    "Power",
    math.pow,
    lambda base, exponent: exponent * Power(base, exponent - 1),
    lambda base, exponent: sympy.Float(math.log(float(base))) * Power(base, exponent),
)
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
    if word in ("le", "lt"):
        return at_most_zero(difference + int(word == "lt"))
    if word in ("ge", "gt"):
        return at_most_zero(int(word == "gt") - difference)
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
    allowed = sympy.to_nnf(allowed, simplify=False)  # ~(a & b) is ~a | ~b
    if isinstance(allowed, Or):
        return Or(*map(canonical, allowed.args))
    if not isinstance(allowed, And):
        # x < 0 is x + 1 <= 0 for integers only.
        is_open = isinstance(allowed, (sympy.Lt, sympy.Ge, sympy.Gt))
        if is_open and (allowed.lhs - allowed.rhs).is_integer:
            return compare(WORDS[type(allowed)], *allowed.args)
        return allowed
    parts = [canonical(part) for part in allowed.args]
    for part in list(parts):
        if isinstance(part, sympy.Eq) and (equal := _what_equality_implies(part)):
            # No other equality: two of them could each make the other one true.
            parts = [p if p is part else substitute(p, equal, sympy.Le) for p in parts]
    return And(*_tightest(parts))


def substitute(expression: Any, replaced: Mapping[Expr, Expr], only: Any = None) -> Any:
    """Replace parts of an expression, and bring relations back to their one form.

    Only in relations of a kind, if it is given.
    """
    if isinstance(expression, (And, Or, Not)):
        return expression.func(*(substitute(part, replaced, only) for part in expression.args))
    if only is not None and not isinstance(expression, only):
        return expression
    result = expression.xreplace(replaced)
    if result != expression and isinstance(result, (sympy.Le, sympy.Eq, sympy.Ne)):
        return compare(WORDS[type(result)], *result.args)
    return result


def normal(allowed: Boolean) -> Boolean:
    """Return a condition in its one form, however it was written: k <= q is k - q <= 0."""
    if isinstance(allowed, (And, Or, Not)):
        return canonical(allowed.func(*map(normal, allowed.args)))
    if isinstance(allowed, Relational) and (allowed.lhs - allowed.rhs).is_integer:
        return compare(WORDS[type(allowed)], *allowed.args)
    return allowed


def _what_equality_implies(equality: sympy.Eq) -> dict[Expr, Expr]:
    """Return which steps of the key equal steps of the query, if sums of such steps are equal.

    A sum of steps that all go up (or all down) is monotonic. If it is equal for two indices, no
    step lies between them.
    """
    difference = sympy.expand(equality.lhs - equality.rhs)
    coefficients = difference.as_coefficients_dict()
    if any(not isinstance(term, Step) for term in coefficients):
        return {}
    of_query = {t.args[1]: c for t, c in coefficients.items() if t.args[0] == QUERY}
    of_key = {t.args[1]: -c for t, c in coefficients.items() if t.args[0] == KEY}
    signs = {bool(c > 0) for c in of_query.values()}
    if of_query != of_key or len(signs) != 1 or len(of_query) * 2 != len(coefficients):
        return {}
    return {Step(KEY, at): Step(QUERY, at) for at in of_query}


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
