"""Replace the attentions that were found by one op, which stands for a whole plan.

    out = scaled_dot_product_attention(q, k, v, is_causal=True)
      =>
    q_local, k_local, v_local = q.to_local(), k.to_local(), v.to_local()
    out_local, lse = cp_inductor::attention(q_local, k_local, v_local, recipe, None, kernel, group)
    out = from_local_like(out_local, q)

flex_attention becomes the same op, and its lse the second result, which flex_attention returns as a
logarithm to base 2.

Plain tensors, under a mesh that the user named, are local already. If a region, or torch's own
style, wrapped shards for the attention only, the from_local before it and the to_local after it are
removed. Casts by which autocast would have changed the inputs of SDPA are inserted.

If the graph writes in place to a tensor that the backward reads, the op gets a copy. The op saves
the local tensor, and autograd does not know that a write to the DTensor is a write to it.

Before that, the tensors of BlockMasks are dropped, which say what the rules of the attentions say.
A BlockMask of a whole sequence is as large as the number of its blocks squared, and a model that
makes one computes a mask of all pairs first:

    kv_num_blocks = create_block_mask's ...                  erased, if nothing else reads it
    flex_attention(q, k, v, score_mod, (256, 256, kv_num_blocks, ..., mask_mod), ...)
      =>
    flex_attention(q, k, v, score_mod, (mask_mod,), ...)     cannot run, and will be captured

Assumes: a graph from Dynamo, before AOTAutograd; sites of this graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import getitem, mul, setitem
from typing import Any, cast

import torch
from sympy import Expr
from torch import SymInt, fx
from torch.distributed.tensor import DTensor

from cp_inductor.batches.plans import Known, remember
from cp_inductor.dtensor.axis import from_local_like, local_part, roles_of, seed_of_shard
from cp_inductor.dtensor.recipe import whole_lengths
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.graph.derive_tables import derive_tables
from cp_inductor.graph.nodes import graphs_of, place_of, recompile_all
from cp_inductor.graph.subgraphs import Calls, bodies_of, bring_in, calls_of, drop_unused_inputs
from cp_inductor.mask.reader.writes import Writes, is_in_place
from cp_inductor.ops.attention import FORWARD, attention_of
from cp_inductor.ops.plan_batch import PLAN_BATCH, remember_mask
from cp_inductor.passes.attentions import Site
from cp_inductor.passes.nodes import insert_call
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.region.flex_bias import bias_of_scores, reads_batch_and_head
from cp_inductor.region.flex_calls import LSE, OUT, SCORE_MOD, bind_flex, has_natural_lse
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.kernel_table import KERNELS
from cp_inductor.torch_private.sizes import Multiple, is_number, size_hint
from cp_inductor.torch_private.tracing import ADD_BATCH_DIM
from cp_inductor.trust.claims import Planned

# The place of the BlockMask among the arguments of flex_attention.
BLOCK_MASK = 4


def drop_block_masks(gm: fx.GraphModule, sites: Sequence[Site]) -> None:
    """Drop the BlockMasks of the sites that are flex_attention; idempotent."""
    calls = calls_of(gm)
    for node in (site.node for site in sites if site.is_flex):
        before, block_mask = node.all_input_nodes, cast("Any", node.args[BLOCK_MASK])
        node.update_arg(BLOCK_MASK, block_mask[-1:])
        dropped = [source for source in before if source not in node.all_input_nodes]
        _erase_unread(node.graph, dropped, _only_computes, calls)
    recompile_all(gm)


def capture_attention(gm: fx.GraphModule, sites: Sequence[Site]) -> None:
    """Rewrite every site in place."""
    calls = calls_of(gm)
    writes = Writes(gm.graph)
    # The nodes whose local tensors the op saves for its backward, if they are DTensors.
    written = {
        node
        for site in sites
        if site.is_distributed
        for node in (site.query, site.key, site.value, *_results(site), *site.mask.tables)
        if writes.has(node)
    }
    captured: dict[fx.Node, fx.Node] = {}
    for site in sites:
        # What another attention made is made anew by the time.
        query, key, value = (captured.get(n, n) for n in (site.query, site.key, site.value))
        was_written = written | {captured[node] for node in written if node in captured}
        site = replace(site, query=query, key=key, value=value)
        captured |= _capture(site, calls, was_written)
    for graph in graphs_of(gm):
        graph.lint()
    recompile_all(gm)


def _results(site: Site) -> list[fx.Node]:
    """Return the nodes that are the results of a site, one tensor each."""
    return [taken for taken in site.node.users if taken.users] if site.is_flex else [site.node]


def _capture(site: Site, calls: Calls, written: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Rewrite a site; return what replaces its results. The graph writes to what is `written`."""
    graph = site.node.graph
    with graph.inserting_before(site.node):
        sides = (site.query, site.key, site.value)
        local = [_copied(site, _to_local(site, node), node in written) for node in sides]
        extras = _extras(site, local[0], calls, written)
        if site.attention.is_per_batch:
            extras += _plan_of_batch(site, local[0], extras)
        result = insert_call(site.node, FORWARD, *local, extras, *site.attention.arguments)
        replaced = {old: _replace(site, old, result, old in written) for old in _results(site)}
    sources = site.node.all_input_nodes
    for old in [*(site.node.users if site.is_flex else ()), site.node]:
        graph.erase_node(old)

    def is_of_attention(node: fx.Node) -> bool:
        is_known = node in site.mask.computed_by or node.target is DTensor.from_local
        return is_known or (site.is_flex and node.op == "get_attr")

    _erase_unread(graph, sources, is_of_attention, calls)
    return replaced


