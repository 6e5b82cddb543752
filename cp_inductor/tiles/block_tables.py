"""Which blocks of a tile hold pairs: interval arithmetic on tensors, from a rule and its tables.

    tile q[0:512] x kv[0:512] under (k - q <= 0) & Eq(t0(b, q), t0(b, k)), t0 = 0 x 256, 1 x 256
      =>
    PARTIAL EMPTY   EMPTY   EMPTY
    FULL    PARTIAL EMPTY   EMPTY          a cell for each block of 128 queries x 128 keys
    EMPTY   EMPTY   PARTIAL EMPTY
    EMPTY   EMPTY   FULL    PARTIAL

An index or a table becomes its least and its greatest value in each block of rows or columns. The
rule is then evaluated on these bounds by the same `evaluate`: by the same operations, in the same
order, as on single values. So bounds hold for what is computed, and not only for what is meant:
rounding is monotonic, and a bound of float32 is rounded as values are. Integers stay integers. What
may leave the range of int64, or may be NaN, is unbounded.

No value is read on the host and no shape depends on one: the function can be traced into a graph.

Shapes: B batch, H heads of the tile, S its queries, T its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import BATCH, HEAD, QUERY
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.tiles.tile_masks import Geometry, Indices, Lazily

# Queries and keys of a block: what flex attention's kernels have.
BLOCK = 128

# Of integers, the ends of int64 as bounds mean that there is none.
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1

# Beyond this a product of integers counts as unbounded. It is estimated in float64.
_LARGE = float(1 << 62)


def make_block_table(rule: Rule, indices: Indices) -> Tensor:
    """Return what a rule says of the blocks of a tile.

    Args:
        rule: of the attention.
        indices: of the tile; nothing is read of them but the geometry and the tables.

    Returns:
        (B | 1, H | 1, ceil(S / 128), ceil(T / 128)) int8, of `Cell`: EMPTY, FULL or PARTIAL.
        PARTIAL may hold any pairs, none and all among them. Nothing is FULL if the rule has a
        bias. B and H are 1 if what exists does not depend on them.
    """
    decision = _decide(rule, indices)
    shape = shape_of_block_table(rule, indices.geometry, indices.batch)
    cells = decision.may.to(torch.int8) * Cell.PARTIAL
    if not rule.bias:
        cells = torch.where(decision.must, Cell.FULL, cells)
    # May and must are made of bounds that hold each by itself: what may not be, is not.
    return torch.where(decision.may, cells, Cell.EMPTY).to(torch.int8).expand(shape)


def shape_of_block_table(
    rule: Rule, geometry: Geometry, batch: int | torch.SymInt
) -> tuple[int | torch.SymInt, ...]:
    """Return the shape of the block table of a tile, for so many batch entries."""
    free = rule.allowed.free_symbols
    return (
        batch if BATCH in free else 1,
        geometry.heads[1] - geometry.heads[0] if HEAD in free else 1,
        num_blocks(geometry.num_queries),
        num_blocks(geometry.num_keys),
    )


def num_blocks(length: int) -> int:
    """Return how many blocks so many tokens are."""
    return -(-length // BLOCK)


def _decide(rule: Rule, indices: Indices) -> _Decision:
    operations = Operations(
        read=lambda number, _, where: _read(indices, number, where),
        floor_divide=_floor_divide,
        minimum=lambda a, b: _extreme(torch.minimum, indices, a, b),
        maximum=lambda a, b: _extreme(torch.maximum, indices, a, b),
        choose=lambda c, a, b: _choose(indices, c, a, b),
        as_integer=lambda c: _Interval(c.must.to(torch.int64), c.may.to(torch.int64)),
        boolean=lambda value: _Decision(indices.boolean(value), indices.boolean(value)),
        apply=lambda _, *values: _unbounded_float(*_of_numbers(indices, values)),
    )
    values = Lazily(lambda symbol: _bounds_of_index(indices, symbol))
    decision: _Decision = evaluate(rule.allowed, values, operations)
    return decision


def _bounds_of_index(indices: Indices, symbol: sympy.Symbol) -> _Interval:
    run = indices.geometry.run_of(symbol)
    if run is None or run[1] - run[0] <= 1:
        return _bounds_of_blocks(indices.of(symbol))
    # Of one run of positions, the bounds are numbers: nothing has to be reduced.
    low = torch.arange(*run, BLOCK, device=indices.device)
    low = low.view(1, 1, -1, 1) if symbol == QUERY else low.view(1, 1, 1, -1)
    return _interval(low, (low + (BLOCK - 1)).clamp(max=run[1] - 1))


def _read(indices: Indices, number: int, where: tuple[sympy.Expr, ...]) -> _Interval:
    if indices.is_cut(where):
        return _bounds_of_blocks(indices.cut(number, where))
    # Read at computed indices: some value of the table.
    table = indices.tables[number]
    table = table if table.is_floating_point() else table.to(torch.int64)
    return _interval(table.amin().view(1, 1, 1, 1), table.amax().view(1, 1, 1, 1))


def _bounds_of_blocks(values: Tensor) -> _Interval:
    """Return the bounds of (B | 1, H | 1, S | 1, T | 1) in each block of rows and columns."""
    low = high = values
    for dim in (2, 3):
        if (length := values.shape[dim]) > 1:
            low, high = (_in_blocks(one, dim, -length % BLOCK) for one in (low, high))
            low, high = low.amin(dim + 1), high.amax(dim + 1)
    return _interval(low, high)


def _in_blocks(values: Tensor, dim: int, missing: int) -> Tensor:
    """(..., n, ...) -> (..., blocks, 128, ...), the last block filled up with its last value."""
    if missing:
        shape = list(values.shape)
        shape[dim] = missing
        values = torch.cat([values, values.narrow(dim, -1, 1).expand(shape)], dim)
    return values.unflatten(dim, (-1, BLOCK))


# --- Intervals --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Decision:
    """Whether a condition surely holds for all pairs of a block, and whether it may for any."""

    must: Tensor
    may: Tensor

    def __and__(self, other: _Decision) -> _Decision:
        return _Decision(self.must & other.must, self.may & other.may)

    def __or__(self, other: _Decision) -> _Decision:
        return _Decision(self.must | other.must, self.may | other.may)

    def __invert__(self) -> _Decision:
        return _Decision(~self.may, ~self.must)


@dataclass(frozen=True, slots=True, eq=False)
class _Interval:
    """Bounds of values, and whether they may be NaN: then they are infinite.

    Both are tensors of one dtype: int64, or that of floats. Of integers, the least number of int64
    as a lower bound, and the greatest as an upper one, mean that there is no bound.
    """

    low: Tensor
    high: Tensor
    may_be_nan: Tensor | None = None

    @property
    def is_float(self) -> bool:
        return self.low.is_floating_point()

    def __add__(self, other: _Value) -> _Interval:
        return _add(self, other)

    __radd__ = __add__

    def __sub__(self, other: _Value) -> _Interval:
        return _add(self, -_as_interval(other, self))

    def __rsub__(self, other: _Value) -> _Interval:
        return _add(-self, other)

    def __neg__(self) -> _Interval:
        if self.is_float:
            return _Interval(-self.high, -self.low, self.may_be_nan)
        return _Interval(_negated(self.high), _negated(self.low))

    def __mul__(self, other: _Value) -> _Interval:
        return _multiply(self, other)

    __rmul__ = __mul__

    def __pow__(self, other: _Value) -> _Interval:
        return _unbounded_float(self, other)

    __rpow__ = __pow__

    def __le__(self, other: _Value) -> _Decision:
        a, b = _matched(self, other)
        must, may = a.high <= b.low, a.low <= b.high
        return _decision(a, b, must, may)

    def __lt__(self, other: _Value) -> _Decision:
        a, b = _matched(self, other)
        return _decision(a, b, a.high < b.low, a.low < b.high)

    def __ge__(self, other: _Value) -> _Decision:
        a, b = _matched(self, other)
        return b <= a

    def __gt__(self, other: _Value) -> _Decision:
        a, b = _matched(self, other)
        return b < a

    def __eq__(self, other: _Value) -> _Decision:  # type: ignore[override]
        a, b = _matched(self, other)
        must = (a.low == b.high) & (a.high == b.low)
        return _decision(a, b, must, (a.low <= b.high) & (b.low <= a.high), is_equality=True)

    def __ne__(self, other: _Value) -> _Decision:  # type: ignore[override]
        return ~(self == other)


# What `evaluate` hands to an operation: bounds, or a number of the rule.
_Value = _Interval | int | float


def _interval(low: Tensor, high: Tensor) -> _Interval:
    """Make an interval of the least and the greatest of some values, which are NaN if any is."""
    if not low.is_floating_point():
        return _Interval(low, high)
    may_be_nan = low.isnan() | high.isnan()
    low, high = low.masked_fill(may_be_nan, -torch.inf), high.masked_fill(may_be_nan, torch.inf)
    return _Interval(low, high, may_be_nan)


def _as_interval(value: _Value, like: _Interval) -> _Interval:
    """Make an interval of a number: an integer, or a float of the dtype that it has beside `like`.

    Beside a float tensor, a number is of the tensor's dtype; a float beside integers is of torch's
    default one.
    """
    if isinstance(value, _Interval):
        return value
    if isinstance(value, int):
        within = min(max(value, _LEAST), _MOST)
        number = like.low.new_full((), within, dtype=torch.int64)
    else:
        number = like.low.new_full((), value, dtype=torch.result_type(like.low, value))
    return _interval(number, number)


def _matched(a: _Value, b: _Value) -> tuple[_Interval, _Interval]:
    """Bring two operands to the dtype in which torch computes with them."""
    if not isinstance(a, _Interval):
        assert isinstance(b, _Interval)
        a = _as_interval(a, b)
    b = _as_interval(b, a)
    dtype = torch.result_type(a.low, b.low)
    return _converted(a, dtype), _converted(b, dtype)


def _converted(value: _Interval, dtype: torch.dtype) -> _Interval:
    """Round bounds, as torch rounds values; what has no bound has none."""
    if value.low.dtype == dtype:
        return value
    if value.is_float:
        return _Interval(value.low.to(dtype), value.high.to(dtype), value.may_be_nan)
    low = value.low.to(dtype).masked_fill(value.low == _LEAST, -torch.inf)
    high = value.high.to(dtype).masked_fill(value.high == _MOST, torch.inf)
    return _Interval(low, high, torch.zeros_like(low, dtype=torch.bool))


def _decision(
    a: _Interval, b: _Interval, must: Tensor, may: Tensor, *, is_equality: bool = False
) -> _Decision:
    """Correct what comparing bounds says where there are none, or where values may be NaN."""
    if a.may_be_nan is not None and b.may_be_nan is not None:
        is_open = a.may_be_nan | b.may_be_nan
    else:
        is_open = (a.high == _MOST) | (b.low == _LEAST)
        may = may | (a.low == _LEAST) | (b.high == _MOST)
        if is_equality:
            is_open = is_open | (a.low == _LEAST) | (b.high == _MOST)
            # Only what both sides leave open may be: a number below all of the other is not equal.
            may = (_at_most(a.low, b.high)) & (_at_most(b.low, a.high))
    return _Decision(must & ~is_open, may)


def _at_most(low: Tensor, high: Tensor) -> Tensor:
    """Whether a lower bound leaves room below an upper one."""
    return (low <= high) | (low == _LEAST) | (high == _MOST)


def _negated(bound: Tensor) -> Tensor:
    """Negate bounds of integers: that there is none on one side is that there is none on the other.

    So is the least number, which has no negative: the greatest is less.
    """
    inside = -bound.clamp(min=-_MOST)
    return torch.where(bound == _MOST, _LEAST, torch.where(bound == _LEAST, _MOST, inside))


def _add(a: _Value, b: _Value) -> _Interval:
    a, b = _matched(a, b)
    if a.is_float:
        return _of_floats(a, b, a.low + b.low, a.high + b.high)
    low = _sum_within(a.low, b.low).masked_fill((a.low == _LEAST) | (b.low == _LEAST), _LEAST)
    high = _sum_within(a.high, b.high).masked_fill((a.high == _MOST) | (b.high == _MOST), _MOST)
    return _Interval(low, high)


def _sum_within(a: Tensor, b: Tensor) -> Tensor:
    """Add integers; a sum beyond int64 is its end."""
    least, most = _LEAST - b.clamp(max=0), _MOST - b.clamp(min=0)
    return torch.minimum(torch.maximum(a, least), most) + b


def _multiply(a: _Value, b: _Value) -> _Interval:
    a, b = _matched(a, b)
    ends = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if a.is_float:
        products = [x * y for x, y in ends]
        return _of_floats(a, b, _least(products), _greatest(products))
    # The ends of int64 are estimated as large, so that no bound times anything is no bound.
    is_large = [(x.double() * y.double()).abs() >= _LARGE for x, y in ends]
    products = [x.masked_fill(large, 0) * y for large, (x, y) in zip(is_large, ends, strict=True)]
    any_large = is_large[0] | is_large[1] | is_large[2] | is_large[3]
    low, high = _least(products), _greatest(products)
    return _Interval(low.masked_fill(any_large, _LEAST), high.masked_fill(any_large, _MOST))


def _least(values: list[Tensor]) -> Tensor:
    return torch.minimum(torch.minimum(values[0], values[1]), torch.minimum(values[2], values[3]))


def _greatest(values: list[Tensor]) -> Tensor:
    return torch.maximum(torch.maximum(values[0], values[1]), torch.maximum(values[2], values[3]))


def _of_floats(a: _Interval, b: _Interval, low: Tensor, high: Tensor) -> _Interval:
    """Make an interval of computed ends; infinite operands may give NaN anywhere between."""
    may_be_nan = ~(a.low.isfinite() & a.high.isfinite() & b.low.isfinite() & b.high.isfinite())
    if low.dtype.itemsize < 4:
        # A number of the rule is not rounded before it is added to half precision.
        may_be_nan = torch.ones_like(may_be_nan)
    for one in (a, b):
        if one.may_be_nan is not None:
            may_be_nan = may_be_nan | one.may_be_nan
    low, high = low.masked_fill(may_be_nan, -torch.inf), high.masked_fill(may_be_nan, torch.inf)
    return _Interval(low, high, may_be_nan)


def _unbounded_float(a: _Value, b: _Value) -> _Interval:
    """Powers, and floors of quotients, are rounded in ways that need not be monotonic."""
    a, b = _matched(a, b)
    either = a.low.double() + b.low.double()
    nothing = torch.zeros_like(either)
    is_nan = torch.ones_like(either, dtype=torch.bool)
    return _Interval(nothing - torch.inf, nothing + torch.inf, is_nan)


def _floor_divide(a: _Value, divisor: int) -> _Interval:
    assert isinstance(a, _Interval)
    assert divisor > 0
    if a.is_float:
        return _unbounded_float(a, divisor)
    low, high = (torch.div(end, divisor, rounding_mode="floor") for end in (a.low, a.high))
    return _Interval(
        low.masked_fill(a.low == _LEAST, _LEAST), high.masked_fill(a.high == _MOST, _MOST)
    )


def _extreme(
    function: Callable[[Tensor, Tensor], Tensor], indices: Indices, a: Any, b: Any
) -> _Interval:
    a, b = _matched(_of_number(indices, a), _of_number(indices, b))
    low, high = function(a.low, b.low), function(a.high, b.high)
    if not a.is_float:
        return _Interval(low, high)
    may_be_nan = a.may_be_nan | b.may_be_nan
    low, high = low.masked_fill(may_be_nan, -torch.inf), high.masked_fill(may_be_nan, torch.inf)
    return _Interval(low, high, may_be_nan)


def _choose(indices: Indices, condition: _Decision, a: Any, b: Any) -> _Interval:
    a, b = _matched(_of_number(indices, a), _of_number(indices, b))
    must, may = condition.must, condition.may

    def pick(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return torch.where(must, x, torch.where(may, function(x, y), y))

    low, high = pick(torch.minimum, a.low, b.low), pick(torch.maximum, a.high, b.high)
    if not a.is_float:
        return _Interval(low, high)
    return _Interval(low, high, pick(torch.logical_or, a.may_be_nan, b.may_be_nan))


def _of_numbers(indices: Indices, values: Sequence[Any]) -> tuple[_Interval, _Interval]:
    first, *rest = (_of_number(indices, value) for value in values)
    return first, rest[0] if rest else first


def _of_number(indices: Indices, value: Any) -> _Interval:
    if isinstance(value, _Interval):
        return value
    number = indices.as_tensor(value)
    return _interval(number, number)
