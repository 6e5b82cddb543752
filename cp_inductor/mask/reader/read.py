"""Find the value of every node of a trace, by the row of its op in the table `aten.OPS`.

    arange_1 = aten.arange.start_step(0, S)     d0
    eq = aten.eq.Tensor(ids_q, ids_k)           Eq(t0(d0), t0(d1)); t0 = ids, of the Dynamo graph

A node is read as a table if its op has no row, or if the row raises `Unknown`. Only nodes of the
Dynamo graph can be tables, because only their tensors exist when the graph runs. A node that is
neither has no value; then a node that is computed from it becomes the table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from cp_inductor.mask.language import SCORE, number_of
from cp_inductor.mask.reader.aten import OPS, UNREADABLE, OpCall, Row
from cp_inductor.mask.reader.lengths import numbers_of, shape_of
from cp_inductor.mask.reader.sequences import fit, runs_of
from cp_inductor.mask.reader.trace import Trace
from cp_inductor.mask.reader.values import DIMS, INTEGERS, MAX_TERMS, RunTimeTables, Unknown, Value
from cp_inductor.torch_private.arguments import bind_arguments

# Positions that number documents are assumed to lie within this. Their dtype, int64, does not say
# so, and near its ends a position plus one would wrap.
MAX_POSITION = 1 << 62


@dataclass
class Reading:
    """The values of the nodes of a trace.

    Attributes:
        values: of the nodes that have one.
        tables: that the values read.
        held: nodes of the Dynamo graph that may only be read at their own indices: element (i, j)
            of a value may read t(i, j), but not t(i + 1, j). Anything else becomes a table.
        ops: the rows by which ops are read.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    tables: RunTimeTables = field(default_factory=RunTimeTables)
    held: Collection[fx.Node] = ()
    ops: Mapping[torch._ops.OpOverload, Row] = field(default_factory=lambda: OPS)


def read(
    trace: Trace,
    held: Collection[fx.Node] = (),
    ops: Mapping[torch._ops.OpOverload, Row] = OPS,
) -> Reading:
    """Return the values of the nodes of a trace, of a mask or of what becomes of scores.

    See `Reading`. A slice of a held node becomes a table of its own.
    """
    reading = Reading(held=held, ops=ops)
    for node in trace.gm.graph.nodes:
        if node.op == "output":
            break
        origin = trace.origins.get(node)
        if origin in trace.written:
            continue
        try:
            value = _value_of(node, trace, reading)
        except (Unknown, TypeError, ValueError, IndexError, OverflowError):
            value = None
        if value is None and origin is not None:
            value = _table(node, origin, reading)
        if value is not None:
            reading.values[node] = value
    return reading


def _value_of(node: fx.Node, trace: Trace, reading: Reading) -> Any:
    op: Any = node.target
    if node is trace.score:
        example = node.meta["val"]
        return Value.of(example.shape, example.dtype, SCORE)
    if node.op == "get_attr":
        return fit(getattr(trace.gm, op))
    if op is getitem:
        source: Any = node.args[0]
        return reading.values[source][node.args[1]] if source in reading.values else None
    if op not in reading.ops:
        return None
    result = node.meta["val"]
    arguments = {
        name: fx.map_arg(argument, lambda source: reading.values.get(source, UNREADABLE))
        for name, argument in bind_arguments(op, node.args, node.kwargs).items()
    }
    value = reading.ops[op](OpCall(op, arguments, result, reading.tables))
    if isinstance(result, Tensor):
        assert value.shape == tuple(result.shape) and value.dtype == result.dtype, node
        if value.num_steps() > MAX_TERMS:
            # Hundreds of documents of constant lengths: every op would process all steps again.
            return None
        return value if _is_held_to(value, reading) else None
    return value if all(_is_held_to(part, reading) for part in value) else None


def _is_held_to(value: Value, reading: Reading) -> bool:
    """Whether a value reads the held tables, if it reads any, at their own indices."""
    for entry in value.tables() if reading.held else ():
        node = reading.tables.nodes[number_of(entry)]
        if node in reading.held:
            shape = node.meta["example_value"].shape
            for index, size in zip(entry.args, numbers_of(shape), strict=True):
                if index not in DIMS[: len(value.shape)] and size != 1:
                    return False
                if index in DIMS and value.shape[DIMS.index(index)] != size:
                    return False
    return True


def _table(node: fx.Node, origin: fx.Node, reading: Reading) -> Value | None:
    example, tables = origin.meta["example_value"], reading.tables
    if example.is_sparse:
        return None
    value = tables.add(origin, shape_of(example), example.dtype)
    if value is not None and node.target is torch.ops.aten.cumsum.default:
        _note_runs(node, value, reading)
    return value


def _note_runs(node: fx.Node, counts: Value, reading: Reading) -> None:
    """Record that the newest table counts where another one does not go up by one, if it does."""
    bound = bind_arguments(torch.ops.aten.cumsum.default, node.args, node.kwargs)
    dim, tables = bound["dim"] % len(counts.shape), reading.tables
    runs = runs_of(reading.values.get(bound["self"]), dim)
    # Two counts must be equal only within a run. Counts that wrap or are rounded may repeat.
    if runs is None or counts.dtype not in INTEGERS:
        return
    if counts.shape[dim] <= torch.iinfo(counts.dtype).max:
        tables.runs_of[len(tables.nodes) - 1] = runs
        tables.ranges[number_of(runs)] = (-MAX_POSITION, MAX_POSITION)


def known_nodes(trace: Trace) -> frozenset[fx.Node]:
    """Return the nodes that are known to only compute."""
    known = {getitem, *OPS}
    steps_of = trace.steps.items()
    return frozenset(n for n, steps in steps_of if known.issuperset(step.target for step in steps))
