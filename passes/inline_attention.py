"""Inline the attentions that Dynamo keeps as one call of another function, so that they are found.

    out, _ = multi_head_attention_forward(x, x, x, 32, 8, w, b, ...)
      =>
    qkv = aten::linear(x, w, b)
    ...
    out = aten::scaled_dot_product_attention(q, k, v, None, 0.0, True)
    ...

nn.MultiheadAttention, and with it nn.TransformerEncoderLayer, reaches a Dynamo graph as this one
function. On plain tensors, which are shards only because the user says so, it would attend within
the shard. On DTensors, DTensor's handler would compute the attention inside, but take a mask for a
tensor, instead of reading which pairs exist. A call on DTensors that returns attention weights uses
no SDPA, and stays: DTensor computes its products.

    out, lse, _ = torch_attn::_varlen_attn(q, k, v, cu, cu, ..., window_size=[-1, 0])   q (T, H, D)
      =>
    docs = document_numbers(cu, T)
    out, lse, _ = flex_attention(q (1, H, T, D), k, v, score_mod, (mask_mod,), ..., (docs, docs))
        mask_mod:   (docs[q] == docs[k]) & (q >= k)
    out (T, H, D), lse (H, T)

torch has kernels of varlen_attn for CUDA alone; what it becomes here has them everywhere. Its lse
has a gradient, which torch does not give. Calls whose tokens are not sharded, as DTensors, are left
alone.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from cp_inductor.dtensor.packed import document_numbers
from cp_inductor.errors import UnsupportedAttention
from cp_inductor.graph.nodes import name_of
from cp_inductor.passes.attentions import calls_to
from cp_inductor.passes.nodes import free_name, insert_call, insert_graph
from cp_inductor.region.flex_calls import FLEX, LSE, OF_VARLEN, OUT
from cp_inductor.region.marks import regions_of
from cp_inductor.region.modes import VARLEN_OPS
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import varlen_op
from cp_inductor.torch_private.tracing import trace_pre_dispatch

TOKENS = 0
# Arguments that change numbers, and how many parts a kernel splits keys into; others are refused.
READ = (
    *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale"),
    *("window_size", "enable_gqa", "num_splits"),
)


def inline_multi_head(gm: fx.GraphModule, *, has_axis: bool) -> None:
    """Replace calls of F.multi_head_attention_forward on DTensors and on shards by its body.

    If it `has_axis`, a user named the mesh axis on which plain tensors are shards.

    Raises:
        UnsupportedAttention: a call on shards returns attention weights, for which it uses no SDPA.
    """
    wanted, regions = [], regions_of(gm)
    for node in calls_to(gm, {F.multi_head_attention_forward}):
        values = [source.meta["example_value"] for source in node.all_input_nodes]
        is_distributed = any(isinstance(value, DTensor) for value in values)
        is_of_shards = not is_distributed and (has_axis or node.graph in regions)
        if not node.kwargs.get("need_weights", True):
            wanted += [node] if is_distributed or is_of_shards else []
        elif is_of_shards:
            raise UnsupportedAttention(
                site=name_of(node),
                expected="need_weights=False",
                got="need_weights=True, which uses no attention kernel",
                remedy="pass need_weights=False to nn.MultiheadAttention",
            )
    for node in wanted:
        _inline_multi_head(node)


def _inline_multi_head(node: fx.Node) -> None:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def run(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec
        )
        return F.multi_head_attention_forward(*args, **kwargs)[0]

    traced = trace_pre_dispatch(run, [leaf.meta["example_value"] for leaf in inputs])
    out, copies = insert_graph(traced, inputs, before=node)
    for original, copy in copies.items():
        copy.meta = {**node.meta, "example_value": original.meta.get("val")}
    for user in list(node.users):
        # The result is (out, None). Dynamo knows the None for what it is and takes the out alone.
        assert user.args[1] == 0
        user.replace_all_uses_with(out)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def inline_varlen(gm: fx.GraphModule) -> None:
    """Rewrite every call whose tokens are sharded, in a Dynamo graph and below it; idempotent.

    Raises:
        UnsupportedAttention: something is asked for that is no rule of positions.
    """
    calls = {}
    for node in calls_to(gm, VARLEN_OPS):
        call = bind_arguments(varlen_op(), node.args, node.kwargs)
        value = call["query"].meta["example_value"]
        placements = value.placements if isinstance(value, DTensor) else ()
        if any(isinstance(p, Shard) and p.dim == TOKENS for p in placements):
            _check_varlen(node, call)
            calls[node] = call
    for node, call in calls.items():
        _inline_varlen(node, call)


def _check_varlen(node: fx.Node, call: dict[str, Any]) -> None:
    site = name_of(node)
    defaults = bind_arguments(varlen_op(), (), {})
    for name in sorted(call.keys() - READ):
        if call[name] is not defaults[name]:
            raise UnsupportedAttention(
                site=site,
                expected=f"{name}={defaults[name]}, over documents that are packed whole",
                got=f"a {name}, as for a cache of keys and values",
                remedy="pass the keys of all documents, and cu_seq_k",
            )
    is_same = call["cu_seq_k"] is None or call["cu_seq_k"] is call["cu_seq_q"]
    if not is_same and _window(call) != (-1, -1):
        raise UnsupportedAttention(
            site=site,
            expected="one tensor as cu_seq_q and cu_seq_k, or window_size=(-1, -1)",
            got=f"two tensors and window_size={_window(call)}",
            remedy="pass the same tensor twice if queries and keys are packed alike",
        )


def _window(call: dict[str, Any]) -> tuple[int, int]:
    left, right = call["window_size"] or (-1, -1)
    return (left, 0) if call["is_causal"] else (left, right)


def _inline_varlen(node: fx.Node, call: dict[str, Any]) -> None:
    with node.graph.inserting_before(node):
        # (T, H, D) => (1, H, T, D)
        sides = [
            insert_call(node, "unsqueeze", insert_call(node, "transpose", call[name], 0, 1), 0)
            for name in ("query", "key", "value")
        ]
        query, key = (side.meta["example_value"] for side in sides[:2])
        starts = call["cu_seq_q"]
        docs_q = insert_call(node, document_numbers, starts, query.shape[2])
        other = starts if call["cu_seq_k"] is None else call["cu_seq_k"]
        is_same = other is starts and query.shape[2] == key.shape[2]
        docs_k = docs_q if is_same else insert_call(node, document_numbers, other, key.shape[2])
        scale = call["scale"]
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        mods = [_body(node, _unchanged), _body(node, _mask_mod(*_window(call)))]
        args = (*sides, mods[0], (mods[1],), scale, OF_VARLEN, (), (docs_q, docs_k))
        flex = node.graph.call_function(FLEX, args)
        statistic = query[..., 0].to(torch.promote_types(query.dtype, torch.float32))
        flex.meta = {**node.meta, "example_value": (query, statistic, statistic)}
        for user in list(node.users):
            if user.users:
                user.replace_all_uses_with(_result(node, flex, user.args[1]))
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _result(node: fx.Node, flex: fx.Node, place: Any) -> fx.Node:
    """Return what takes the place of one of the results of varlen_attn."""
    if place not in (OUT, LSE):
        raise UnsupportedAttention(
            site=name_of(node),
            expected="the output of varlen_attn, and its lse if wanted",
            got="the state of the generator, of which nothing is drawn",
            remedy="call torch.nn.attention.varlen.varlen_attn",
        )
    taken = insert_call(node, "squeeze", insert_call(node, getitem, flex, place), 0)
    return insert_call(node, "transpose", taken, 0, 1) if place == OUT else taken


def _unchanged(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score


def _mask_mod(left: int, right: int) -> Callable[..., Any]:
    """Return the documents' mask_mod; a negative length of the window is none."""

    def allowed(b: Any, h: Any, q: Any, k: Any, docs_q: Any, docs_k: Any) -> Any:
        is_allowed = docs_q[q] == docs_k[k]
        if left >= 0:
            is_allowed = is_allowed & (q - k <= left)
        if right >= 0:
            is_allowed = is_allowed & (k - q <= right)
        return is_allowed

    return allowed


def _body(node: fx.Node, function: Callable[..., Any]) -> fx.Node:
    """Return a node that stands for a function, as a body of the graph."""
    root = node.graph.owning_module
    assert root is not None
    name = free_name(root, "cp_inductor_mod")
    setattr(root, name, fx.symbolic_trace(function))
    return node.graph.get_attr(name)
