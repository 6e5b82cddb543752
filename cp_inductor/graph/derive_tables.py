"""Find how the tables that a mask reads follow from the inputs of a model, as a function.

    documents = (diff(position_ids) != 1).cumsum(-1)          in the graph
      =>
    ("position_ids",), a function from whole position_ids to documents

The graph computes tables on DTensors. `cp_inductor.prepared` calls the function on whole, plain
tensors instead.

Assumes: a graph from Dynamo, whose placeholders know the names of the model's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import Symbol
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.modes import OnlyComputes
from cp_inductor.torch_private.sizes import Multiple, is_number, size_hint, solve
from cp_inductor.torch_private.tracing import fake_mode_of, fakes_of_shapes

# What Dynamo calls an argument of the model: L['kwargs']['position_ids'].
NAME = re.compile(r"\['(\w+)'\]$")


@dataclass(frozen=True, slots=True)
class Derived:
    """Tables as a function of the inputs of a model."""

    names: tuple[str, ...]  # of the inputs
    # The shape and dtype of each; sizes that Dynamo traced as symbols are multiples of these.
    like: tuple[tuple[tuple[int | Multiple, ...], torch.dtype], ...]
    function: fx.Graph = field(compare=False)  # makes the tables of them

    def __call__(self, batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Compute on the CPU, without a gradient, on copies: the function may write to them."""
        inputs = [batch[name].detach().to("cpu", copy=True) for name in self.names]
        with torch.no_grad(), OnlyComputes():
            tables: Sequence[Tensor] = fx.Interpreter(nn.Module(), graph=self.function).run(*inputs)
        return tables

    def solve(self, batch: Mapping[str, Any]) -> dict[Symbol, int] | None:
        """Return what the symbols of sizes are in a batch; None if it has other inputs or sizes."""
        sizes: list[int | Multiple] = []
        numbers: list[int] = []
        for name, (shape, dtype) in zip(self.names, self.like, strict=True):
            value = batch.get(name)
            if type(value) is not Tensor or (value.ndim, value.dtype) != (len(shape), dtype):
                return None
            sizes += shape
            numbers += value.shape
        return solve(sizes, numbers)


def derive_tables(
    tables: Sequence[fx.Node], shapes: Sequence[Sequence[int | torch.SymInt]]
) -> Derived | None:
    """Return how tables follow from the inputs of a model.

    Args:
        tables: nodes of one graph.
        shapes: of what plans are made from: a rank may read a part of a table.

    Returns:
        None if the tables follow from anything else, such as parameters, other ranks or random
        numbers, from no input, or by what cannot be computed of whole, plain tensors.
    """
    needed, stack = set[fx.Node](), list(tables)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    inputs: dict[str, Tensor] = {}
    function, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in tables[0].graph.nodes if tables else ():
        if node not in needed:
            continue
        if (node.op, node.target) == ("call_method", "full_tensor"):
            copies[node] = copies[node.all_input_nodes[0]]  # tensors are whole already
            continue
        if node.op == "placeholder":
            name = _name_of(node)
            if name is None or name in inputs:
                return None
            inputs[name] = node.meta["example_value"]
        elif node.op not in ("call_function", "call_method"):
            return None
        copies[node] = function.node_copy(node, copies.__getitem__)
        copies[node].meta = {}  # which holds the fakes of the compile
    if not inputs or len(copies) < len(needed):
        return None
    function.output([copies[node] for node in tables])
    like: list[Any] = []
    for value in inputs.values():
        sizes = [int(size) if is_number(size) else Multiple.of(size) for size in value.shape]
        if None in sizes:
            return None
        like.append((tuple(sizes), value.dtype))
    derived = Derived(tuple(inputs), tuple(like), function)
    fakes = fakes_of_shapes([([*map(size_hint, v.shape)], v.dtype) for v in inputs.values()])
    with fake_mode_of(fakes[0]):
        try:
            made = derived(dict(zip(inputs, fakes, strict=True)))
        except Exception:  # a model may call anything, which may raise anything
            return None
    is_plain = not any(isinstance(made_table, DTensor) for made_table in made)
    is_right = [tuple(table.shape) for table in made] == [tuple(map(size_hint, s)) for s in shapes]
    return derived if is_plain and is_right else None


def _name_of(placeholder: fx.Node) -> str | None:
    """Return the name of the argument of the model that a tensor is."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None or not isinstance(placeholder.meta.get("example_value"), Tensor):
        return None
    name = source.name if isinstance(source.name, str) else source.name()
    match = NAME.search(name)
    return match[1] if match else None
