"""What regions write into a graph while Dynamo traces it, and how passes read it.

with local_attention(): sdpa(q, k, v)           node.meta["custom"] has LEFT_ALONE
with per_rank(): x.roll(1)                      node.meta["custom"] has PER_RANK
ContextParallel's module                        node.meta["custom"] has IN_REGION
with context_parallel(mesh): checkpoint(f, x)   checkpoint(f, in_region(x, group, rank, ...))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.errors import UnsupportedAttention
from cp_inductor.graph.nodes import graphs_of, modules_of, nodes_of, recompile_all
from cp_inductor.graph.subgraphs import bodies_of
from cp_inductor.sequence.rules.call import RULES
from cp_inductor.sequence.rules.computing import pointwise
from cp_inductor.torch_private.dtensor import flex_attention_op

FLEX = flex_attention_op()

# Custom metadata of an attention that is left alone, and of what each rank computes for itself.
LEFT_ALONE, PER_RANK = ({"cp_inductor": said} for said in ("local_attention", "per_rank"))

# In that of what runs in a region that the graph begins: the group of its ranks. Around a graph,
# only a mode says that there is a region.
IN_REGION = "cp_inductor_region"


@torch.library.custom_op("cp_inductor::in_region", mutates_args=())
def _in_region(
    tensor: Tensor, group_name: str, rank: int, world_size: int, lengths: list[int]
) -> Tensor:
    """Mark an argument of the body of a higher-order op that is traced in a region.

    Dynamo (2.13 to 2.15) calls no mode while it traces such a body, as of a checkpoint or a branch.
    The query of flex_attention is marked as well. If it were a DTensor, the functions of
    flex_attention would have to compute with DTensors. A graph pass reads the mark and removes it.
    Only another backend runs this op.
    """
    raise UnsupportedAttention(
        site="flex_attention, torch.cond, while_loop or another higher-order op, in a"
        " context-parallel region",
        expected="a function compiled with backend='cp_inductor' or 'cp_aot_eager' around it",
        got="eager code, in which torch runs such an op with a backend of its own, or another"
        " backend; there attention would see only the local shard",
        remedy="compile the function that calls it with backend='cp_inductor'; or, instead of"
        " torch.cond and while_loop, write if and while in eager code",
    )


@_in_region.register_fake
def _(tensor: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(tensor)


_in_region.register_autograd(lambda ctx, grad: (grad, *[None] * 4))

MARK = torch.ops.cp_inductor.in_region.default
RULES[MARK] = pointwise


@dataclass(frozen=True, slots=True)
class Region:
    """A context in which plain tensors are shards, with the known lengths of whole sequences."""

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
    customs = (node.meta.get("custom", {}) for node in nodes_of(gm))
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


def is_marked(node: fx.Node, mark: dict[str, str]) -> bool:
    """Whether the user said of a node that it is `LEFT_ALONE`, or `PER_RANK`."""
    return mark.items() <= node.meta.get("custom", {}).items()
