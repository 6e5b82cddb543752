"""Interval arithmetic: what bounds of the parts of an expression say about the whole.

    q in [0, 127], k in [128, 255]      k - q in [1, 255]      k - q <= 0 holds for no pair

`Interval` and `interval_operations` are the one table of how an operation maps intervals, and
`evaluate` applies it. A new operation of the language of masks gets its row here. `Numbers` says
how the ends are computed, and there are three kinds of them:

    FLOATS          float64 in numpy, an entry per box      the cells of a plan
    EXACT           integers and fractions of Python        what the reader of masks may claim
    block tables    integers in tensors of float64          the blocks of a tile, within a graph

The kinds of tensors are in `cp_inductor.tiles.block_tables`, because this module imports no torch.

Bounds hold, but may not be tight: every occurrence of an index varies by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import sympy
from sympy import And, Expr, Not, Or
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from cp_inductor.kept import lru_cache
from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import INDICES

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
    """The least and the greatest of some values. The operators take intervals and numbers."""

    # low and high: the ends.
    low: Any
    high: Any
    numbers: Numbers  # how they are computed

    def __add__(self, other: Any) -> Interval:
        a, b, numbers = self.numbers.match(self, other)
        low = numbers.add(a.low, b.low, numbers.least)
        return Interval(low, numbers.add(a.high, b.high, numbers.most), numbers)

    __radd__ = __add__

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low, self.numbers)

    def __sub__(self, other: Any) -> Interval:
        a, b, _ = self.numbers.match(self, other)
        return a + -b

    def __rsub__(self, other: Any) -> Interval:
        return -self + other

    def __mul__(self, other: Any) -> Interval:
        a, b, numbers = self.numbers.match(self, other)
        ends = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        return Interval(*numbers.multiply(ends), numbers)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> Interval:
        numbers = self.numbers
        if numbers.is_rounded:
            return numbers.unbounded(self, self)
        low, high = (numbers.floor_divide(end, divisor) for end in (self.low, self.high))
        return Interval(low, high, numbers)

    def __pow__(self, other: Any) -> Interval:
        a, b, numbers = self.numbers.match(self, other)
        return numbers.unbounded(a, b)

    __rpow__ = __pow__

    def extreme(self, word: str, other: Any) -> Interval:
        """Return the bounds of the "minimum" or the "maximum" of two values."""
        a, b, numbers = self.numbers.match(self, other)
        function = getattr(numbers, word)
        return Interval(function(a.low, b.low), function(a.high, b.high), numbers)

    def choose(self, other: Any, condition: Decision) -> Interval:
        """Return the bounds of what is this value under a condition, and else the other."""
        a, b, numbers = self.numbers.match(self, other)

        def pick(function: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
            either = numbers.where(condition.may, function(x, y), y)
            return numbers.where(condition.must, x, either)

        low, high = pick(numbers.minimum, a.low, b.low), pick(numbers.maximum, a.high, b.high)
        return Interval(low, high, numbers)

    def __le__(self, other: Any) -> Decision:
        a, b, numbers = self.numbers.match(self, other)
        return numbers.decide(a.high <= b.low, a.low <= b.high)

    def __lt__(self, other: Any) -> Decision:
        a, b, numbers = self.numbers.match(self, other)
        return numbers.decide(a.high < b.low, a.low < b.high)

    def __ge__(self, other: Any) -> Decision:
        return self.numbers.match(self, other)[1] <= self

    def __gt__(self, other: Any) -> Decision:
        return self.numbers.match(self, other)[1] < self

    def __eq__(self, other: object) -> Decision:  # type: ignore[override]
        a, b, numbers = self.numbers.match(self, other)
        must = (a.low == b.high) & (a.high == b.low)
        may = (a.low <= b.high) & (b.low <= a.high)
        return numbers.decide(must, may)

    def __ne__(self, other: object) -> Decision:  # type: ignore[override]
        return ~(self == other)


def interval_operations(
    read: Callable[[Any, tuple[Any, ...]], Interval],
    make: Callable[[Any, Any], Interval],
    condition: Callable[[bool], Any] = np.bool_,
    number: Callable[[Expr], Any] = float,
) -> Operations:
    """Return the operations by which `evaluate` computes intervals.

    Args:
        read: the bounds of a table; see `Operations`.
        make: makes an interval of its two ends, which may be numbers of Python or conditions.
        condition: makes one that holds everywhere, or nowhere.
        number: see `Operations`.
    """

    def of(value: Any) -> Interval:
        return value if isinstance(value, Interval) else make(value, value)

    def remainder(value: Interval, divisor: int) -> Interval:
        # The remainder of an integer lies within the divisor, whatever is known of the integer.
        rest = value - value // divisor * divisor
        return rest.extreme("maximum", 0).extreme("minimum", divisor - 1)

    return Operations(
        read=read,
        remainder=remainder,
        minimum=lambda a, b: of(a).extreme("minimum", of(b)),
        maximum=lambda a, b: of(a).extreme("maximum", of(b)),
        choose=lambda where, a, b: of(a).choose(of(b), where),
        as_integer=lambda decision: make(decision.must, decision.may),
        boolean=lambda value: Decision(condition(value), condition(value)),
        # Like a power, a function is rounded in a way that need not be monotonic.
        apply=lambda _, *values: of(values[0]) ** of(values[-1]),
        number=number,
    )


# --- Numbers ----------------------------------------------------------------------------------


class Numbers:
    """How ends are computed. Here no value is NaN, and an infinite end means that there is none.

    Attributes:
        least, most: as a lower, and as an upper end: there is none.
        is_rounded: the values are floats, whose rounding a quotient has to follow.
    """

    least: Any = -math.inf
    most: Any = math.inf
    is_rounded = False

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    # (condition, end, other) -> the end where the condition holds, else the other.
    where: Callable[[Any, Any, Any], Any]
    # (end, other) -> their product, which is 0 for 0 times infinity.
    times: Callable[[Any, Any], Any]
    # (end, divisor) -> the whole part of the quotient.
    floor_divide: Callable[[Any, int], Any]
    # Two numbers of Python, or two conditions as 0 and 1 -> an interval.
    make: Callable[[Any, Any], Interval]

    def match(self, a: Interval, b: Any) -> tuple[Interval, Interval, Numbers]:
        """Return an operand, and another one that may be a number, as intervals of one kind."""
        return a, b if isinstance(b, Interval) else self.make(b, b), self

    def add(self, a: Any, b: Any, missing: Any) -> Any:
        """Return the sum of two lower, or of two upper ends; `missing` says that there is none."""
        return a + b

    def multiply(self, ends: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return the least and the greatest product."""
        products = [self.times(x, y) for x, y in ends]
        return reduce(self.minimum, products), reduce(self.maximum, products)

    def unbounded(self, a: Interval, b: Interval) -> Interval:
        """Return the bounds of what may be anything, with the shape of operands."""
        return self.make(self.least, self.most)

    def decide(self, must: Any, may: Any) -> Decision:
        """Return a decision, given what comparing the ends of two intervals says."""
        return Decision(must, may)


