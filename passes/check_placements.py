"""Warn if an op turns the sequence of DTensors from Shard to Replicate before an attention.

    x (B, S, D) [Shard(1)]
    y = x.roll(1, 1)                       y: [Replicate]: every rank has all of it
    out = attention(split(linear(y)))      every rank computes it for the whole sequence

The results are right, but every rank computes all of them, so the mesh brings nothing, and DTensor
does not say so. This pass changes nothing.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.errors import SequenceWarning
from cp_inductor.graph.nodes import name_of
from cp_inductor.graph.subgraphs import Calls, calls_of, method_of, source_of
from cp_inductor.passes.attentions import CAPTURED, calls_to

# Who writes these says so himself.
ON_PURPOSE = frozenset(
    {DTensor.redistribute, DTensor.full_tensor, DTensor.from_local, DTensor.to_local}
)


def check_placements(gm: fx.GraphModule) -> None:
    """Warn of every attention that an earlier op keeps from being sharded."""
    calls = calls_of(gm)
    for node in calls_to(gm, CAPTURED):
        query: Any = node.args[0] if node.args else node.kwargs["query"]
        for axis, placement in enumerate(_placements(query)):
            op = _first_loss(query, axis, calls) if isinstance(placement, Replicate) else None
            if op is not None:
                _warn(node, op, axis)


def _placements(node: object) -> tuple[object, ...]:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.placements) if isinstance(value, DTensor) else ()


def _first_loss(query: fx.Node, axis: int, calls: Calls) -> fx.Node | None:
    """Return the op ahead of a query that gave up its sharding on an axis; None if none did."""
    stack, seen = [query], set[fx.Node]()
    while stack:
        node = source_of(stack.pop(), calls)
        if node in seen:
            continue
        seen.add(node)
        stack += node.all_input_nodes
        if node.target in ON_PURPOSE or method_of(node) in ON_PURPOSE:
            continue
        placements = _placements(node)
        if len(placements) <= axis or not isinstance(placements[axis], Replicate):
            continue
        for source in node.all_input_nodes:
            given = _placements(source)
            is_weight = isinstance(source.meta.get("example_value"), nn.Parameter)
            if len(given) > axis and isinstance(given[axis], Shard) and not is_weight:
                return node
    return None


def _warn(attention: fx.Node, op: fx.Node, axis: int) -> None:
    given = next(placements for source in op.all_input_nodes if (placements := _placements(source)))
    warnings.warn(
        f"{name_of(attention)}: every rank computes attention over the"
        f" whole sequence, because {name_of(op)} turned {given} into"
        f" {_placements(op)}. Call {op.name} before the sequence is sharded, or redistribute"
        " its result",
        SequenceWarning,
        stacklevel=2,
    )
