"""Find the tensors that a graph writes to in place.

    mask[:, 0] = False           the storage of mask, and so of all its views
    checkpoint(body, ids)        with ids.add_(1) in the body: the storage of ids

To find what a node writes to, the node is run on fake tensors, and the schemas of the aten ops that
it calls say which arguments are written. Only nodes that take a tensor of the storage in question
are run.

Assumes: a graph from Dynamo, whose nodes carry `example_value`, also those in bodies.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate, map_arg

from cp_inductor.graph.nodes import call_target, modules_of
from cp_inductor.graph.subgraphs import bodies_of
from cp_inductor.torch_private.dtensor import flex_attention_op, local_of
from cp_inductor.torch_private.sizes import size_hint
from cp_inductor.torch_private.tracing import (
    fakes_of_shapes,
    memory_of,
    tensors_in,
    without_vmap,
    writes_of,
)

# add_, __iadd__, __setitem__
_IN_PLACE = re.compile(r".*[^_]_|__i(?!nvert__).*__|__setitem__")
# What Dynamo calls for `x += y`. Others of their module, such as `and_`, write nothing.
_OPERATORS = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor"
_ASSIGNING = {operator.setitem, *(getattr(operator, f"i{name}") for name in _OPERATORS.split())}


def is_in_place(node: fx.Node) -> bool:
    """Whether a call writes to its first tensor, by what it calls, or by its name."""
    if getattr(node.target, "__module__", "") == operator.add.__module__:
        return node.target in _ASSIGNING
    name = getattr(node.target, "__name__", str(node.target))
    return _IN_PLACE.fullmatch(name) is not None or "out" in node.kwargs


class Writes:
    """The writes of a graph and of the bodies that it calls (checkpointed regions and the like)."""

    def __init__(self, graph: fx.Graph) -> None:
        self.users: dict[UntypedStorage, list[fx.Node]] = {}
        for node in _calls(graph):
            for storage in {_storage_of(tensor) for tensor in _inputs_of(node)}:
                self.users.setdefault(storage, []).append(node)
        self.known: dict[fx.Node, set[UntypedStorage]] = {}

    def has(self, node: fx.Node, besides: Collection[fx.Node] = ()) -> bool:
        """Whether any node but these writes to the tensors of a node."""
        for storage in storages_of(node):
            for user in self.users.get(storage, ()):
                if user in besides:
                    continue
                if user not in self.known:
                    self.known[user] = _written_by(user)
                if storage in self.known[user]:
                    return True
        return False


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the calls in a graph and in all its bodies, but not those of the bodies.

    The functions of flex_attention are left out: they write to no tensor that they capture.
    """
    owner = graph.owning_module
    modules = list(modules_of(owner)) if owner else []
    of_flex = {
        body
        for module in modules
        for node in module.graph.find_nodes(op="call_function", target=flex_attention_op())
        for body in bodies_of(node, module)
    }
    parts = {graph: owner, **{m.graph: m for m in modules if m not in of_flex}}
    for part, module in parts.items():
        for node in part.nodes:
            is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
            if is_higher_order and module is not None and bodies_of(node, module):
                continue
            if node.op in ("call_function", "call_method", "call_module"):
                yield node


def _written_by(node: fx.Node) -> set[UntypedStorage]:
    """Return the storages that a node writes to; if it cannot be run, all that it is given."""
    if node.op == "call_method" and not is_in_place(node):
        return set()
    inputs = _inputs_of(node)
    if any(without_vmap(tensor) is not tensor for tensor in inputs):
        # A node within torch.vmap cannot be run without it. What it writes to comes first.
        return {_storage_of(inputs[0])} if is_in_place(node) else set()
    try:
        if any(isinstance(tensor, DTensor) for tensor in inputs):
            return {_storage_of(tensor) for _, tensor in writes_of(partial(_run, node), inputs[0])}
        # What is written to does not depend on how long it is.
        shapes = [(tuple(map(size_hint, tensor.shape)), tensor.dtype) for tensor in inputs]
        fakes = dict(zip(map(id, inputs), fakes_of_shapes(shapes), strict=True))
        written = writes_of(partial(_run, node, fakes), fakes[id(inputs[0])])
        storages = {_storage_of(fakes[id(tensor)]): _storage_of(tensor) for tensor in inputs}
        written_storages = (_storage_of(tensor) for _, tensor in written)
        return {storages[s] for s in written_storages if s in storages}
    except Exception:  # a model may call anything, which may raise anything
        return {_storage_of(tensor) for tensor in inputs}


def _run(node: fx.Node, fakes: Mapping[int, Tensor] | None = None) -> None:
    """Call what a node calls: on its own tensors, or on others by their `id`."""

    def replaced(value: Any) -> Any:
        if fakes is None:
            return value
        if isinstance(value, torch.SymInt):
            return size_hint(value)
        return fakes[id(value)] if isinstance(value, Tensor) else value

    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["example_value"])
    call_target(node, *map_aggregate((args, kwargs), replaced))


def _inputs_of(node: fx.Node) -> list[Tensor]:
    examples = [source.meta.get("example_value") for source in node.all_input_nodes]
    return tensors_in(examples)


def storages_of(node: fx.Node) -> set[UntypedStorage]:
    """Return the storages of a node's tensors."""
    return {_storage_of(tensor) for tensor in tensors_in(node.meta.get("example_value"))}


def _storage_of(tensor: Tensor) -> UntypedStorage:
    return memory_of(local_of(tensor) if isinstance(tensor, DTensor) else tensor)