class _Floats(Numbers):
    """Arrays of float64, which broadcast."""

    minimum, maximum = staticmethod(np.minimum), staticmethod(np.maximum)
    where = staticmethod(np.where)

    def make(self, low: Any, high: Any) -> Interval:
        return Interval(np.float64(low), np.float64(high), self)

    @staticmethod
    def times(a: Any, b: Any) -> Any:
        with np.errstate(invalid="ignore"):
            product = a * b
        return np.where(np.isnan(product), 0.0, product)

    def floor_divide(self, end: Any, divisor: int) -> Any:
        # Divide once, as the program does: in float64, 49 * (1 / 49) is less than 1.
        return np.floor(end / divisor)


class _Exact(Numbers):
    """Integers and fractions of Python, and infinity: nothing is rounded."""

    minimum, maximum = staticmethod(min), staticmethod(max)

    def make(self, low: Any, high: Any) -> Interval:
        if isinstance(low, np.bool_):
            low, high = int(low), int(high)
        return Interval(low, high, self)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b

    @staticmethod
    def times(a: Any, b: Any) -> Any:
        return 0 if 0 in (a, b) else a * b

    def floor_divide(self, end: Any, divisor: int) -> Any:
        return end if isinstance(end, float) else end // divisor

    def decide(self, must: Any, may: Any) -> Decision:
        # Python's ~True is -2.
        return Decision(np.bool_(must), np.bool_(may))


FLOATS, EXACT = _Floats(), _Exact()


def exact_number(expression: Any) -> Any:
    """Return a number of sympy as one that is not rounded."""
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    value = float(expression)
    return value if math.isinf(value) else Fraction(value)


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
    known = {part: Interval(*bounds, FLOATS) for part, bounds in box.items()}
    operations = interval_operations(lambda read, _: known.get(read, anything), FLOATS.make)
    indices = dict.fromkeys(INDICES, from_zero) | known
    decision: Decision = evaluate(_expanded(allowed), indices, operations)
    return decision.must, decision.may


@lru_cache(maxsize=1024)
def _expanded(allowed: Boolean) -> Boolean:
    """Compare the difference of the two sides of each relation with 0, for tighter bounds."""
    if isinstance(allowed, (And, Or, Not)):
        return allowed.func(*map(_expanded, allowed.args))
    if isinstance(allowed, Relational):
        return allowed.func(sympy.expand(allowed.lhs - allowed.rhs), sympy.Integer(0))
    return allowed
