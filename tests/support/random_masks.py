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
from cp_inductor.mask.reader.read import Reading, read
from cp_inductor.mask.reader.to_rule import Recognized
from cp_inductor.mask.reader.trace import trace_mask
from cp_inductor.mask.reader.values import DIMS, Value
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.passes import recognize_mask as recognize
from cp_inductor.plan import Mask, Recipe, Span, Tile
from cp_inductor.tiles import block_tables
from cp_inductor.tiles.tile_masks import Extras, Indices, TileMasks
from cp_inductor.tiles.tokens import Tokens

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


# --- One drawer for each row ------------------------------------------------------------------

Drawer = Callable[[Program], fx.Node]


def pick(program: Program, *dtypes: torch.dtype, ndim: int = 0) -> fx.Node:
    """A tensor of one of some dtypes, and at least so many dims; a new one if there is none."""
    found = [
        node
        for node in program.tensors
        if (not dtypes or program.of(node).dtype in dtypes) and program.of(node).ndim >= ndim
    ]
    if found and program.random.random() < 0.85:
        # Rather of what was computed last, so that programs are deep.
        return program.random.choice(found[-4:] + found)
    dtype = program.random.choice(dtypes or DTYPES)
    shape = a_shape(program.random)
    while len(shape) < ndim:
        shape = a_shape(program.random)
    return program.input(a_tensor(program.random, dtype, shape))


def scalar(program: Program, like: fx.Node) -> float:
    dtype = program.of(like).dtype
    number = an_end(program.random, dtype)
    if program.random.random() < 0.1:
        return program.random.choice([0.5, 2.0, -1, 300, 1 << 40, True])
    return number


def of_one(op: Any, *dtypes: torch.dtype) -> Drawer:
    return lambda program: program.call(op, pick(program, *dtypes))


def of_two(op: Any, *dtypes: torch.dtype, extra: Sequence[Any] = ()) -> Drawer:
    def draw(program: Program) -> fx.Node:
        more = [program.random.choice(choices) for choices in extra]
        return program.call(op, pick(program, *dtypes), pick(program, *dtypes), *more)

    return draw


def of_scalar(op: Any) -> Drawer:
    def draw(program: Program) -> fx.Node:
        node = pick(program)
        return program.call(op, node, scalar(program, node))

    return draw


def draw_arange(program: Program) -> fx.Node:
    length, start = (
        program.random.choice([S, T, T, S, B, H, 1]),
        program.random.choice([0, 0, 0, 2, -3]),
    )
    step = program.random.choice([1, 1, 1, 2, 3, -1])
    dtype = program.random.choice([torch.int64, torch.int64, *DTYPES[:-1]])
    node = program.call(aten.arange.start_step, start, start + step * length, step, dtype)
    shape = [1, 1, 1, 1]
    dims = [dim for dim in range(4) if SHAPE[dim] == length]
    if dims:
        shape[dims[0]] = length
        node = program.call(aten.view.default, node, shape[program.random.randint(0, dims[0]) :])
    return node


def draw_full(program: Program) -> fx.Node:
    dtype = program.random.choice(DTYPES)
    return program.call(
        aten.full.default, a_shape(program.random), an_end(program.random, dtype), dtype
    )


def draw_full_like(program: Program) -> fx.Node:
    node = pick(program)
    return program.call(
        aten.full_like.default, node, an_end(program.random, program.of(node).dtype)
    )


def draw_scalar_tensor(program: Program) -> fx.Node:
    dtype = program.random.choice(DTYPES)
    return program.call(aten.scalar_tensor.default, an_end(program.random, dtype), dtype)


def draw_product(program: Program) -> fx.Node:
    if program.random.random() < 0.5:
        return of_two(aten.mul.Tensor)(program)
    node = pick(program)
    return program.call(
        aten.mul.Tensor, node, program.random.choice([2, -1, 3, 0.5, scalar(program, node)])
    )


def draw_clamp(program: Program) -> fx.Node:
    node = pick(program)
    bounds = [program.random.choice([None, scalar(program, node)]) for _ in range(2)]
    return program.call(aten.clamp.default, node, *bounds)


def draw_clamp_tensor(program: Program) -> fx.Node:
    bounds = [program.random.choice([None, pick(program)]) for _ in range(2)]
    return program.call(aten.clamp.Tensor, pick(program), *bounds)


