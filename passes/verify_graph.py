"""Check a lowered graph. A failure is our own bug, so these are assertions, not refusals.

    every start is waited for exactly once, and nothing else reads it      else: torn data
    every rank has as many starts as the plan                              else: a hang
    no op of the pair is left over                                         else: nothing overlaps

Reads the graph, changes nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from cp_inductor.graph.collectives import STARTS, WAIT, is_start
from cp_inductor.passes.lower_attention import EXPANSIONS

SIZE = torch.ops.aten.sym_size.int


def verify_graph(gm: fx.GraphModule) -> list[str]:
    """Raise AssertionError where a lowered graph breaks a rule above.

    Returns:
        Names of the nodes that start collectives, in order.
    """
    starts = []
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
            for node in module.graph.nodes:
                _verify_node(node)
                if is_start(node):
                    starts.append(node.name)
    return starts


def _verify_node(node: fx.Node) -> None:
    assert node.target not in EXPANSIONS, f"{node} was not lowered"
    if node.target in STARTS:
        # How many rows there are is known before they arrive.
        users = [user for user in node.users if user.target is not SIZE]
        assert len(users) == 1 and users[0].target is WAIT, f"{node} is read by {users}"
