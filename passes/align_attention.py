"""Write attentions over a sharded sequence as they are found and planned. What they are, stays.

    out, _ = multi_head_attention_forward(x, x, x, 32, 8, w, b, ...)
      =>                                                                inline_multi_head
    qkv = aten::linear(x, w, b)
    ...
    out = aten::scaled_dot_product_attention(q, k, v, None, 0.0, True)
    ...

nn.MultiheadAttention, and with it nn.TransformerEncoderLayer, reaches a Dynamo graph as this one
function. Plain shards would attend within themselves, and DTensor's handler would take a mask for a
tensor. A call on DTensors that returns attention weights stays: DTensor computes its products.

    out, lse, _ = torch_attn::_varlen_attn(q, k, v, cu, cu, ..., window_size=[-1, 0])   q (T, H, D)
      =>                                                                inline_varlen
    docs = document_numbers(cu, T)
    out, lse, _ = flex_attention(q (1, H, T, D), k, v, score_mod, (mask_mod,), ..., (docs, docs))
        mask_mod:   (docs[q] == docs[k]) & (q >= k)
    out (T, H, D), lse (H, T)

torch has kernels of varlen_attn for CUDA alone, whose lse has no gradient; flex_attention has both.

    k, v = k[:, :, None].expand(B, G, n, S, D).reshape(B, G * n, S, D), ...
    out = scaled_dot_product_attention(q, k, v)
      =>                                                                align_attention
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True)        n times fewer bytes travel

    out = scaled_dot_product_attention(q, k, v)       q: [Shard(2)], k: [Replicate], v: head dim 128
      =>                                              of 192
    k = k.redistribute(mesh, [Shard(2)])
    v = pad(v, (0, 64))
    out = scaled_dot_product_attention(q, k, v, scale=1 / sqrt(192))
    out = out[..., :128]

What every rank has whole is sliced, which moves nothing; its gradient is gathered. Zeros behind a
value give zeros behind the output; zeros behind query and key change no score, if the scale stays.

Assumes: a graph from Dynamo with `example_value`s. Attentions over no sharded sequence stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from operator import getitem
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Shard

from cp_inductor.dtensor.axis import SequenceAxis, axis_and_placements, is_sequence_sharded
from cp_inductor.dtensor.packed import document_numbers
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import CPError, UnsupportedAttention
from cp_inductor.graph.nodes import call_target, name_of
from cp_inductor.passes.attentions import CAPTURED, SDPA_OP, calls_to
from cp_inductor.passes.nodes import free_name, insert_call, insert_graph, replace_results
from cp_inductor.region.flex_calls import LSE, OF_VARLEN, OUT
from cp_inductor.region.marks import FLEX, regions_of
from cp_inductor.region.modes import VARLEN_OPS, WORDS_OF_WEIGHTS
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import varlen_op
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.torch_private.tracing import fake_mode_of, trace_pre_dispatch

SIDES = ("query", "key", "value")
TOKENS = 0
# Arguments that change numbers, and how many parts a kernel splits keys into; others are refused.
READ = (
    *(*SIDES, "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale"),
    *("window_size", "enable_gqa", "num_splits"),
)


def inline_multi_head(gm: fx.GraphModule, axis: SequenceAxis | None) -> None:
    """Replace calls of F.multi_head_attention_forward on DTensors and on shards by its body.

    Plain tensors are shards on the axis that a user named, if any. Refused is a call on shards that
    returns attention weights, for which it uses no SDPA.
    """
    wanted, regions = [], regions_of(gm)
    for node in calls_to(gm, {F.multi_head_attention_forward}):
        values = [source.meta["example_value"] for source in node.all_input_nodes]
        is_distributed = any(isinstance(value, DTensor) for value in values)
        is_of_shards = not is_distributed and (axis is not None or node.graph in regions)
        if not node.kwargs.get("need_weights", True):
            wanted += [node] if is_distributed or is_of_shards else []
        elif is_of_shards:
            raise UnsupportedAttention(site=name_of(node), **WORDS_OF_WEIGHTS)
    for node in wanted:
        _inline_multi_head(node)


def _inline_multi_head(node: fx.Node) -> None:
    inputs = node.all_input_nodes

    def run(*tensors: Tensor) -> Tensor:
        value_of = dict(zip(inputs, tensors, strict=True)).__getitem__
        arguments: Any = fx.map_arg((node.args, node.kwargs), value_of)
        return call_target(node, *arguments)[0]

    traced = trace_pre_dispatch(run, [source.meta["example_value"] for source in inputs])
    out, copies = insert_graph(traced, inputs, before=node)
    for original, copy in copies.items():
        copy.meta = {**node.meta, "example_value": original.meta.get("val")}
    # The result is (out, None). Dynamo knows the None for what it is and takes the out alone.
    replace_results(node, (out,).__getitem__)


def inline_varlen(gm: fx.GraphModule) -> None:
    """Rewrite every call whose tokens are sharded, in a Dynamo graph and below it; idempotent.

    Refused is what is no rule of positions.
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
            for name in SIDES
        ]
        query, key = (side.meta["example_value"] for side in sides[:2])
        starts = call["cu_seq_q"]
        docs_q = insert_call(node, document_numbers, starts, query.shape[2])
        other = starts if call["cu_seq_k"] is None else call["cu_seq_k"]
        is_same = other is starts and query.shape[2] == key.shape[2]
        docs_k = docs_q if is_same else insert_call(node, document_numbers, other, key.shape[2])
        scale = call["scale"]
        scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
        score_mod = _body(node, lambda score, b, h, q, k: score)
        mask_mod = _body(node, _mask_mod(*_window(call)))
        args = (*sides, score_mod, (mask_mod,), scale, OF_VARLEN, (), (docs_q, docs_k))
        flex = node.graph.call_function(FLEX, args)
        statistic = query[..., 0].to(torch.promote_types(query.dtype, torch.float32))
        flex.meta = {**node.meta, "example_value": (query, statistic, statistic)}
        replace_results(node, partial(_result, node, flex))


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


