"""A tensor as a function of its own indices.

    arange(S)[:, None]                 (S, 1) int64    d0
    zeros(S, T).masked_fill(c, -inf)   (S, T) float32  -oo where c(d0, d1), 0 elsewhere
    ids[:, None] == ids[None]          (S, S) bool     Eq(t0(d0), t0(d1)), t0 = ids

A bool tensor is a condition. A tensor of numbers is a list of cases: (condition, expression). A
tensor that exists only when the graph runs is a table, `t0(d1)`: only the range of its dtype is
known of its numbers.

Ranges decide what may be claimed. If the range of an expression fits the dtype, the tensor equals
the expression exactly. An int64 sum that may wrap is known modulo 2^64. A float that may be rounded
still compares with small integers as the expression does. Anything else raises `Unknown`.

This module knows no aten ops, graphs or attention.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sympy
import torch
from sympy import And, Expr, Not, Or
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from cp_inductor.mask.evaluate import evaluate, sides
from cp_inductor.mask.intervals import EXACT, Interval
from cp_inductor.mask.language import SCORE, at_most_zero, compare, number_of, substitute, table

# The indices of a tensor. The index of a dim of size 1 is written 0.
DIMS = sympy.symbols("d0:8", integer=True, nonnegative=True)

# A tensor with more cases than this is Unknown.
MAX_CASES = 8
# A condition with more relations than this is Unknown: evaluating it costs more than a table.
MAX_TERMS = 64

# The dtype holds all integers up to this exactly.
WHOLE_UP_TO = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
}
# Without uint64: rules are evaluated in int64, which does not hold all its numbers.
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS = frozenset({*_SIGNED, torch.uint8, torch.uint16, torch.uint32})

# What a table may hold, and a constant.
READABLE = frozenset({torch.bool, *INTEGERS, *WHOLE_UP_TO})

Range = tuple[Any, Any]


class Unknown(Exception):
    """The result of an operation is not known as an expression."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as a function of its indices `DIMS`."""

    shape: tuple[int, ...]  # of the tensor
    dtype: torch.dtype  # of the tensor
    # truth: of a bool tensor: the condition under which an element is True. Otherwise None.
    truth: Boolean | None = None
    # cases: of a tensor of numbers: (condition, number). Exactly one condition holds.
    cases: tuple[tuple[Boolean, Expr], ...] = ()
    # Comparing the tensor with an integer from -limit to limit gives the same as comparing its
    # numbers. Beyond, floats may be rounded.
    limit: float = math.inf
    is_wrapped: bool = False  # the tensor equals its numbers only modulo 2^64

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, number: Expr) -> Value:
        """Return the tensor whose elements are a number, or tell whether it is not 0."""
        if dtype == torch.bool:
            return Value(tuple(shape), dtype, truth=compare("ne", number, sympy.Integer(0)))
        return Value(tuple(shape), dtype, cases=((sympy.true, number),))

    def numbers(self) -> tuple[tuple[Boolean, Expr], ...]:
        """Return the cases; those of a bool tensor are 1 and 0."""
        if self.truth is None:
            return self.cases
        cases = (self.truth, sympy.Integer(1)), (Not(self.truth), sympy.Integer(0))
        return that_may_hold(cases)

    def map(self, shape: Sequence[int], indices: Mapping[Expr, Expr]) -> Value:
        """Return a view of the tensor.

        Args:
            shape: of the view.
            indices: index of this tensor => the expression of the view's indices to read it at.
        """
        truth = None if self.truth is None else substitute(self.truth, indices)
        cases = [(substitute(c, indices), substitute(e, indices)) for c, e in self.cases]
        return replace(self, shape=tuple(shape), truth=truth, cases=that_may_hold(cases))

    def expand(self, shape: tuple[int, ...]) -> Value:
        """Return the tensor, repeated along new dims and along those of size 1."""
        offset = len(shape) - len(self.shape)
        return self.map(shape, {DIMS[d]: DIMS[d + offset] for d in range(len(self.shape))})

    def exact(self) -> Value:
        """Return the value itself if it equals its expressions exactly; else raise Unknown."""
        if self.is_wrapped or self.limit < math.inf:
            raise Unknown
        return self

    def expression(self) -> Any:
        """Return its only expression, a condition or a number; raise Unknown if it has cases."""
        if len(self.cases) > 1:
            raise Unknown
        return self.cases[0][1] if self.truth is None else self.truth

    def tables(self) -> set[Any]:
        """Return the reads of tables, such as t0(d1)."""
        return self.atoms(AppliedUndef)

    def atoms(self, kind: Any) -> set[Any]:
        """Return all parts of a kind that occur in its expressions."""
        parts = [self.truth] if self.truth is not None else sum(self.cases, ())
        return set().union(*(part.atoms(kind) for part in parts))


