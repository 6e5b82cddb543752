"""Number, label and verify the exchanges and tiles of lowered graphs.

    attention_1 = cp_inductor::attention(...)      "cp_inductor_place": (1, "forward")
      => lower_attention
    wait_tensor_3 = _c10d_functional::wait_tensor(all_to_all_single_3)
      => its "from_node" is cp_attention_1_forward_exchange_2_of_4, and Inductor writes
    # Topologically Sorted Source Nodes: [cp_attention_1_forward_exchange_2_of_4], ...

Errors and profiles name exchanges by these labels, which are in the code that Inductor caches. They
name attentions by their place, not by their line: graphs that differ in that alone share code.

To verify a graph changes nothing. A failure is our own bug, so these are assertions, not refusals:

    every start is waited for exactly once, and nothing else reads it      else: torn data
    every attention has all starts of its plan, in their order             else: a hang
    no op of the pair is left over                                         else: nothing overlaps

Assumes: graphs from AOTAutograd, in which a backward's node has the `seq_nr` of its forward's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import fx

from cp_inductor.graph.collectives import STARTS, WAIT, is_start
from cp_inductor.graph.nodes import graphs_of, nodes_of
from cp_inductor.ops.attention import FORWARD
from cp_inductor.passes.lower_attention import EXPANSIONS
from cp_inductor.passes.nodes import EXCHANGE_KEY, SIZE, TILE_KEY
from cp_inductor.torch_private.inductor import put_label

# In the meta of an attention, which its expansion shares: (its place in the graph, direction).
PLACE = "cp_inductor_place"
# Attention, direction, what, its number, how many; "unknown": no forward has the attention.
LABEL = re.compile(r"cp_attention_(\d+|unknown)_(forward|backward)_(exchange|tile)_(\d+)_of_(\d+)")


def number_attentions(gm: fx.GraphModule, kind: str, place_of: dict[Any, int]) -> None:
    """Note in the meta of each attention of an unlowered graph which it is.

    A forward writes to `place_of`, by `seq_nr`; the backward of the same compile reads it.
    """
    if kind != "backward":
        place_of.clear()
    for place, node in enumerate([node for node in nodes_of(gm) if node.target in EXPANSIONS]):
        direction, number = "backward", node.meta.get("seq_nr")
        if node.target is FORWARD:
            direction = "forward"
            if kind != "backward":
                place_of[number] = place
        node.meta[PLACE] = (place_of.get(number, "unknown"), direction)


def label_exchanges(graph: fx.Graph) -> None:
    """Label starts, waits and tiles of attentions that were numbered before they were lowered."""
    label_of: dict[object, str] = {}
    for node in graph.nodes:
        for key, what in ((EXCHANGE_KEY, "exchange"), (TILE_KEY, "tile")):
            if key in node.meta and PLACE in node.meta:
                (place, direction), (number, total) = node.meta[PLACE], node.meta[key]
                label_of[node] = f"cp_attention_{place}_{direction}_{what}_{number}_of_{total}"
        label = label_of.get(node.args[0] if node.target is WAIT else node)
        if label is not None:
            put_label(node, label)


def verify_graph(gm: fx.GraphModule) -> list[str]:
    """Return the names of starts in order; raise AssertionError where a rule above is broken."""
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
        _verify_starts(node.meta[EXCHANGE_KEY] for node in own if EXCHANGE_KEY in node.meta)
        starts += [node.name for node in own]
    return starts


def _verify_starts(numbers: Iterable[tuple[int, int]]) -> None:
    """Check that every attention has all its starts, which may stand between those of others."""
    reached: list[tuple[int, int]] = []
    for number, total in numbers:
        if number > 1:
            before = (number - 1, total)
            assert before in reached, f"start {number} of {total} stands before the one ahead of it"
            reached.remove(before)
        reached += [(number, total)] if number < total else []
    assert not reached, f"of an attention's starts, as (number, how many), only {reached} stand"
