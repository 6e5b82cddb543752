"""Cut the expansion of an attention at its collectives: what is between them, layers share.

    rows = ...                                    rows = invoke_subgraph(piece_0, q, k, v)
    arriving = exchange_rows(rows, ...)           arriving = exchange_rows(rows, ...)
    tile, sums = ...                        =>    tile = invoke_subgraph(piece_1, rows, tables)
    message = wait_tensor(arriving)               message = wait_tensor(arriving)
    out = combine(tile, message)                  out = invoke_subgraph(piece_2, tile, message)

The attentions of layers that are alike are copies of one trace, and call the same pieces. Inductor
lowers a piece once, and generates one function for it; how long it takes does not grow with the
layers. Exchanges stay outside, where the schedule moves them. What computes numbers, such as the
tables of tiles, stays outside as well: layers share its results.

A piece returns tensors that have memory of their own; views of them are made again outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import getitem

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from cp_inductor.graph.collectives import is_collective
from cp_inductor.passes.nodes import SIZE, TILES_KEY, computes_numbers, free_name, is_view
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.torch_private.tracing import INVOKE_SUBGRAPH, known_results

# A piece of fewer nodes is not worth a function.
MIN_NODES = 4


class Piece(fx.GraphModule):
    """What layers share of the expansion of an attention."""


def share_pieces(gm: fx.GraphModule) -> None:
    """Cut a traced expansion, whose nodes carry `val`; it is changed in place."""
    outside: set[fx.Node] = set()
    piece: list[fx.Node] = []
    for node in [*gm.graph.nodes]:
        if node.op == "output" or is_collective(node):
            if len(piece) >= MIN_NODES:
                _cut(gm, piece)
            piece = []
        is_light = node.op != "call_function" or is_view(node) or computes_numbers(node)
        if is_collective(node) or (is_light and outside.issuperset(node.all_input_nodes)):
            outside.add(node)
        else:
            piece.append(node)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()


def _cut(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    """Put the call of a piece in the place of nodes, if they can be one."""
    graph, inside = gm.graph, set(nodes)
    leaving = [node for node in nodes if not inside.issuperset(node.users)]
    views_of = {node: _views(node) for node in leaving}
    results = list(dict.fromkeys(views[-1] for views in views_of.values()))
    are_own = all(node in inside and isinstance(node.meta["val"], Tensor) for node in results)
    sizes = _sizes_read(graph, nodes) if are_own else None
    if sizes is None:
        return
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    given = [node for node in read if node not in inside and node.op != "get_attr"]
    given = list(dict.fromkeys(sizes + given))
    piece, name = _piece_of(gm, nodes, given, results), free_name(gm, "piece")
    setattr(gm, name, piece)

    behind: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(nodes[-1].next):
        call = graph.call_function(INVOKE_SUBGRAPH, (graph.get_attr(name), name, *given))
        call.meta["val"] = tuple(node.meta["val"] for node in results)
        call.meta[TILES_KEY] = tuple(node for node in piece.graph.nodes if node.target in TILE_OPS)
        for place, node in enumerate(results):
            behind[node] = graph.call_function(getitem, (call, place))
            behind[node].meta = dict(node.meta)
        for node in (view for views in views_of.values() for view in reversed(views)):
            if node not in behind:
                behind[node] = graph.node_copy(node, lambda source: behind.get(source, source))
    copies = set(behind.values())
    for node in leaving:
        node.replace_all_uses_with(
            behind[node], lambda user: user not in inside and user not in copies
        )
    for node in reversed(nodes):
        graph.erase_node(node)


def _views(node: fx.Node) -> list[fx.Node]:
    """Return a node and what it is a view of, down to what has memory of its own."""
    found = [node]
    while is_view(node) or (node.target is getitem and is_view(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
        found.append(node)
    return found


def _sizes_read(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node] | None:
    """Return nodes of the symbols in the sizes of a piece, which its function has to be given.

    None if one of them is nowhere a size, but only a part of sizes.
    """
    read = (source for node in nodes for source in (node, *node.all_input_nodes))
    symbols = free_symbols([node.meta.get("val") for node in read])
    found: dict[sympy.Symbol, fx.Node] = {}
    last, inside = nodes[-1], set(nodes)
    for node in takewhile(lambda node: node is not last, graph.nodes):
        if node in inside:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found.setdefault(size_expression(value), node)
        for dim, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
            symbol = size_expression(length)
            if symbol in symbols and symbol not in found:
                with graph.inserting_before(last):
                    found[symbol] = graph.call_function(SIZE, (node, dim))
                found[symbol].meta["val"] = length
    is_given = symbols.issubset(found)
    return [found[symbol] for symbol in sorted(symbols, key=str)] if is_given else None


def _piece_of(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], given: list[fx.Node], results: list[fx.Node]
) -> Piece:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for place, node in enumerate(given):
        copies[node] = graph.placeholder(f"given_{place}")
        copies[node].meta["val"] = node.meta["val"]
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    piece = Piece(gm, graph)
    known_results(piece, [node.meta["val"] for node in results])
    return piece
