"""Return DTensors that are parts of other outputs as tensors of their own.

    tokens = layer_norm(...)              DTensor [Shard(1)]
    first = tokens[:, 0]
    return tokens, first                  AOTAutograd makes `first` from `tokens` by as_strided
      =>
    own = first.clone()
    return tokens, own

AOTAutograd returns the base of outputs that share memory, and makes the views of it again outside
of the graph. DTensor has no `as_strided` (torch 2.13 to 2.15), so that call fails. What a user
writes to one of the two in place does not reach the other. In eager code it does not, either, where
DTensor has redistributed the one to make the other.

Assumes: a graph from Dynamo, before AOTAutograd, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections import Counter

from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.passes.insert_call import insert_call


def separate_outputs(gm: fx.GraphModule) -> None:
    """Copy the views among outputs that share memory, in place."""
    (output,) = gm.graph.find_nodes(op="output")
    values = {
        node: node.meta["example_value"]
        for node in output.all_input_nodes
        if node.op != "placeholder" and isinstance(node.meta.get("example_value"), DTensor)
    }
    sharing = Counter(
        id(value if value._base is None else value._base) for value in values.values()
    )
    views = {
        node: value
        for node, value in values.items()
        if value._base is not None and sharing[id(value._base)] > 1
    }
    with gm.graph.inserting_before(output):
        for node, value in views.items():
            own = insert_call(node, "clone", node)
            own.meta["example_value"].requires_grad_(value.requires_grad)
            output.replace_input_with(node, own)
    if views:
        gm.recompile()
