"""Walk and change any graph: its bodies, what a node calls, which line it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.nn.attention
from torch import fx

# Code that stands between the program and an op.
INSIDE = (Path(__file__).parents[1], Path(torch.nn.attention.__file__).parent)


def modules_of(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a module and every graph module below it."""
    yield from (module for module in gm.modules() if isinstance(module, fx.GraphModule))


def graphs_of(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """Yield the graph of a module and of every graph module below it."""
    yield from (module.graph for module in modules_of(gm))


def nodes_of(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a module and of every graph module below it."""
    yield from (node for graph in graphs_of(gm) for node in graph.nodes)


def recompile_all(gm: fx.GraphModule) -> None:
    """Have a module and every graph module below it run the graphs that they have now."""
    for module in modules_of(gm):
        module.recompile()


def call_target(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the function or the method that a node calls, on values."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target), node.op
    return node.target(*args, **kwargs)


def name_of(node: fx.Node) -> str:
    """Return `sdpa (model.py:41)`."""
    return f"{node.name} ({source_line(node)})"


def source_line(node: fx.Node) -> str:
    """Return `model.py:41`, from the innermost stack frame outside this package and torch's."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not any(map(Path(frame[0]).is_relative_to, INSIDE))]
    if not frames:
        return "source unknown"
    path, line = frames[-1]
    return f"{Path(path).name}:{line}"


def place_of(node: fx.Node) -> str:
    """Return `model.py:41, layers.3.attn`: the line, and the module whose forward it is in.

    Models of transformers call every attention in one line, which says nothing of the layer.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    # As in L['self'].layers.3.attn, and L['self'] is the model itself.
    module = re.sub(r"^[A-Z]\[[^\]]*\]\.?", "", stack[-1][0]) if stack else ""
    return f"{source_line(node)}, {module}" if module else source_line(node)
