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

from operator import getitem

import torch
from torch import fx

from cp_inductor.graph.collectives import STARTS, is_collective
from cp_inductor.ops.plan_batch import PLAN_BATCH
from cp_inductor.passes.nodes import merge_equal

PAD = torch.ops.aten.constant_pad_nd.default


def merge_starts(graph: fx.Graph) -> None:
    """Merge equal collectives, what pads their inputs, their waits, and plans; in place."""
    of_plans = _of_plans(graph)

    def is_merged(node: fx.Node) -> bool:
        if is_collective(node):
            return node.target not in STARTS
        return node.target is PAD or (node in of_plans and _is_pure(node))

    merge_equal(graph, is_merged)


def _of_plans(graph: fx.Graph) -> set[fx.Node]:
    """Return plans of batches, what they are computed of, and what is taken of them."""
    plans = graph.find_nodes(op="call_function", target=PLAN_BATCH)
    found, left = {user for plan in plans for user in plan.users}, [*plans]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _is_pure(node: fx.Node) -> bool:
    """Whether a node computes the same again of the same."""
    target = node.target
    return target is getitem or (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )
