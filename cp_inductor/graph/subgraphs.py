"""Values across the borders of subgraphs, such as checkpointed regions.

    mask = ...                                        what the body calls its second input
    out = tag_activation_checkpoint(body, x, mask)    is `mask`, computed outside

Assumes: a graph from Dynamo. Bodies that are called by several nodes, or whose inputs are not the
operands one by one, are left alone: to them everything from outside is an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, cast

import torch
from torch import fx

# The graph of a body => the node that calls it.
Calls = Mapping[fx.Graph, fx.Node]


def calls_of(gm: fx.GraphModule) -> Calls:
    """Return the calls of all bodies below a graph module."""
    calls: dict[fx.Graph, list[fx.Node]] = {}
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            body = _body_of(node, module)
            if body is not None:
                calls.setdefault(body.graph, []).append(node)
    return {graph: nodes[0] for graph, nodes in calls.items() if len(nodes) == 1}


def _body_of(node: fx.Node, module: fx.GraphModule) -> fx.GraphModule | None:
    is_call = node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
    if not is_call or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    attribute, *operands = cast("tuple[Any, ...]", node.args)
    if attribute.op != "get_attr" or any(
        isinstance(operand, fx.Node) and operand.op == "get_attr" for operand in operands
    ):
        return None
    body = reduce(getattr, str(attribute.target).split("."), module)
    if not isinstance(body, fx.GraphModule):
        return None
    is_one_by_one = len(body.graph.find_nodes(op="placeholder")) == len(operands)
    return body if is_one_by_one else None


def bodies_of(node: fx.Node, module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the bodies that a node of a module calls."""
    bodies = [
        reduce(getattr, str(source.target).split("."), module)
        for source in node.all_input_nodes
        if source.op == "get_attr"
    ]
    return [body for body in bodies if isinstance(body, fx.GraphModule)]


def method_of(node: fx.Node) -> object:
    """Return the function that a node calls by the name of a method; None if it calls none."""
    if node.op != "call_method" or not isinstance(node.args[0], fx.Node):
        return None
    return getattr(type(node.args[0].meta.get("example_value")), str(node.target), None)


def source_of(node: fx.Node, calls: Calls) -> fx.Node:
    """Return what a node is outside of all bodies that it is merely an input of."""
    while node.op == "placeholder" and node.graph in calls:
        inputs = node.graph.find_nodes(op="placeholder")
        operand = calls[node.graph].args[1 + inputs.index(node)]
        if not isinstance(operand, fx.Node):
            return node
        node = operand
    return node


def bring_in(node: fx.Node, graph: fx.Graph, calls: Calls) -> fx.Node:
    """Return a node of a graph that is a node of a graph around it; it becomes an input."""
    if node.graph is graph:
        return node
    call = calls[graph]
    outside = bring_in(node, call.graph, calls)
    inputs = graph.find_nodes(op="placeholder")
    for place, operand in enumerate(call.args[1:]):
        if operand is outside:
            return inputs[place]
    call.args = (*call.args, outside)
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        placeholder = graph.placeholder(f"{node.name}_outside")
    placeholder.meta = {"example_value": outside.meta["example_value"]}
    return placeholder


def drop_unused_inputs(graph: fx.Graph, calls: Calls) -> list[fx.Node]:
    """Drop the inputs of a body that it does not read; return what they were outside."""
    if graph not in calls:
        return []
    call, dropped = calls[graph], []
    operands = list(call.args[1:])
    for place, placeholder in reversed(list(enumerate(graph.find_nodes(op="placeholder")))):
        if not placeholder.users:
            graph.erase_node(placeholder)
            dropped.append(operands.pop(place))
    call.args = (call.args[0], *operands)
    return [node for node in dropped if isinstance(node, fx.Node)]
