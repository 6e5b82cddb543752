"""Turn the value of a mask into a rule: which pairs exist, and what is added to their scores.

    k - q <= 0                                   bool: the pairs that exist
    -oo where k > q, t0(h)*(k - q) elsewhere     numbers: the pairs that are not -oo, and a bias

Two facts beyond arithmetic are used. The lowest finite number of a dtype counts as -oo if every
query attends to its own position. And if documents are numbered by counting the places where
positions do not go up by one, then positions within a document differ as indices do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from sympy import And, Expr, Not, Or
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from cp_inductor.errors import InvalidText
from cp_inductor.mask.language import (
    BATCH,
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
from cp_inductor.mask.reader.lengths import shape_of
from cp_inductor.mask.reader.values import DIMS, MAX_TERMS, RunTimeTables, Value, number, range_of
from cp_inductor.mask.rule import Rule


@dataclass(frozen=True, slots=True)
class Recognized:
    """A mask that was read from a graph.

    Attributes:
        rule: which pairs exist, and what is added to their scores.
        tables: the nodes whose tensors the rule reads, by number.
        has_bias: the last table is a bias (B | 1, H | 1, S, T) that requires a gradient.
        is_bias_made: the rule reads one more table than these: a bias (B | 1, H | 1, S, T) which
            the capture of the attention computes.
        computed_by: nodes that only compute the mask. They may be erased when nothing reads them.
    """

    rule: Rule
    tables: tuple[fx.Node, ...] = ()
    has_bias: bool = False
    is_bias_made: bool = False
    computed_by: frozenset[fx.Node] = frozenset()

    @property
    def indices(self) -> list[tuple[Expr, ...]]:
        """Where the rule reads each table; see `Rule.tables`."""
        return [self.rule.tables[number] for number in range(len(self.tables))]


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
    lowest = -math.inf
    if value.dtype.is_floating_point:
        lowest = torch.finfo(value.dtype).min
    # The lowest finite number acts as -oo where every row attends to something: the key of its own
    # index, whatever the tables hold.
    recognized = _as_rule(value, tables, {sympy.S.NegativeInfinity, number(lowest)})
    if value.truth is not None:
        return recognized
    *_, num_queries, num_keys = (1, 1, *value.shape)
    at_itself = None if recognized is None else substitute(recognized.rule.allowed, {KEY: QUERY})
    sees_itself = len(value.shape) >= 2 and num_keys >= num_queries
    if at_itself is None or not sees_itself or canonical(at_itself) != sympy.true:
        recognized = _as_rule(value, tables, {sympy.S.NegativeInfinity})
    return recognized


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
    if value.truth is not None:
        allowed, bias = value.truth, sympy.Integer(0)
    else:
        allowed = Not(Or(*(c for c, e in value.cases if e in nothing)))
        finite = [(c, e) for c, e in value.cases if e not in nothing]
        if any(e.is_infinite for _, e in finite):
            return None
        bias = sympy.Integer(0)
        if finite:
            *others, (_, last) = finite
            bias = sympy.Piecewise(*((e, c) for c, e in others), (last, True))
        if bias.atoms(Step) and not bias.is_integer:
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
    sizes = dict(zip(INDICES, [1] * (4 - len(shape)) + list(shape), strict=True))
    found = set()
    roles: dict[fx.Node, tuple[Any, ...]] = {}
    for entry in sorted(recognized.rule.reads, key=str):
        node = recognized.tables[number_of(entry)]
        lengths = shape_of(node.meta["example_value"])
        of_pairs = is_of_pairs(entry.args)
        role = tuple(
            i if i in (BATCH, HEAD) or (of_pairs and i == QUERY) else None for i in entry.args
        )
        is_right = roles.setdefault(node, role) == role
        is_plain = all(index.is_Symbol or index.is_Integer for index in entry.args)
        is_right &= is_plain or not of_pairs
        for index, length in zip(entry.args, lengths, strict=True):
            if index in (BATCH, HEAD) or (of_pairs and index.is_Symbol):
                is_right &= sizes[index] == length
            else:
                low, high = range_of(index, sizes, tables)
                is_right &= bool(low >= 0 and high < length)
        if not is_right:
            found.add(node)
    return found
