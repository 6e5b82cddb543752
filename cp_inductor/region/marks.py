"""Read in a Dynamo graph what regions marked: shards, and what is deliberately local.

q = region_mark(q, group, rank, ...)       plain shards, in the graphs that are called with them
node.meta["custom"]                        `local_attention`, `per_rank`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.graph.nodes import graphs_of, modules_of, recompile_all
from cp_inductor.graph.subgraphs import bodies_of
from cp_inductor.region.flex_calls import FLEX
from cp_inductor.region.traced import IN_REGION, LEFT_ALONE, MARK, PER_RANK


@dataclass(frozen=True, slots=True)
class Region:
    """A context in which plain tensors are shards.

    Attributes:
        axis: the axis that shards them.
        lengths: the known lengths of whole sequences.
    """

    axis: SequenceAxis
    lengths: tuple[int, ...]


def regions_of(gm: fx.GraphModule) -> dict[fx.Graph, Region]:
    """Return the graphs that are called with marked tensors, and the graphs below them."""
    regions: dict[fx.Graph, Region] = {}
    for module in modules_of(gm):
        for mark in module.graph.find_nodes(op="call_function", target=MARK):
            region = _region_of(mark)
            for user in mark.users:
                for body in bodies_of(user, module):
                    regions.update((graph, region) for graph in graphs_of(body))
    return regions


def groups_of_regions(gm: fx.GraphModule) -> list[str]:
    """Return the groups of the ranks of regions that begin in a graph."""
    customs = (node.meta.get("custom", {}) for graph in graphs_of(gm) for node in graph.nodes)
    return sorted({custom[IN_REGION] for custom in customs if IN_REGION in custom})


def region_of_query(node: fx.Node) -> Region | None:
    """Return the context of a call of flex_attention, whose query is marked."""
    query: Any = node.args[0] if node.target is FLEX else None
    return _region_of(query) if query is not None and query.target is MARK else None


def _region_of(mark: fx.Node) -> Region:
    arguments: Any = mark.args
    _, group_name, rank, world_size, lengths = arguments
    axis = SequenceAxis(f"group {group_name!r}", group_name, rank, world_size)
    return Region(axis, tuple(lengths))


def remove_marks(gm: fx.GraphModule) -> None:
    """Remove the marks from all graphs."""
    for graph in graphs_of(gm):
        for mark in graph.find_nodes(op="call_function", target=MARK):
            mark.replace_all_uses_with(mark.args[0])
            graph.erase_node(mark)
    recompile_all(gm)


def is_left_alone(node: fx.Node) -> bool:
    """Whether the user asked for local attention at this node."""
    return LEFT_ALONE.items() <= node.meta.get("custom", {}).items()


def is_per_rank(node: fx.Node) -> bool:
    """Whether the user said that each rank computes this within its own shard."""
    return PER_RANK.items() <= node.meta.get("custom", {}).items()
