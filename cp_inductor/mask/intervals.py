"""Interval arithmetic: what a condition says of all pairs of a box at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import sympy
from sympy import And, Expr, Not, Or
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue

from cp_inductor.mask.language import Step

# Inclusive bounds of an index, arrays that broadcast against each other.
Bounds = tuple[np.ndarray, np.ndarray]


Box = Mapping[sympy.Symbol, Bounds]


def decide(allowed: Boolean, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return of every box whether all its pairs are surely allowed, and whether any may be."""
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
