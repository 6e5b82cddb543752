"""Compute an expression on numpy arrays or tensors of indices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import sympy
from sympy import Expr
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFalse, BooleanTrue

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import WORDS, Step


@dataclass(frozen=True, slots=True)
class Operations:
    """How `evaluate` computes what Python operators do not cover: on numpy arrays, if not told."""

    index: Callable[[sympy.Symbol], Any]  # an index, or the score -> its values, which broadcast
    # (read of a table, values of its indices) -> value. None where none is read.
    read: Any = None
    # (value, positive integer) -> value.
    floor_divide: Callable[[Any, int], Any] = operator.floordiv
    # minimum and maximum: (value, value) -> value, elementwise.
    minimum: Callable[[Any, Any], Any] = np.minimum
    maximum: Callable[[Any, Any], Any] = np.maximum
    # (condition, value, other) -> value where the condition holds, else other.
    choose: Callable[[Any, Any, Any], Any] = np.where
    as_integer: Callable[[Any], Any] = np.int64  # condition -> 0 or 1
    boolean: Callable[[bool], Any] = np.bool_  # bool -> a constant condition
    # (name of a function of `language.FUNCTIONS`, values) -> value. None where there are none.
    apply: Any = None
    # (value of an integer, positive integer) -> value. None: by `floor_divide`.
    remainder: Callable[[Any, int], Any] | None = None
    integer: Callable[[Any], Any] = int  # integer -> value
    number: Callable[[Expr], Any] = float  # number of sympy that is no integer -> value


_JOINING = {sympy.Mul: operator.mul, sympy.And: operator.and_, sympy.Or: operator.or_}


def evaluate(expression: Any, with_: Operations) -> Any:
    """Return the value of an expression or a condition of sympy."""

    def of(part: Any) -> Any:
        return evaluate(part, with_)

    match expression:
        case BooleanTrue() | BooleanFalse():
            return with_.boolean(bool(expression))
        case sympy.Integer():
            return with_.integer(expression)
        case _ if expression.is_number:
            return with_.number(expression)
        case sympy.Symbol():
            return with_.index(expression)
        case AppliedUndef(args=indices):
            return with_.read(expression, tuple(map(of, indices)))
        case Relational():
            kind, left, right = sides(expression)
            return getattr(operator, WORDS[kind])(of(left), of(right))
        case sympy.Add(args=terms):
            (sign, first), *rest = _in_order(terms)
            total = of(first) if sign > 0 else -of(first)
            for sign, term in rest:
                total = total + of(term) if sign > 0 else total - of(term)
            return total
        case sympy.Mul(args=parts) | sympy.And(args=parts) | sympy.Or(args=parts):
            return reduce(_JOINING[expression.func], map(of, parts))
        case sympy.Not(args=(inner,)):
            return ~of(inner)
        case sympy.ITE(args=(condition, value, other)):
            # Sympy makes one from a relation of a Piecewise.
            return (of(condition) & of(value)) | (~of(condition) & of(other))
        case sympy.floor(args=(inner,)):
            numerator, divisor = _fraction(inner)
            return with_.floor_divide(of(numerator), divisor)
        case sympy.Mod(args=(inner, divisor)):
            value, divisor = of(inner), int(divisor)
            if with_.remainder is not None and inner.is_integer:
                return with_.remainder(value, divisor)
            return value - with_.floor_divide(value, divisor) * with_.integer(divisor)
        case sympy.Min(args=parts):
            return reduce(with_.minimum, map(of, parts))
        case sympy.Max(args=parts):
            return reduce(with_.maximum, map(of, parts))
        case sympy.Pow(args=(base, exponent)):
            return of(base) ** of(exponent)
        case sympy.Piecewise(args=(*cases, otherwise)):
            value = of(otherwise[0])
            for inner, condition in reversed(cases):
                value = with_.choose(of(condition), of(inner), value)
            return value
        case Step(args=(index, at)):
            return with_.as_integer(of(at) <= of(index))
    return with_.apply(expression.func.__name__, *map(of, expression.args))


# Sympy takes a millisecond for what these functions remember.
@lru_cache(maxsize=4096)
def _in_order(terms: tuple[Expr, ...]) -> list[tuple[int, Expr]]:
    """Put negative terms behind: in generated code, a - b reads better than a + -b."""
    return sorted(map(_signed, terms), key=lambda part: part[0] < 0)


@lru_cache(maxsize=1024)
def _fraction(expression: Expr) -> tuple[Expr, int]:
    """Return an expression as one that is divided once, by an integer."""
    numerator, denominator = sympy.fraction(sympy.together(expression))
    return (numerator, int(denominator)) if denominator.is_Integer else (expression, 1)


def _signed(part: Expr) -> tuple[int, Expr]:
    return (-1, -part) if part.could_extract_minus_sign() else (1, part)


@lru_cache(maxsize=1024)
def sides(relation: Any) -> tuple[type, Expr, Expr]:
    """Return a relation in the form in which it is evaluated: (its class, left, right).

    a - b + c <= 0 becomes a + c <= b, with only positive terms on both sides. a - b + 1 <= 0 and
    b - a >= 1 become a < b, because a + 1 wraps if a is the greatest number of its dtype.
    """
    if isinstance(relation, (sympy.Eq, sympy.Ne)):
        return (type(relation), *relation.args)
    # `lts` and `gts` are the lesser and the greater side: x >= 1 becomes 1 - x <= 0.
    difference = relation.lts - relation.gts
    constant, rest = difference.as_coeff_Add()
    kind: type = sympy.Lt if isinstance(relation, (sympy.Lt, sympy.Gt)) else sympy.Le
    if kind is sympy.Le and constant == 1 and rest.is_integer:
        kind, constant = sympy.Lt, sympy.Integer(0)
    signed = [_signed(part) for part in sympy.Add.make_args(rest + constant)]
    left = sympy.Add(*(part for sign, part in signed if sign > 0))
    return kind, left, sympy.Add(*(part for sign, part in signed if sign < 0))
