"""What expressions of rules are made of: indices, scores, run-time tables, steps, functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from sympy import Expr
from sympy.core.function import AppliedUndef
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
