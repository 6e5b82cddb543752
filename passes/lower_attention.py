"""Expand the op pair into starts, waits, tiles and sums: this rank's part of the plan.

    out, lse = cp_inductor::attention(q, k, v, ...)                   (ring, rank 1 of 2, causal)
      =>
    arriving = _c10d_functional::all_to_all_single(empty, [2 B T G D, 0], [0, 0], group)
    out_0, lse_0 = aten::_scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    kv_0 = _c10d_functional::wait_tensor(arriving).view(T, B, 2 G, D).permute(1, 2, 0, 3)
    out_1, lse_1 = aten::_scaled_dot_product_flash_attention(q, kv_0[:, :G], kv_0[:, G:])
    out, lse = combine((out_0, lse_0), (out_1, lse_1))

This module does not write the expansion. It traces `run_forward` and `run_backward` on fake
tensors, the functions that the op's eager kernel runs. A long expansion that layers have in common
is cut at its collectives. What is between them, layers share:

    rows = ...                                    rows = invoke_subgraph(piece_0, q, k, v)
    arriving = exchange_rows(rows, ...)           arriving = exchange_rows(rows, ...)
    tile, sums = ...                        =>    tile = invoke_subgraph(piece_1, rows, tables)
    message = wait_tensor(arriving)               message = wait_tensor(arriving)
    out = combine(tile, message)                  out = invoke_subgraph(piece_2, tile, message)

The attentions of layers that are alike are copies of one trace, and call the same pieces, each of
which Inductor lowers once, to one function. Exchanges stay outside, where the schedule moves them,
and so does what computes numbers, such as the tables of tiles: layers share its results. A piece
returns tensors that have memory of their own; views of them are made again outside.

Assumes: a forward, backward or inference graph from AOTAutograd, whose nodes carry `val`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import getitem
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from cp_inductor.graph.collectives import START, STARTS, is_collective
from cp_inductor.graph.nodes import modules_of, source_line
from cp_inductor.ops.attention import BACKWARD, FORWARD, NUM_TENSORS, attention_of
from cp_inductor.passes.nodes import (
    BYTES_KEY,
    EXCHANGE_KEY,
    SIZE,
    TILE_KEY,
    TILES_KEY,
    computes_numbers,
    free_name,
    insert_graph,
    is_view,
    merge_equal,
    replace_results,
)
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.run.executor import run_backward, run_forward
from cp_inductor.tiles.kernel_table import KERNELS, TILE_OPS
from cp_inductor.torch_private.inductor import ONE_KERNEL_KEY
from cp_inductor.torch_private.sizes import size_expression, size_hint
from cp_inductor.torch_private.tracing import (
    INVOKE_SUBGRAPH,
    fake_mode_of,
    known_results,
    trace_fake,
)
from cp_inductor.trust.agreement import NOTE_TABLES
from cp_inductor.trust.claims import kind_of, tables_to_note

# What nodes of an expansion do not share with their site.
OWN_KEYS = (BYTES_KEY, EXCHANGE_KEY, TILES_KEY, TILE_KEY, ONE_KERNEL_KEY)
OWN_META = ("val", "unbacked_bindings", *OWN_KEYS)
# In the meta of nodes of an expansion.
IS_OURS = "cp_inductor_expansion"

# What computes the results of the ops, and is traced.
EXPANSIONS: Mapping[object, Callable[..., Any]] = {FORWARD: run_forward, BACKWARD: run_backward}

# A piece of fewer nodes is not worth a function.
MIN_NODES = 4


def lower_attention(
    gm: fx.GraphModule, decompositions: Mapping[Any, Any], *, note_tables: bool
) -> int:
    """Expand every op of the pair, in place and in subgraphs as well; return how many there were.

    By `decompositions` an expansion uses the ops of the rest of the graph. If `note_tables`, ops
    hand over tables which all ranks must read alike.
    """
    num_lowered = 0
    for module in modules_of(gm):
        nodes = [node for node in module.graph.nodes if node.target in EXPANSIONS]
        if not nodes:
            continue
        if note_tables:
            _note_tables([node for node in nodes if node.target is FORWARD])
        traced: dict[Any, fx.GraphModule] = {}
        counts = Counter(map(_key, nodes))
        for node in nodes:
            key = _key(node)
            if key not in traced:
                traced[key] = _trace(node, decompositions, counts[key] > 1)
                _adopt_subgraphs(traced[key], module.graph)
            outputs, copies = insert_graph(traced[key], _inputs_of(node), before=node)
            for original, copy in copies.items():
                own = {key: original.meta[key] for key in OWN_META if key in original.meta}
                copy.meta = {**_meta_of_site(node), **own, IS_OURS: True}
            replace_results(node, outputs.__getitem__)
        # Layers that read the same tables compute the same numbers of them; tokens differ.
        merge_equal(module.graph, lambda node: IS_OURS in node.meta and computes_numbers(node))
        module.graph.lint()
        module.recompile()
        num_lowered += len(nodes)
    return num_lowered


def _note_tables(nodes: Sequence[fx.Node]) -> None:
    """Insert ops that hand over tables and seeds; they share a token, which orders them."""
    token: fx.Node | None = None
    for node in nodes:
        arguments: Any = node.args
        query, extras, attention = arguments[0], arguments[3], attention_of(node)
        assert attention is not None
        tables = [extras[place] for place in tables_to_note(attention)]
        if not tables:
            continue
        value = query.meta["val"]
        with node.graph.inserting_before(node):
            if token is None:
                token = node.graph.call_function(torch.ops.aten.new_empty.default, (query, [1]))
                with fake_mode_of(value):
                    token.meta["val"] = value.new_empty([1])
            kind, site = kind_of(attention, value.dtype), f"attention ({source_line(node)})"
            args = (token, tables, kind, site, attention.dropout_p > 0, attention.group_name)
            note = node.graph.call_function(NOTE_TABLES, args)
        note.meta = {**_meta_of_site(node), "val": None}


def _trace(node: fx.Node, decompositions: Mapping[Any, Any], is_repeated: bool) -> fx.GraphModule:
    """Trace the function of an op; if it `is_repeated`, the graph has others that are alike."""
    attention, used = attention_of(node), _used_of(node)
    assert attention is not None

    def run(*tensors: Tensor) -> list[Tensor | None]:
        # What nobody reads (the lse at inference) is left out, and dies with what computed it.
        results = EXPANSIONS[node.target](attention, *tensors)
        return [result if index in used else None for index, result in enumerate(results)]

    values = [arg.meta["val"] for arg in _inputs_of(node)]
    traced = trace_fake(run, values, decompositions)
    if not attention.is_per_batch:
        plan = (forward_plan if node.target is FORWARD else backward_plan)(attention.recipe)
        # What the busiest rank moves, so that all ranks estimate starts alike.
        starts = traced.graph.find_nodes(op="call_function", target=START)
        assert len(starts) == len(plan.exchange_bytes), "a rank starts what its plan does not have"
        batch = size_hint(values[0].shape[0])
        for start, num_bytes in zip(starts, plan.exchange_bytes, strict=True):
            start.meta[BYTES_KEY] = batch * num_bytes
    for key, targets in ((EXCHANGE_KEY, STARTS), (TILE_KEY, TILE_OPS)):
        nodes = [node for node in traced.graph.nodes if node.target in targets]
        for number, numbered in enumerate(nodes, 1):
            numbered.meta[key] = number, len(nodes)
    for cat in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        cat.meta[ONE_KERNEL_KEY] = True
    for view in traced.graph.nodes:
        # Aliases, and slices that cut nothing off: decompositions leave them by the dozen. All but
        # the tensor and the dim of such a slice are what they are by default.
        is_whole = view.target is torch.ops.aten.slice.Tensor and len(view.args) == 2
        if is_whole or view.target is torch.ops.aten.alias.default:
            view.replace_all_uses_with(view.args[0])
    traced.graph.eliminate_dead_code()
    # A template computes all tiles under a mask: such an expansion is long.
    if is_repeated and attention.is_per_batch and KERNELS[attention.kernel].under_rule.needs_graph:
        _share_pieces(traced)
    return traced


def _key(node: fx.Node) -> Any:
    """Return what a trace depends on."""
    return node.target, attention_of(node), _used_of(node), _layouts(_inputs_of(node))


def _inputs_of(node: fx.Node) -> tuple[fx.Node, ...]:
    # Some are lists: extras, and what the forward kept.
    inputs = pytree.tree_leaves(node.args[: NUM_TENSORS[node.target]])
    assert all(isinstance(arg, fx.Node) for arg in inputs)
    return tuple(inputs)


def _used_of(node: fx.Node) -> frozenset[Any]:
    """Return which results are used."""
    return frozenset(user.args[1] for user in node.users)


def _layouts(inputs: Sequence[fx.Node]) -> tuple[Any, ...]:
    """Return the layouts of inputs, and which of them are one.

    Integers are told apart. They decide sizes, and the copies of a trace have its sizes.
    """

    def layout(node: fx.Node) -> tuple[Any, ...]:
        value = node.meta["val"]
        sizes = repr((value.shape, value.stride(), value.storage_offset()))
        is_integer = not (value.is_floating_point() or value.is_complex())
        return sizes, value.dtype, value.device, node if is_integer else inputs.index(node)

    return tuple(map(layout, inputs))


def _adopt_subgraphs(traced: fx.GraphModule, graph: fx.Graph) -> None:
    """Give the module of a graph the subgraphs of a traced one, and these names of their own."""
    module = graph.owning_module
    assert module is not None
    for node in traced.graph.find_nodes(op="get_attr"):
        name = free_name(module, f"tile_{node.target}")
        setattr(module, name, getattr(traced, node.target))
        node.target = name
        for user in list(node.users):
            if user.target is INVOKE_SUBGRAPH:
                user.update_arg(1, name)


def _meta_of_site(node: fx.Node) -> dict[str, Any]:
    """Return the meta that all nodes of a site share: their place in the user's model."""
    # What the site's own arguments were in eager ("eager_input_vals"), Inductor holds them to.
    own = ("val", "tensor_meta", "eager_input_vals")
    return {key: value for key, value in node.meta.items() if key not in own}


