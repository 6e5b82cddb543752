"""Interval arithmetic: what bounds of the parts of an expression say about the whole.

    q in [0, 127], k in [128, 255]      k - q in [1, 255]      k - q <= 0 holds for no pair

`Interval` is the one table of how an operation maps intervals, and `evaluate` applies it. A new
operation of the language of masks gets its row here. A kind of intervals says how its ends are
computed, and there are three:

    FLOATS          float64 in numpy, an entry per box      the cells of a plan
    EXACT           integers and fractions of Python        what the reader of masks may claim
    block tables    integers in tensors of float64          the blocks of a tile, within a graph

The kinds of tensors are in `cp_inductor.tiles.block_tables`, because this module imports no torch.

Bounds hold, but may not be tight: every occurrence of an index varies by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any, ClassVar

import numpy as np
import sympy
from sympy import And, Expr, Not, Or
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from cp_inductor.kept import lru_cache
from cp_inductor.mask.evaluate import Operations, evaluate

# --- The table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a condition surely holds for all pairs of a box, and whether it may for any."""

    must: Any
    may: Any

    def __and__(self, other: Decision) -> Decision:
        return Decision(self.must & other.must, self.may & other.may)

    def __or__(self, other: Decision) -> Decision:
        return Decision(self.must | other.must, self.may | other.may)

    def __invert__(self) -> Decision:
        return Decision(~self.may, ~self.must)


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """The least and the greatest of some values, of one kind.

    No end is NaN, and an infinite end means that there is none.
    """

    low: Any
    high: Any

    # Functions of ends: (end, other) -> the lesser, and the greater of them.
    minimum: ClassVar[Any]
    maximum: ClassVar[Any]
    where: ClassVar[Any]  # (condition, end, other) -> the end where it holds, else the other
    times: ClassVar[Any]  # (end, other) -> their product, which is 0 for 0 times infinity
    floor_divide: ClassVar[Any]  # (end, divisor) -> the whole part of the quotient
    # Two numbers of Python, or two conditions as 0 and 1 -> an interval.
    make: ClassVar[Any]
    number: ClassVar[Any] = float  # number of sympy -> number of Python

    @classmethod
    def decide(cls, must: Any, may: Any) -> Decision:
        """Return a decision, given what comparing the ends of two intervals says."""
        return Decision(must, may)

    def beside(self, other: Interval) -> type[Interval]:
        """Return the kind of what is computed of both."""
        return type(self)

    def __add__(self, other: Interval) -> Interval:
        return self.beside(other)(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Interval:
        return type(self)(-self.high, -self.low)

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        pairs = product((self.low, self.high), (other.low, other.high))
        products = [self.times(*ends) for ends in pairs]
        low, high = reduce(self.minimum, products), reduce(self.maximum, products)
        return self.beside(other)(low, high)

    def __floordiv__(self, divisor: int) -> Interval:
        low, high = (self.floor_divide(end, divisor) for end in (self.low, self.high))
        return type(self)(low, high)

    def __pow__(self, other: Interval) -> Interval:
        return self.make(-math.inf, math.inf)

    def extreme(self, word: str, other: Interval) -> Interval:
        """Return the bounds of the "minimum" or the "maximum" of two values."""
        function = getattr(self, word)
        return self.beside(other)(function(self.low, other.low), function(self.high, other.high))

    def choose(self, other: Interval, condition: Decision) -> Interval:
        """Return the bounds of what is this value under a condition, and else the other."""

        def pick(function: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
            either = self.where(condition.may, function(x, y), y)
            return self.where(condition.must, x, either)

        low = pick(self.minimum, self.low, other.low)
        return self.beside(other)(low, pick(self.maximum, self.high, other.high))

    def __le__(self, other: Interval) -> Decision:
        return self.beside(other).decide(self.high <= other.low, self.low <= other.high)

    def __lt__(self, other: Interval) -> Decision:
        return self.beside(other).decide(self.high < other.low, self.low < other.high)

    def __eq__(self, other: Interval) -> Decision:  # type: ignore[override]
        return (self <= other) & (other <= self)

    def __ne__(self, other: Interval) -> Decision:  # type: ignore[override]
        return ~(self == other)

    @classmethod
    def operations(
        cls,
        index: Callable[[sympy.Symbol], Interval],
        read: Callable[[Any, tuple[Any, ...]], Interval],
        make: Callable[[Any, Any], Interval] | None = None,
        condition: Callable[[bool], Any] = np.bool_,
    ) -> Operations:
        """Return the operations by which `evaluate` computes intervals of a kind.

        Args:
            index, read: the bounds of an index, and of a table; see `Operations`.
            make: in the place of the kind's.
            condition: makes one that holds everywhere, or nowhere.
        """
        make = make or cls.make

        def constant(value: Any) -> Interval:
            return make(value, value)

        def remainder(value: Interval, divisor: int) -> Interval:
            # The remainder of an integer lies within the divisor, whatever is known of it.
            rest = value - value // divisor * constant(divisor)
            return rest.extreme("maximum", constant(0)).extreme("minimum", constant(divisor - 1))

        return Operations(
            index=index,
            read=read,
            remainder=remainder,
            minimum=lambda value, other: value.extreme("minimum", other),
            maximum=lambda value, other: value.extreme("maximum", other),
            choose=lambda where, value, other: value.choose(other, where),
            as_integer=lambda decision: make(decision.must, decision.may),
            boolean=lambda value: Decision(condition(value), condition(value)),
            # Like a power, a function is rounded in a way that need not be monotonic.
            apply=lambda _, *values: values[0] ** values[-1],
            integer=lambda value: constant(int(value)),
            number=lambda value: constant(cls.number(value)),
        )


class _Floats(Interval):
    """Arrays of float64, which broadcast."""

    minimum, maximum = staticmethod(np.minimum), staticmethod(np.maximum)
    where = staticmethod(np.where)

    @classmethod
    def make(cls, low: Any, high: Any) -> Interval:
        return cls(np.float64(low), np.float64(high))

    @staticmethod
    def times(end: Any, other: Any) -> Any:
        with np.errstate(invalid="ignore"):
            result = end * other
        return np.where(np.isnan(result), 0.0, result)

    @staticmethod
    def floor_divide(end: Any, divisor: int) -> Any:
        # Divide once, as the program does: in float64, 49 * (1 / 49) is less than 1.
        return np.floor(end / divisor)


class _Exact(Interval):
    """Integers and fractions of Python, and infinity: nothing is rounded."""

    minimum, maximum = staticmethod(min), staticmethod(max)
    where = staticmethod(lambda condition, end, other: end if condition else other)
    times = staticmethod(lambda end, other: 0 if 0 in (end, other) else end * other)

    @classmethod
    def make(cls, low: Any, high: Any) -> Interval:
        return cls(*(int(end) if isinstance(end, np.bool_) else end for end in (low, high)))

    @staticmethod
    def number(expression: Any) -> Any:
        if expression.is_Rational:
            return Fraction(int(expression.p), int(expression.q))
        value = float(expression)
        return value if math.isinf(value) else Fraction(value)

    @staticmethod
    def floor_divide(end: Any, divisor: int) -> Any:
        return end if isinstance(end, float) else end // divisor

    @classmethod
    def decide(cls, must: Any, may: Any) -> Decision:
        # Python's ~True is -2.
        return Decision(np.bool_(must), np.bool_(may))


FLOATS, EXACT = _Floats, _Exact


# --- Boxes ------------------------------------------------------------------------------------

# The least and the greatest value, as arrays with an entry per box; they broadcast.
Bounds = tuple[np.ndarray, np.ndarray]

# The bounds of each index in a box, and of reads of run-time tables where they are known.
Box = Mapping[Expr, Bounds]


def decide(allowed: Boolean, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Decide a condition for every box.

    Returns:
        (must, may): whether all pairs of a box are surely allowed, and whether any may be.
    """
    anything, from_zero = FLOATS.make(-math.inf, math.inf), FLOATS.make(0, math.inf)
    known = {part: FLOATS(*bounds) for part, bounds in box.items()}
    operations = FLOATS.operations(
        lambda symbol: known.get(symbol, from_zero), lambda read, _: known.get(read, anything)
    )
    decision: Decision = evaluate(_expanded(allowed), operations)
    return decision.must, decision.may


@lru_cache(maxsize=1024)
def _expanded(allowed: Boolean) -> Boolean:
    """Compare the difference of the two sides of each relation with 0, for tighter bounds."""
    if isinstance(allowed, (And, Or, Not)):
        return allowed.func(*map(_expanded, allowed.args))
    if isinstance(allowed, Relational):
        return allowed.func(sympy.expand(allowed.lhs - allowed.rhs), sympy.Integer(0))
    return allowed