def align_attention(gm: fx.GraphModule, axis: SequenceAxis | None) -> None:
    """Align every attention of a Dynamo graph, in place. Plain tensors are as above."""
    for node in calls_to(gm, CAPTURED):
        is_flex = node.target is FLEX
        call: dict[str, Any] = dict(zip(SIDES, node.args, strict=False))
        call = call if is_flex else bind_arguments(SDPA_OP, node.args, node.kwargs)
        if not all(isinstance(call[side], fx.Node) for side in SIDES):
            continue
        values = [_value(call[side]) for side in SIDES]
        if any(value.ndim != 4 for value in values):
            continue
        if axis is None and not any(map(is_sequence_sharded, values)):
            continue
        if not is_flex:
            _align_heads(node, call)
        _align_placements(node, call)
        if not is_flex:
            _align_head_dims(node, call)
    gm.recompile()


def _align_heads(node: fx.Node, call: dict[str, Any]) -> None:
    """Take keys and values as they were before each head was repeated for its group of queries."""
    key, value = (_before_repeated(call[side]) for side in ("key", "value"))
    if key is None or value is None or call["enable_gqa"]:
        return
    if _value(key).shape[1] == _value(value).shape[1]:
        call |= {"key": key, "value": value, "enable_gqa": True}
        _rewrite(node, call)


def _before_repeated(node: fx.Node) -> fx.Node | None:
    """Return (B, G, S, D) of which a node is (B, G n, S, D), each head n times in a row, or None.

    That is how models of transformers write it: a new dim, which is expanded, and joined with G.
    """
    if not _is_call(node, "reshape", torch.reshape):
        return None
    expanded = node.args[0]
    if not _is_call(expanded, "expand"):
        return None
    inserted = expanded.args[0]
    whole = (slice(None),) * 2
    is_inserted = _is_call(inserted, "unsqueeze", torch.unsqueeze) and inserted.args[1:] == (2,)
    if _is_call(inserted, None, getitem):
        is_inserted = inserted.args[1] in [(*whole, None, *whole[:rest]) for rest in range(3)]
    if not is_inserted:
        return None
    source = inserted.args[0]
    sizes = [[size_expression(size) for size in _value(t).shape] for t in (source, expanded)]
    batch, heads, *others = sizes[0]
    is_repeated = len(sizes[1]) == 5 and sizes[1] == [batch, heads, sizes[1][2], *others]
    joined = [batch, heads * sizes[1][2], *others]
    is_joined = [size_expression(size) for size in _value(node).shape] == joined
    # What was written to the one may not have reached the other.
    is_written = _value(source)._version > 0 or _value(node)._version > 0
    return source if is_repeated and is_joined and not is_written else None


def _is_call(node: object, method: str | None, *functions: object) -> TypeGuard[Any]:
    return isinstance(node, fx.Node) and (
        (node.op == "call_method" and node.target == method)
        or (node.op == "call_function" and node.target in functions)
    )


def _align_placements(node: fx.Node, call: dict[str, Any]) -> None:
    """Place query, key and value alike; what cannot be, `find_attention` refuses."""
    try:
        _, placements = axis_and_placements(*(_value(call[side]) for side in SIDES), site="")
    except CPError:
        return
    for side in SIDES if placements else ():
        value, mesh = _value(call[side]), _value(call[side]).device_mesh
        if value.placements != placements:
            with node.graph.inserting_before(node):
                call[side] = insert_call(node, "redistribute", call[side], mesh, placements)
            _rewrite(node, call)


def _align_head_dims(node: fx.Node, call: dict[str, Any]) -> None:
    head_dim, of_key, of_value = (_value(call[side]).shape[-1] for side in SIDES)
    # SDPA itself refuses other key dims, and dynamic ones are left to the check of kernels.
    if of_key != head_dim or of_value == head_dim or not isinstance(of_value, int):
        return
    widest = max(head_dim, of_value)
    for side in SIDES:
        missing = widest - _value(call[side]).shape[-1]
        if missing:
            with node.graph.inserting_before(node):
                call[side] = insert_call(node, F.pad, call[side], [0, missing])
    if call["scale"] is None:
        call["scale"] = 1 / sqrt(head_dim)
    out = _value(node)
    _rewrite(node, call)
    if of_value == widest:
        return
    users = list(node.users)
    with node.graph.inserting_after(node):
        part = node.graph.call_function(torch.narrow, (node, -1, 0, of_value))
    part.meta = {**node.meta, "example_value": out}
    with torch.no_grad(), fake_mode_of(held_by_rank(out)):
        node.meta["example_value"] = F.pad(out, [0, widest - of_value])
    for user in users:
        user.replace_input_with(node, part)


def _rewrite(node: fx.Node, call: dict[str, Any]) -> None:
    sides = tuple(call[side] for side in SIDES)
    if node.target is FLEX:
        node.args = sides + node.args[len(SIDES) :]
        return
    node.args = sides
    node.kwargs = {name: value for name, value in call.items() if name not in SIDES}


def _value(node: fx.Node) -> Any:
    return node.meta["example_value"]
