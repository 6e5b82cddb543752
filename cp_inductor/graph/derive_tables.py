"""Find how the tables that a mask reads follow from the inputs of a model, as a function.

    documents = (diff(position_ids) != 1).cumsum(-1)          in the graph
      =>
    ("position_ids",), a function from whole position_ids to documents

The graph computes tables on DTensors. `cp_inductor.prepare` calls the function on whole, plain
tensors instead.

Assumes: a graph from Dynamo, whose placeholders know the names of the model's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from cp_inductor.graph.program import Program, WrittenCall, write_call
from cp_inductor.torch_private.sizes import Multiple, is_number, size_hint
from cp_inductor.torch_private.tracing import fake_mode_of, fakes_of_shapes

# What Dynamo calls an argument of the model: L['kwargs']['position_ids'].
NAME = re.compile(r"\['(\w+)'\]$")


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """Tables as a function of the inputs of a model.

    Attributes:
        names: of the inputs.
        like: the shape and dtype of each; sizes that Dynamo traced as symbols are multiples of
            these.
        function: makes the tables of them, on the CPU.
    """

    names: tuple[str, ...]
    like: tuple[tuple[tuple[int | Multiple, ...], torch.dtype], ...]
    function: Program


def derive_tables(
    tables: Sequence[fx.Node], shapes: Sequence[Sequence[int | torch.SymInt]]
) -> Derived | None:
    """Return how tables follow from the inputs of a model.

    Args:
        tables: nodes of one graph.
        shapes: of what plans are made from: a rank may read a part of a table.

    Returns:
        None if the tables follow from anything else, such as parameters, other ranks or random
        numbers, or from no input, or by a function that a `Program` cannot call.
    """
    needed, stack = set[fx.Node](), list(tables)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    numbers: dict[fx.Node, int] = {}
    inputs: dict[str, Tensor] = {}
    calls: list[WrittenCall] = []
    for node in tables[0].graph.nodes if tables else ():
        if node not in needed:
            continue
        if (node.op, node.target) == ("call_method", "full_tensor"):
            numbers[node] = numbers[node.all_input_nodes[0]]  # tensors are whole already
            continue
        if node.op == "placeholder":
            name = _name_of(node)
            if name is None or name in inputs:
                return None
            inputs[name] = node.meta["example_value"]
        elif (call := write_call(node, numbers)) is not None:
            calls.append(call)
        else:
            return None
        numbers[node] = len(inputs) + len(calls) - 1
    if not inputs or len(numbers) < len(needed):
        return None
    like = tuple(
        (size, value.dtype)
        for value in inputs.values()
        if (size := _multiples(value.shape)) is not None
    )
    hints = [(_hints(value.shape), value.dtype) for value in inputs.values()]
    function = Program(calls, [numbers[node] for node in tables])
    if len(like) < len(inputs) or not _makes(function, hints, [_hints(one) for one in shapes]):
        return None
    return Derived(tuple(inputs), like, function)


def _multiples(shape: Sequence[int | torch.SymInt]) -> tuple[int | Multiple, ...] | None:
    """Return a shape as numbers and multiples of symbols; None if some of it is something else."""
    sizes = [int(size) if is_number(size) else Multiple.of(size) for size in shape]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _hints(shape: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(map(size_hint, shape))


def _makes(
    function: Program,
    like: Sequence[tuple[tuple[int, ...], torch.dtype]],
    shapes: Sequence[tuple[int, ...]],
) -> bool:
    """Whether a function of whole, plain tensors can be computed, and returns these shapes."""
    inputs = fakes_of_shapes(like)
    with fake_mode_of(inputs[0]):
        try:
            found = function(*inputs)
        except Exception:  # a model may call anything, which may raise anything
            return False
    return [tuple(one.shape) for one in found] == list(shapes)


def _name_of(placeholder: fx.Node) -> str | None:
    """Return the name of the argument of the model that a tensor is."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None or not isinstance(placeholder.meta.get("example_value"), Tensor):
        return None
    name = source.name if isinstance(source.name, str) else source.name()
    found = NAME.search(name)
    return found[1] if found else None
