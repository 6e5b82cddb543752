"""Drop the inputs of a graph that are neither tensors nor numbers, and that nothing reads.

    def graph(mesh, q, k, v)      =>      def graph(q, k, v)           returns the places 1, 2, 3

After capturing, the mesh of a region is such an input. torch 2.13's partitioner with a memory
budget takes it for an object of unknown size.

Assumes: a graph from Dynamo, before AOTAutograd; who calls it leaves out the same inputs.
"""

from __future__ import annotations

from torch import SymBool, SymFloat, SymInt, Tensor, fx


def drop_idle_objects(gm: fx.GraphModule) -> tuple[int, ...]:
    """Drop them in place, and return the places of the remaining inputs."""
    kept = []
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if node.users or isinstance(value, (Tensor, int, float, SymInt, SymFloat, SymBool)):
            kept.append(place)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return tuple(kept)