def that_may_hold(cases: Iterable[tuple[Boolean, Expr]]) -> tuple[tuple[Boolean, Expr], ...]:
    """Return the cases whose conditions are not known to be false."""
    return tuple(case for case in cases if case[0] != sympy.false)


def _range_of_dtype(dtype: torch.dtype) -> Range:
    if dtype.is_floating_point:
        return -math.inf, math.inf
    if dtype == torch.bool:
        return 0, 1
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def index_of(shape: Sequence[int], dim: int) -> Expr:
    """Return the index of a dim; 0 if its size is 1."""
    return DIMS[dim] if shape[dim] > 1 else sympy.Integer(0)


def number(value: float) -> Expr:
    """Return a number as an expression; a whole number becomes an integer."""
    if value != value:
        raise Unknown
    if value in (math.inf, -math.inf):
        return sympy.oo if value > 0 else -sympy.oo
    is_whole = isinstance(value, int) or (float(value).is_integer() and abs(value) < 1 << 53)
    return sympy.Integer(int(value)) if is_whole else sympy.Float(value)


def constant(value: float, shape: Sequence[int] = ()) -> Value:
    """Return a tensor whose elements are all one number or bool."""
    if isinstance(value, bool):
        return Value(tuple(shape), torch.bool, truth=sympy.sympify(value))
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return Value.of(shape, dtype, number(value))


