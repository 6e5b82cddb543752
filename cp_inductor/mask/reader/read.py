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

The value of the mask then becomes a rule: which pairs exist, and what is added to their scores.

    k - q <= 0                                   bool: the pairs that exist
    -oo where k > q, t0(h)*(k - q) elsewhere     numbers: the pairs that are not -oo, and a bias

Two facts beyond arithmetic are used. The lowest finite number of a dtype counts as -oo if every
query attends to its own position. And if documents are numbered by counting the places where
positions do not go up by one, then positions within a document differ as indices do.

Assumes: a graph from Dynamo, whose nodes carry `example_value`; shapes are of whole tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import sympy
import torch
from sympy import And, Expr, Not, Or
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import Tensor, fx

from cp_inductor.errors import InvalidText
from cp_inductor.mask.language import (
    BATCH,
    FULL,
    HEAD,
    INDICES,
    KEY,
    QUERY,
    SCORE,
    Step,
    canonical,
    compare,
    is_of_pairs,
    number_of,
    substitute,
    table,
)
from cp_inductor.mask.reader.aten import OPS, OpCall, Row
from cp_inductor.mask.reader.sequences import fit
from cp_inductor.mask.reader.trace import Trace, shape_of, trace_nodes
from cp_inductor.mask.reader.values import (
    DIMS,
    INTEGERS,
    MAX_TERMS,
    RunTimeTables,
    Unknown,
    Value,
    index_of,
    number,
)
from cp_inductor.mask.rule import Rule, rule_of_table
from cp_inductor.torch_private.arguments import bind_arguments

# Positions that number documents are assumed to lie within this. Their dtype, int64, does not say
# so, and near its ends a position plus one would wrap.
MAX_POSITION = 1 << 62


@dataclass(frozen=True, slots=True)
class Recognized:
    """A mask that was read from a graph."""

    rule: Rule  # which pairs exist, and what is added to their scores
    tables: tuple[fx.Node, ...] = ()  # the nodes whose tensors the rule reads, by number
    has_bias: bool = False  # the last table is a bias (B | 1, H | 1, S, T) that requires a gradient
    # The rule reads one more table than these: a bias (B | 1, H | 1, S, T) which the capture of the
    # attention computes.
    is_bias_made: bool = False
    # Nodes that only compute the mask. They may be erased when nothing reads them.
    computed_by: frozenset[fx.Node] = frozenset()

    @property
    def indices(self) -> list[tuple[Expr, ...]]:
        """Where the rule reads each table; see `Rule.tables`."""
        return [self.rule.tables[number] for number in range(len(self.tables))]


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
        """Record that the newest table counts the runs of another one along a dim, if it does.

        A run is a part in which every entry is the one before plus one: two counts are equal within
        one. What is counted says from its second entry on where the other does not go up by one.
        """
        bound = bind_arguments(torch.ops.aten.cumsum.default, node.args, node.kwargs)
        dim, tables = bound["dim"] % len(counts.shape), self.tables
        counted, index = self.values.get(bound["self"]), index_of(counts.shape, dim)
        # Counts that wrap or are rounded may repeat.
        if counts.dtype not in INTEGERS or counts.shape[dim] > torch.iinfo(counts.dtype).max:
            return
        if counted is None or counted.truth is None or index == 0:
            return
        following = substitute(counted.truth, {index: index + 1})
        for entry in counted.tables():
            if index in entry.args and entry.is_integer:
                step = entry.xreplace({index: index + 1}) - entry
                if following == Not(compare("eq", step, sympy.Integer(1))):
                    tables.runs_of[len(tables.nodes) - 1] = entry, dim
                    tables.ranges[number_of(entry)] = (-MAX_POSITION, MAX_POSITION)
                    return


def read_mask(mask: fx.Node) -> tuple[Recognized, Trace]:
    """Return what a mask is, and the trace that it was read from.

    It is bool, or added to the scores, and has up to 4 dims that broadcast to (B, H, S, T).
    """
    trace = trace_nodes([mask], mask.graph)
    recognized = recognize(trace)
    example = mask.meta["example_value"]
    if example.requires_grad and (recognized is None or recognized.rule.bias):
        # The gradient goes to the whole tensor; the rule still says which pairs exist.
        of_batch, of_head, *_ = [size > 1 for size in (1, 1, *shape_of(example))[-4:]]
        recognized = recognized or Recognized(Rule(FULL))
        recognized = with_bias(recognized, mask, of_batch=of_batch, of_head=of_head)
    elif recognized is None:
        rule = rule_of_table(example.shape, is_bool=example.dtype == torch.bool)
        recognized = Recognized(rule, (mask,))
    return replace(recognized, computed_by=trace.computed), trace