class Piece(fx.GraphModule):
    """What layers share of the expansion of an attention."""


def _share_pieces(gm: fx.GraphModule) -> None:
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
    operands = [node for node in read if node not in inside and node.op != "get_attr"]
    operands = list(dict.fromkeys(sizes + operands))
    piece, name = _piece_of(gm, nodes, operands, results), free_name(gm, "piece")
    setattr(gm, name, piece)

    behind: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(nodes[-1].next):
        call = graph.call_function(INVOKE_SUBGRAPH, (graph.get_attr(name), name, *operands))
        call.meta["val"] = tuple(node.meta["val"] for node in results)
        call.meta[TILES_KEY] = tuple(node for node in piece.graph.nodes if node.target in TILE_OPS)
        for place, node in enumerate(results):
            behind[node] = graph.call_function(getitem, (call, place))
            behind[node].meta = dict(node.meta)
        for node in (view for views in views_of.values() for view in reversed(views)):
            if node not in behind:
                behind[node] = graph.node_copy(node, lambda source: behind.get(source, source))
    own = inside.union(behind.values())
    for node in leaving:
        node.replace_all_uses_with(behind[node], lambda user: user not in own)
    for node in reversed(nodes):
        graph.erase_node(node)


def _views(node: fx.Node) -> list[fx.Node]:
    """Return a node and what it is a view of, down to what has memory of its own."""
    views = [node]
    while is_view(node) or (node.target is getitem and is_view(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
        views.append(node)
    return views


def _sizes_read(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node] | None:
    """Return nodes of the symbols in the sizes of a piece, which its function has to be given.

    None if one of them is nowhere a size, but only a part of sizes.
    """
    read = (source for node in nodes for source in (node, *node.all_input_nodes))
    symbols = free_symbols([node.meta.get("val") for node in read])
    sizes: dict[sympy.Symbol, fx.Node] = {}
    last, inside = nodes[-1], set(nodes)
    for node in takewhile(lambda node: node is not last, graph.nodes):
        if node in inside:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(size_expression(value), node)
        for dim, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
            symbol = size_expression(length)
            if symbol in symbols and symbol not in sizes:
                with graph.inserting_before(last):
                    sizes[symbol] = graph.call_function(SIZE, (node, dim))
                sizes[symbol].meta["val"] = length
    is_given = symbols.issubset(sizes)
    return [sizes[symbol] for symbol in sorted(symbols, key=str)] if is_given else None


def _piece_of(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], operands: list[fx.Node], results: list[fx.Node]
) -> Piece:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for place, node in enumerate(operands):
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
