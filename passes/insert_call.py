"""Insert calls into a Dynamo graph, each with its value on fake tensors; and graphs into graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.graph.nodes import call_target
from cp_inductor.graph.subgraphs import body_at
from cp_inductor.torch_private.tracing import fake_mode_of, tensors_in, unbacked_ignored

# What the nodes of one place in the user's model share.
OF_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack")


def insert_call(
    like: fx.Node, target: str | Callable[..., Any], *args: Any, **kwargs: Any
) -> fx.Node:
    """Insert a call of a function, or of a method by its name, where the graph of `like` inserts.

    `like` reads or returns a tensor; its place in the model is that of the call. Return the node.
    """
    values: Any = fx.map_arg(args, _value)
    kind = "call_method" if isinstance(target, str) else "call_function"
    node = like.graph.create_node(kind, target, args, kwargs)
    node.meta = {key: like.meta[key] for key in OF_PLACE if key in like.meta}
    near = [other.meta.get("example_value") for other in (like, *like.all_input_nodes)]
    local = held_by_rank(tensors_in(near)[0])
    # How many numbers a plan has is not known; the symbol of this value is nobody's.
    with torch.no_grad(), fake_mode_of(local), unbacked_ignored(local):
        node.meta["example_value"] = call_target(node, values, kwargs)
    return node


def insert_graph(
    traced: fx.GraphModule, inputs: Sequence[Any], before: fx.Node
) -> tuple[Any, dict[fx.Node, fx.Node]]:
    """Copy a graph, with inputs in the place of its own; return its output, and what it copied."""
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with before.graph.inserting_before(before):
        outputs = before.graph.graph_copy(traced.graph, copies)
    return outputs, {old: new for old, new in copies.items() if old.op != "placeholder"}


def free_name(module: nn.Module, prefix: str) -> str:
    """Return the first of `prefix_0`, `prefix_1`, ... that a module has no attribute of."""
    names = (f"{prefix}_{number}" for number in count())
    return next(name for name in names if not hasattr(module, name))


def _value(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return body_at(node)
    value = node.meta["example_value"]
    # DTensor warns where it wraps a leaf without autograd.
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return value.detach() if is_plain and value.is_leaf else value