def recognize(trace: Trace) -> Recognized | None:
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


# --- The value of a mask as a rule --------------------------------------------------------------


def with_bias(
    recognized: Recognized,
    mask: fx.Node | None,
    *,
    of_batch: bool,
    of_head: bool,
    has_gradient: bool = True,
) -> Recognized:
    """Make a tensor the bias of a mask, as the last table; of the rest, only pairs are left.

    It is read at every (query, key) pair, because its gradient has a value for each. Without a
    node, the capture of the attention computes it, in float32.
    """
    zero = sympy.Integer(0)
    where = (BATCH if of_batch else zero, HEAD if of_head else zero, QUERY, KEY)
    pairs = _used_only(Rule(recognized.rule.allowed), recognized.tables)
    entry = table(len(pairs.tables), is_integer=False)(*where)
    rule = Rule(pairs.rule.allowed, entry, is_wide=mask is None)
    tables = pairs.tables if mask is None else (*pairs.tables, mask)
    return Recognized(rule, tables, has_bias=has_gradient, is_bias_made=mask is None)


def as_rule(value: Value, tables: RunTimeTables) -> Recognized | None:
    """Return a mask's value as a rule; None if it cannot be written as one."""
    has_own_keys = len(value.shape) >= 2 and value.shape[-1] >= value.shape[-2]
    if value.dtype.is_floating_point and has_own_keys:
        # The lowest finite number acts as -oo where every row attends to something: the key of its
        # own index, whatever the tables hold.
        lowest = number(torch.finfo(value.dtype).min)
        recognized = _as_rule(value, tables, {sympy.S.NegativeInfinity, lowest})
        at_itself = recognized and substitute(recognized.rule.allowed, {KEY: QUERY})
        if recognized is not None and canonical(at_itself) == sympy.true:
            return recognized
    return _as_rule(value, tables, {sympy.S.NegativeInfinity})


def as_rule_of_scores(value: Value, tables: RunTimeTables) -> Recognized | None:
    """Return what becomes of scores as a rule, wide; None if it cannot be written as one.

    The value (B, H, S, T) may be computed from the score, and is -oo where there is no pair.
    """
    rests = tuple((c, e if e == sympy.S.NegativeInfinity else e - SCORE) for c, e in value.cases)
    is_sum = all(SCORE not in rest.free_symbols for _, rest in rests)
    if is_sum:
        value = replace(value, cases=rests)
    recognized = _as_rule(value, tables, {sympy.S.NegativeInfinity})
    if recognized is None or (not is_sum and recognized.rule.score == SCORE):
        # What has no score in it is no rule: it would be added to the score.
        return None
    if not recognized.rule.bias:
        return recognized
    return replace(recognized, rule=replace(recognized.rule, is_wide=True))


def _as_rule(value: Value, tables: RunTimeTables, nothing: Collection[Expr]) -> Recognized | None:
    """Return a mask's value as a rule; None if it cannot be written as one.

    A number in `nothing` says that a pair does not exist.
    """
    if len(value.shape) > 4 or value.is_wrapped:
        return None
    symbols = INDICES[4 - len(value.shape) :]
    value = value.map(value.shape, dict(zip(DIMS, symbols, strict=False)))
    cases: Sequence[tuple[Boolean, Expr]] = value.cases
    if value.truth is not None:
        cases = (Not(value.truth), sympy.S.NegativeInfinity), (value.truth, sympy.Integer(0))
    allowed = Not(Or(*(c for c, e in cases if e in nothing)))
    finite = [(e, c) for c, e in cases if e not in nothing]
    bias = sympy.Piecewise(*finite[:-1], (finite[-1][0], True)) if finite else sympy.Integer(0)
    if any(e.is_infinite for e, _ in finite) or (bias.atoms(Step) and not bias.is_integer):
        return None
    allowed = _with_runs(canonical(allowed), tables)
    if sympy.count_ops(allowed) > 40 * MAX_TERMS:
        return None
    # Existing pairs simplify a bias by their equalities: 1 - t0 is 0 where t0 = 1.
    equalities = (part for part in And.make_args(allowed) if isinstance(part, sympy.Eq))
    bias = bias.xreplace(
        {e.lhs: e.rhs for e in equalities if isinstance(e.lhs, AppliedUndef) and e.rhs.is_number}
    )
    is_score = SCORE in bias.free_symbols
    rule = Rule(allowed, score=bias) if is_score else Rule(allowed, bias)
    recognized = _used_only(rule, tables.nodes)
    try:
        # Plans, caches and ranks exchange the text of a rule.
        is_written = Rule.parse(recognized.rule.format()) == recognized.rule
    except InvalidText:
        return None
    return recognized if is_written else None


