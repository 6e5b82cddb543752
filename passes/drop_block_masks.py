"""Drop the tensors of BlockMasks, which say what the rules of the attentions say.

    kv_num_blocks = create_block_mask's ...                  erased, if nothing else reads it
    flex_attention(q, k, v, score_mod, (256, 256, kv_num_blocks, ..., mask_mod), ...)
      =>
    flex_attention(q, k, v, score_mod, (mask_mod,), ...)

A BlockMask of a whole sequence is as large as the number of its blocks squared. Made inside the
model, it is computed from a mask of all pairs; nothing of that is left.

Assumes: a graph from Dynamo, before AOTAutograd; the sites were found in it, and will be captured:
the op cannot run afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from cp_inductor.graph.subgraphs import calls_of, drop_unused_inputs
from cp_inductor.passes.find_attention import Site

BLOCK_MASK = 4


def drop_block_masks(gm: fx.GraphModule, sites: Sequence[Site]) -> None:
    """Drop them from the sites that are flex_attention; idempotent."""
    calls = calls_of(gm)
    dropped: list[fx.Node] = []
    for site in sites:
        if site.is_flex:
            node = site.node
            before = node.all_input_nodes
            block_mask: Any = node.args[BLOCK_MASK]
            node.update_arg(BLOCK_MASK, block_mask[-1:])
            dropped += [source for source in before if source not in node.all_input_nodes]
    while dropped:
        graphs = dict.fromkeys(node.graph for node in dropped)
        for node in dropped:
            _erase_unread(node)
        # The BlockMask of all layers is an input of a checkpointed one.
        dropped = [node for graph in graphs for node in drop_unused_inputs(graph, calls)]
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()


def _erase_unread(node: fx.Node) -> None:
    stack = [node]
    while stack:
        node = stack.pop()
        if node._erased or node.users or not _only_computes(node):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        stack += sources


def _only_computes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    is_body = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.op == "call_function" and not is_body and not node.is_impure()
