"""Expand the op pair into starts, waits, tiles and sums: this rank's part of the plan.

    out, lse = cp_inductor::attention(q, k, v, ...)                   (ring, rank 1 of 2, causal)
      =>
    arriving = _c10d_functional::all_to_all_single(empty, [2 B T G D, 0], [0, 0], group)
    out_0, lse_0 = aten::_scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    kv_0 = _c10d_functional::wait_tensor(arriving).view(T, B, 2 G, D).permute(1, 2, 0, 3)
    out_1, lse_1 = aten::_scaled_dot_product_flash_attention(q, kv_0[:, :G], kv_0[:, G:])
    out, lse = combine((out_0, lse_0), (out_1, lse_1))

This module does not write the expansion. It traces `run_forward` and `run_backward` on fake
tensors, the functions that the op's eager kernel runs.

Assumes: a forward, backward or inference graph from AOTAutograd, whose nodes carry `val`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from cp_inductor.graph.collectives import START, STARTS
from cp_inductor.graph.nodes import modules_of, source_line
from cp_inductor.ops.attention import BACKWARD, FORWARD, NUM_TENSORS, attention_of
from cp_inductor.passes.nodes import (
    BYTES_KEY,
    EXCHANGE_KEY,
    TILE_KEY,
    TILES_KEY,
    computes_numbers,
    free_name,
    insert_graph,
    merge_equal,
)
from cp_inductor.passes.share_pieces import share_pieces
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.run.executor import run_backward, run_forward
from cp_inductor.tiles.kernel_table import KERNELS, TILE_OPS
from cp_inductor.torch_private.inductor import ONE_KERNEL_KEY
from cp_inductor.torch_private.sizes import size_hint
from cp_inductor.torch_private.tracing import (
    INVOKE_SUBGRAPH,
    fake_mode_of,
    trace_fake,
)
from cp_inductor.trust.claims import kind_of, tables_to_note
from cp_inductor.trust.graph_agreement import NOTE_TABLES

# What nodes of an expansion do not share with their site.
OWN_KEYS = (BYTES_KEY, EXCHANGE_KEY, TILES_KEY, TILE_KEY, ONE_KERNEL_KEY)
OWN_META = ("val", "unbacked_bindings", *OWN_KEYS)

# In the meta of nodes of an expansion.
IS_OURS = "cp_inductor_expansion"

# What computes the results of the ops, and is traced.
EXPANSIONS: Mapping[object, Callable[..., Sequence[Tensor]]] = {
    FORWARD: run_forward,
    BACKWARD: run_backward,
}


def lower_attention(
    gm: fx.GraphModule, decompositions: Mapping[Any, Any], *, note_tables: bool
) -> int:
    """Expand every op of the pair, in place and in subgraphs as well; return how many there were.

    Args:
        gm: the graph.
        decompositions: aten op to function, so that the expansion uses the ops of the rest of the
            graph.
        note_tables: insert ops that hand over tables which all ranks must read alike; see
            `agreement`.
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
                traced[key] = _trace(node, decompositions, is_repeated=counts[key] > 1)
                _adopt_subgraphs(traced[key], module.graph)
            _lower(node, traced[key])
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
        query, extras = node.args[0], node.args[3]
        assert isinstance(query, fx.Node) and isinstance(extras, (list, tuple))
        this = attention_of(node)
        assert this is not None
        tables = [extras[place] for place in tables_to_note(this)]
        if not tables:
            continue
        value = query.meta["val"]
        with node.graph.inserting_before(node):
            if token is None:
                token = node.graph.call_function(torch.ops.aten.new_empty.default, (query, [1]))
                with fake_mode_of(value):
                    token.meta["val"] = value.new_empty([1])
            kind, site = kind_of(this, value.dtype), f"attention ({source_line(node)})"
            args = (token, tables, kind, site, this.dropout_p > 0, this.group_name)
            note = node.graph.call_function(NOTE_TABLES, args)
        note.meta = {**_meta_of_site(node), "val": None}


def _lower(node: fx.Node, traced: fx.GraphModule) -> None:
    """Put in place of an op what its function traces to."""
    outputs, copies = insert_graph(traced, _inputs_of(node), before=node)
    for original, copy in copies.items():
        own = {key: original.meta[key] for key in OWN_META if key in original.meta}
        copy.meta = {**_meta_of_site(node), **own, IS_OURS: True}
    for index, user in _used_of(node).items():
        assert user.target is getitem
        user.replace_all_uses_with(outputs[index])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _trace(
    node: fx.Node, decompositions: Mapping[Any, Any], *, is_repeated: bool
) -> fx.GraphModule:
    """Trace the function of an op; if it `is_repeated`, the graph has others that are alike."""
    this, used = attention_of(node), _used_of(node)
    assert this is not None

    def run(*tensors: Tensor) -> list[Tensor | None]:
        # What nobody reads (the lse at inference) is left out, and dies with what computed it.
        results = EXPANSIONS[node.target](this, *tensors)
        return [result if index in used else None for index, result in enumerate(results)]

    values = [arg.meta["val"] for arg in _inputs_of(node)]
    traced = trace_fake(run, values, decompositions)
    if not this.is_per_batch:
        plan = (forward_plan if node.target is FORWARD else backward_plan)(this.recipe)
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
    _drop_whole_views(traced.graph)
    traced.graph.eliminate_dead_code()
    # A template computes all tiles under a mask: such an expansion is long.
    if is_repeated and this.is_per_batch and KERNELS[this.kernel].under_rule.needs_graph:
        share_pieces(traced)
    return traced


def _drop_whole_views(graph: fx.Graph) -> None:
    """Drop aliases, and slices that cut nothing off: decompositions leave them by the dozen."""
    aten = torch.ops.aten
    for node in graph.nodes:
        # All but the tensor and the dim of such a slice are what they are by default.
        is_whole = node.target is aten.slice.Tensor and len(node.args) == 2
        if is_whole or node.target is aten.alias.default:
            node.replace_all_uses_with(node.args[0])


def _key(node: fx.Node) -> Any:
    """Return what a trace depends on."""
    return node.target, attention_of(node), frozenset(_used_of(node)), _layouts(_inputs_of(node))


def _inputs_of(node: fx.Node) -> tuple[fx.Node, ...]:
    # Some are lists: extras, and what the forward kept.
    inputs = pytree.tree_leaves(node.args[: NUM_TENSORS[node.target]])
    assert all(isinstance(arg, fx.Node) for arg in inputs)
    return tuple(inputs)


def _used_of(node: fx.Node) -> dict[int, fx.Node]:
    """Return which results are used, and the nodes that take them: getitem(node, index)."""
    return {cast(int, user.args[1]): user for user in node.users}


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
