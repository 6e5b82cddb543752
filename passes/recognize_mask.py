"""Read the mask that a graph computes for an attention: what it is, as a function of indices.

    kv_idx <= q_idx, of two aranges                        =>  k - q <= 0
    docs[b, q_idx] == docs[b, kv_idx], docs an input       =>  Eq(t0(b, k), t0(b, q)), t0 = docs

Every tensor from which the mask is computed is interpreted as an expression of its own indices:
factory functions, views, indexing (also by index tensors), arithmetic, comparisons, logic, casts,
`where` and its kin. What depends on run-time tensors stays a table of which only the indices are
known. Constant sequences are computed and fitted (a line and steps), so that `cumsum` and `diff` of
`arange` say what they are. What cannot be interpreted is a table itself: in the end the mask, which
is then taken as it is. Nothing is claimed that is not so for every index.

Assumes: a graph from Dynamo, whose nodes carry `example_value`; shapes are of whole tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sympy
import torch
from sympy import And, Expr, Not, Or
from sympy.logic.boolalg import Boolean
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Replicate

from cp_inductor.plan.rules import (
    BATCH,
    HEAD,
    KEY,
    QUERY,
    Operations,
    Rule,
    Step,
    at_most_zero,
    bounds,
    canonical,
    compare,
    evaluate,
    is_of_pairs,
    number_of,
    rule_of_table,
    table,
)
from cp_inductor.torch_private import without_modes

__all__ = ["Recognized", "is_pure", "recognize_mask"]

# More alternatives of a number are not told apart.
MAX_CASES = 8
# Constant sequences up to this length are computed; with more steps than that they are tables.
MAX_COMPUTED = 1 << 24
MAX_STEPS = 256
# Terms of a rule, beyond which it is not worth having.
MAX_TERMS = 64

_DIMS = sympy.symbols("d0:8", integer=True, nonnegative=True)
_MINUS_INFINITY = sympy.S.NegativeInfinity

# Integers up to this are exact in a float.
_EXACT = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
}


@dataclass(frozen=True, slots=True)
class Recognized:
    """A mask.

    Attributes:
        rule: which pairs exist, and what is added to their scores.
        tables: what the rule reads, by number.
        indices: at which it reads them, of the dims of each; the same wherever it does, but for
            query and key.
        has_bias: the last table is a bias (B | 1, H | 1, S, T) that wants a gradient.
    """

    rule: Rule
    tables: tuple[fx.Node, ...] = ()
    indices: tuple[tuple[Expr, ...], ...] = ()
    has_bias: bool = False


def recognize_mask(mask: fx.Node) -> Recognized:
    """Return what a mask is.

    Args:
        mask: bool, or added to the scores; of up to 4 dims that broadcast to (B, H, S, T).
    """
    reader = _Reader(mask.graph)
    value = reader.value_of(mask)
    recognized = None
    if value is not None:
        lowest = _lowest(mask.meta["example_value"].dtype)
        # The lowest finite number is as good as minus infinity where every row sees something.
        recognized = _as_rule(value, reader, {_MINUS_INFINITY, lowest})
        if recognized is None or not _sees_itself(recognized.rule, value.shape):
            recognized = _as_rule(value, reader, {_MINUS_INFINITY})
    if recognized is None:
        recognized = _as_it_is(mask)
    elif recognized.rule.bias and _wants_grad(mask):
        # Its gradient is the bias's as a whole; what does not exist is known nevertheless.
        allowed = Recognized(Rule(recognized.rule.allowed), recognized.tables, recognized.indices)
        recognized = _with_bias(_used_only(allowed), mask)
    return recognized


def _with_bias(recognized: Recognized, mask: fx.Node) -> Recognized:
    """Add a tensor that wants a gradient, in full: the gradient has a value for every pair."""
    shape = mask.meta["example_value"].shape
    sizes = [1] * (4 - len(shape)) + list(map(int, shape))
    where = tuple(
        sympy.Integer(0) if size == 1 and symbol in (BATCH, HEAD) else symbol
        for symbol, size in zip((BATCH, HEAD, QUERY, KEY), sizes, strict=True)
    )
    entry = table(len(recognized.tables), is_integer=False)(*where)
    rule = Rule(recognized.rule.allowed, entry)
    return Recognized(rule, (*recognized.tables, mask), (*recognized.indices, where), True)


def _lowest(dtype: torch.dtype) -> Expr:
    return _number(torch.finfo(dtype).min) if dtype.is_floating_point else _MINUS_INFINITY


def _sees_itself(rule: Rule, shape: Sequence[int]) -> bool:
    """Whether every query sees the key of its own index, whatever the tables hold."""
    at_itself = _subs(rule.allowed, {KEY: QUERY})
    return len(shape) >= 2 and shape[-1] >= shape[-2] and canonical(at_itself) == sympy.true


def _wants_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def _as_it_is(mask: fx.Node) -> Recognized:
    value = mask.meta["example_value"]
    if _wants_grad(mask):
        return _with_bias(Recognized(Rule(sympy.true)), mask)
    rule, where = rule_of_table(value.shape, is_bool=value.dtype == torch.bool)
    return Recognized(rule, (mask,), (where,))


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor as a function of its indices, which are `_DIMS`; dims of size 1 do not occur.

    Attributes:
        shape: of the tensor.
        truth: of a bool tensor.
        cases: of a tensor of numbers: (condition, number), of which one always holds.
    """

    shape: tuple[int, ...]
    truth: Boolean | None = None
    cases: tuple[tuple[Boolean, Expr], ...] = ()

    def numbers(self) -> tuple[tuple[Boolean, Expr], ...]:
        """Return its cases, of a bool tensor 1 and 0."""
        if self.truth is None:
            return self.cases
        if self.truth in (sympy.true, sympy.false):
            return ((sympy.true, sympy.Integer(int(bool(self.truth)))),)
        return ((self.truth, sympy.Integer(1)), (Not(self.truth), sympy.Integer(0)))

    def map(self, shape: Sequence[int], indices: dict[Expr, Expr]) -> _Value:
        """Return a view: the dims of this value, as expressions of the dims of the view."""
        truth = None if self.truth is None else _subs(self.truth, indices)
        cases = tuple((_subs(c, indices), _subs(e, indices)) for c, e in self.cases)
        return _Value(tuple(shape), truth, cases)

    @property
    def is_constant(self) -> bool:
        """Whether it reads no table."""
        parts = [self.truth] if self.truth is not None else [p for case in self.cases for p in case]
        return not any(part.atoms(sympy.core.function.AppliedUndef) for part in parts)


