"""Return scalars whole: sum the ranks' parts of a loss before it leaves the graph.

    return loss      loss: DTensor () [Partial(sum)]: its item() is this rank's part alone
      =>
    whole = loss.redistribute(mesh, [Replicate()])
    return whole

A sum over sharded tokens is a part on every rank. torch's `DTensor.item()` returns the part, and so
every log of a loss would be wrong. The gradient of every part is that of the whole, so backward
passes stay as they are. Tensors with dims keep their placements.

Assumes: a graph from Dynamo, before AOTAutograd, whose nodes carry `example_value`.
"""

from __future__ import annotations

from torch import fx
from torch.distributed.tensor import DTensor, Replicate

from cp_inductor.dtensor.rules.partials import is_partial
from cp_inductor.passes.insert_call import insert_call


def whole_scalars(gm: fx.GraphModule) -> None:
    """Sum the parts of every scalar that a Dynamo graph returns, in place."""
    (output,) = gm.graph.find_nodes(op="output")
    returned = [node for node in output.all_input_nodes if _is_part(node.meta.get("example_value"))]
    with gm.graph.inserting_before(output):
        for node in returned:
            part: DTensor = node.meta["example_value"]
            placements = [Replicate()] * part.device_mesh.ndim
            whole = insert_call(node, "redistribute", node, part.device_mesh, placements)
            whole.meta["example_value"].requires_grad_(part.requires_grad)
            output.replace_input_with(node, whole)
    if returned:
        gm.recompile()


def _is_part(value: object) -> bool:
    if not isinstance(value, DTensor) or value.ndim or value.device_mesh.get_coordinate() is None:
        return False
    return is_partial(value)
