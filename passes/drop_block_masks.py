"""Drop the tensors of BlockMasks, which say what the rules of the attentions say.

    kv_num_blocks = create_block_mask's ...                  erased, if nothing else reads it
    flex_attention(q, k, v, score_mod, (256, 256, kv_num_blocks, ..., mask_mod), ...)
      =>
    flex_attention(q, k, v, score_mod, (mask_mod,), ...)

A BlockMask of a whole sequence is as large as the number of its blocks squared, and a model that
makes one computes a mask of all pairs first. This pass erases both.

Assumes: a graph from Dynamo, before AOTAutograd. The sites were found in it, and will be captured,
because flex_attention cannot run without its BlockMask.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import setitem
from typing import Any, cast

import torch
from torch import fx

from cp_inductor.graph.nodes import recompile_all
from cp_inductor.graph.subgraphs import calls_of, drop_unused_inputs
from cp_inductor.mask.reader.writes import is_in_place
from cp_inductor.passes.attentions import Site
from cp_inductor.torch_private.tracing import ADD_BATCH_DIM

# The place of the BlockMask among the arguments of flex_attention.
BLOCK_MASK = 4


def drop_block_masks(gm: fx.GraphModule, sites: Sequence[Site]) -> None:
    """Drop the BlockMasks of the sites that are flex_attention; idempotent."""
    calls = calls_of(gm)
    dropped: list[fx.Node] = []
    for node in (site.node for site in sites if site.is_flex):
        before, block_mask = node.all_input_nodes, cast("Any", node.args[BLOCK_MASK])
        node.update_arg(BLOCK_MASK, block_mask[-1:])
        dropped += [source for source in before if source not in node.all_input_nodes]
    while dropped:
        graphs = dict.fromkeys(node.graph for node in dropped)
        for graph in graphs:
            _erase_unread([node for node in dropped if node.graph is graph])
        # The BlockMask of all layers is an input of a checkpointed one.
        dropped = [node for graph in graphs for node in drop_unused_inputs(graph, calls)]
    recompile_all(gm)


def _erase_unread(dropped: Sequence[fx.Node]) -> None:
    """Erase these nodes, and the nodes that they depend on, if nothing else reads them."""
    erasable: dict[fx.Node, None] = {}
    # Nothing depends on an index that the mask_mod does not read.
    graph = dropped[0].graph
    stack = [*dropped, *graph.find_nodes(op="call_function", target=ADD_BATCH_DIM)]
    while stack:
        node = stack.pop()
        if node not in erasable and _only_computes(node):
            erasable[node] = None
            # A BlockMask is transposed by way of a tensor that is written to.
            stack += [user for user in node.users if user.target is setitem]
            stack += node.all_input_nodes
    while read := [node for node in erasable if not erasable.keys() >= node.users.keys()]:
        for node in read:
            del erasable[node]
    written = {node.args[0] for node in erasable if node.target is setitem}
    if written <= erasable.keys():
        for node in reversed(graph.nodes):
            if node in erasable:
                graph.erase_node(node)


def _only_computes(node: fx.Node) -> bool:
    if node.target is setitem:
        target = node.args[0]
        return isinstance(target, fx.Node) and target.target in ("new_zeros", torch.zeros)
    if node.op not in ("call_function", "call_method") or is_in_place(node):
        return False
    is_body = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.op == "call_method" or not (is_body or node.is_impure())
