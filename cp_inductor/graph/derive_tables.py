"""Find how what a mask reads follows from the inputs of a model, as a function of its own.

    documents = (diff(position_ids) != 1).cumsum(-1)          in the graph
      =>
    ("position_ids",), a function from whole position_ids to documents

`cp_inductor.prepare` calls the function on plain tensors, which are whole, where the graph computes
on DTensors.

Assumes: a graph from Dynamo, whose placeholders know the names of the model's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import Tensor, fx

NAME = re.compile(r"\['(\w+)'\]$")


def derive_tables(
    tables: Sequence[fx.Node],
) -> tuple[tuple[str, ...], Callable[..., Sequence[Tensor]]] | None:
    """Return the names of the inputs that tables follow from, and what computes them.

    Args:
        tables: nodes of one graph.

    Returns:
        None if they follow from anything else, such as parameters, or from nothing.
    """
    needed, stack = set[fx.Node](), list(tables)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    graph, copies, names = fx.Graph(), dict[fx.Node, fx.Node](), list[str]()
    for node in tables[0].graph.nodes if tables else ():
        if node not in needed:
            continue
        if node.op == "placeholder":
            name = _name_of(node)
            if name is None:
                return None
            names.append(name)
        elif node.op not in ("call_function", "call_method"):
            return None
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if not names or len(copies) < len(needed):
        return None
    graph.output([copies[node] for node in tables])
    # Without what it keeps of the compile.
    for node in graph.nodes:
        node.meta.clear()
    return tuple(names), fx.GraphModule({}, graph)


def _name_of(placeholder: fx.Node) -> str | None:
    """Return the name of the argument of the model that a tensor is."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None or not isinstance(placeholder.meta.get("example_value"), Tensor):
        return None
    name = source.name if isinstance(source.name, str) else source.name()
    found = NAME.search(name)
    return found[1] if found else None
