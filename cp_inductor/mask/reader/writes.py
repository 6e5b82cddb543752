"""Which tensors a graph writes to in place.

    mask[:, 0] = False           the storage of mask, and so of all its views
    checkpoint(body, ids)        with ids.add_(1) in the body: the storage of ids

A write is what the schema of an op calls one: a node is run on fake tensors, and the ops that it
comes down to are asked. Only nodes that are given one of the storages in question are run.

Assumes: a graph from Dynamo, whose nodes, those of the bodies below it too, carry `example_value`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate, map_arg

from cp_inductor.graph.subgraphs import bodies_of
from cp_inductor.torch_private.tracing import fakes_of_shapes, tensors_written


def is_writing_op(node: fx.Node) -> bool:
    """Whether a node calls an op that writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class Writes:
    """What is written to in a graph, and in the bodies below it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.users: dict[int, list[fx.Node]] = {}
        for node, module in _calls(graph):
            if _is_of_bodies(node, module):
                continue
            for storage in {_storage_of(tensor) for tensor in _inputs_of(node)}:
                self.users.setdefault(storage, []).append(node)
        self.known: dict[fx.Node, set[int]] = {}

    def has(self, node: fx.Node, *, besides: Collection[fx.Node]) -> bool:
        """Whether the tensors of a node are written to, by others than some that are known."""
        storages = {_storage_of(tensor) for tensor in _tensors_in(node.meta["example_value"])}
        return any(
            storage in self._written_by(user)
            for storage in storages
            for user in self.users.get(storage, ())
            if user not in besides
        )

    def _written_by(self, node: fx.Node) -> set[int]:
        if node not in self.known:
            self.known[node] = _written_by(node)
        return self.known[node]


def _calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.GraphModule | None]]:
    """Yield the calls of a graph and of all bodies below it, and the modules they are of."""
    owner = graph.owning_module
    modules = [m for m in owner.modules() if isinstance(m, fx.GraphModule)] if owner else []
    for part, module in [(graph, owner), *((m.graph, m) for m in modules if m.graph is not graph)]:
        for node in part.nodes:
            if node.op in ("call_function", "call_method", "call_module"):
                yield node, module


def _is_of_bodies(node: fx.Node, module: fx.GraphModule | None) -> bool:
    is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_higher_order and module is not None and bool(bodies_of(node, module))


def _written_by(node: fx.Node) -> set[int]:
    """Return the storages that a node writes to; if that cannot be known, those it is given."""
    inputs = _inputs_of(node)
    try:
        if any(isinstance(tensor, DTensor) for tensor in inputs):
            written = tensors_written(partial(_run, node, lambda tensor: tensor), inputs[0])
            return {_storage_of(tensor) for tensor in written}
        shapes = [(tuple(map(int, tensor.shape)), tensor.dtype) for tensor in inputs]
        fakes = dict(zip(map(id, inputs), fakes_of_shapes(shapes), strict=True))
        written = tensors_written(partial(_run, node, lambda t: fakes[id(t)]), fakes[id(inputs[0])])
        storages = {_storage_of(fakes[id(tensor)]): _storage_of(tensor) for tensor in inputs}
        return {storages[s] for s in map(_storage_of, written) if s in storages}
    except Exception:  # of whatever a model calls
        return {_storage_of(tensor) for tensor in inputs}


def _run(node: fx.Node, of: Callable[[Tensor], Tensor]) -> None:
    """Call what a node calls, on other tensors."""

    def value_of(value: Any) -> Any:
        return of(value) if isinstance(value, Tensor) else value

    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["example_value"])
    args, kwargs = map_aggregate((args, kwargs), value_of)
    if node.op == "call_method":
        getattr(args[0], str(node.target))(*args[1:], **kwargs)
    elif callable(node.target):
        node.target(*args, **kwargs)
    else:
        raise TypeError(node.op)


def _inputs_of(node: fx.Node) -> list[Tensor]:
    examples = [source.meta.get("example_value") for source in node.all_input_nodes]
    return [tensor for example in examples for tensor in _tensors_in(example)]


def _tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_aggregate(value, lambda part: found.append(part) if isinstance(part, Tensor) else None)
    return found


def _storage_of(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)