def _replace(site: Site, old: fx.Node, result: fx.Node, is_written: bool) -> fx.Node:
    """Replace a result of a site by that of the op; return what replaces it."""
    place = old.args[1] if site.is_flex else OUT
    local = insert_call(site.node, getitem, result, place)
    if place == LSE and not has_natural_lse(site.node):
        local = insert_call(site.node, mul, local, 1 / math.log(2))
    local = _copied(site, local, is_written)
    # What a region (`nested_compile_region`) returns has gradients if this says so.
    before = old.meta["example_value"]
    local.meta["example_value"].requires_grad_(before.requires_grad)
    local_users = []
    if site.is_distributed and before.placements == site.query.meta["example_value"].placements:
        to_local: Any = ("call_method", "to_local", (old,), {})
        local_users = [u for u in old.users if (u.op, u.target, u.args, u.kwargs) == to_local]
    for user in local_users:
        user.replace_all_uses_with(local)
        old.graph.erase_node(user)
    if site.is_distributed and (old.users or not local_users):
        local = insert_call(site.node, from_local_like, local, site.query)
        # Later code relies on the placements before.
        if before.placements != local.meta["example_value"].placements:
            wanted = before.device_mesh, list(before.placements)
            local = insert_call(site.node, "redistribute", local, *wanted)
    old.replace_all_uses_with(local)
    return local


def _copied(site: Site, node: fx.Node, is_written: bool) -> fx.Node:
    return insert_call(site.node, "clone", node) if is_written else node


def _extras(site: Site, query: fx.Node, calls: Calls, written: set[fx.Node]) -> list[fx.Node]:
    """Insert the tensors that the mask reads, and the seed of dropout."""
    mask, extras = site.mask, []
    for place, (table, indices) in enumerate(zip(mask.tables, mask.indices, strict=True)):
        node = bring_in(table, site.node.graph, calls)
        if mask.has_bias and not mask.is_bias_made and place == len(mask.tables) - 1:
            node = _expanded(site, node, indices)
        if site.is_distributed:
            part = insert_call(site.node, local_part, node, site.query, roles_of(indices))
            node = _copied(site, part, table in written)
        extras.append(node)
    if mask.is_bias_made:
        extras.append(_made_bias(site, query))
    if site.attention.dropout_p:
        device = query.meta["example_value"].device
        seed = insert_call(site.node, torch.randint, 0, 1 << 31, (), device=device)
        if site.is_distributed:
            seed = insert_call(site.node, seed_of_shard, seed, _placed(site.query))
        extras.append(seed)
    return extras


def _plan_of_batch(site: Site, query: fx.Node, extras: Sequence[fx.Node]) -> list[fx.Node]:
    """Insert the plan of a batch: its sizes and its numbers."""
    batch, num_heads, *_ = query.meta["example_value"].shape
    values = [node.meta["example_value"] for node in (site.query, site.key)]
    num_kv_heads = held_by_rank(values[1]).shape[1]
    here = site.plan_options, site.axis, *values
    lengths = whole_lengths(*here, site=site.name, is_dynamic=True)
    mask = site.of_lengths
    args = (
        list(extras),
        site.attention.source.rule,
        insert_call(site.node, "size", query, 0) if isinstance(batch, SymInt) else batch,
        *(_length(site, node, n) for node, n in zip((site.query, site.key), lengths, strict=True)),
        num_heads,
        num_kv_heads,
        site.attention.source.stages,
        query.meta["example_value"].device,
        site.attention.group_name,
        "" if mask is None else mask.name,
        site.attention.nodes,
    )
    if mask is not None:
        hints = [size_hint(value.shape[SEQUENCE_DIM]) for value in values]
        remember_mask(mask.name, site.name, mask.holds, (hints[0], hints[1]))
    plan = insert_call(site.node, PLAN_BATCH, *args)
    _remember(site, args)
    return [insert_call(site.node, getitem, plan, place) for place in (0, 1)]


def _remember(site: Site, args: Sequence[Any]) -> None:
    """Remember for `prepared` how the tables of a mask follow from the inputs."""
    shapes = [node.meta["example_value"].shape for node in args[0]]
    derived = derive_tables(site.mask.tables, shapes)
    if derived is None:
        return
    values = _values_of(args[2:7])
    sizes: Any = [int(size) if is_number(size) else Multiple.of(size) for size in values]
    known = {n.symbol for shape, _ in derived.like for n in shape if isinstance(n, Multiple)}
    if all(isinstance(size, int) or getattr(size, "symbol", None) in known for size in sizes):
        attention = site.attention
        source, is_copied = attention.source, KERNELS[attention.kernel].device != "cpu"
        plan = (source.rule, tuple(sizes[:3]), (sizes[3], sizes[4]), source.stages, attention.nodes)
        remember(Known(derived, *plan, attention.group_name, is_copied))


