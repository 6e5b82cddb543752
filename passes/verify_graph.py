"""Check a lowered graph. A failure is our own bug, so these are assertions, not refusals.

    every start is waited for exactly once, and nothing else reads it      else: torn data
    every attention has all starts of its plan, in their order             else: a hang
    no op of the pair is left over                                         else: nothing overlaps

Reads the graph, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from cp_inductor.graph.collectives import STARTS, WAIT, is_start
from cp_inductor.graph.nodes import graphs_of
from cp_inductor.passes.lower_attention import EXPANSIONS
from cp_inductor.passes.nodes import EXCHANGE_KEY, SIZE


def verify_graph(gm: fx.GraphModule) -> list[str]:
    """Raise AssertionError where a lowered graph breaks a rule above.

    Returns:
        Names of the nodes that start collectives, in order.
    """
    starts = []
    for graph in graphs_of(gm):
        graph.lint()
        for node in graph.nodes:
            assert node.target not in EXPANSIONS, f"{node} was not lowered"
            if node.target in STARTS:
                # How many rows there are is known before they arrive.
                users = [user for user in node.users if user.target is not SIZE]
                is_awaited = len(users) == 1 and users[0].target is WAIT
                assert is_awaited, f"{node} is read by {users}"
        own = [node for node in graph.nodes if is_start(node)]
        _verify_starts([node.meta[EXCHANGE_KEY] for node in own if EXCHANGE_KEY in node.meta])
        starts += [node.name for node in own]
    return starts


def _verify_starts(numbers: Sequence[tuple[int, int]]) -> None:
    """Check that every attention has its starts, which may stand between those of others.

    Args:
        numbers: of each start, its number among those of its attention, from 1, and theirs.
    """
    reached: list[tuple[int, int]] = []
    for number, total in numbers:
        before = (number - 1, total)
        if number > 1:
            assert before in reached, f"start {number} of {total} stands before the one ahead of it"
            reached.remove(before)
        reached.append((number, total))
    left = [one for one in reached if one[0] < one[1]]
    assert not left, f"of an attention's starts, numbers and how many there are, only {left} stand"
