"""Compute an expression on numpy arrays or tensors of indices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
from sympy import Expr
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFalse, BooleanTrue

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import WORDS, Step, number_of


@dataclass(frozen=True, slots=True)
class Operations:
    """How `evaluate` computes what Python operators do not cover, on one kind of values.

    Attributes:
        read: (number of the table, values of its indices, expressions of its indices) -> value.
        floor_divide: (value, positive integer) -> value.
        minimum, maximum: (value, value) -> value, elementwise.
        choose: (condition, value, other) -> value where the condition holds, else other.
        as_integer: condition -> 0 or 1.
        boolean: bool -> a constant condition.
        apply: (name of a function of `language.FUNCTIONS`, values) -> value. None where such
            functions do not occur.
        remainder: (value of an integer, positive integer) -> value. None: by `floor_divide`.
        number: number of sympy that is no integer -> value.
    """

    read: Callable[[int, tuple[Any, ...], tuple[Expr, ...]], Any]
    floor_divide: Callable[[Any, int], Any]
    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]
    as_integer: Callable[[Any], Any]
    boolean: Callable[[bool], Any]
    apply: Callable[..., Any] | None = None
    remainder: Callable[[Any, int], Any] | None = None
    number: Callable[[Expr], Any] = float


# Expression -> its value.
Of = Callable[[Any], Any]


def evaluate(expression: Any, values: Mapping[sympy.Symbol, Any], with_: Operations) -> Any:
    """Return the value of an expression or a condition of sympy.

    The values of the indices that occur in it are arrays or tensors that broadcast.
    """

    def of(part: Any) -> Any:
        return evaluate(part, values, with_)

    if isinstance(expression, (BooleanTrue, BooleanFalse)):
        return with_.boolean(bool(expression))
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if expression.is_number:
        return with_.number(expression)
    if isinstance(expression, sympy.Symbol):
        return values[expression]
    if isinstance(expression, AppliedUndef):
        arguments = tuple(map(of, expression.args))
        return with_.read(number_of(expression), arguments, expression.args)
    if isinstance(expression, Relational):
        kind, left, right = sides(expression)
        return getattr(operator, WORDS[kind])(of(left), of(right))
    if expression.func in _VALUES:
        return _VALUES[expression.func](expression.args, of, with_)
    assert with_.apply is not None, expression
    return with_.apply(expression.func.__name__, *map(of, expression.args))


def _add(terms: Any, of: Of, _: Operations) -> Any:
    first, *rest = _in_order(terms)
    total = of(first[1]) if first[0] > 0 else -of(first[1])
    for sign, part in rest:
        total = total + of(part) if sign > 0 else total - of(part)
    return total


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


def _floor(arguments: Any, of: Of, with_: Operations) -> Any:
    numerator, denominator = _fraction(arguments[0])
    return with_.floor_divide(of(numerator), denominator)


def _remainder(arguments: Any, of: Of, with_: Operations) -> Any:
    inner, divisor = of(arguments[0]), int(arguments[1])
    if with_.remainder is not None and arguments[0].is_integer:
        return with_.remainder(inner, divisor)
    return inner - with_.floor_divide(inner, divisor) * divisor


def _choose(cases: Any, of: Of, with_: Operations) -> Any:
    *others, (last, _) = cases
    value = of(last)
    for inner, condition in reversed(others):
        value = with_.choose(of(condition), of(inner), value)
    return value


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


# By class of expression: (its arguments, `of`, the operations) -> its value. Other classes are
# functions, for `Operations.apply`.
_VALUES: Mapping[type, Callable[[Any, Of, Operations], Any]] = {
    sympy.Add: _add,
    sympy.Mul: lambda args, of, with_: reduce(operator.mul, map(of, args)),
    sympy.And: lambda args, of, with_: reduce(operator.and_, map(of, args)),
    sympy.Or: lambda args, of, with_: reduce(operator.or_, map(of, args)),
    sympy.Not: lambda args, of, with_: ~of(args[0]),
    # Sympy makes one from a relation of a Piecewise.
    sympy.ITE: lambda args, of, with_: (of(args[0]) & of(args[1])) | (~of(args[0]) & of(args[2])),
    sympy.floor: _floor,
    sympy.Mod: _remainder,
    sympy.Min: lambda args, of, with_: reduce(with_.minimum, map(of, args)),
    sympy.Max: lambda args, of, with_: reduce(with_.maximum, map(of, args)),
    sympy.Pow: lambda args, of, with_: of(args[0]) ** of(args[1]),
    sympy.Piecewise: _choose,
    Step: lambda args, of, with_: with_.as_integer(of(args[0]) >= int(args[1])),
}
