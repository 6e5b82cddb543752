"""Start a collective once where a graph starts it twice, so that the graphs of all ranks are alike.

    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]))
    b = all_gather(constant_pad_nd(x, [0, n - (s - n)]))
      =>
    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]));  b = a

The shards of other ranks may need no padding. There nothing is computed of sizes, so AOTAutograd
finds the two gathers equal, and starts one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, fx

from cp_inductor.graph.collectives import STARTS, WAIT, is_collective
from cp_inductor.torch_private.sizes import size_expression

PAD = torch.ops.aten.constant_pad_nd.default


def merge_starts(graph: fx.Graph) -> None:
    """Merge equal collectives, what pads their inputs, and their waits; in place."""
    merge_equal(
        graph,
        lambda node: (
            node.target in (PAD, WAIT) or (is_collective(node) and node.target not in STARTS)
        ),
    )


def merge_equal(graph: fx.Graph, is_wanted: Callable[[fx.Node], bool]) -> None:
    """Keep the first of the wanted nodes that call the same of the same, or of equal sizes."""
    first: dict[Any, fx.Node] = {}
    for node in filter(is_wanted, list(graph.nodes)):
        words = torch.utils._pytree.tree_map(_word, (node.args, node.kwargs))
        known = first.setdefault((node.target, repr(words)), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _word(argument: Any) -> Any:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    return size_expression(value) if isinstance(value, SymInt) else argument
