"""Random programs that compute masks, and what they are read as, against what they compute.

    python -m tests.support.random_masks --count 20000
    python -m tests.support.random_masks --count 5000 --seed 7

A program is a graph of aten ops, of every row of the table of `cp_inductor.mask.reader.aten`, with
arguments by place and by keyword, on tensors of every dtype whose numbers lie at the ends of its
range as often as not, of all shapes that broadcast to (B, H, S, T), of 0 dims too. Every value that
the reader gives to a node on the way is held against the tensor, and the rule against the mask.
What interval arithmetic says of small blocks of the rule is held against their pairs.

Prints how many programs were read, as what, and the seed of the first that was misread.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import sympy
import torch
import torch.nn.functional as F
from sympy.core.function import AppliedUndef
from torch import Tensor, fx

from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import number_of
from cp_inductor.mask.reader import read as reader
from cp_inductor.mask.reader.read import Reading, Recognized
from cp_inductor.mask.reader.trace import trace_nodes
from cp_inductor.mask.reader.values import DIMS, Value
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan import Mask, Recipe, Span, Tile
from cp_inductor.tiles import block_tables
from cp_inductor.tiles.dims import Tokens
from cp_inductor.tiles.tile_masks import Indices, TileMasks

aten = torch.ops.aten

B, H, S, T = 2, 3, 5, 7
SHAPE = (B, H, S, T)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # of which aten computes next to nothing
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*INTEGERS, *UNSIGNED, *FLOATS, torch.bool)


# --- Programs ---------------------------------------------------------------------------------


class Program:
    """A graph of ops that grows with the tensors that it computes.

    Attributes:
        values: of its nodes.
        tensors: nodes of one tensor each, to compute with.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.tensors: list[fx.Node] = []

    def input(self, value: Tensor) -> fx.Node:
        return self._note(self.graph.placeholder(f"x{len(self.values)}"), value)

    def call(self, op: Any, *args: Any) -> fx.Node:
        """Call an op, some of its last arguments by keyword."""
        names = [argument.name for argument in op._schema.arguments]
        num_keywords = sum(argument.kwarg_only for argument in op._schema.arguments)
        by_place = min(len(args), len(names) - num_keywords)
        by_place = min([by_place, *(place for place, a in enumerate(args) if a is _DEFAULT)])
        by_place = self.random.randint(0, by_place)
        kwargs = {
            n: a
            for n, a in zip(names[by_place:], args[by_place:], strict=False)
            if a is not _DEFAULT
        }
        args = args[:by_place]
        values = fx.map_arg((args, kwargs), lambda node: self.values[node])
        result = op(*values[0], **values[1])
        return self._note(self.graph.call_function(op, args, kwargs), result)

    def _note(self, node: fx.Node, value: Any) -> fx.Node:
        self.values[node] = node.meta["example_value"] = value
        if isinstance(value, Tensor) and value.numel() and value.ndim <= 5:
            self.tensors.append(node)
        return node

    def of(self, node: fx.Node) -> Tensor:
        return self.values[node]

    def choose(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def pick(self, *dtypes: torch.dtype, ndim: int = 0) -> fx.Node:
        """A tensor of one of some dtypes, and at least so many dims; a new one if there is none."""
        found = [
            node
            for node in self.tensors
            if (not dtypes or self.of(node).dtype in dtypes) and self.of(node).ndim >= ndim
        ]
        if found and self.random.random() < 0.85:
            # Rather of what was computed last, so that programs are deep.
            return self.choose(*found[-4:], *found)
        dtype, shape = self.choose(*(dtypes or DTYPES)), a_shape(self.random)
        while len(shape) < ndim:
            shape = a_shape(self.random)
        return self.input(a_tensor(self.random, dtype, shape))

    def pick_dim(self) -> tuple[fx.Node, int, int]:
        """A tensor, one of its dims, and its size there."""
        ndim = self.of(node := self.pick(ndim=1)).ndim
        dim = self.random.randint(-ndim, ndim - 1)
        return node, dim, self.of(node).shape[dim]

    def scalar(self, like: fx.Node) -> float:
        if self.random.random() < 0.1:
            return self.choose(0.5, 2.0, -1, 300, 1 << 40, True)
        return an_end(self.random, self.of(like).dtype)


_DEFAULT = object()


def an_end(random: Random, dtype: torch.dtype) -> float:
    """A number, at an end of the range of a dtype as often as not."""
    small = random.randint(-3, 9)
    if dtype == torch.bool:
        return bool(small % 2)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        exact = round(2 / info.eps)
        ends = [info.min, info.max, exact, exact + 1, -exact, exact // 2, 0.5, -math.inf, math.inf]
        return random.choice([small, small, small, 0, 1, random.choice(ends)])
    info = torch.iinfo(dtype)
    end = random.choice(
        [info.min, info.max, info.min + 1, info.max - 1, info.max // 2, info.max // 3]
    )
    return random.choice([max(small, info.min), max(small, info.min), 0, 1, end])


def a_tensor(random: Random, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    numbers = [an_end(random, dtype) for _ in range(math.prod(shape))]
    if random.random() < 0.4:  # documents: few numbers, in order
        numbers = sorted(random.choices(numbers[:3] or [0], k=len(numbers)))
    return torch.tensor(numbers, dtype=dtype).view(list(shape))


def a_shape(random: Random) -> tuple[int, ...]:
    """A shape that broadcasts to (B, H, S, T)."""
    ndim = random.choice([0, 1, 2, 2, 3, 4, 4])
    shape = [size if random.random() < 0.5 else 1 for size in SHAPE[4 - ndim :]]
    return tuple(shape)


# --- The arguments of each row's op ------------------------------------------------------------

Drawer = Callable[[Program], Sequence[Any]]


def of_two(*dtypes: torch.dtype) -> Drawer:
    return lambda p: [p.pick(*dtypes), p.pick(*dtypes)]


def draw_full(p: Program) -> Sequence[Any]:
    dtype = p.choose(*DTYPES)
    return [a_shape(p.random), an_end(p.random, dtype), dtype]


def draw_by_a_number(p: Program) -> Sequence[Any]:
    return [node := p.pick(), p.choose(2, 3, 4, 1, p.scalar(node))]


def draw_by_a_tensor(p: Program) -> Sequence[Any]:
    node, divisor = draw_by_a_number(p)
    if p.random.random() < 0.7:
        dtype = p.of(node).dtype
        divisor = p.call(aten.full.default, p.choose((), (1,), (T,)), int(divisor == 3) + 2, dtype)
    return [node, divisor]


def draw_expand(p: Program) -> Sequence[Any]:
    node = p.pick()
    shape = list(p.of(node).shape)
    wider = SHAPE[4 - len(shape) :] if len(shape) <= 4 else shape
    sizes = [
        b if a == 1 and p.random.random() < 0.6 else p.choose(a, -1)
        for a, b in zip(shape, wider, strict=True)
    ]
    if len(sizes) < 4 and p.random.random() < 0.4:
        sizes = [SHAPE[3 - len(sizes)], *sizes]
    return [node, sizes]


def draw_view(p: Program) -> Sequence[Any]:
    node = p.pick()
    sizes = list(p.of(node).shape)
    kind = p.choose("flat", "ones", "split", "merge")
    if kind == "flat":
        sizes = [p.of(node).numel()]
    elif kind == "ones":
        sizes = [size for size in sizes if size != 1 or p.random.random() < 0.5]
        sizes.insert(p.random.randint(0, len(sizes)), 1)
    elif kind == "merge" and len(sizes) > 1:
        at = p.random.randrange(len(sizes) - 1)
        sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    elif kind == "split" and any(size % 2 == 0 for size in sizes):
        at = next(dim for dim, size in enumerate(sizes) if size % 2 == 0)
        sizes[at : at + 1] = p.choose([2, sizes[at] // 2], [sizes[at] // 2, 2])
    return [node, sizes]


def draw_unsqueeze(p: Program) -> Sequence[Any]:
    ndim = p.of(node := p.pick()).ndim
    return [node, p.random.randint(-ndim - 1, ndim)]


def draw_dims(p: Program) -> Sequence[Any]:
    node, dim, _ = p.pick_dim()
    return [node, [dim]]


def draw_permute(p: Program) -> Sequence[Any]:
    order = list(range(p.of(node := p.pick(ndim=1)).ndim))
    p.random.shuffle(order)
    return [node, [d - p.choose(0, len(order)) for d in order]]


def draw_slice(p: Program) -> Sequence[Any]:
    node, dim, size = p.pick_dim()
    start = p.choose(None, 0, p.random.randint(-size, size - 1))
    end = p.choose(None, sys.maxsize, p.random.randint(-size, size + 3))
    return [node, dim, start, end, p.choose(1, 1, 2)]


def draw_select(p: Program) -> Sequence[Any]:
    node, dim, size = p.pick_dim()
    return [node, dim, p.random.randint(-size, size - 1)]


def draw_split(p: Program) -> Sequence[Any]:
    node, dim, size = p.pick_dim()
    first = p.random.randint(0, size)
    return [node, [first, size - first], dim]


def an_index(p: Program, size: int) -> fx.Node:
    """Indices into a dim: computed, or a table."""
    found = [
        node
        for node in p.tensors
        if p.of(node).dtype in (torch.int64, torch.int32)
        and int(p.of(node).min()) >= 0
        and int(p.of(node).max()) < size
    ]
    if found and p.random.random() < 0.7:
        return p.choose(*found)
    arange = p.call(aten.arange.start_step, 0, size)
    if p.random.random() < 0.5:
        return p.call(aten.unsqueeze.default, arange, p.choose(0, 1))
    return p.call(aten.flip.default, arange, [0])


def draw_index(p: Program) -> Sequence[Any]:
    shape = p.of(node := p.pick(ndim=1)).shape
    indices = [an_index(p, n) if p.random.random() < 0.6 else None for n in shape]
    if not any(index is not None for index in indices):
        indices[-1] = an_index(p, shape[-1])
    return [node, indices]


def draw_index_select(p: Program) -> Sequence[Any]:
    node, dim, size = p.pick_dim()
    return [node, dim, p.call(aten.view.default, an_index(p, size), [-1])]


def draw_cat(p: Program) -> Sequence[Any]:
    node, dim, _ = p.pick_dim()
    shape = list(p.of(node).shape)
    del shape[dim]
    others = []
    for other in p.tensors:
        of_other = list(p.of(other).shape)
        if len(of_other) == len(shape) + 1:
            del of_other[dim]
            others += [other] * (of_other == shape)
    return [[node, p.choose(*others)], dim]


def draw_cumsum(p: Program) -> Sequence[Any]:
    node, dim, size = p.pick_dim()
    dtype = p.choose(_DEFAULT, _DEFAULT, torch.int8, torch.int64, torch.float16)
    if p.random.random() < 0.5:  # where positions do not go up by one
        node = p.pick(*INTEGERS, ndim=1)
        dim, size = -1, p.of(node).shape[-1]
        if size > 1:
            first = p.call(aten.slice.Tensor, node, -1, 0, 1)
            joined = p.call(aten.cat.default, [p.call(aten.sub.Tensor, first, 1), node], -1)
            before = p.call(aten.slice.Tensor, joined, -1, 0, size)
            node = p.call(aten.ne.Scalar, p.call(aten.sub.Tensor, node, before), 1)
    return [node, dim, dtype]


def draw_arange(p: Program) -> Sequence[Any]:
    length, start = p.choose(S, T, T, S, B, H, 1), p.choose(0, 0, 0, 2, -3)
    step = p.choose(1, 1, 1, 2, 3, -1)
    return [start, start + step * length, step, p.choose(torch.int64, torch.int64, *DTYPES[:-1])]


RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne")
LOGIC, BITS = ("and", "or", "xor"), (*INTEGERS, torch.bool)
MODES = ("floor", "floor", "trunc", None)

DRAWERS: Mapping[Any, Drawer] = {
    aten.arange.start_step: draw_arange,
    aten.full.default: draw_full,
    aten.full_like.default: lambda p: [node := p.pick(), an_end(p.random, p.of(node).dtype)],
    aten.scalar_tensor.default: lambda p: draw_full(p)[1:],
    aten.add.Tensor: lambda p: [p.pick(), p.pick(), p.choose(_DEFAULT, _DEFAULT, 2, -1)],
    aten.sub.Tensor: lambda p: [p.pick(), p.pick(), p.choose(_DEFAULT, _DEFAULT, 3)],
    aten.mul.Tensor: lambda p: [node := p.pick(), p.choose(p.pick(), 2, -1, 0.5, p.scalar(node))],
    **dict.fromkeys((aten.neg.default, aten.abs.default), lambda p: [p.pick()]),
    **dict.fromkeys((aten.minimum.default, aten.maximum.default), of_two()),
    aten.clamp.default: lambda p: [
        node := p.pick(),
        *(p.choose(None, p.scalar(node)) for _ in range(2)),
    ],
    aten.clamp.Tensor: lambda p: [p.pick(), *(p.choose(None, p.pick()) for _ in range(2))],
    aten.div.Tensor: draw_by_a_tensor,
    aten.div.Tensor_mode: lambda p: [*draw_by_a_tensor(p), p.choose(*MODES)],
    **dict.fromkeys((aten.remainder.Scalar, aten.fmod.Scalar), draw_by_a_number),
    **dict.fromkeys((aten.remainder.Tensor, aten.fmod.Tensor), draw_by_a_tensor),
    **{getattr(aten, word).Tensor: of_two() for word in RELATIONS},
    **{
        getattr(aten, word).Scalar: lambda p: [node := p.pick(), p.scalar(node)]
        for word in RELATIONS
    },
    **{getattr(aten, f"logical_{word}").default: of_two() for word in LOGIC},
    **{getattr(aten, f"bitwise_{word}").Tensor: of_two(*BITS) for word in LOGIC},
    aten.logical_not.default: lambda p: [p.pick()],
    aten.bitwise_not.default: lambda p: [p.pick(*BITS)],
    aten.where.self: lambda p: [p.pick(torch.bool), p.pick(), p.pick()],
    aten._to_copy.default: lambda p: [p.pick(), p.choose(*DTYPES)],
    **dict.fromkeys((aten.clone.default, aten.alias.default), lambda p: [p.pick()]),
    aten.lift_fresh_copy.default: lambda p: [p.pick()],
    aten.expand.default: draw_expand,
    aten.view.default: draw_view,
    aten.unsqueeze.default: draw_unsqueeze,
    aten.squeeze.dims: draw_dims,
    aten.permute.default: draw_permute,
    aten.slice.Tensor: draw_slice,
    aten.select.int: draw_select,
    aten.split_with_sizes.default: draw_split,
    aten.flip.default: draw_dims,
    aten.repeat.default: lambda p: [
        node := p.pick(),
        [p.choose(1, 1, 2) for _ in range(max(1, p.of(node).ndim))],
    ],
    aten.index.Tensor: draw_index,
    aten.index_select.default: draw_index_select,
    aten.cat.default: draw_cat,
    aten.cumsum.default: draw_cumsum,
}


def draw(program: Program, op: Any) -> fx.Node:
    """Call an op with drawn arguments."""
    node = program.call(op, *DRAWERS[op](program))
    if op is aten.split_with_sizes.default:
        index = program.choose(0, 1)
        piece = program.graph.call_function(getitem, (node, index))
        return program._note(piece, program.values[node][index])
    if op is aten.arange.start_step:
        length = len(program.of(node))
        shape = [1, 1, 1, 1]
        dims = [dim for dim in range(4) if SHAPE[dim] == length]
        if dims:
            shape[dims[0]] = length
            sizes = shape[program.random.randint(0, dims[0]) :]
            node = program.call(aten.view.default, node, sizes)
    return node


# --- Programs and what they are held against --------------------------------------------------


def a_program(random: Random) -> tuple[Program, fx.Node]:
    """A program and its mask: bool, or added to the scores."""
    program = Program(random)
    for dim in (3, 2):  # indices of keys and queries, which masks are about
        arange = program.call(aten.arange.start_step, 0, SHAPE[dim])
        program.call(aten.view.default, arange, [-1, *[1] * (3 - dim)])
    for _ in range(random.randint(4, 14)):
        attempt(program, partial(draw, op=random.choice(list(DRAWERS))))
    for _ in range(100):
        node = attempt(program, draw_mask)
        if node is not None:
            return program, node
    raise AssertionError("no mask")


def attempt(program: Program, draw: Callable[[Program], fx.Node]) -> fx.Node | None:
    """Draw an op, if it takes what was drawn for it."""
    try:
        return draw(program)
    except (RuntimeError, LookupError, TypeError, ArithmeticError, ValueError, Warning):
        return None


def draw_mask(program: Program) -> fx.Node:
    random = program.random
    found = [node for node in program.tensors if is_mask_shape(program.of(node).shape)]
    last = random.choice(found[-3:] + found)
    if random.random() < 0.4:
        other = random.choice(found[-5:])
        last = program.call(getattr(aten, random.choice(RELATIONS)).Tensor, last, other)
    dtype = program.of(last).dtype
    if dtype == torch.bool and random.random() < 0.4:
        zero = program.call(aten.full.default, (1, 1, S, T), 0.0)
        lowest = random.choice([-math.inf, torch.finfo(torch.float32).min, -1e9])
        lowest = program.call(aten.scalar_tensor.default, lowest)
        last = program.call(aten.where.self, last, zero, lowest)
    elif dtype != torch.bool and dtype not in FLOATS:
        last = program.call(aten.le.Scalar, last, program.scalar(last))
    if not is_mask_shape(program.of(last).shape):
        raise ValueError
    return last


def is_mask_shape(shape: Sequence[int]) -> bool:
    if not 2 <= len(shape) <= 4:
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(SHAPE), strict=False))


def check_program(program: Program, mask: fx.Node) -> str:
    """Hold what a program is read as against what it computes; return what kind of rule it is."""
    trace = trace_nodes([mask], mask.graph)
    reading = Reading(trace)
    for node, origin in trace.origins.items():
        if node in reading.values:
            check_value(reading.values[node], program.values[origin], reading, program.values)
    with mock.patch.object(reader, "trace_nodes", return_value=trace):
        recognized = reader.read_mask(mask)[0]
    check_rule(recognized, program.values, program.values[mask])
    text = recognized.rule.format()
    again = Rule.parse(text)
    assert " " not in text and Rule.parse(again.format()) == again, text
    check_rule(replace(recognized, rule=again), program.values, program.values[mask])
    if recognized.tables == (mask,):
        return "as it is"
    return "of tables" if recognized.tables else "of indices"


def check_value(
    value: Value, tensor: Tensor, reading: Reading, values: Mapping[Any, Tensor]
) -> None:
    """Hold the value of a node against its tensor, computing in integers without end."""
    if value.truth is not None:
        truth = exactly(value.truth, value, reading, values)
        assert (truth == tensor.numpy()).all(), value
        return
    actual = numbers_of(tensor)
    remaining = np.ones(actual.shape, dtype=bool)
    for condition, number in value.cases:
        holds = exactly(condition, value, reading, values).astype(bool)
        assert not (holds & ~remaining).any(), value
        remaining &= ~holds
        expected = exactly(number, value, reading, values)
        for a, e in zip(actual[holds], expected[holds], strict=True):
            assert agrees(a, e, value), (a, e, value)
    assert not remaining.any(), value


def numbers_of(tensor: Tensor) -> np.ndarray:
    numbers = np.empty(tensor.shape, dtype=object)
    flat = tensor.double() if tensor.is_floating_point() else tensor.long()
    numbers[...] = np.array(flat.tolist(), dtype=object).reshape(tensor.shape)
    return numbers


def exactly(
    expression: Any, value: Value, reading: Reading, values: Mapping[Any, Tensor]
) -> np.ndarray:
    """Evaluate an expression of indices and tables on Python's numbers, broadcast to a value."""
    ndim = len(value.shape)
    indices = {}
    for dim, size in enumerate(value.shape):
        index = np.empty([size if d == dim else 1 for d in range(ndim)], dtype=object)
        index.flat = range(size)
        indices[DIMS[dim]] = index

    def look_up(read: Any, where: Sequence[Any]) -> np.ndarray:
        table = numbers_of(values[reading.tables.nodes[number_of(read)]])
        # What lies outside is behind a condition that does not hold there.
        inside = [np.asarray(w).astype(int) % n for w, n in zip(where, table.shape, strict=True)]
        # Python's bools, which comparisons of 0 dims give, have another ~.
        return np.atleast_1d(np.asarray(table[tuple(inside)], dtype=object))

    operations = Operations(
        indices.__getitem__, look_up, as_integer=lambda c: np.asarray(c).astype(int).astype(object)
    )
    if expression.is_infinite:
        return np.full(value.shape, float(expression), dtype=object)
    expression = expression.replace(_is_equality_of_tables, _modulo_int64)
    with np.errstate(invalid="ignore"):  # tables may hold what is no number
        found = np.asarray(evaluate(expression, operations), dtype=object)
    # What was looked up has a dim at least, also for a value of none.
    return np.broadcast_to(found.reshape(()) if ndim == 0 else found, value.shape)


def _is_equality_of_tables(part: Any) -> bool:
    is_equality = isinstance(part, (sympy.Eq, sympy.Ne))
    return is_equality and bool(part.atoms(AppliedUndef)) and (part.lhs - part.rhs).is_integer


def _modulo_int64(equality: Any) -> Any:
    """Say of an equality what int64 does, in which sums of tables wrap: there it is evaluated."""
    return equality.func(sympy.Mod(equality.lhs - equality.rhs, 1 << 64), 0)


def agrees(actual: Any, expected: Any, value: Value) -> bool:
    """Whether a number of a tensor is what its value says it is."""
    expected = expected.item() if isinstance(expected, np.generic) else expected
    if value.is_wrapped:
        return (actual - expected) % (1 << 64) == 0
    if isinstance(expected, int) and value.limit < math.inf:
        limit = value.limit
        return actual == expected if abs(expected) <= limit else abs(actual) >= limit
    if isinstance(expected, int) or not math.isfinite(expected):
        # A product may overflow here alone: aten adds it unrounded.
        is_at_end = value.dtype in FLOATS and abs(actual) > torch.finfo(value.dtype).max / 16
        return actual == expected or math.isnan(expected) or is_at_end
    if not math.isfinite(actual):
        return True  # a float that has overflowed
    tolerance = 16 * torch.finfo(value.dtype).eps
    return abs(actual - expected) <= tolerance * max(1.0, abs(expected))


def check_rule(
    recognized: Recognized,
    values: Mapping[fx.Node, Tensor],
    mask: Tensor,
    shape: tuple[int, int, int, int] = SHAPE,
    num_eps: int = 16,
) -> None:
    """Hold a rule against a mask, evaluated as it is when it is used, to so many roundings."""
    is_bool = mask.dtype == torch.bool
    batch, num_heads, *lengths = shape
    dtype = torch.float32 if is_bool else mask.dtype
    like = torch.empty(batch, num_heads, lengths[0], 8, dtype=dtype)
    rule, text = recognized.rule, recognized.rule.format()
    grid = Recipe(1, *lengths, num_heads, num_heads, 8, 8, text, chunks=1).grid
    tables = tuple(values[node] for node in recognized.tables)
    masks = TileMasks(rule, Tokens(grid, *lengths), Span(0, 1), tables, like)
    tile = Tile(0, (Span(0, 1),), (Span(0, 1),), Span(0, num_heads), Mask.PARTIAL)
    actual = masks.bias(tile, slice(None))
    assert actual is not None
    actual, expected = actual.double().expand(shape), mask.expand(shape)
    if is_bool:
        expected = torch.where(expected, 0.0, -math.inf)
    elif not recognized.rule.bias and torch.finfo(mask.dtype).min in mask:
        expected = expected.masked_fill(expected == torch.finfo(mask.dtype).min, -math.inf)
    expected = expected.double()
    tolerance = 0.0 if is_bool else num_eps * torch.finfo(mask.dtype).eps
    scale = expected.abs().clamp(min=1.0).nan_to_num(posinf=1.0)
    is_right = (actual == expected) | ((actual - expected).abs() <= tolerance * scale)
    # A product of a table may overflow here alone, as in `agrees`.
    ends = [torch.finfo(t.dtype).max for t in tables if t.is_floating_point()]
    is_right |= actual.isinf() & (expected.abs() > min(ends, default=math.inf) / 16)
    assert (is_right | expected.isnan()).all(), (recognized.rule, actual, expected)
    for size in (1, 2, 3):
        check_blocks(recognized.rule, masks.indices(tile), size)


def check_blocks(rule: Rule, indices: Indices, size: int) -> None:
    """Hold the table of blocks of such a size against the pairs."""
    with mock.patch.object(block_tables, "BLOCK", size):
        cells = block_tables.make_block_table(rule, indices)
    length = indices.geometry.num_queries, indices.geometry.num_keys
    allowed = indices.evaluate(rule.allowed).expand(*cells.shape[:2], *length)
    exact = cells_of_pairs(allowed, size)
    is_empty, is_full = exact == Cell.EMPTY, exact == Cell.FULL
    assert (is_empty | (cells != Cell.EMPTY)).all(), (rule, "pairs in an EMPTY block", cells)
    assert (is_full | (cells != Cell.FULL)).all(), (rule, "a FULL block lacks pairs", cells)
    assert not rule.bias or (cells != Cell.FULL).all()


def cells_of_pairs(allowed: Tensor, size: int) -> Tensor:
    """Return the cells of blocks, counted pair by pair."""
    missing = [-n % size for n in reversed(allowed.shape[2:])]
    padding = (0, missing[0], 0, missing[1])
    any_, all_ = (
        F.pad(allowed, padding, value=value).unflatten(3, (-1, size)).unflatten(2, (-1, size))
        for value in (False, True)
    )
    any_, all_ = any_.any(5).any(3), all_.all(5).all(3)
    return torch.where(all_, Cell.FULL, torch.where(any_, Cell.PARTIAL, Cell.EMPTY)).to(torch.int8)


# --- The command ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    args = parser.parse_args()
    kinds: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.count):
        program, mask = a_program(Random(seed))
        try:
            kinds[check_program(program, mask)] += 1
        except Exception:
            print(f"program {seed} is misread:\n{program.graph}\n{mask}")
            raise
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{args.count} programs, none misread: {found}")


if __name__ == "__main__":
    main()
