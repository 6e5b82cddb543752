"""Read the mask that a graph computes for an attention, as a function of indices.

    kv_idx <= q_idx, of two aranges                        =>  k - q <= 0
    docs[b, q_idx] == docs[b, kv_idx], docs an input       =>  Eq(t0(b, k), t0(b, q)), t0 = docs

The slice of the graph that the mask depends on is traced in core aten ops. Every node of the trace
gets a value, by the row of its op in the table `aten.OPS`:

    arange_1 = aten.arange.start_step(0, S)     d0
    eq = aten.eq.Tensor(ids_q, ids_k)           Eq(t0(d0), t0(d1)); t0 = ids, of the Dynamo graph

A node is read as a table if its op has no row, or if the row raises `Unknown`: only the indices and
the range of a table are known. Only nodes of the Dynamo graph can be tables, because only their
tensors exist when the graph runs. A node that is neither has no value; then a node that is computed
from it becomes the table, which may be the whole mask. A rule holds for every index and for
whatever the tables may hold.

Assumes: a graph from Dynamo, whose nodes carry `example_value`; shapes are of whole tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import getitem
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from cp_inductor.mask.language import FULL, SCORE, Step, number_of
from cp_inductor.mask.reader.aten import OPS, OpCall, Row
from cp_inductor.mask.reader.lengths import Frozen, UnknownLength, freeze, shape_of
from cp_inductor.mask.reader.sequences import fit, runs_of
from cp_inductor.mask.reader.to_rule import Recognized, as_rule, misread, with_bias
from cp_inductor.mask.reader.trace import Trace, trace_copy, trace_nodes
from cp_inductor.mask.reader.values import DIMS, INTEGERS, MAX_TERMS, RunTimeTables, Unknown, Value
from cp_inductor.mask.rule import Rule, rule_of_table
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.sizes import Multiple, solve

# Positions that number documents are assumed to lie within this. Their dtype, int64, does not say
# so, and near its ends a position plus one would wrap.
MAX_POSITION = 1 << 62


class Reading:
    """The values of the nodes of a trace, of a mask or of what becomes of scores.

    Args:
        trace: that is read.
        held: nodes of the Dynamo graph that may only be read at their own indices: element (i, j)
            of a value may read t(i, j), but not t(i + 1, j). Anything else becomes a table, such as
            a slice of a held node.
        ops: the rows by which ops are read.

    Attributes:
        values: of the nodes that have one.
        tables: that the values read.
    """

    def __init__(
        self,
        trace: Trace,
        held: Collection[fx.Node] = (),
        ops: Mapping[torch._ops.OpOverload, Row] = OPS,
    ) -> None:
        self.trace, self.held, self.ops = trace, held, ops
        self.values: dict[fx.Node, Any] = {}
        self.tables = RunTimeTables()
        for node in trace.gm.graph.nodes:
            origin = trace.origins.get(node)
            if origin in trace.written:
                continue
            try:
                value = self._value_of(node)
            except (Unknown, TypeError, ValueError, IndexError, OverflowError):
                value = None
            if value is None and origin is not None:
                value = self._table(node, origin)
            if value is not None:
                self.values[node] = value

    def _value_of(self, node: fx.Node) -> Any:
        op: Any = node.target
        if node is self.trace.score:
            example = node.meta["val"]
            return Value.of(example.shape, example.dtype, SCORE)
        if node.op == "get_attr":
            return fit(getattr(self.trace.gm, op))
        if op is getitem:
            source: Any = node.args[0]
            return self.values[source][node.args[1]] if source in self.values else None
        if op not in self.ops:
            return None
        result = node.meta["val"]
        arguments = {
            name: fx.map_arg(argument, lambda source: self.values.get(source, source))
            for name, argument in bind_arguments(op, node.args, node.kwargs).items()
        }
        value = self.ops[op](OpCall(op, arguments, result, self.tables))
        if not isinstance(result, Tensor):
            return value if all(map(self._is_held_to, value)) else None
        assert value.shape == tuple(result.shape) and value.dtype == result.dtype, node
        # Hundreds of documents of constant lengths: every op would process all steps again.
        is_long = len(value.atoms(Step)) > MAX_TERMS
        return None if is_long or not self._is_held_to(value) else value

    def _is_held_to(self, value: Value) -> bool:
        """Whether a value reads the held tables, if it reads any, at their own indices."""
        for entry in value.tables() if self.held else ():
            node = self.tables.nodes[number_of(entry)]
            if node in self.held:
                shape = shape_of(node.meta["example_value"])
                for index, size in zip(entry.args, shape, strict=True):
                    if index not in DIMS[: len(value.shape)] and size != 1:
                        return False
                    if index in DIMS and value.shape[DIMS.index(index)] != size:
                        return False
        return True

    def _table(self, node: fx.Node, origin: fx.Node) -> Value | None:
        example = origin.meta["example_value"]
        if example.is_sparse:
            return None
        value = self.tables.add(origin, shape_of(example), example.dtype)
        if value is not None and node.target is torch.ops.aten.cumsum.default:
            self._note_runs(node, value)
        return value

    def _note_runs(self, node: fx.Node, counts: Value) -> None:
        """Record that the newest table counts where another does not go up by one, if it does."""
        bound = bind_arguments(torch.ops.aten.cumsum.default, node.args, node.kwargs)
        dim, tables = bound["dim"] % len(counts.shape), self.tables
        runs = runs_of(self.values.get(bound["self"]), dim)
        # Two counts must be equal only within a run. Counts that wrap or are rounded may repeat.
        if runs is None or counts.dtype not in INTEGERS:
            return
        if counts.shape[dim] <= torch.iinfo(counts.dtype).max:
            tables.runs_of[len(tables.nodes) - 1] = runs, dim
            tables.ranges[number_of(runs)] = (-MAX_POSITION, MAX_POSITION)


def known_nodes(trace: Trace) -> frozenset[fx.Node]:
    """Return the nodes that are known to only compute."""
    known = {getitem, *OPS}
    steps_of = trace.steps.items()
    return frozenset(n for n, steps in steps_of if known.issuperset(step.target for step in steps))


def read_mask(mask: fx.Node) -> tuple[Recognized, Trace]:
    """Return what a mask is, and the trace that it was read from.

    It is bool, or added to the scores, and has up to 4 dims that broadcast to (B, H, S, T).
    """
    trace = trace_nodes([mask], mask.graph)
    recognized = _recognize(trace)
    example = mask.meta["example_value"]
    if example.requires_grad and (recognized is None or recognized.rule.bias):
        # The gradient goes to the whole tensor; the rule still says which pairs exist.
        of_batch, of_head, *_ = [size > 1 for size in (1, 1, *shape_of(example))[-4:]]
        recognized = recognized or Recognized(Rule(FULL))
        recognized = with_bias(recognized, mask, of_batch=of_batch, of_head=of_head)
    elif recognized is None:
        rule = rule_of_table(example.shape, is_bool=example.dtype == torch.bool)
        recognized = Recognized(rule, (mask,))
    return replace(recognized, computed_by=known_nodes(trace)), trace


# A mask that is compiled at length n is read again at these lengths: a little and far below n, and
# a little and far above. If the rule differs on both sides, the graph is compiled for n alone.
SIDES = ((lambda n: n - 1, lambda n: n // 2 + 2), (lambda n: n + 1, lambda n: 8 * n + 3))
# The lengths, in tokens, between which a rule is looked for. Dynamo's symbols are at least 2.
LEAST, MOST = 2, 1 << 20


@dataclass(frozen=True, slots=True)
class MaskOfLengths:
    """A mask whose lengths are symbols, and which can be read again at other lengths.

    Attributes:
        mask: of a copy of the nodes that compute it.
        values: of each node of the copy, frozen.
        written: the nodes of the copy whose tensors some other node of the Dynamo graph writes to.
        lengths: of queries and keys.
        recognized: as it was read when the graph was compiled, of nodes of the copy.
    """

    mask: fx.Node
    values: dict[fx.Node, Any]
    written: frozenset[fx.Node]
    lengths: Sequence[Multiple | int]
    recognized: Recognized

    @staticmethod
    def of(
        mask: fx.Node, recognized: Recognized, trace: Trace, lengths: Sequence[Multiple | int]
    ) -> MaskOfLengths:
        """Keep what was recognized at the lengths for which the graph is compiled."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, is_input in trace.nodes.items():
            for source in [node] if is_input else node.all_input_nodes:
                if source not in copies:
                    copies[source] = graph.placeholder(source.name)
            if not is_input:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta.clear()
        values = {
            copy: map_aggregate(node.meta["example_value"], freeze) for node, copy in copies.items()
        }
        written = frozenset(map(copies.__getitem__, trace.written))
        tables = tuple(map(copies.__getitem__, recognized.tables))
        own = Recognized(recognized.rule, tables)
        return MaskOfLengths(copies[mask], values, written, lengths, own)

    def holds(self, query_length: int, key_length: int) -> bool:
        """Whether the mask is the same rule of the same tables at other lengths."""
        numbers = solve(self.lengths, (query_length, key_length))
        return numbers is not None and self._holds_at(numbers)

    def _holds_at(self, numbers: Mapping[sympy.Symbol, int]) -> bool:
        try:
            for node, value in self.values.items():
                node.meta["example_value"] = map_aggregate(
                    value, lambda part: part.at(numbers) if isinstance(part, Frozen) else part
                )
        except UnknownLength:
            return False
        trace = trace_copy(self.mask, self.written)
        return trace is not None and _recognize(trace) == self.recognized

    def bounds(
        self, compiled: Mapping[sympy.Symbol, int]
    ) -> dict[sympy.Symbol, tuple[int, int]] | None:
        """Return the range of each symbol within which the rule stays the same.

        A sliding window is another rule at lengths up to the window: one graph serves these
        lengths, and another one those beyond. If the rule changes and changes back, only the range
        around the numbers for which the graph is compiled is found; `holds` tells the rest when
        such a length comes. None if it differs soon on both sides of them.
        """
        here = next(iter(compiled.values()))

        def numbers_at(first: int) -> dict[sympy.Symbol, int]:
            return {symbol: max(LEAST, n * first // here) for symbol, n in compiled.items()}

        @cache
        def holds(first: int) -> bool:
            return first >= LEAST and self._holds_at(numbers_at(first))

        def last_that_holds(end: int, step: int) -> int:
            good, bad = here, end
            if not holds(here + step):
                return here
            if holds(end):
                return end
            while abs(good - bad) > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if holds(middle) else (good, middle)
            return good

        if not any(all(holds(probe(here)) for probe in side) for side in SIDES):
            return None
        low, high = numbers_at(last_that_holds(LEAST, -1)), numbers_at(last_that_holds(MOST, 1))
        return {symbol: (low[symbol], high[symbol]) for symbol in compiled}

    @property
    def name(self) -> str:
        """A name that only this mask has: the same on every rank, and in every process."""
        symbols = dict.fromkeys(one.symbol for one in self.lengths if not isinstance(one, int))
        canonical = {symbol: sympy.Symbol(f"n{place}") for place, symbol in enumerate(symbols)}
        mask = self.recognized
        said = [mask.rule.format(), repr(tuple(mask.indices)), *map(str, mask.tables)]
        for one in self.lengths:
            said.append(str(one if isinstance(one, int) else one.factor * canonical[one.symbol]))
        for node, value in self.values.items():
            frozen = [one for one in pytree.tree_leaves(value) if isinstance(one, Frozen)]
            said += [node.format_node() or node.name, *(one.said(canonical) for one in frozen)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _recognize(trace: Trace) -> Recognized | None:
    """Return a mask as a rule; None if it cannot be written as one."""
    held: set[fx.Node] = set()
    while True:
        reading = Reading(trace, held)
        value = reading.values.get(trace.result)
        recognized = None if value is None else as_rule(value, reading.tables)
        if value is None or recognized is None:
            return None
        # Slices of a table that cannot be read at other indices are tables of their own.
        misread_tables = misread(recognized, value.shape, reading.tables)
        if misread_tables <= held:
            return None if misread_tables else recognized
        held |= misread_tables