def _subs(expression: Any, indices: dict[Expr, Expr]) -> Any:
    """Substitute, and bring relations back to their one form."""
    if not expression.free_symbols & set(indices):
        return expression
    if isinstance(expression, (And, Or, Not)):
        return expression.func(*(_subs(part, indices) for part in expression.args))
    replaced = expression.xreplace(indices)
    return _normal(replaced)


def _normal(expression: Any) -> Any:
    if isinstance(expression, sympy.Le):
        return at_most_zero(expression.lhs - expression.rhs)
    if isinstance(expression, (sympy.Eq, sympy.Ne)):
        return compare("eq" if isinstance(expression, sympy.Eq) else "ne", *expression.args)
    return expression


class _Unknown(Exception):
    """What an operation does to its inputs is not known as an expression."""


@dataclass
class _Reader:
    """Interprets the nodes of a graph."""

    graph: fx.Graph
    values: dict[fx.Node, _Value | None] = field(default_factory=dict)
    tables: list[fx.Node] = field(default_factory=list)
    # Of a table that counts where another stops to go up by one: that other, as its expression.
    runs_of: dict[int, Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mutated = _mutated_storages(self.graph)

    def value_of(self, node: Any) -> _Value | None:
        """Return what a node is, at least as a table; None if it may change after it is read."""
        if isinstance(node, (bool, int, float)):
            return _constant(node)
        if not isinstance(node, fx.Node):
            return None
        if node not in self.values:
            self.values[node] = self._read(node)
        return self.values[node]

    def _read(self, node: fx.Node) -> _Value | None:
        # Inputs first, without recursion: models are deep.
        stack = [node]
        while stack:
            last = stack[-1]
            known = last in self.values
            missing = (
                []
                if known or not is_pure(last)
                else [source for source in last.all_input_nodes if source not in self.values]
            )
            if missing:
                stack += missing
                continue
            if not known:
                self.values[last] = self._interpret(last)
            stack.pop()
        return self.values[node]

    def _interpret(self, node: fx.Node) -> _Value | None:
        example = node.meta.get("example_value")
        if not isinstance(example, Tensor):
            return _constant(example) if isinstance(example, (bool, int, float)) else None
        if _storage_of(example) in self.mutated or example.is_sparse or example.ndim > len(_DIMS):
            return None
        shape = tuple(map(int, example.shape))
        value = None
        if is_pure(node):
            try:
                value = _INTERPRETERS[_name_of(node)](self, node, *node.args, **node.kwargs)
            except (_Unknown, TypeError, ValueError, IndexError):
                value = None
        if value is not None and value.shape == shape:
            value = _cast(value, example.dtype)
        return value if value is not None and value.shape == shape else self._as_table(node, shape)

    def _as_table(self, node: fx.Node, shape: tuple[int, ...]) -> _Value | None:
        example = node.meta["example_value"]
        index = len(self.tables)
        self.tables.append(node)
        is_integer = not example.is_floating_point() and not example.is_complex()
        where = [sympy.Integer(0) if n == 1 else _DIMS[dim] for dim, n in enumerate(shape)]
        entry = table(index, is_integer=is_integer)(*where) if where else None
        if entry is None:
            return None
        source = self._run_lengths(node)
        if source is not None:
            self.runs_of[index] = source
        if example.dtype == torch.bool:
            return _Value(shape, truth=compare("ne", entry, sympy.Integer(0)))
        return _Value(shape, cases=((sympy.true, entry),))

    def _run_lengths(self, node: fx.Node) -> Expr | None:
        """Return x for `(diff(x, prepend=...) != 1).cumsum(-1)`.

        Within a run of equal counts x goes up by one at every step.
        """
        if _name_of(node) != "cumsum" or not _is_last_dim(node, 1):
            return None
        compared = node.args[0]
        if not isinstance(compared, fx.Node) or _name_of(compared) != "ne":
            return None
        difference, one = compared.args
        if one != 1 or not isinstance(difference, fx.Node) or _name_of(difference) != "diff":
            return None
        source = self.value_of(difference.args[0])
        prepend = difference.kwargs.get("prepend")
        is_first_order = difference.kwargs.get("n", 1) == 1 and len(difference.args) == 1
        is_padded = isinstance(prepend, fx.Node) and prepend.meta["example_value"].shape[-1] == 1
        if source is None or len(source.cases) != 1 or not is_first_order or not is_padded:
            return None
        return source.cases[0][1] if _is_last_dim(difference, 2) else None


def _is_last_dim(node: fx.Node, place: int) -> bool:
    """Whether an operation is along the last dim, named by keyword or in its place."""
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1)
    return dim in (-1, node.meta["example_value"].ndim - 1)


