"""Label the exchanges and tiles of a lowered graph, so that errors and profiles can name them.

    attention_1 = cp_inductor::attention(...)      "cp_inductor_place": (1, "forward")
      => lower_attention
    wait_tensor_3 = _c10d_functional::wait_tensor(all_to_all_single_3)
      => its "from_node" is cp_attention_1_forward_exchange_2_of_4, and Inductor writes
    # Topologically Sorted Source Nodes: [cp_attention_1_forward_exchange_2_of_4], ...

The labels are in the code that Inductor keeps in its cache. They name attentions by their place in
the graph, and not by their source line: two graphs that differ in nothing else share code.

Assumes: graphs from AOTAutograd, in which a backward's node has the `seq_nr` of its forward's.
"""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from cp_inductor.graph.collectives import WAIT
from cp_inductor.graph.nodes import nodes_of
from cp_inductor.ops.attention import FORWARD
from cp_inductor.passes.lower_attention import EXPANSIONS
from cp_inductor.passes.nodes import EXCHANGE_KEY, TILE_KEY
from cp_inductor.torch_private.inductor import put_label

# In the meta of an attention, which its expansion shares: (its place in the graph, direction).
PLACE = "cp_inductor_place"

# Attention, direction, what, its number, how many; "unknown": no forward has the attention.
LABEL = re.compile(r"cp_attention_(\d+|unknown)_(forward|backward)_(exchange|tile)_(\d+)_of_(\d+)")


def number_attentions(gm: fx.GraphModule, kind: str, place_of: dict[Any, int]) -> None:
    """Note in the meta of each attention of an unlowered graph which it is.

    `place_of` is the place of an attention by its `seq_nr`. A forward writes it, and the backward
    of the same compile reads it.
    """
    nodes = [node for node in nodes_of(gm) if node.target in EXPANSIONS]
    if kind != "backward":
        place_of.clear()
    for place, node in enumerate(nodes):
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
