"""Questions about any graph: its bodies, and which line of the program a node comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch.nn.attention
from torch import fx

# Code that stands between the program and an op.
INSIDE = (Path(__file__).parents[1], Path(torch.nn.attention.__file__).parent)


def graphs_of(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """Yield the graph of a module and of every graph module below it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


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
