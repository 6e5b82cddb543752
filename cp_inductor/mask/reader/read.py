"""The value of every node of a trace, each by its row of the table of ops.

    arange_1 = aten.arange.start_step(0, S)     d0
    eq = aten.eq.Tensor(ids_q, ids_k)           Eq(t0(d0), t0(d1)); t0 = ids, of the Dynamo graph

What has no row, or of which its row knows nothing, is a table, if it is a node of the Dynamo graph
whose tensor can be had when the graph runs; and otherwise what is computed of it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from cp_inductor.mask.language import number_of
from cp_inductor.mask.reader.aten import OPS, UNREADABLE, Call
from cp_inductor.mask.reader.sequences import fit, runs_of
from cp_inductor.mask.reader.trace import Trace
from cp_inductor.mask.reader.values import DIMS, INTEGERS, MAX_TERMS, Tables, Unknown, Value
from cp_inductor.torch_private.arguments import bind_arguments

# Positions of tokens lie within this. Nothing says so of a tensor of int64, but that it stops to go
# up by one is counted: next to its ends, what goes up by one would wrap.
MAX_POSITION = 1 << 62


@dataclass
class Reading:
    """What the nodes of a trace are.

    Attributes:
        values: of the nodes of the trace that have one.
        tables: that these read.
        held: nodes of the Dynamo graph that are read at their own indices, or not at all.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    tables: Tables = field(default_factory=Tables)
    held: Collection[fx.Node] = ()


def read(trace: Trace, held: Collection[fx.Node] = ()) -> Reading:
    """Return what the nodes of a trace are.

    Args:
        held: see `Reading`; a slice of one is a table of its own.
    """
    reading = Reading(held=held)
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
    if node.op == "get_attr":
        return fit(getattr(trace.gm, op))
    if op is getitem:
        source: Any = node.args[0]
        return reading.values[source][node.args[1]] if source in reading.values else None
    if op not in OPS:
        return None
    result = node.meta["val"]
    arguments = {
        name: fx.map_arg(argument, lambda source: reading.values.get(source, UNREADABLE))
        for name, argument in bind_arguments(op, node.args, node.kwargs).items()
    }
    value = OPS[op](Call(op, arguments, result, reading.tables))
    if isinstance(result, Tensor):
        assert value.shape == tuple(result.shape) and value.dtype == result.dtype, node
        if value.num_steps() > MAX_TERMS:
            # Of hundreds of constant documents: every op would go through all of them again.
            return None
        return value if _is_held_to(value, reading) else None
    return value if all(_is_held_to(part, reading) for part in value) else None


def _is_held_to(value: Value, reading: Reading) -> bool:
    """Whether tables that are to be read at their own indices are, all of them."""
    for entry in value.tables() if reading.held else ():
        node = reading.tables.nodes[number_of(entry)]
        if node in reading.held:
            shape = node.meta["example_value"].shape
            for index, size in zip(entry.args, map(int, shape), strict=True):
                if index not in DIMS[: len(value.shape)] and size != 1:
                    return False
                if index in DIMS and value.shape[DIMS.index(index)] != size:
                    return False
    return True


def _table(node: fx.Node, origin: fx.Node, reading: Reading) -> Value | None:
    example, tables = origin.meta["example_value"], reading.tables
    if example.is_sparse:
        return None
    value = tables.add(origin, tuple(map(int, example.shape)), example.dtype)
    if value is not None and node.target is torch.ops.aten.cumsum.default:
        _note_runs(node, value, reading)
    return value


def _note_runs(node: fx.Node, counts: Value, reading: Reading) -> None:
    """Note that a table, the last one, counts where another does not go up by one."""
    bound = bind_arguments(torch.ops.aten.cumsum.default, node.args, node.kwargs)
    dim = bound["dim"] % len(counts.shape)
    runs = runs_of(reading.values.get(bound["self"]), dim)
    # Counts that wrap, or are rounded, are equal again.
    if runs is not None and counts.dtype in INTEGERS:
        tables = reading.tables
        if counts.shape[dim] <= torch.iinfo(counts.dtype).max:
            tables.runs_of[len(tables.nodes) - 1] = runs
            tables.ranges[number_of(runs)] = (-MAX_POSITION, MAX_POSITION)
