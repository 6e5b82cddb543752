"""What core aten ops do to values: the table `OPS`, with one row for each op.

    aten.add.Tensor(x, y)       => the expression of x plus the expression of y
    aten.slice.Tensor(x, ...)   => the expression of x at other indices

A row is a function from an `OpCall`, which has the op's arguments by name, to the result's value.
The value must be right for every index; where it might not be, the row raises `Unknown`. To add an
op, add a row, and let `tests/support/random_masks.py` draw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import neg
from typing import Any

import sympy
import torch
from sympy import And, Expr, Not, Or
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from cp_inductor.mask.language import WORDS, at_most_zero
from cp_inductor.mask.reader.sequences import fit, materialize
from cp_inductor.mask.reader.values import (
    DIMS,
    MAX_CASES,
    WHOLE_UP_TO,
    RunTimeTables,
    Unknown,
    Value,
    align,
    check_terms,
    combine,
    constant,
    index_of,
    join_pieces,
    multiply,
    number,
    pointwise,
)
from cp_inductor.torch_private.modes import without_modes

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op in a trace."""

    op: torch._ops.OpOverload  # what is called
    # By name. A tensor is given as its `Value`; as its node if it has none.
    arguments: Mapping[str, Any]
    result: Any  # a fake tensor like the result, or several
    tables: RunTimeTables  # those that values read

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return tuple(self.result.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the result."""
        dtype: torch.dtype = self.result.dtype
        return dtype

    def __getitem__(self, name: str) -> Any:
        """Return an argument as it is given."""
        return self.arguments[name]

    def tensor(self, name: str) -> Value:
        """Return a tensor argument; a number in its place becomes a constant tensor."""
        value = self.arguments[name]
        if isinstance(value, (bool, int, float)):
            return constant(value)
        if not isinstance(value, Value):
            raise Unknown
        return value

    def operands(self, *names: str) -> list[Value]:
        """Return tensor arguments in the dtype of the result, for an op that computes in it."""
        return [self.tables.promote(self.tensor(name), self.dtype) for name in names]

    def alternatives(self, *values: Value) -> list[Value]:
        """Return tensors in the dtype of the result, for an op that only selects.

        One that has this dtype is returned unchanged, without the checks of arithmetic.
        """
        return [
            value if value.dtype == self.dtype else self.tables.promote(value, self.dtype)
            for value in values
        ]

    def settled(self, value: Value) -> Value:
        """Return a value as the result, in its dtype; see `RunTimeTables.settle`."""
        return self.tables.settle(value, self.dtype)


Row = Callable[[OpCall], Any]


# --- Factories --------------------------------------------------------------------------------


def _arange(call: OpCall) -> Value:
    start, step = (number(call[name]) for name in ("start", "step"))
    expression = start + step * index_of(call.shape, 0)
    return call.settled(Value.of(call.shape, call.dtype, expression))


def _full(name: str) -> Row:
    def row(call: OpCall) -> Value:
        return call.settled(replace(call.tensor(name), shape=call.shape))

    return row


# --- Numbers ----------------------------------------------------------------------------------


def computed(function: Callable[..., Value]) -> Row:
    """Return the row of an op that computes with all its arguments in the dtype of its result."""
    return lambda call: call.settled(function(*call.operands(*call.arguments)))


def _sum(sign: int) -> Row:
    def row(call: OpCall) -> Value:
        left, right = call.operands("self", "other")
        if call["alpha"] != 1:
            scale = call.tables.promote(constant(call["alpha"]), call.dtype)
            right = call.settled(_product(right, scale))
        limit = min(left.limit, right.limit)
        if limit < math.inf:
            # If x compares with n as its expression does for |n| <= limit, and y is exact, then
            # x + y compares with n as the sum's expression does for |n| <= limit - |y|.
            exact = left if left.limit == math.inf else right
            limit -= call.tables.magnitude(exact.exact())
            # Half of the dtype's exact integers must be left.
            if limit < WHOLE_UP_TO[call.dtype] // 2:
                raise Unknown
        total = pointwise(lambda a, b: combine(sympy.Add, a, sign * b), left, right, is_sum=True)
        return call.settled(replace(total, limit=limit))

    return row


def _product(left: Value, right: Value) -> Value:
    if min(left.limit, right.limit) < math.inf:
        # The other factor must be a constant other than 0: 0 times infinity would be NaN.
        exact = (left if left.limit == math.inf else right).exact()
        if any(not e.is_number or e.is_zero or e.is_infinite for _, e in exact.numbers()):
            raise Unknown
    return pointwise(multiply, left, right)


def _extreme(function: Callable[..., Expr], *values: Value) -> Value:
    def of(*numbers: Expr) -> Expr:
        # Sympy may drop a float that never is the extreme. If the float is NaN, the result is NaN.
        result = function(*numbers)
        read = set().union(*(number.atoms(AppliedUndef) for number in numbers))
        if not {entry for entry in read if not entry.is_integer} <= result.atoms(AppliedUndef):
            raise Unknown
        return result

    return pointwise(of, *values)


def _clamped(call: OpCall) -> Value:
    (value,) = call.operands("self")
    for name, function in (("min", sympy.Max), ("max", sympy.Min)):
        if call[name] is not None:
            value = _extreme(function, value, *call.operands(name))
    return call.settled(value)


def true_quotient(left: Expr, right: Expr) -> Expr:
    """Return left / right; raise Unknown if the right one is no finite number other than 0."""
    if not right.is_number or right.is_zero or right.is_infinite:
        raise Unknown
    return left if right == 1 else multiply(left, sympy.Float(1 / float(right)))


def _by_whole_number(rounding: str, *, is_remainder: bool = True) -> Row:
    """Return the row of a quotient or remainder of integers by a positive one.

    Quotients are rounded down. Ops that are not told to round by "floor" or by "trunc", which are
    alike from 0 on, round so.
    """

    def row(call: OpCall) -> Value:
        left, right = (value.exact() for value in call.operands("self", "other"))
        divisor = right.expression()
        if not divisor.is_Integer or divisor <= 0:
            raise Unknown
        shape, (left, _) = align([left, right])
        mode = call.arguments.get("rounding_mode", rounding)
        lows = (call.tables.range_of(e, shape)[0] for _, e in left.numbers())
        if mode not in ("floor", "trunc") or (mode == "trunc" and any(low < 0 for low in lows)):
            raise Unknown

        def of(expression: Expr) -> Expr:
            if not expression.is_integer or expression.has(sympy.Float):
                raise Unknown
            quotient, rest = call.tables.divide(expression, int(divisor), shape)
            return rest if is_remainder else quotient

        return call.settled(pointwise(of, left))

    return row


# --- Conditions -------------------------------------------------------------------------------


def _relation(word: str) -> Row:
    def row(call: OpCall) -> Value:
        # Numbers take part in torch's type promotion as they are.
        like = (
            torch.empty([1] * len(value.shape), dtype=value.dtype, device="meta")
            if isinstance(value, Value)
            else value
            for value in (call["self"], call["other"])
        )
        dtype = torch.result_type(*like)
        left, right = call.tensor("self"), call.tensor("other")
        left, right = (call.tables.promote(value, dtype) for value in (left, right))
        return call.tables.relate(word, left, right)

    return row


def _logic(function: Callable[..., Boolean], *, of_bits: bool = False) -> Row:
    def row(call: OpCall) -> Value:
        values = [call.tensor(name) for name in call.arguments]
        if of_bits and any(value.truth is None for value in values):
            raise Unknown
        shape, aligned = align([call.tables.as_bool(value) for value in values])
        truth = check_terms(function(*(value.truth for value in aligned)))
        return Value(shape, torch.bool, truth=truth)

    return row


def _where(call: OpCall) -> Value:
    condition = call.tables.as_bool(call.tensor("condition"))
    both = call.alternatives(call.tensor("self"), call.tensor("other"))
    _, (where, value, other) = align([condition, *both])
    assert where.truth is not None
    chosen = join_pieces([(where.truth, value), (Not(where.truth), other)])
    merged: dict[Expr, Boolean] = {}
    for c, e in chosen.cases:
        merged[e] = check_terms(Or(merged.get(e, sympy.false), c))
    if len(merged) > MAX_CASES:
        raise Unknown
    return call.settled(replace(chosen, cases=tuple((c, e) for e, c in merged.items())))


# --- Views ------------------------------------------------------------------------------------


def _viewed(call: OpCall) -> Any:
    """Return one view or several, by where the op finds its elements in a contiguous tensor."""
    value, others = call.tensor("self"), dict(call.arguments)
    del others["self"]
    if 0 in value.shape:
        raise Unknown
    with without_modes():
        result = call.op(torch.empty(value.shape, device="meta"), **others)
    views = result if isinstance(result, (list, tuple)) else (result,)
    values = []
    for view in views:
        shape = tuple(view.shape)
        flat = sympy.Integer(view.storage_offset() if view.numel() else 0)
        for dim, stride in enumerate(view.stride()):
            flat += stride * index_of(shape, dim)
        indices: dict[Expr, Expr] = {}
        # An index of a dim of size 1 is in no expression.
        for dim, size in reversed([*enumerate(value.shape)]):
            if size > 1:
                flat, indices[DIMS[dim]] = call.tables.divide(flat, size, shape)
        values.append(value.map(shape, indices))
    return values[0] if views is not result else tuple(values)


def _flipped(call: OpCall) -> Value:
    value = call.tensor("self")
    dims = {dim % len(value.shape) for dim in call["dims"]}
    shape = value.shape
    return value.map(shape, {DIMS[d]: shape[d] - 1 - index_of(shape, d) for d in dims})


def _repeated(call: OpCall) -> Value:
    value, shape = call.tensor("self"), call.shape
    offset = len(shape) - len(value.shape)
    indices = {
        DIMS[dim]: call.tables.divide(index_of(shape, dim + offset), size, shape)[1]
        for dim, size in enumerate(value.shape)
        if size > 1
    }
    return value.map(shape, indices)


def _index_selected(call: OpCall) -> Value:
    shape, index = call.tensor("self").shape, call.tensor("index")
    if not shape or len(index.shape) != 1:
        raise Unknown
    dim = call["dim"] % len(shape)
    return _indexed(replace(call, arguments={**call.arguments, "indices": [*[None] * dim, index]}))


def _indexed(call: OpCall) -> Value:
    """Return what is read at index tensors of adjacent dims."""
    arrays = {dim: array for dim, array in enumerate(call["indices"]) if array is not None}
    value, places = call.tensor("self"), sorted(arrays)
    is_adjacent = bool(places) and places[-1] - places[0] + 1 == len(places)
    # A bool or uint8 tensor would be a mask of what to take, not indices.
    if not is_adjacent or not all(
        isinstance(array, Value) and array.dtype in (torch.int64, torch.int32)
        for array in arrays.values()
    ):
        raise Unknown
    common, aligned = align(list(arrays.values()))
    first, added = places[0], len(common) - len(places)
    moved = {DIMS[d]: DIMS[d + first] for d in range(len(common))}
    indices: dict[Expr, Expr] = {
        DIMS[dim]: DIMS[dim + added] for dim in range(places[-1] + 1, len(value.shape))
    }
    for dim, array in zip(arrays, aligned, strict=True):
        expression, size = array.exact().expression(), value.shape[dim]
        low, high = call.tables.range_of(expression, array.shape)
        # A negative index would count from the end.
        if not expression.is_integer or low < 0 or high >= size:
            raise Unknown
        indices[DIMS[dim]] = expression.xreplace(moved) if size > 1 else sympy.Integer(0)
    return value.map(call.shape, indices)


# --- Sequences --------------------------------------------------------------------------------


def _cumulated(call: OpCall) -> Value:
    """Compute the sums of a constant tensor, and fit the result by a line and steps."""
    return fit(call.op(materialize(call.tensor("self")), call["dim"], dtype=call["dtype"]))


def _joined(call: OpCall) -> Value:
    if not all(isinstance(value, Value) for value in call["tensors"]):
        raise Unknown
    values = call.alternatives(*call["tensors"])
    dim = call["dim"] % len(call.shape)
    if not any(value.tables() for value in values):
        try:
            return fit(torch.cat([materialize(value) for value in values], dim))
        except Unknown:
            pass  # it varies along several dims, or is too long
    index, start = index_of(call.shape, dim), 0
    pieces: list[tuple[Boolean, Value]] = []
    for value in values:
        size = value.shape[dim] if len(value.shape) == len(call.shape) else 0
        if size:
            stop = start + size
            is_behind = at_most_zero(start - index) if start else sympy.true
            is_before = at_most_zero(index - stop + 1) if stop < call.shape[dim] else sympy.true
            condition = And(is_behind, is_before)
            at = index - start if size > 1 else sympy.Integer(0)
            pieces.append((condition, value.map(call.shape, {DIMS[dim]: at})))
            start = stop
    return call.settled(join_pieces(pieces))


# --- The table --------------------------------------------------------------------------------

_JOINING: Mapping[str, Callable[..., Boolean]] = {
    "and": And,
    "or": Or,
    "xor": lambda left, right: Or(And(left, Not(right)), And(Not(left), right)),
}

OPS: Mapping[torch._ops.OpOverload, Row] = {
    aten.arange.start_step: _arange,
    aten.full.default: _full("fill_value"),
    aten.full_like.default: _full("fill_value"),
    aten.scalar_tensor.default: _full("s"),
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.mul.Tensor: computed(_product),
    aten.neg.default: computed(partial(pointwise, neg, is_sum=True)),
    aten.abs.default: computed(partial(pointwise, lambda a: sympy.Max(a, -a))),
    aten.minimum.default: computed(partial(_extreme, sympy.Min)),
    aten.maximum.default: computed(partial(_extreme, sympy.Max)),
    aten.clamp.default: _clamped,
    aten.clamp.Tensor: _clamped,
    aten.div.Tensor: computed(lambda a, b: pointwise(true_quotient, a.exact(), b.exact())),
    aten.div.Tensor_mode: _by_whole_number("floor", is_remainder=False),
    aten.remainder.Scalar: _by_whole_number("floor"),
    aten.remainder.Tensor: _by_whole_number("floor"),
    aten.fmod.Scalar: _by_whole_number("trunc"),
    aten.fmod.Tensor: _by_whole_number("trunc"),
    **{getattr(aten, word).Tensor: _relation(word) for word in WORDS.values()},
    **{getattr(aten, word).Scalar: _relation(word) for word in WORDS.values()},
    **{getattr(aten, f"logical_{word}").default: _logic(join) for word, join in _JOINING.items()},
    **{
        getattr(aten, f"bitwise_{word}").Tensor: _logic(join, of_bits=True)
        for word, join in _JOINING.items()
    },
    aten.logical_not.default: _logic(Not),
    aten.bitwise_not.default: _logic(Not, of_bits=True),
    aten.where.self: _where,
    aten._to_copy.default: lambda call: call.tables.cast(call.tensor("self"), call.dtype),
    **dict.fromkeys(
        (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default),
        lambda call: call.tensor("self"),
    ),
    **dict.fromkeys(
        (
            *(aten.expand.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims),
            *(aten.permute.default, aten.slice.Tensor, aten.select.int),
            aten.split_with_sizes.default,
        ),
        _viewed,
    ),
    aten.flip.default: _flipped,
    aten.repeat.default: _repeated,
    aten.index.Tensor: _indexed,
    aten.index_select.default: _index_selected,
    aten.cat.default: _joined,
    aten.cumsum.default: _cumulated,
}
