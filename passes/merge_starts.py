"""Start a collective once where a graph starts it twice, so that the graphs of all ranks are alike.

    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]));         plan_batch([view(a)], ...)
    b = all_gather(constant_pad_nd(x, [0, n - (s - n)]));       plan_batch([view(b)], ...)
      =>
    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]));  b = a; plan_batch([view(a)], ...)

The shards of other ranks may need no padding. There nothing is computed of sizes, so AOTAutograd
finds the two gathers equal, and starts one. So it does with what is computed of them, up to the
plan of a batch, for which ranks meet as well.
"""

from __future__ import annotations

import torch
from torch import fx

from cp_inductor.graph.collectives import STARTS, is_collective
from cp_inductor.passes.nodes import computes_numbers, merge_equal

PAD = torch.ops.aten.constant_pad_nd.default


def merge_starts(graph: fx.Graph) -> None:
    """Merge equal collectives, what pads their inputs, their waits, and numbers; in place."""
    merge_equal(graph, _is_merged)


def _is_merged(node: fx.Node) -> bool:
    if is_collective(node):
        return node.target not in STARTS
    return node.target is PAD or (computes_numbers(node) and not _is_drawn(node))


def _is_drawn(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable
    )
