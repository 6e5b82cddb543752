"""What ops do to scores: the table `OPS_OF_SCORES`, which has `aten.OPS` in it.

    tanh(div(s, 20))               Tanh(0.05*s)
    pow(0.5, h + 1)                Power(0.5, h + 1)

Only scores are read through these functions. They exist nowhere but within a tile, whereas a mask
that a model computes as a tensor had better stay a table, which is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy
import torch
from sympy import Expr

from cp_inductor.mask.language import Exp, Power, Sigmoid, Tanh
from cp_inductor.mask.reader.aten import OPS, OpCall, Row, true_quotient
from cp_inductor.mask.reader.values import Unknown, Value, multiply, pointwise

aten = torch.ops.aten


def _of(function: Callable[[Expr], Expr], name: str = "self") -> Row:
    def row(call: OpCall) -> Value:
        (value,) = call.operands(name)
        return call.settled(pointwise(_finite(function), value.exact()))

    return row


def _finite(function: Callable[..., Expr]) -> Callable[..., Expr]:
    def of(*numbers: Expr) -> Expr:
        result = function(*numbers)
        if any(number.is_infinite for number in (*numbers, result)):
            raise Unknown
        return result

    return of


def _power(base: Expr, exponent: Expr) -> Expr:
    # A power of a negative number may be NaN, but not one that repeats a product.
    if base.is_Number and base > 0:
        return Power(base, exponent)
    if exponent.is_Number and (exponent.is_Integer and exponent > 0):
        return Power(base, exponent)
    raise Unknown


def _raised(call: OpCall) -> Value:
    base, exponent = call.operands("self", "exponent")
    return call.settled(pointwise(_finite(_power), base.exact(), exponent.exact()))


def _quotient(call: OpCall) -> Value:
    left, right = call.operands("self", "other")
    return call.settled(pointwise(_finite(_ratio), left.exact(), right.exact()))


def _ratio(left: Expr, right: Expr) -> Expr:
    if right.is_number:
        return true_quotient(left, right)
    if left.is_number or right.free_symbols & left.free_symbols:
        raise Unknown
    return multiply(left, Power(right, sympy.Integer(-1)))


OPS_OF_SCORES: Mapping[torch._ops.OpOverload, Row] = {
    **OPS,
    aten.tanh.default: _of(Tanh),
    aten.exp.default: _of(Exp),
    aten.exp2.default: _of(lambda x: Power(sympy.Integer(2), x)),
    aten.sigmoid.default: _of(Sigmoid),
    aten.pow.Scalar: _raised,
    aten.pow.Tensor_Scalar: _raised,
    aten.div.Tensor: _quotient,
}