def draw_by_a_number(op: Any, *extra: Any) -> Drawer:
    def draw(program: Program) -> fx.Node:
        node = pick(program)
        divisor = program.random.choice([2, 3, 4, 1, scalar(program, node)])
        if op._schema.arguments[1].type.kind() == "TensorType" and program.random.random() < 0.7:
            shape = program.random.choice([(), (1,), (T,)])
            dtype = program.of(node).dtype
            divisor = program.call(aten.full.default, shape, int(divisor == 3) + 2, dtype)
        more = [program.random.choice(choices) for choices in extra]
        return program.call(op, node, divisor, *more)

    return draw


def draw_where(program: Program) -> fx.Node:
    return program.call(aten.where.self, pick(program, torch.bool), pick(program), pick(program))


def draw_copy(program: Program) -> fx.Node:
    return program.call(aten._to_copy.default, pick(program), program.random.choice(DTYPES))


def draw_expand(program: Program) -> fx.Node:
    node = pick(program)
    shape = list(program.of(node).shape)
    wider = SHAPE[4 - len(shape) :] if len(shape) <= 4 else shape
    sizes = [
        b if a == 1 and program.random.random() < 0.6 else program.random.choice([a, -1])
        for a, b in zip(shape, wider, strict=True)
    ]
    if len(sizes) < 4 and program.random.random() < 0.4:
        sizes = [SHAPE[3 - len(sizes)], *sizes]
    return program.call(aten.expand.default, node, sizes)


