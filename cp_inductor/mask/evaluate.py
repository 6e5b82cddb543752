"""The value of an expression, on arrays or tensors of indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFalse, BooleanTrue

from cp_inductor.mask.language import Step, number_of


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
