"""Read what takes the place of scores: ops that masks are not read through, and sums.

    tanh(div(s, 20))               Tanh(0.05*s)
    pow(0.5, h + 1)                Power(0.5, h + 1)

Only scores are read through these functions. They exist nowhere but within a tile, whereas a mask
that a model computes as a tensor had better stay a table, which is computed once.

    where(q >= k, s + table[bucket(q - k)], -inf)      a sum, whatever `bucket` calls
    s * table[q]    50 * tanh(s / 50)                  none

A sum is f(s) = s + f(0), and f(0) may be computed as a tensor. So what is added need not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from sympy import Expr
from torch import fx

from cp_inductor.mask.language import Exp, Power, Sigmoid, Tanh
from cp_inductor.mask.reader.aten import OPS, Row, computed, true_quotient
from cp_inductor.mask.reader.read import Reading
from cp_inductor.mask.reader.trace import Trace
from cp_inductor.mask.reader.values import Unknown, multiply, pointwise
from cp_inductor.torch_private.arguments import bind_arguments

aten = torch.ops.aten


def _exact(function: Callable[..., Expr]) -> Row:
    """Return the row of a function of finite numbers, which no operand may approximate."""

    def finite(*numbers: Expr) -> Expr:
        result = function(*numbers)
        if any(number.is_infinite for number in (*numbers, result)):
            raise Unknown
        return result

    return computed(lambda *values: pointwise(finite, *(v.exact() for v in values)))


def _power(base: Expr, exponent: Expr) -> Expr:
    # A power of a negative number may be NaN, but not one that repeats a product.
    if not (base.is_Number and base > 0) and not (exponent.is_Integer and exponent > 0):
        raise Unknown
    return Power(base, exponent)


def _ratio(left: Expr, right: Expr) -> Expr:
    if right.is_number:
        return true_quotient(left, right)
    if left.is_number or right.free_symbols & left.free_symbols:
        raise Unknown
    return multiply(left, Power(right, sympy.Integer(-1)))


OPS_OF_SCORES: Mapping[torch._ops.OpOverload, Row] = {
    **OPS,
    aten.tanh.default: _exact(Tanh),
    aten.exp.default: _exact(Exp),
    aten.exp2.default: _exact(lambda x: Power(sympy.Integer(2), x)),
    aten.sigmoid.default: _exact(Sigmoid),
    aten.pow.Scalar: _exact(_power),
    aten.pow.Tensor_Scalar: _exact(_power),
    aten.div.Tensor: _exact(_ratio),
}

# Ops whose result is a sum if one of these arguments is; the others have no score in them.
_SUMMED: Mapping[Any, tuple[str, ...]] = {
    **dict.fromkeys((aten.alias.default, aten.clone.default, aten.expand.default), ("self",)),
    **dict.fromkeys((aten.permute.default, aten.squeeze.dims, aten.unsqueeze.default), ("self",)),
    **dict.fromkeys((aten.view.default, aten._to_copy.default, aten.sub.Tensor), ("self",)),
    **dict.fromkeys((aten.add.Tensor, aten.where.self), ("self", "other")),
}


def is_sum_with_score(trace: Trace, reading: Reading) -> bool:
    """Whether a trace of scores adds to them, or removes pairs, and does nothing else.

    The reading of the trace knows which branches are -oo.
    """
    assert trace.score is not None
    of_score, sums = {trace.score}, {trace.score}
    for node in trace.gm.graph.nodes:
        if node.op != "call_function" or of_score.isdisjoint(node.all_input_nodes):
            continue
        of_score.add(node)
        if _is_sum(node, of_score, sums, reading):
            sums.add(node)
    return trace.result in sums


def _is_sum(node: fx.Node, of_score: set[fx.Node], sums: set[fx.Node], reading: Reading) -> bool:
    op: Any = node.target
    if op not in _SUMMED:
        return False
    call = bind_arguments(op, node.args, node.kwargs)
    summed = [name for name in _SUMMED[op] if call[name] in sums]
    rest = {name: argument for name, argument in call.items() if name not in summed}
    if not of_score.isdisjoint(part for part in rest.values() if isinstance(part, fx.Node)):
        return False
    if op is aten.where.self:
        # What is no sum removes pairs.
        values = [reading.values.get(rest[name]) for name in ("self", "other") if name in rest]
        removed = [{e for _, e in getattr(value, "cases", ())} for value in values]
        return all(numbers == {-sympy.oo} for numbers in removed)
    if op is aten._to_copy.default:
        before, after = call["self"].meta["val"].dtype, node.meta["val"].dtype
        return after.is_floating_point and after.itemsize >= before.itemsize
    return summed == ["self"] or (summed == ["other"] and call["alpha"] == 1)