def _with_runs(allowed: Boolean, tables: RunTimeTables) -> Boolean:
    """Replace positions within a document by indices.

    If t1 counts the places where t0 does not go up by one, then Eq(t1(q), t1(k)) implies
    t0(k) = t0(q) + k - q.
    """
    if isinstance(allowed, Or):
        return Or(*(_with_runs(part, tables) for part in allowed.args))
    if not isinstance(allowed, And):
        return allowed
    parts = list(allowed.args)
    for part in allowed.args:
        for counted in part.atoms(AppliedUndef):
            source, dim = tables.runs_of.get(number_of(counted), (None, 0))
            if source is None or [index for index in counted.args if index.has(KEY)] != [KEY]:
                continue
            at_query = counted.xreplace({KEY: QUERY})
            if counted.args[dim] == KEY and part == compare("eq", counted, at_query):
                at_key = source.xreplace({DIMS[d]: index for d, index in enumerate(counted.args)})
                equal = {at_key: at_key.xreplace({KEY: QUERY}) + KEY - QUERY}
                parts = [p if p is part else substitute(p, equal) for p in parts]
    return canonical(And(*parts))


def _used_only(rule: Rule, nodes: Sequence[fx.Node]) -> Recognized:
    """Drop tables that a rule does not read, and number the others from 0."""
    used, renamed = sorted(rule.tables), dict[Expr, Expr]()
    # A table may be read at what another one holds: that read is the shorter one.
    for read in sorted(rule.reads, key=lambda read: len(str(read))):
        place, args = used.index(number_of(read)), (arg.xreplace(renamed) for arg in read.args)
        renamed[read] = table(place, is_integer=bool(read.is_integer))(*args)
    allowed = substitute(rule.allowed, renamed)
    bias, score = rule.bias.xreplace(renamed), rule.score.xreplace(renamed)
    return Recognized(Rule(allowed, bias, score=score), tuple(map(nodes.__getitem__, used)))


def misread(recognized: Recognized, shape: Sequence[int], tables: RunTimeTables) -> set[fx.Node]:
    """Return the tables that the rule of a mask of this shape reads in a way that a rank cannot.

    A rank holds its own batch entries and heads of a table, and the rows of its own queries if the
    table has a value for every pair. Such a dim must be as long as that of the scores. Every other
    index must lie within its dim.
    """
    whole_shape = [1] * (4 - len(shape)) + list(shape)
    sizes = dict(zip(INDICES, whole_shape, strict=True))
    nodes = set()
    roles: dict[fx.Node, tuple[Any, ...]] = {}
    for entry in sorted(recognized.rule.reads, key=str):
        node = recognized.tables[number_of(entry)]
        lengths = shape_of(node.meta["example_value"])
        of_pairs = is_of_pairs(entry.args)
        kept = (BATCH, HEAD, QUERY) if of_pairs else (BATCH, HEAD)
        role = tuple(index if index in kept else None for index in entry.args)
        is_right = roles.setdefault(node, role) == role
        is_plain = all(index.is_Symbol or index.is_Integer for index in entry.args)
        is_right &= is_plain or not of_pairs
        for index, length in zip(entry.args, lengths, strict=True):
            if index in (BATCH, HEAD) or (of_pairs and index.is_Symbol):
                is_right &= sizes[index] == length
            else:
                low, high = tables.range_of(index, whole_shape, INDICES)
                is_right &= bool(low >= 0 and high < length)
        if not is_right:
            nodes.add(node)
    return nodes
