"""Return what a caller can use by itself: scalars whole, and parts of other outputs as copies.

    return loss               loss: DTensor () [Partial(sum)]: its item() is the part of this rank
      =>
    whole = loss.redistribute(mesh, [Replicate()])
    return whole

    tokens = layer_norm(...)              DTensor [Shard(1)]
    first = tokens[:, 0]
    return tokens, first                  AOTAutograd makes `first` from `tokens` by as_strided
      =>
    own = first.clone()
    return tokens, own

A sum over sharded tokens is a part on every rank. torch's `DTensor.item()` returns the part, and so
every log of a loss would be wrong. The gradient of every part is that of the whole, so backward
passes stay as they are. Tensors with dims keep their placements.

AOTAutograd returns the base of outputs that share memory, and makes the views of it again outside
of the graph. DTensor has no `as_strided` (torch 2.13 to 2.15), so that call fails. What a user
writes to one of the two in place does not reach the other. In eager code it does not, either, where
DTensor has redistributed the one to make the other.

Assumes: a graph from Dynamo, before AOTAutograd, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor, Replicate

from cp_inductor.dtensor.rules.partials import is_partial
from cp_inductor.passes.insert_call import insert_call


def complete_outputs(gm: fx.GraphModule) -> None:
    """Sum the parts of scalars, and copy the views among outputs that share memory, in place."""
    output = gm.graph.output_node()
    returned = {
        node: value
        for node in output.all_input_nodes
        if isinstance(value := node.meta.get("example_value"), DTensor)
    }
    calls: dict[fx.Node, tuple[Any, ...]] = {}
    for node, value in returned.items():
        if not value.ndim and value.device_mesh.get_coordinate() is not None and is_partial(value):
            placements = [Replicate()] * value.device_mesh.ndim
            calls[node] = ("redistribute", node, value.device_mesh, placements)
    made = [node for node in returned if node.op != "placeholder" and node not in calls]
    sharing = Counter(map(_memory, map(returned.__getitem__, made)))
    for node in made:
        value = returned[node]
        if value._base is not None and sharing[_memory(value)] > 1:
            calls[node] = ("clone", node)
    with gm.graph.inserting_before(output):
        for node, (method, *arguments) in calls.items():
            own = insert_call(node, method, *arguments)
            own.meta["example_value"].requires_grad_(returned[node].requires_grad)
            output.replace_input_with(node, own)
    if calls:
        gm.recompile()


def _memory(value: DTensor) -> int:
    return id(value if value._base is None else value._base)