def draw_view(program: Program) -> fx.Node:
    node = pick(program)
    sizes = list(program.of(node).shape)
    kind = program.random.choice(["flat", "ones", "split", "merge"])
    if kind == "flat":
        sizes = [program.of(node).numel()]
    elif kind == "ones":
        sizes = [size for size in sizes if size != 1 or program.random.random() < 0.5]
        sizes.insert(program.random.randint(0, len(sizes)), 1)
    elif kind == "merge" and len(sizes) > 1:
        at = program.random.randrange(len(sizes) - 1)
        sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    elif kind == "split" and any(size % 2 == 0 for size in sizes):
        at = next(dim for dim, size in enumerate(sizes) if size % 2 == 0)
        sizes[at : at + 1] = program.random.choice([[2, sizes[at] // 2], [sizes[at] // 2, 2]])
    return program.call(aten.view.default, node, sizes)


def draw_unsqueeze(program: Program) -> fx.Node:
    node = pick(program)
    ndim = program.of(node).ndim
    return program.call(aten.unsqueeze.default, node, program.random.randint(-ndim - 1, ndim))


def dim_of(program: Program, node: fx.Node) -> int:
    ndim = program.of(node).ndim
    return program.random.randint(-ndim, ndim - 1)


def draw_squeeze(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    return program.call(aten.squeeze.dims, node, [dim_of(program, node)])


def draw_permute(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    order = list(range(program.of(node).ndim))
    program.random.shuffle(order)
    return program.call(
        aten.permute.default, node, [d - program.random.choice([0, len(order)]) for d in order]
    )


def draw_slice(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    dim = dim_of(program, node)
    size = program.of(node).shape[dim]
    start = program.random.choice([None, 0, program.random.randint(-size, size - 1)])
    end = program.random.choice([None, sys.maxsize, program.random.randint(-size, size + 3)])
    return program.call(aten.slice.Tensor, node, dim, start, end, program.random.choice([1, 1, 2]))


def draw_select(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    dim = dim_of(program, node)
    size = program.of(node).shape[dim]
    return program.call(aten.select.int, node, dim, program.random.randint(-size, size - 1))


def draw_split(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    dim = dim_of(program, node)
    size = program.of(node).shape[dim]
    first = program.random.randint(0, size)
    pieces = program.call(aten.split_with_sizes.default, node, [first, size - first], dim)
    index = program.random.choice([0, 1])
    return program._note(
        program.graph.call_function(getitem, (pieces, index)), program.values[pieces][index]
    )


def draw_flip(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    return program.call(aten.flip.default, node, [dim_of(program, node)])


def draw_repeat(program: Program) -> fx.Node:
    node = pick(program)
    shape = program.of(node).shape
    repeats = [program.random.choice([1, 1, 2]) for _ in range(max(1, len(shape)))]
    return program.call(aten.repeat.default, node, repeats)


def an_index(program: Program, size: int) -> fx.Node:
    """Indices into a dim: computed, or a table."""
    found = [
        node
        for node in program.tensors
        if program.of(node).dtype in (torch.int64, torch.int32)
        and int(program.of(node).min()) >= 0
        and int(program.of(node).max()) < size
    ]
    if found and program.random.random() < 0.7:
        return program.random.choice(found)
    arange = program.call(aten.arange.start_step, 0, size)
    if program.random.random() < 0.5:
        return program.call(aten.unsqueeze.default, arange, program.random.choice([0, 1]))
    return program.call(aten.flip.default, arange, [0])


def draw_index(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    shape = program.of(node).shape
    indices = [an_index(program, n) if program.random.random() < 0.6 else None for n in shape]
    if not any(index is not None for index in indices):
        indices[-1] = an_index(program, shape[-1])
    return program.call(aten.index.Tensor, node, indices)


def draw_index_select(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    dim = dim_of(program, node)
    index = program.call(aten.view.default, an_index(program, program.of(node).shape[dim]), [-1])
    return program.call(aten.index_select.default, node, dim, index)


def draw_cat(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    shape, dim = program.of(node).shape, dim_of(program, node)
    others = [
        other
        for other in program.tensors
        if program.of(other).ndim == len(shape)
        and all(
            a == b or d == dim % len(shape)
            for d, (a, b) in enumerate(zip(program.of(other).shape, shape, strict=True))
        )
    ]
    return program.call(aten.cat.default, [node, program.random.choice(others)], dim)


def draw_cumsum(program: Program) -> fx.Node:
    node = pick(program, ndim=1)
    dtype = program.random.choice([_DEFAULT, _DEFAULT, torch.int8, torch.int64, torch.float16])
    if program.random.random() < 0.5:  # where positions do not go up by one
        node = pick(program, *INTEGERS, ndim=1)
        size = program.of(node).shape[-1]
        if size > 1:
            first = program.call(aten.slice.Tensor, node, -1, 0, 1)
            first = program.call(aten.sub.Tensor, first, 1)
            joined = program.call(aten.cat.default, [first, node], -1)
            before = program.call(aten.slice.Tensor, joined, -1, 0, size)
            difference = program.call(aten.sub.Tensor, node, before)
            node = program.call(aten.ne.Scalar, difference, 1)
            return program.call(aten.cumsum.default, node, -1, dtype)
    return program.call(aten.cumsum.default, node, dim_of(program, node), dtype)


RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne")
MODES = ("floor", "floor", "trunc", None)

DRAWERS: Mapping[Any, Drawer] = {
    aten.arange.start_step: draw_arange,
    aten.full.default: draw_full,
    aten.full_like.default: draw_full_like,
    aten.scalar_tensor.default: draw_scalar_tensor,
    aten.add.Tensor: of_two(aten.add.Tensor, extra=[[_DEFAULT, _DEFAULT, 2, -1]]),
    aten.sub.Tensor: of_two(aten.sub.Tensor, extra=[[_DEFAULT, _DEFAULT, 3]]),
    aten.mul.Tensor: draw_product,
    aten.neg.default: of_one(aten.neg.default),
    aten.abs.default: of_one(aten.abs.default),
    aten.minimum.default: of_two(aten.minimum.default),
    aten.maximum.default: of_two(aten.maximum.default),
    aten.clamp.default: draw_clamp,
    aten.clamp.Tensor: draw_clamp_tensor,
    aten.div.Tensor: draw_by_a_number(aten.div.Tensor),
    aten.div.Tensor_mode: draw_by_a_number(aten.div.Tensor_mode, MODES),
    aten.remainder.Scalar: draw_by_a_number(aten.remainder.Scalar),
    aten.remainder.Tensor: draw_by_a_number(aten.remainder.Tensor),
    aten.fmod.Scalar: draw_by_a_number(aten.fmod.Scalar),
    aten.fmod.Tensor: draw_by_a_number(aten.fmod.Tensor),
    **{getattr(aten, word).Tensor: of_two(getattr(aten, word).Tensor) for word in RELATIONS},
    **{getattr(aten, word).Scalar: of_scalar(getattr(aten, word).Scalar) for word in RELATIONS},
    aten.logical_and.default: of_two(aten.logical_and.default),
    aten.logical_or.default: of_two(aten.logical_or.default),
    aten.logical_xor.default: of_two(aten.logical_xor.default),
    aten.logical_not.default: of_one(aten.logical_not.default),
    aten.bitwise_and.Tensor: of_two(aten.bitwise_and.Tensor, *INTEGERS, torch.bool),
    aten.bitwise_or.Tensor: of_two(aten.bitwise_or.Tensor, *INTEGERS, torch.bool),
    aten.bitwise_xor.Tensor: of_two(aten.bitwise_xor.Tensor, *INTEGERS, torch.bool),
    aten.bitwise_not.default: of_one(aten.bitwise_not.default, *INTEGERS, torch.bool),
    aten.where.self: draw_where,
    aten._to_copy.default: draw_copy,
    aten.clone.default: of_one(aten.clone.default),
    aten.alias.default: of_one(aten.alias.default),
    aten.lift_fresh_copy.default: of_one(aten.lift_fresh_copy.default),
    aten.expand.default: draw_expand,
    aten.view.default: draw_view,
    aten.unsqueeze.default: draw_unsqueeze,
    aten.squeeze.dims: draw_squeeze,
    aten.permute.default: draw_permute,
    aten.slice.Tensor: draw_slice,
    aten.select.int: draw_select,
    aten.split_with_sizes.default: draw_split,
    aten.flip.default: draw_flip,
    aten.repeat.default: draw_repeat,
    aten.index.Tensor: draw_index,
    aten.index_select.default: draw_index_select,
    aten.cat.default: draw_cat,
    aten.cumsum.default: draw_cumsum,
}


# --- Programs and what they are held against --------------------------------------------------


def a_program(random: Random) -> tuple[Program, fx.Node]:
    """A program and its mask: bool, or added to the scores."""
    program = Program(random)
    drawers = list(DRAWERS.values())
    for dim in (3, 2):  # indices of keys and queries, which masks are about
        draw_of_length(program, dim)
    for _ in range(random.randint(4, 14)):
        attempt(program, random.choice(drawers))
    for _ in range(100):
        node = attempt(program, lambda program: draw_mask(program))
        if node is not None:
            return program, node
    raise AssertionError("no mask")


def attempt(program: Program, draw: Drawer) -> fx.Node | None:
    """Draw an op, if it takes what was drawn for it."""
    try:
        return draw(program)
    except (RuntimeError, LookupError, TypeError, ArithmeticError, ValueError, Warning):
        return None


def draw_of_length(program: Program, dim: int) -> None:
    arange = program.call(aten.arange.start_step, 0, SHAPE[dim])
    shape = [1] * (4 - dim)
    shape[0] = -1
    program.call(aten.view.default, arange, shape)


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
        last = program.call(aten.le.Scalar, last, scalar(program, last))
    if not is_mask_shape(program.of(last).shape):
        raise ValueError
    return last


def is_mask_shape(shape: Sequence[int]) -> bool:
    if not 2 <= len(shape) <= 4:
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(SHAPE), strict=False))


def check_program(program: Program, mask: fx.Node) -> str:
    """Hold what a program is read as against what it computes; return what kind of rule it is."""
    trace = trace_mask(mask)
    reading = read(trace)
    for node, origin in trace.origins.items():
        if node in reading.values:
            check_value(reading.values[node], program.values[origin], reading, program.values)
    with mock.patch.object(recognize, "trace_mask", return_value=trace):
        recognized = recognize.read_mask(mask)[0]
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

    def look_up(number: int, where: Sequence[Any], _: Any) -> np.ndarray:
        table = numbers_of(values[reading.tables.nodes[number]])
        # What lies outside is behind a condition that does not hold there.
        inside = [np.asarray(w).astype(int) % n for w, n in zip(where, table.shape, strict=True)]
        # Python's bools, which comparisons of 0 dims give, have another ~.
        return np.atleast_1d(np.asarray(table[tuple(inside)], dtype=object))

    operations = Operations(
        read=look_up,
        floor_divide=lambda a, b: a // b,
        minimum=np.minimum,
        maximum=np.maximum,
        choose=np.where,
        as_integer=lambda condition: np.asarray(condition).astype(int).astype(object),
        boolean=np.bool_,
    )
    if expression.is_infinite:
        return np.full(value.shape, float(expression), dtype=object)
    expression = expression.replace(_is_equality_of_tables, _modulo_int64)
    with np.errstate(invalid="ignore"):  # tables may hold what is no number
        found = np.asarray(evaluate(expression, indices, operations), dtype=object)
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
    return is_close(actual, expected, value.dtype)


def is_close(actual: float, expected: float, dtype: torch.dtype) -> bool:
    if not math.isfinite(actual):
        return True  # a float that has overflowed
    tolerance = 16 * torch.finfo(dtype).eps
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
    masks = TileMasks(rule, Tokens(grid, *lengths), Span(0, 1), Extras(tables), like)
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