def _is_whole(expression: Expr) -> bool:
    return bool(expression.is_integer) and not expression.has(sympy.Float)


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether both are floats, and the first holds more integers exactly."""
    return WHOLE_UP_TO.get(dtype, 0) > WHOLE_UP_TO.get(other, math.inf)


def _is_sum(expression: Expr) -> bool:
    """Whether an expression is a sum of terms with coefficients 1 or -1, and a constant.

    Modulo 2^64, such a sum is right wherever its terms or partial sums wrap.
    """
    _, rest = sympy.expand(expression).as_coeff_Add()
    return all(abs(c) == 1 for c in rest.as_coefficients_dict().values())


def multiply(left: Expr, right: Expr) -> Expr:
    """Return a product; see `combine`. Raise Unknown for 0 times what may be infinite."""
    product = combine(sympy.Mul, left, right)
    if product.is_zero and not (_is_whole(left) and _is_whole(right)):
        raise Unknown
    return product


def combine(kind: Any, left: Expr, right: Expr) -> Expr:
    """Return a sum or product of two expressions.

    Floats are rounded after every operation. If sympy merged or cancelled their terms, the result
    would not show this rounding, so raise Unknown. Whole numbers and constants may be merged.
    """
    result = kind(left, right)
    parts = [kind.make_args(part) for part in (left, right)]
    are_known = [_is_whole(part) or part.is_number for part in (left, right)]
    is_same = kind.identity in (left, right) or len(kind.make_args(result)) == sum(map(len, parts))
    if not (all(are_known) or result.is_infinite or is_same):
        raise Unknown
    return result


def align(values: Sequence[Value]) -> tuple[tuple[int, ...], list[Value]]:
    """Broadcast values to one shape."""
    shape = tuple(np.broadcast_shapes(*(value.shape for value in values)))
    return shape, [value.expand(shape) for value in values]


def pointwise(function: Callable[..., Expr], *values: Value, is_sum: bool = False) -> Value:
    """Apply a function of numbers elementwise: to every combination of the values' cases.

    Of what is known modulo 2^64, only sums and differences are known so.
    """
    if not is_sum and any(value.is_wrapped for value in values):
        raise Unknown
    shape, aligned = align(values)
    cases = []
    for combination in itertools.product(*(value.numbers() for value in aligned)):
        condition = And(*(c for c, _ in combination))
        if condition != sympy.false:
            cases.append((condition, function(*(n for _, n in combination))))
    if len(cases) > MAX_CASES:
        raise Unknown
    return Value(shape, values[0].dtype, None, tuple(cases), **_marks_of(values))


def _marks_of(values: Sequence[Value]) -> dict[str, Any]:
    """Return what may be claimed of a result of values: no more than of each."""
    limit = min(value.limit for value in values)
    return {"limit": limit, "is_wrapped": any(value.is_wrapped for value in values)}


def check_terms(truth: Boolean) -> Boolean:
    """Return a condition; raise Unknown if it has too many relations."""
    if len(truth.atoms(sympy.core.relational.Relational)) > MAX_TERMS:
        raise Unknown
    return truth


def join_pieces(pieces: Sequence[tuple[Boolean, Value]]) -> Value:
    """Return the tensor that is one of some values of one shape and dtype, by their conditions.

    Exactly one condition holds at each index.
    """
    values = [value for _, value in pieces]
    if values[0].dtype == torch.bool:
        truth = check_terms(Or(*(And(condition, v.truth) for condition, v in pieces)))
        return replace(values[0], truth=truth)
    cases = [(check_terms(And(condition, c)), e) for condition, v in pieces for c, e in v.cases]
    return replace(values[0], cases=that_may_hold(cases), **_marks_of(values))


# --- What may be claimed ----------------------------------------------------------------------


@dataclass
class RunTimeTables:
    """The run-time tables, known only when the graph runs, and what their ranges let us claim."""

    nodes: list[fx.Node] = field(default_factory=list)  # whose tensors they are, by number
    # The least and the greatest number that each may hold.
    ranges: list[Range] = field(default_factory=list)
    # Number of a table that counts where another table does not go up by one => the other table, as
    # an expression of the same indices, and the dim that they count along.
    runs_of: dict[int, tuple[Expr, int]] = field(default_factory=dict)

    def add(self, node: fx.Node, shape: Sequence[int], dtype: torch.dtype) -> Value | None:
        """Make a node a table, and return its value; None if rules cannot read such a tensor."""
        if not shape or dtype not in READABLE:
            return None
        index = len(self.nodes)
        self.nodes.append(node)
        self.ranges.append(_range_of_dtype(dtype))
        entry = table(index, is_integer=not dtype.is_floating_point)(
            *(index_of(shape, dim) for dim in range(len(shape)))
        )
        return Value.of(shape, dtype, entry)

    def range_of(
        self, expression: Expr, shape: Sequence[int], symbols: Sequence[Expr] = DIMS
    ) -> Range:
        """Return bounds of an expression, computed without rounding; they may not be tight.

        Its indices, one of each dim, count from 0 to the sizes of their dims.
        """
        indices = dict(zip(symbols, (EXACT(0, size - 1) for size in shape), strict=False))
        operations = EXACT.operations(
            ({SCORE: EXACT(-math.inf, math.inf)} | indices).__getitem__,
            lambda read, _: EXACT(*self.ranges[number_of(read)]),
        )
        value: Interval = evaluate(sympy.expand(expression), operations)
        return value.low, value.high

    def settle(self, value: Value, dtype: torch.dtype, *, is_operand: bool = False) -> Value:
        """Return the result of an operation in its dtype, with what may wrap or be rounded marked.

        Torch may round an operand that is a number of Python only after computing with it: it must
        not overflow in the dtype, and no operand may wrap.

        Raises:
            Unknown: an integer may wrap in a way that is not known, or the result may be NaN.
        """
        if dtype == torch.bool:
            return self.as_bool(value)
        cases = []
        limit, is_wrapped = value.limit, value.is_wrapped
        for condition, expression in value.numbers():
            if expression.has(sympy.nan, sympy.zoo):
                raise Unknown
            if expression.is_number and expression.is_finite and dtype.is_floating_point:
                rounded = torch.tensor(float(expression), dtype=dtype).item()
                if is_operand and math.isinf(rounded):
                    raise Unknown
                expression = expression if is_operand else number(rounded)
            cases.append((condition, expression))
            if self._fits(expression, value.shape, dtype):
                continue
            if dtype.is_floating_point:
                limit = min(limit, WHOLE_UP_TO[dtype])
            elif dtype == torch.int64 and _is_sum(expression) and not is_operand:
                is_wrapped = True
            else:
                raise Unknown
        return Value(value.shape, dtype, None, tuple(cases), limit, is_wrapped)

    def promote(self, value: Value, dtype: torch.dtype) -> Value:
        """Return an operand in the dtype that an operation computes in."""
        if dtype == torch.bool:
            return self.as_bool(value)
        self._check_native(value)
        if value.dtype == dtype:
            return value
        self._check_cast(value, dtype)
        return self.settle(value, dtype, is_operand=True)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a tensor in another dtype."""
        if dtype not in (value.dtype, torch.bool):
            self._check_cast(value, dtype)
        return self.settle(value, dtype)

    def _check_cast(self, value: Value, dtype: torch.dtype) -> None:
        """Raise Unknown if a cast would pass on a wrapped or rounded number as if it were exact."""
        is_wider = _is_wider(dtype, value.dtype)
        if is_wider:
            self._check_native(value)
        if value.is_wrapped or (value.limit < math.inf and (is_wider or dtype not in WHOLE_UP_TO)):
            raise Unknown
        is_half = value.dtype in (torch.float16, torch.bfloat16)
        for _, e in value.numbers() if is_wider and is_half else ():
            # What is not whole was computed, rather than read or constant.
            if not (isinstance(e, AppliedUndef) or e.is_number or _is_whole(e)):
                raise Unknown

    def _check_native(self, value: Value) -> None:
        """Raise Unknown if a cast to a narrower float has rounded a table that a value reads."""
        for entry in value.tables():
            table_of = self.nodes[number_of(entry)].meta["example_value"]
            if _is_wider(table_of.dtype, value.dtype):
                raise Unknown

    def _fits(self, value: Expr, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a dtype holds a whole number exactly. True for floats that are not whole."""
        if dtype not in INTEGERS and dtype not in WHOLE_UP_TO:
            raise Unknown
        if dtype.is_floating_point and not _is_whole(value):
            return True
        if not _is_whole(value):
            raise Unknown
        low, high = self.range_of(value, shape)
        if not dtype.is_floating_point:
            return bool(low >= torch.iinfo(dtype).min and high <= torch.iinfo(dtype).max)
        if low < torch.finfo(dtype).min or high > torch.finfo(dtype).max:
            raise Unknown
        return bool(low >= -WHOLE_UP_TO[dtype] and high <= WHOLE_UP_TO[dtype])

    def as_bool(self, value: Value) -> Value:
        """Return a bool tensor that is True where a tensor is not 0."""
        if value.truth is not None:
            return value
        return self.relate("ne", value, constant(0))

    def divide(self, left: Expr, by: int, shape: Sequence[int]) -> tuple[Expr, Expr]:
        """Return left // right and left % right, simplified as far as ranges of indices allow."""
        # left = quotient * right + rest, with as much as possible in the quotient.
        quotient, rest = sympy.Integer(0), sympy.Integer(0)
        for term, coefficient in sympy.expand(left).as_coefficients_dict().items():
            whole = coefficient // by if coefficient.is_Integer else sympy.Integer(0)
            if term != 1 and coefficient != whole * by:
                whole = sympy.Integer(0)
            quotient += whole * term
            rest += (coefficient - whole * by) * term
        low, high = self.range_of(rest, shape)
        if low >= 0 and high < by:
            return quotient, rest
        return quotient + sympy.floor(rest / by), sympy.Mod(rest, by)

    def relate(self, word: str, left: Value, right: Value) -> Value:
        """Compare values of one dtype; word is one of lt le gt ge eq ne."""
        shape, (left, right) = align([left, right])
        if (left.is_wrapped or right.is_wrapped) and word not in ("eq", "ne"):
            raise Unknown
        for side, other in ((left, right), (right, left)):
            if side.limit < math.inf and self.magnitude(other.exact()) + 1 > side.limit:
                raise Unknown
        parts = [
            And(c, d, self._compare(word, a, b, shape))
            for c, a in left.numbers()
            for d, b in right.numbers()
            if And(c, d) != sympy.false
        ]
        return Value(shape, torch.bool, truth=check_terms(Or(*parts)))

    def _compare(self, word: str, left: Expr, right: Expr, shape: Sequence[int]) -> Any:
        if left.is_infinite or right.is_infinite:
            if not all(e.is_infinite or _is_whole(e) for e in (left, right)):
                raise Unknown
            ends = [float(e) if e.is_infinite else 0.0 for e in (left, right)]
            return sympy.sympify(bool(getattr(operator, word)(*ends)))
        if not _is_whole(left) or not _is_whole(right):
            raise Unknown
        relation = compare(word, left, right)
        inner = relation.args[0] if isinstance(relation, Not) else relation
        if not isinstance(inner, sympy.core.relational.Relational):
            return relation
        # A condition may be negated later, so its contrary must be evaluable as well.
        contrary = at_most_zero(1 - inner.lhs) if isinstance(inner, sympy.Le) else inner
        if all(self._is_evaluable(way, shape) for way in (inner, contrary)):
            return relation
        low, high = self.range_of(inner.lhs - inner.rhs, shape)
        if isinstance(inner, sympy.Le) and (high <= 0 or low > 0):
            return sympy.sympify(bool(high <= 0))
        raise Unknown

    def _is_evaluable(self, relation: Any, shape: Sequence[int]) -> bool:
        """Whether both sides of a relation fit in int64, in which rules are evaluated."""
        if not isinstance(relation, sympy.core.relational.Relational):
            return True
        _, *both = sides(relation)
        compared = both if isinstance(relation, sympy.Le) else both[1:]
        ends = [self.range_of(side, shape) for side in compared]
        least, most = _range_of_dtype(torch.int64)
        return all(low >= least and high <= most for low, high in ends)

    def magnitude(self, value: Value) -> Any:
        """Return a bound of the absolute values of a tensor's numbers."""
        ranges = (self.range_of(number, value.shape) for _, number in value.numbers())
        return max(abs(end) for ends in ranges for end in ends)