def _storage_of(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def _mutated_storages(graph: fx.Graph) -> set[int]:
    """Return the storages that some node of the graph writes to."""
    in_place = {f"i{name}" for name in ("add", "sub", "mul", "and", "or", "xor", "floordiv")}
    in_place |= {"itruediv", "imod", "ipow", "ilshift", "irshift", "setitem"}
    found = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = _name_of(node)
        is_method = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_")
        is_method |= name.removeprefix("__").removesuffix("__") in in_place
        targets = [node.kwargs.get("out")]
        is_operator = getattr(node.target, "__module__", None) == "_operator"
        if is_method or (is_operator and name in in_place):
            targets.append(node.args[0] if node.args else None)
        for target in targets:
            value = target.meta.get("example_value") if isinstance(target, fx.Node) else None
            if isinstance(value, Tensor):
                found.add(_storage_of(value))
    return found


def _name_of(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    name = str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""
    return name.split(".")[0]  # of an operator of aten, without its overload


def is_pure(node: fx.Node) -> bool:
    """Whether a node does nothing but compute what it is, as far as is known here."""
    return _name_of(node) in _INTERPRETERS


# --- Values -----------------------------------------------------------------------------------


def _constant(number: float) -> _Value:
    if isinstance(number, bool):
        return _Value((), truth=sympy.sympify(number))
    if number != number:
        raise _Unknown
    return _Value((), cases=((sympy.true, _number(number)),))


def _number(number: float) -> Expr:
    if number in (float("inf"), -float("inf")):
        return sympy.oo if number > 0 else -sympy.oo
    is_whole = isinstance(number, int) or (float(number).is_integer() and abs(number) < 1 << 53)
    return sympy.Integer(int(number)) if is_whole else sympy.Float(number)


def _cast(value: _Value, dtype: torch.dtype) -> _Value | None:
    """Return a value in a dtype; None if it would be rounded, or wrap."""
    if dtype == torch.bool:
        if value.truth is not None:
            return value
        truth = Or(*(And(c, _compare("ne", e, sympy.Integer(0))) for c, e in value.cases))
        return _Value(value.shape, truth=truth)
    cases = value.numbers()
    for _, number in cases:
        if number.is_infinite:
            continue
        if not number.is_integer:
            if not dtype.is_floating_point:
                return None
            continue
        low, high = _bounds_of(number, value.shape)
        if not np.isfinite([low, high]).all():
            continue  # of a table: what it holds is in the dtype already, or becomes a table
        lowest, highest = _exact_range(dtype)
        if low < lowest or high > highest:
            return None
    return _Value(value.shape, cases=cases)


def _exact_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the integers that a dtype holds, without a gap."""
    if dtype.is_floating_point or dtype.is_complex:
        limit = _EXACT.get(dtype, 0)
        return -limit, limit
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _bounds_of(expression: Expr, shape: Sequence[int]) -> tuple[float, float]:
    box = {_DIMS[dim]: (np.array(0.0), np.array(n - 1.0)) for dim, n in enumerate(shape)}
    low, high = bounds(sympy.expand(expression), box)
    return float(low), float(high)


def _align(values: Sequence[_Value]) -> tuple[tuple[int, ...], list[_Value]]:
    """Broadcast values to one shape."""
    shape = tuple(np.broadcast_shapes(*(value.shape for value in values)))
    aligned = []
    for value in values:
        offset = len(shape) - len(value.shape)
        indices = {_DIMS[dim]: _DIMS[dim + offset] for dim in range(len(value.shape))}
        aligned.append(value.map(shape, indices) if offset else replace(value, shape=shape))
    return shape, aligned


def _numeric(function: Callable[..., Expr], *values: _Value) -> _Value:
    """Apply a function of numbers to every combination of cases."""
    shape, aligned = _align(values)
    combined: list[tuple[Boolean, tuple[Expr, ...]]] = [(sympy.true, ())]
    for value in aligned:
        combined = [
            (And(condition, c), (*numbers, number))
            for condition, numbers in combined
            for c, number in value.numbers()
        ]
        combined = [pair for pair in combined if pair[0] != sympy.false]
        if len(combined) > MAX_CASES:
            raise _Unknown
    return _Value(shape, cases=tuple((c, _checked(function(*n))) for c, n in combined))


def _checked(number: Expr) -> Expr:
    if number is sympy.nan or number.has(sympy.nan, sympy.zoo):
        raise _Unknown
    return number


def _logical(function: Callable[..., Boolean], *values: _Value) -> _Value:
    shape, aligned = _align([_as_bool(value) for value in values])
    return _Value(shape, truth=_limited(function(*(value.truth for value in aligned))))


def _limited(truth: Boolean) -> Boolean:
    if len(truth.atoms(sympy.core.relational.Relational)) > MAX_TERMS:
        raise _Unknown
    return truth


def _as_bool(value: _Value) -> _Value:
    cast = _cast(value, torch.bool)
    assert cast is not None
    return cast


def _relational(word: str, left: _Value, right: _Value) -> _Value:
    shape, (left, right) = _align([left, right])
    parts = [And(c, d, _compare(word, a, b)) for c, a in left.numbers() for d, b in right.numbers()]
    return _Value(shape, truth=_limited(Or(*parts)))


def _compare(word: str, left: Expr, right: Expr) -> Boolean:
    if left.is_number and right.is_number:
        return sympy.sympify(bool(getattr(operator, word)(float(left), float(right))))
    if not left.is_integer or not right.is_integer:
        raise _Unknown
    return compare(word, left, right)


# --- Operations -------------------------------------------------------------------------------

_INTERPRETERS: dict[str, Callable[..., _Value | None]] = {}


def _interprets(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _INTERPRETERS.update(dict.fromkeys(names, function))
        return function

    return register


def _needed(value: _Value | None) -> _Value:
    if value is None:
        raise _Unknown
    return value


def _shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(map(int, node.meta["example_value"].shape))


@_interprets("from_local")
def _from_local(
    reader: _Reader, node: fx.Node, local: Any, mesh: Any, placements: Any, **kwargs: Any
) -> _Value:
    """Look through what a region wraps: a mask that every rank has, whole."""
    if not all(isinstance(placement, Replicate) for placement in placements):
        raise _Unknown
    return _needed(reader.value_of(local))


@_interprets("arange")
def _arange(reader: _Reader, node: fx.Node, *args: Any, **kwargs: Any) -> _Value:
    start = kwargs.get("start", args[0] if len(args) > 1 else 0)
    step = kwargs.get("step", args[2] if len(args) > 2 else 1)
    if not all(isinstance(number, (int, float, torch.SymInt)) for number in (start, step)):
        raise _Unknown
    expression = _number(int(start) if int(start) == start else start) + _number(step) * _DIMS[0]
    (length,) = _shape_of(node)
    if length <= 1:
        expression = expression.xreplace({_DIMS[0]: sympy.Integer(0)})
    return _Value((length,), cases=((sympy.true, expression),))


def _filled(number: Any) -> Callable[..., _Value]:
    def of(reader: _Reader, node: fx.Node, *args: Any, **kwargs: Any) -> _Value:
        return replace(_constant(number), shape=_shape_of(node))

    return of


for _name, _content in (("ones", 1), ("zeros", 0)):
    _interprets(_name, f"new_{_name}", f"{_name}_like")(_filled(_content))


@_interprets("full", "new_full", "full_like", "scalar_tensor")
def _full(reader: _Reader, node: fx.Node, *args: Any, **kwargs: Any) -> _Value:
    place = {"full": 1, "new_full": 2, "full_like": 1, "scalar_tensor": 0}[_name_of(node)]
    number = kwargs.get("fill_value", args[place] if len(args) > place else None)
    return replace(_needed(reader.value_of(number)), shape=_shape_of(node))


@_interprets("tensor")
def _tensor(reader: _Reader, node: fx.Node, data: Any, **kwargs: Any) -> _Value | None:
    numbers = torch.as_tensor(data)
    return _fit(numbers) if numbers.ndim else _constant(data)


def _elementwise(function: Callable[..., Expr], *, scaled: int | None = None) -> Any:
    def of(reader: _Reader, node: fx.Node, *args: Any, **kwargs: Any) -> _Value:
        if "rounding_mode" in kwargs or "out" in kwargs:
            raise _Unknown
        operands = [_needed(reader.value_of(arg)) for arg in args]
        if scaled is not None and kwargs.get("alpha", 1) != 1:
            raise _Unknown
        return _numeric(function, *operands)

    return of


def _is_whole_division(left: Expr, right: Expr) -> Expr:
    if not (right.is_Integer and right > 0 and left.is_integer):
        raise _Unknown
    return sympy.floor(left / right)


def _remainder(left: Expr, right: Expr) -> Expr:
    if not (right.is_Integer and right > 0 and left.is_integer):
        raise _Unknown
    return sympy.Mod(left, right)


def _true_division(left: Expr, right: Expr) -> Expr:
    if not right.is_number or right == 0:
        raise _Unknown
    return left * sympy.Float(1 / float(right))


_interprets("add")(_elementwise(operator.add, scaled=1))
_interprets("sub")(_elementwise(operator.sub, scaled=1))
_interprets("rsub")(_elementwise(lambda a, b: b - a, scaled=1))
_interprets("mul")(_elementwise(operator.mul))
_interprets("neg")(_elementwise(operator.neg))
_interprets("abs")(_elementwise(lambda a: sympy.Max(a, -a)))
_interprets("floordiv", "floor_divide")(_elementwise(_is_whole_division))
_interprets("mod", "remainder")(_elementwise(_remainder))
_interprets("truediv")(_elementwise(_true_division))
_interprets("minimum")(_elementwise(sympy.Min))
_interprets("maximum")(_elementwise(sympy.Max))


@_interprets("div")
def _div(reader: _Reader, node: fx.Node, left: Any, right: Any, **kwargs: Any) -> _Value:
    function = {"floor": _is_whole_division, None: _true_division}.get(kwargs.get("rounding_mode"))
    if function is None:
        raise _Unknown
    return _numeric(function, *(_needed(reader.value_of(arg)) for arg in (left, right)))


@_interprets("clamp", "clip")
def _clamp(reader: _Reader, node: fx.Node, tensor: Any, min: Any = None, max: Any = None) -> _Value:
    value = _needed(reader.value_of(tensor))
    if min is not None:
        value = _numeric(sympy.Max, value, _needed(reader.value_of(min)))
    if max is not None:
        value = _numeric(sympy.Min, value, _needed(reader.value_of(max)))
    return value


def _comparison(word: str) -> Any:
    def of(reader: _Reader, node: fx.Node, left: Any, right: Any) -> _Value:
        return _relational(word, *(_needed(reader.value_of(arg)) for arg in (left, right)))

    return of


for _word in ("lt", "le", "gt", "ge", "eq", "ne"):
    _interprets(_word)(_comparison(_word))


def _logic(function: Callable[..., Boolean]) -> Any:
    def of(reader: _Reader, node: fx.Node, *args: Any) -> _Value:
        values = [_needed(reader.value_of(arg)) for arg in args]
        if not _name_of(node).startswith("logical") and any(v.truth is None for v in values):
            raise _Unknown  # bits of integers
        return _logical(function, *values)

    return of


_interprets("and_", "bitwise_and", "logical_and", "__and__")(_logic(And))
_interprets("or_", "bitwise_or", "logical_or", "__or__")(_logic(Or))
_interprets("xor", "bitwise_xor", "logical_xor", "__xor__")(_logic(sympy.Xor))
_interprets("invert", "bitwise_not", "logical_not", "__invert__")(_logic(Not))


@_interprets("where")
def _where(reader: _Reader, node: fx.Node, condition: Any, value: Any, other: Any) -> _Value:
    return _choose(*(_needed(reader.value_of(arg)) for arg in (condition, value, other)))


@_interprets("masked_fill")
def _masked_fill(reader: _Reader, node: fx.Node, tensor: Any, mask: Any, value: Any) -> _Value:
    return _choose(*(_needed(reader.value_of(arg)) for arg in (mask, value, tensor)))


def _choose(condition: _Value, value: _Value, other: _Value) -> _Value:
    shape, aligned = _align([_as_bool(condition), value, other])
    truth = aligned[0].truth
    assert truth is not None
    if value.truth is not None and other.truth is not None:
        chosen = Or(And(truth, aligned[1].truth), And(Not(truth), aligned[2].truth))
        return _Value(shape, truth=_limited(chosen))
    cases = [(And(truth, c), e) for c, e in aligned[1].numbers()]
    cases += [(And(Not(truth), c), e) for c, e in aligned[2].numbers()]
    merged: dict[Expr, Boolean] = {}
    for c, e in cases:
        merged[e] = _limited(Or(merged.get(e, sympy.false), c))
    found = tuple((c, e) for e, c in merged.items() if c != sympy.false)
    if len(found) > MAX_CASES:
        raise _Unknown
    return _Value(shape, cases=found)


def _triangle(is_lower: bool) -> Any:
    def of(reader: _Reader, node: fx.Node, tensor: Any, diagonal: int = 0) -> _Value:
        value = _needed(reader.value_of(tensor))
        row, column = _DIMS[len(value.shape) - 2], _DIMS[len(value.shape) - 1]
        rows, columns = value.shape[-2:]
        row = row if rows > 1 else sympy.Integer(0)
        column = column if columns > 1 else sympy.Integer(0)
        limit = sympy.Integer(int(diagonal))
        truth = compare("le" if is_lower else "ge", column - row, limit)
        zero = _constant(False) if value.truth is not None else _constant(0)
        return _choose(_Value(value.shape, truth=truth), value, zero)

    return of


_interprets("tril")(_triangle(True))
_interprets("triu")(_triangle(False))


def _same(reader: _Reader, node: fx.Node, tensor: Any, *args: Any, **kwargs: Any) -> _Value:
    return _needed(reader.value_of(tensor))


_interprets(
    *("to", "bool", "int", "long", "float", "double", "half", "bfloat16", "type", "type_as"),
    *("clone", "contiguous", "detach", "cpu", "cuda", "alias"),
)(_same)


# --- Views ------------------------------------------------------------------------------------


@_interprets("unsqueeze")
def _unsqueeze(reader: _Reader, node: fx.Node, tensor: Any, dim: int) -> _Value:
    value = _needed(reader.value_of(tensor))
    dim %= len(value.shape) + 1
    shape = (*value.shape[:dim], 1, *value.shape[dim:])
    return value.map(shape, {_DIMS[d]: _DIMS[d + 1] for d in range(dim, len(value.shape))})


@_interprets("squeeze")
def _squeeze(reader: _Reader, node: fx.Node, tensor: Any, dim: int | None = None) -> _Value:
    value = _needed(reader.value_of(tensor))
    dims = range(len(value.shape)) if dim is None else [dim % len(value.shape)]
    kept = [d for d, n in enumerate(value.shape) if d not in dims or n != 1]
    indices = {_DIMS[d]: _DIMS[place] for place, d in enumerate(kept)}
    return value.map([value.shape[d] for d in kept], indices)


@_interprets("expand", "expand_as", "broadcast_to")
def _expand(reader: _Reader, node: fx.Node, tensor: Any, *sizes: Any) -> _Value:
    value, shape = _needed(reader.value_of(tensor)), _shape_of(node)
    _, (expanded, _) = _align([value, _Value(shape, truth=sympy.true)])
    return expanded


@_interprets("transpose", "swapaxes")
def _transpose(reader: _Reader, node: fx.Node, tensor: Any, first: int, second: int) -> _Value:
    value = _needed(reader.value_of(tensor))
    order = list(range(len(value.shape)))
    first, second = first % len(order), second % len(order)
    order[first], order[second] = order[second], order[first]
    return _permuted(value, order)


@_interprets("permute")
def _permute(reader: _Reader, node: fx.Node, tensor: Any, *dims: Any) -> _Value:
    value = _needed(reader.value_of(tensor))
    flat = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return _permuted(value, [dim % len(value.shape) for dim in flat])


@_interprets("t")
def _t(reader: _Reader, node: fx.Node, tensor: Any) -> _Value:
    value = _needed(reader.value_of(tensor))
    return _permuted(value, list(reversed(range(len(value.shape)))))


@_interprets("getattr")
def _attribute(reader: _Reader, node: fx.Node, tensor: Any, name: str) -> _Value:
    value = _needed(reader.value_of(tensor))
    if name not in ("mT", "T") or (name == "T" and len(value.shape) != 2):
        raise _Unknown
    order = list(range(len(value.shape)))
    return _permuted(value, [*order[:-2], order[-1], order[-2]])


def _permuted(value: _Value, order: Sequence[int]) -> _Value:
    indices = {_DIMS[dim]: _DIMS[place] for place, dim in enumerate(order)}
    return value.map([value.shape[dim] for dim in order], indices)


@_interprets("view", "reshape", "flatten", "unflatten")
def _view(reader: _Reader, node: fx.Node, tensor: Any, *args: Any, **kwargs: Any) -> _Value:
    value, shape = _needed(reader.value_of(tensor)), _shape_of(node)
    if isinstance(args[0] if args else None, torch.dtype):
        raise _Unknown
    # Dims of size 1 come and go; the others must be the same.
    old = [dim for dim, n in enumerate(value.shape) if n != 1]
    new = [dim for dim, n in enumerate(shape) if n != 1]
    if [value.shape[dim] for dim in old] != [shape[dim] for dim in new]:
        raise _Unknown
    return value.map(shape, {_DIMS[a]: _DIMS[b] for a, b in zip(old, new, strict=True)})


@_interprets("select")
def _select(reader: _Reader, node: fx.Node, tensor: Any, dim: int, index: int) -> _Value:
    value = _needed(reader.value_of(tensor))
    where: list[Any] = [slice(None)] * len(value.shape)
    where[dim % len(value.shape)] = index
    return _indexed(reader, value, where)


@_interprets("narrow")
def _narrow(
    reader: _Reader, node: fx.Node, tensor: Any, dim: int, start: int, length: int
) -> _Value:
    value = _needed(reader.value_of(tensor))
    where: list[Any] = [slice(None)] * len(value.shape)
    where[dim % len(value.shape)] = slice(start, start + length)
    return _indexed(reader, value, where)


@_interprets("getitem")
def _getitem(reader: _Reader, node: fx.Node, tensor: Any, where: Any) -> _Value:
    value = _needed(reader.value_of(tensor))
    indices = list(where) if isinstance(where, (tuple, list)) else [where]
    if Ellipsis in [index for index in indices if index is Ellipsis]:
        place = next(i for i, index in enumerate(indices) if index is Ellipsis)
        taken = sum(index is not None and index is not Ellipsis for index in indices)
        indices[place : place + 1] = [slice(None)] * (len(value.shape) - taken)
    return _indexed(reader, value, indices)


def _indexed(reader: _Reader, value: _Value, where: Sequence[Any]) -> _Value:
    """Index by None, integers, slices, and adjacent index tensors."""
    taken = sum(index is not None for index in where)
    where = [*where, *[slice(None)] * (len(value.shape) - taken)]
    arrays = [index for index in where if isinstance(index, fx.Node)]
    places = [place for place, index in enumerate(where) if isinstance(index, fx.Node)]
    if places and places[-1] - places[0] + 1 != len(places):
        raise _Unknown
    common: tuple[int, ...] = ()
    aligned: list[_Value] = []
    if arrays:
        common, aligned = _align([_needed(reader.value_of(array)) for array in arrays])
    shape: list[int] = []
    indices: dict[Expr, Expr] = {}
    dim = 0
    for place, index in enumerate(where):
        if index is None:
            shape.append(1)
            continue
        size = value.shape[dim]
        if isinstance(index, fx.Node):
            if place == places[0]:
                first = len(shape)
                shape += common
            moved = {_DIMS[d]: _DIMS[d + first] for d in range(len(common))}
            indices[_DIMS[dim]] = _array_index(aligned[places.index(place)], size, moved)
        elif isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step < 1:
                raise _Unknown
            length = max(0, -(-(stop - start) // step))
            at = _DIMS[len(shape)] if length > 1 else sympy.Integer(0)
            indices[_DIMS[dim]] = sympy.Integer(start) + step * at
            shape.append(length)
        elif isinstance(index, int) and not isinstance(index, bool):
            indices[_DIMS[dim]] = sympy.Integer(index % size)
        else:
            raise _Unknown
        dim += 1
    return value.map(shape, indices)


def _array_index(index: _Value, size: int, moved: dict[Expr, Expr]) -> Expr:
    if index.truth is not None or len(index.cases) != 1:
        raise _Unknown
    ((_, expression),) = index.cases
    low, high = _bounds_of(expression, index.shape)
    # Not known to be an index from the beginning: -1 would be the last.
    if not expression.is_integer or low < 0 or high >= size:
        raise _Unknown
    return expression.xreplace(moved) if size > 1 else sympy.Integer(0)


# --- Sequences --------------------------------------------------------------------------------


@_interprets("cumsum", "diff", "cat", "flip", "roll", "repeat_interleave")
def _computed(reader: _Reader, node: fx.Node, *args: Any, **kwargs: Any) -> _Value | None:
    """Compute what depends on nothing, and see what it is."""

    def concrete(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return _materialize(_needed(reader.value_of(arg)), arg.meta["example_value"].dtype)
        return arg

    args, kwargs = fx.node.map_aggregate((args, kwargs), concrete)
    with torch.no_grad():
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    return _fit(result)


def _materialize(value: _Value, dtype: torch.dtype) -> Tensor:
    """Return the tensor that a value is, if it reads no table."""
    if not value.is_constant or np.prod(value.shape, dtype=object) > MAX_COMPUTED:
        raise _Unknown
    ndim = len(value.shape)
    with without_modes():
        indices = {
            _DIMS[dim]: torch.arange(n).view([-1 if d == dim else 1 for d in range(ndim)])
            for dim, n in enumerate(value.shape)
        }
        operations = Operations(
            read=lambda *_: None,
            floor_divide=lambda a, b: torch.div(a, b, rounding_mode="floor"),
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            choose=torch.where,
            as_integer=lambda condition: torch.as_tensor(condition).long(),
            boolean=torch.tensor,
        )
        if value.truth is not None:
            result = evaluate(value.truth, indices, operations)
        else:
            if len(value.cases) != 1 or value.cases[0][1].is_infinite:
                raise _Unknown
            result = evaluate(value.cases[0][1], indices, operations)
        return torch.as_tensor(result).to(dtype).expand(value.shape).contiguous()


def _fit(tensor: Tensor) -> _Value | None:
    """Return a sequence, the same along all dims but one, as a line and steps."""
    shape = tuple(tensor.shape)
    if not tensor.numel() or tensor.is_floating_point() or len(shape) > len(_DIMS):
        return None
    with without_modes():
        long = [dim for dim, n in enumerate(shape) if n > 1]
        varying = [dim for dim in long if bool((tensor != tensor.narrow(dim, 0, 1)).any())]
        if len(varying) > 1:
            return None
        flat = tensor.long().numpy()
        flat = flat[tuple(slice(None) if dim in varying else 0 for dim in range(len(shape)))]
    flat = np.atleast_1d(flat)
    at = _DIMS[varying[0]] if varying else sympy.Integer(0)
    differences, counts = np.unique(np.diff(flat), return_counts=True)
    slope = int(differences[counts.argmax()]) if len(differences) else 0
    jumps = np.diff(flat) - slope
    places = np.flatnonzero(jumps)
    if len(places) > MAX_STEPS:
        return None
    expression = sympy.Integer(int(flat[0])) + slope * at
    expression += sum(
        int(jumps[place]) * Step(at, sympy.Integer(int(place) + 1)) for place in places
    )
    if tensor.dtype == torch.bool:
        return _Value(shape, truth=compare("ne", expression, sympy.Integer(0)))
    return _Value(shape, cases=((sympy.true, expression),))


# --- The rule ---------------------------------------------------------------------------------


def _as_rule(value: _Value, reader: _Reader, nothing: set[Expr]) -> Recognized | None:
    """Return a mask's value as a rule; None if it is a table of pairs, or worse.

    Args:
        value: of the mask.
        reader: that read it.
        nothing: numbers of pairs that do not exist.
    """
    if len(value.shape) > 4:
        return None
    offset = 4 - len(value.shape)
    symbols = (BATCH, HEAD, QUERY, KEY)[offset:]
    value = value.map(value.shape, dict(zip(_DIMS, symbols, strict=False)))
    if value.truth is not None:
        allowed, bias = value.truth, sympy.Integer(0)
    else:
        allowed = Not(Or(*(c for c, e in value.cases if e in nothing)))
        finite = [(c, e) for c, e in value.cases if e not in nothing]
        if any(e.is_infinite for _, e in finite):
            return None
        bias = sympy.Integer(0)
        if len({e for _, e in finite}) == 1:
            bias = finite[0][1]
        elif finite:
            *others, (_, last) = finite
            bias = sympy.Piecewise(*((e, c) for c, e in others), (last, True))
        if bias.atoms(Step) and not bias.is_integer:
            return None
    allowed = _with_runs(canonical(allowed), reader)
    bias = _where_allowed(bias, allowed)
    recognized = _used_only(
        Recognized(Rule(allowed, bias), tuple(reader.tables), ((),) * len(reader.tables))
    )
    return recognized if _is_sound(recognized) else None


def _where_allowed(bias: Expr, allowed: Boolean) -> Expr:
    """Simplify a bias by what a table must be for the pair to exist: 1 - t0 where t0 = 1."""
    equal = {
        part.lhs: part.rhs
        for part in And.make_args(allowed)
        if isinstance(part, sympy.Eq) and part.rhs.is_number
    }
    return bias.xreplace(equal)


def _with_runs(allowed: Boolean, reader: _Reader) -> Boolean:
    """Within a document, positions differ as indices do.

    Where t1 counts the places at which t0 does not go up by one, Eq(t1(q), t1(k)) says that
    t0(k) = t0(q) + k - q.
    """
    if isinstance(allowed, Or):
        return Or(*(_with_runs(part, reader) for part in allowed.args))
    if not isinstance(allowed, And):
        return allowed
    parts = list(allowed.args)
    for part in parts:
        if not isinstance(part, sympy.Eq):
            continue
        functions = part.atoms(sympy.core.function.AppliedUndef)
        of_key = {f for f in functions if KEY in f.args}
        of_query = {f.xreplace({QUERY: KEY}) for f in functions if QUERY in f.args}
        if len(functions) != 2 or len(of_key) != 1 or of_key != of_query or part.rhs != 0:
            continue
        (counted,) = of_key
        if part.lhs not in (
            counted - counted.xreplace({KEY: QUERY}),
            -counted + counted.xreplace({KEY: QUERY}),
        ):
            continue
        source = reader.runs_of.get(number_of(counted))
        if source is None:
            continue
        dims = {_DIMS[d]: index for d, index in enumerate(counted.args)}
        at_key = source.xreplace(dims)
        if not isinstance(at_key, sympy.core.function.AppliedUndef):
            continue
        at_query = at_key.xreplace({KEY: QUERY})
        equal = {at_key: at_query + KEY - QUERY}
        parts = [p if p is part else _normal_deep(p.xreplace(equal)) for p in parts]
    return canonical(And(*parts))


def _normal_deep(allowed: Boolean) -> Boolean:
    if isinstance(allowed, (And, Or, Not)):
        return allowed.func(*map(_normal_deep, allowed.args))
    return _normal(allowed)


def _used_only(recognized: Recognized) -> Recognized:
    """Number the tables that the rule reads from 0."""
    rule = recognized.rule
    functions = rule.allowed.atoms(sympy.core.function.AppliedUndef)
    functions |= rule.bias.atoms(sympy.core.function.AppliedUndef)
    numbers = sorted({number_of(function) for function in functions})
    renamed = {
        function: table(
            numbers.index(number_of(function)), is_integer=function.func.__name__[0] == "t"
        )(*function.args)
        for function in functions
    }
    allowed, bias = _rename(rule.allowed, renamed), rule.bias.xreplace(renamed)
    where: list[tuple[Expr, ...]] = []
    for number in numbers:
        # Query and key may be read of one table, each in its own mention.
        where.append(max((f.args for f in functions if number_of(f) == number), key=str))
    nodes = tuple(recognized.tables[number] for number in numbers)
    return Recognized(Rule(allowed, bias), nodes, tuple(where))


def _rename(allowed: Boolean, renamed: dict[Expr, Expr]) -> Boolean:
    if isinstance(allowed, (And, Or, Not)):
        return allowed.func(*(_rename(part, renamed) for part in allowed.args))
    return _normal(allowed.xreplace(renamed)) if renamed else allowed


def _is_sound(recognized: Recognized) -> bool:
    """Whether every table of pairs is read at plain indices, and none is as good as the mask."""
    rule = recognized.rule
    if sympy.count_ops(rule.allowed) > 40 * MAX_TERMS:
        return False
    functions = rule.allowed.atoms(sympy.core.function.AppliedUndef)
    functions |= rule.bias.atoms(sympy.core.function.AppliedUndef)
    for function in functions:
        mentions_both = {QUERY, KEY} <= function.free_symbols
        is_plain = all(index.is_Symbol or index.is_Integer for index in function.args)
        if mentions_both and is_of_pairs(function.args) and not is_plain:
            return False
    return True