def _length(site: Site, side: fx.Node, length: int | SymInt) -> fx.Node | int:
    """Return the length of a whole sequence, as the graph computes it if it is dynamic."""
    if not isinstance(length, SymInt):
        return length
    size = insert_call(site.node, "size", side, SEQUENCE_DIM)
    return size if site.is_distributed else insert_call(site.node, mul, size, site.axis.world_size)


def _made_bias(site: Site, query: fx.Node) -> fx.Node:
    """Insert what the score_mod of flex_attention adds to the scores of this rank's queries."""
    call, recipe = bind_flex(site.node, site.name), site.attention.recipe
    before = sum(shard_lengths(recipe.query_length, recipe.world_size)[: site.axis.rank])
    where = (before, recipe.grid.key_length, *reads_batch_and_head(call.score_mod))
    args = (site.node.args[SCORE_MOD], query, _placed(site.query), *where, *call.of_score_mod)
    return insert_call(site.node, bias_of_scores, *args)


def _expanded(site: Site, bias: fx.Node, indices: Sequence[Expr]) -> fx.Node:
    """Expand a bias to all queries and keys, so that every rank has the gradient of its own part.

    If other mesh axes may shard batch or heads, expand these dims as well.
    """
    query, key = (node.meta["example_value"] for node in (site.query, site.key))
    sizes = [query.shape[0], query.shape[1], query.shape[2], key.shape[2]]
    if query.device_mesh.ndim == 1:
        sizes = [1 if i.is_Integer else size for i, size in zip(indices, sizes, strict=True)]
    if list(bias.meta["example_value"].shape) == sizes:
        return bias
    return insert_call(site.node, "expand", bias, *sizes)


def _erase_unread(
    graph: fx.Graph, nodes: Sequence[fx.Node], may_erase: Callable[[fx.Node], bool], calls: Calls
) -> None:
    """Erase nodes, and what they are computed of, if nothing else reads it, also outside of bodies.

    The BlockMask of all layers is an input of a checkpointed one.
    """
    erasable: dict[fx.Node, None] = {}
    # Nothing depends on an index that a mask_mod does not read.
    stack = [*nodes, *graph.find_nodes(op="call_function", target=ADD_BATCH_DIM)]
    while stack:
        node = stack.pop()
        if node not in erasable and may_erase(node):
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
    if graph in calls:
        outside = drop_unused_inputs(graph, calls)
        _erase_unread(calls[graph].graph, outside, may_erase, calls)


def _only_computes(node: fx.Node) -> bool:
    if node.target is setitem:
        target = node.args[0]
        return isinstance(target, fx.Node) and target.target in ("new_zeros", torch.zeros)
    if node.op not in ("call_function", "call_method") or is_in_place(node):
        return False
    is_body = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.op == "call_method" or not (is_body or node.is_impure())


def _to_local(site: Site, node: fx.Node) -> fx.Node:
    if isinstance(node.meta["example_value"], DTensor):
        wrapped = _wrapped(node)
        node = insert_call(site.node, "to_local", node) if wrapped is None else wrapped
    if node.meta["example_value"].dtype != site.dtype:
        node = insert_call(site.node, "to", node, site.dtype)
    return node


def _wrapped(node: fx.Node) -> fx.Node | None:
    """Return the local tensor that a DTensor merely wraps; None if it does more."""
    is_wrapped = node.target is DTensor.from_local and "grad_placements" not in node.kwargs
    return cast(fx.Node, node.args[0]) if is_wrapped else None


def _placed(node: fx.Node) -> fx.Node:
    """Return the DTensor that knows which batch entries and heads a query has.

    A query that was unwrapped, and wrapped again for the attention only, knows just its sequence.
    """
    local = _wrapped(node)
    if local is None or (local.op, local.target) != ("call_method", "to_local"):
        return node
    (tensor,) = local.all_input_nodes
    return tensor


def list_attentions(gm: fx.GraphModule) -> list[Planned]:
    """Return the attentions that were captured in a graph, in execution order."""
    planned: list[Planned] = []
    for node in gm.graph.nodes:
        for body in bodies_of(node, gm):
            planned += list_attentions(body)
        attention = attention_of(node)
        if attention is None:
            continue
        query, key = (node.args[place].meta["example_value"] for place in (0, 1))
        lengths = (query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
        sizes, heads = (query.shape[0], *lengths), tuple[int, ...]()
        if attention.is_per_batch:
            *_, numbers = node.args[3]
            sizes = (*_values_of(numbers.args[0].args[2:5]), *lengths)
            heads = (query.shape[1], key.shape[1], query.shape[3])
        site = f"attention ({place_of(node)})"
        planned.append(Planned(attention, query.dtype, sizes, site, heads))
    return planned


def _values_of(arguments: Sequence[Any]) -> list[Any]:
    return [arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in arguments]
