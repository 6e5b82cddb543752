"""What the program of a graph computes over DTensors, for the other ranks to compare.

    dropout(x, 0.1, True) * 2   =>   calls of dropout: 1 as 5be1, calls of mul: 1 as 03ac

Over DTensors all ranks run one program. A rank that runs
another one, such as a model in eval() among models in train(), or one whose weights are frozen,
fits the attentions of the others, and computes other numbers, or waits for a backward in vain.

The order of calls is left out: it may come from a set, whose order differs by process. So are whole
numbers, and what is computed of sizes: a rank that compiles alone may have sizes as symbols. A
graph that takes DTensors apart, or makes them of a rank's own tensors, is left out as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from cp_inductor.graph.nodes import graphs_of
from cp_inductor.trust.claims import digest

# What they return, or take, is each rank's own.
OF_A_RANK = ("to_local", "from_local")


def describe_program(gm: fx.GraphModule) -> dict[str, str]:
    """Return fields that must be equal on all ranks; none if ranks may run other programs.

    Args:
        gm: from Dynamo, before any pass.
    """
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    sharded = [value for value in inputs if isinstance(value, DTensor)]
    calls = [
        node
        for graph in graphs_of(gm)
        for node in graph.nodes
        if node.op in ("call_function", "call_method") and _has_tensor(node)
    ]
    names = [_name(node) for node in calls]
    if not sharded or any(own in name for name in names for own in OF_A_RANK):
        return {}
    lines = defaultdict[str, list[str]](list)
    for name, node in zip(names, calls, strict=True):
        lines[name].append(_text((node.args, node.kwargs)))
    needed = [f"{one.ndim} {one.dtype} {one.requires_grad}" for one in sharded]
    fields = {
        "inputs that require gradients": str(sum(value.requires_grad for value in sharded)),
        **{
            f"calls of {name}": f"{len(lines[name])} as {_digest(lines[name])}"
            for name in sorted(lines)
        },
    }
    # A field that a rank leaves out is not compared, but this one is.
    return fields | {"program": _digest([*needed, *fields])}


def _digest(lines: list[str]) -> str:
    return digest("\n".join(sorted(lines)).encode())


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return _has_tensor(value.meta.get("example_value"))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


def _text(value: Any) -> str:
    """Write the flags and fractions that a call is given; of the rest only that it is there."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key}={_text(one)}' for key, one in value.items())})"
    if isinstance(value, str):
        return value.partition(":")[0]  # "cuda:1" is the device of a rank
    if isinstance(value, (bool, float, torch.dtype)):
        return repr(value)
    if value is None:
        return "None"
    return "tensor" if _has_tensor(value) else "."
