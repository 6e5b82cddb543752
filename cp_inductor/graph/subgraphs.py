"""Follow values into and out of bodies: subgraphs that a node calls.

    mask = ...
    out = tag_activation_checkpoint(body, x, mask)    the body's second input is `mask`

Assumes: a graph from Dynamo. A body is followed only if one node calls it, and if its inputs are
the operands of that node one by one. The inputs of other bodies stay inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, cast

import torch
from torch import fx

from cp_inductor.graph.nodes import modules_of

# The graph of a body => the one node that calls it.
Calls = Mapping[fx.Graph, fx.Node]


def calls_of(gm: fx.GraphModule) -> Calls:
    """Return the calls of all bodies within a graph module, at any depth."""
    calls: dict[fx.Graph, list[fx.Node]] = {}
    for module in modules_of(gm):
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
    body = _value_of(attribute, module)
    if not isinstance(body, fx.GraphModule):
        return None
    is_one_by_one = len(body.graph.find_nodes(op="placeholder")) == len(operands)
    return body if is_one_by_one else None


def bodies_of(node: fx.Node, module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the bodies that a node of a module takes as operands."""
    attributes = [source for source in node.all_input_nodes if source.op == "get_attr"]
    values = (_value_of(attribute, module) for attribute in attributes)
    return [value for value in values if isinstance(value, fx.GraphModule)]


def _value_of(attribute: fx.Node, module: fx.GraphModule | None) -> Any:
    return reduce(getattr, str(attribute.target).split("."), module)


def body_at(attribute: fx.Node) -> fx.GraphModule:
    """Return the function that a `get_attr` node stands for."""
    body = _value_of(attribute, attribute.graph.owning_module)
    assert isinstance(body, fx.GraphModule)
    return body


def copy_graphs(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a copy of a module and of its bodies, sharing all else, and the copy of each node."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    copy = fx.GraphModule(gm, graph)
    for name, child in list(copy.named_children()):
        if isinstance(child, fx.GraphModule):
            body, of_body = copy_graphs(child)
            setattr(copy, name, body)
            copies.update(of_body)
    return copy, copies


def method_of(node: fx.Node) -> object:
    """Return the function behind a `call_method` node, such as Tensor.triu; None for others."""
    if node.op != "call_method" or not isinstance(node.args[0], fx.Node):
        return None
    return getattr(type(node.args[0].meta.get("example_value")), str(node.target), None)


def source_of(node: fx.Node, calls: Calls) -> fx.Node:
    """Return the node that an input of a body stands for, outside all bodies; others unchanged."""
    while node.op == "placeholder" and node.graph in calls:
        inputs = node.graph.find_nodes(op="placeholder")
        operand = calls[node.graph].args[1 + inputs.index(node)]
        if not isinstance(operand, fx.Node):
            return node
        node = operand
    return node


def bring_in(node: fx.Node, graph: fx.Graph, calls: Calls) -> fx.Node:
    """Make a node of an enclosing graph available in a body, as an input if it is not one yet.

    Args:
        node: of the body's graph, or of any graph around it.
        graph: of the body.
        calls: of all bodies between the two.

    Returns:
        The node of `graph` that stands for `node`.
    """
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
    """Erase the inputs that a body does not read; return the nodes outside that were passed."""
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
