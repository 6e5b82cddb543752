"""Interval arithmetic: whether a condition holds for all pairs of a box, or may hold for any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import sympy
from sympy import And, Expr, Not, Or
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import Step

# The least and the greatest value, as arrays with an entry per box; they broadcast.
Bounds = tuple[np.ndarray, np.ndarray]


# The bounds of each index in a box, and of reads of run-time tables where they are known.
Box = Mapping[Expr, Bounds]


def decide(allowed: Boolean, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Decide a condition for every box.

    Returns:
        (must, may): whether all pairs of a box are surely allowed, and whether any may be.
    """
    if isinstance(allowed, (BooleanTrue, BooleanFalse)):
        known = np.array(bool(allowed))
        return known, known
    if isinstance(allowed, (And, Or)):
        decided = [decide(part, box) for part in allowed.args]
        combine = np.logical_and if isinstance(allowed, And) else np.logical_or
        must, may = decided[0]
        for other_must, other_may in decided[1:]:
            must, may = combine(must, other_must), combine(may, other_may)
        return must, may
    if isinstance(allowed, Not):
        must, may = decide(allowed.args[0], box)
        return ~may, ~must
    assert isinstance(allowed, Relational), allowed
    low, high = bounds(_difference(allowed), box)
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


@lru_cache(maxsize=1024)
def _difference(relation: Relational) -> Expr:
    """Return the difference of the two sides, which takes sympy a millisecond."""
    return sympy.expand(relation.lhs - relation.rhs)


_UNKNOWN: Bounds = (np.array(-np.inf), np.array(np.inf))


def bounds(expression: Expr, box: Box) -> Bounds:
    """Return bounds of an expression over boxes.

    The bounds hold, but may not be tight: every occurrence of an index varies by itself.
    """
    if expression in box:
        return box[expression]
    if expression.is_number:
        value = np.array(float(expression))
        return value, value
    if isinstance(expression, sympy.Symbol):
        return np.array(0.0), np.array(np.inf)
    if isinstance(expression, sympy.floor):
        return _bounds_of_floor(expression, box)
    rule = _BOUNDS.get(expression.func)
    if rule is None:
        return _UNKNOWN
    return rule(expression, [bounds(part, box) for part in expression.args])


def _bounds_of_product(_: Expr, parts: Sequence[Bounds]) -> Bounds:
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


def _bounds_of_step(step: Expr, parts: Sequence[Bounds]) -> Bounds:
    (low, high), at = parts[0], float(step.args[1])
    return (low >= at).astype(float), (high >= at).astype(float)


def _bounds_of_remainder(remainder: Expr, parts: Sequence[Bounds]) -> Bounds:
    if not remainder.args[1].is_number:
        return _UNKNOWN
    return np.array(0.0), parts[1][1] - 1


def _outermost(ends: Sequence[np.ndarray]) -> Bounds:
    low = high = ends[0]
    for end in ends[1:]:
        low, high = np.minimum(low, end), np.maximum(high, end)
    return low, high


def _bounds_of_floor(floor: Expr, box: Box) -> Bounds:
    """Divide once, as the program does: in float64, 49 * (1 / 49) is less than 1."""
    numerator, denominator = _fraction(floor.args[0])
    low, high = bounds(numerator, box)
    return np.floor(low / denominator), np.floor(high / denominator)


@lru_cache(maxsize=1024)
def _fraction(expression: Expr) -> tuple[Expr, float]:
    numerator, denominator = sympy.fraction(sympy.together(expression))
    is_number = denominator.is_number and denominator > 0
    return (numerator, float(denominator)) if is_number else (expression, 1.0)


def _fold(function: Callable[..., np.ndarray], parts: Sequence[Bounds]) -> Bounds:
    low, high = parts[0]
    for other_low, other_high in parts[1:]:
        low, high = function(low, other_low), function(high, other_high)
    return low, high


# By class of expression: (expression, bounds of its arguments) -> its bounds. For other classes,
# bounds are infinite.
_BOUNDS: Mapping[type, Callable[[Expr, Sequence[Bounds]], Bounds]] = {
    sympy.Add: lambda _, parts: _fold(np.add, parts),
    sympy.Mul: _bounds_of_product,
    sympy.Min: lambda _, parts: _fold(np.minimum, parts),
    sympy.Max: lambda _, parts: _fold(np.maximum, parts),
    Step: _bounds_of_step,
    sympy.Mod: _bounds_of_remainder,
}
