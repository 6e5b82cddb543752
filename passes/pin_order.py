"""Prepare a scheduled graph for who runs it: its order for Inductor, its views for an interpreter.

    start_0 . tile_0 . wait_0 . start_1 . tile_1     =>     each depends on those before it

Inductor's scheduler moves a start to just before its wait if nothing forbids it, and then nothing
overlaps. Worse, graphs differ between ranks, so the order of collectives would differ as well, and
the ranks would hang. So every collective of the graph is in the chain, including those of DTensor
and data parallelism, in the order that all ranks agreed on when the graph was lowered. The compute
that hides them is in the chain as well: tiles, and matrix multiplications between a start and its
wait.

`number_nodes` numbers the nodes of the lowered graph in their order. `pin_order`, which runs after
Inductor's own rewrites, turns the numbers into dependencies.

    flat = view(softplus_backward(...), [66, 4])     =>     flat = reshape(...)

Some of torch's kernels return other strides than their fake ones (`softplus_backward` of tensors
that differ in strides, read in torch 2.13), and AOTAutograd has made `view` of every reshape that
was one when traced. `relax_views` lets interpreted graphs copy: in a functional graph nothing
writes to a tensor that a view is made of. Inductor's own kernels have the strides that were traced.
"""

from __future__ import annotations

import torch
from torch import fx

from cp_inductor.graph.collectives import WAIT, is_collective
from cp_inductor.passes.nodes import is_heavy, tiles_of, walk_back
from cp_inductor.torch_private.inductor import keep_order, sort_topologically

META_KEY = "cp_inductor_order"
# In the meta of what a collective reads: the number of the collective.
READ_BY = "cp_inductor_read_by"


def number_nodes(graph: fx.Graph) -> None:
    """Number collectives, and the compute between their starts and waits, in their order."""
    number, num_in_flight = 0, 0
    for node in graph.nodes:
        if is_collective(node):
            num_in_flight = max(0, num_in_flight + (-1 if node.target is WAIT else 1))
        elif not tiles_of(node) and not (num_in_flight > 0 and is_heavy(node)):
            continue
        node.meta[META_KEY] = number
        if is_collective(node) and node.target is not WAIT:
            # What it sends, and what that is made of: DDP divides gradients first.
            for source in node.all_input_nodes:
                for sent in (source, *source.all_input_nodes):
                    sent.meta[READ_BY] = number
        number += 1


def pin_order(graph: fx.Graph) -> None:
    """Chain the nodes that `number_nodes` numbered, in a graph that Inductor has rewritten."""
    # Fusing the all-reduces of DDP leaves it out of order.
    sort_topologically(graph)
    latest: dict[object, fx.Node] = {}
    earlier_of = {}
    for node in _in_order(graph):
        # After the latest of every op, not the last node alone: in Inductor's eyes a wait
        # returns the buffer of its start, so that whoever depends on a wait may overtake it.
        earlier_of[node] = list(latest.values())
        latest[node.target] = node
    keep_order(graph, earlier_of)


def _in_order(graph: fx.Graph) -> list[fx.Node]:
    """Sort by number; a collective made since takes the place of the last one it is made of."""
    _forget_what_changed(graph)
    number_of: dict[fx.Node, int] = {}
    behind = latest = -1
    for node in graph.nodes:
        if META_KEY in node.meta:
            behind = number_of[node] = node.meta[META_KEY]
        elif node.target is WAIT:
            number_of[node] = latest
        elif is_collective(node):
            # One made since, such as a bucket of DDP. Its place depends on the rest of the graph,
            # which differs on other ranks. What it was made of is in an order that all agree on.
            sources = walk_back(node.all_input_nodes, lambda source: READ_BY in source.meta)
            numbers = (source.meta[READ_BY] for source in sources if READ_BY in source.meta)
            number_of[node] = max(numbers, default=behind)
        latest = max(latest, number_of.get(node, -1))
    # As stable as it looks: what has one number is in the order of the graph.
    return sorted(number_of, key=number_of.__getitem__) if behind >= 0 else []


def _forget_what_changed(graph: fx.Graph) -> None:
    """Drop numbers that Inductor's rewrites passed on to other nodes, or that contradict the data.

    Inductor fuses a sum and a matrix multiplication into one node, which depends on the inputs of
    both.
    """
    latest: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((latest[source] for source in node.all_input_nodes), default=-1)
        number = node.meta.get(META_KEY, -1)
        is_fixed = is_collective(node) or bool(tiles_of(node))
        if number >= 0 and not is_fixed and not (is_heavy(node) and number > before):
            del node.meta[META_KEY]
            number = -1
        latest[node] = max(before, number)


def relax_views(gm: fx.GraphModule) -> None:
    """Replace views to a shape by reshapes, in place."""
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    for node in nodes:
        node.target = torch.ops.aten.reshape.default
    if nodes:
        gm.recompile()
