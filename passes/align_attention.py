"""Write attentions over a sharded sequence as plans take them: one head dim, placements alike.

    k, v = k[:, :, None].expand(B, G, n, S, D).reshape(B, G * n, S, D), ...
    out = scaled_dot_product_attention(q, k, v)
      =>
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True)        n times fewer bytes travel

    out = scaled_dot_product_attention(q, k, v)       q: [Shard(2)], k: [Replicate], v: head dim 128
      =>                                              of 192
    k = k.redistribute(mesh, [Shard(2)])
    v = pad(v, (0, 64))
    out = scaled_dot_product_attention(q, k, v, scale=1 / sqrt(192))
    out = out[..., :128]

What every rank has whole is sliced, which moves nothing; its gradient is gathered.
Zeros behind a value give zeros behind the output; zeros behind query and key change no score, if
the scale is that of the head dim before. What changes is how attention is written, not what it is.

Assumes: a graph from Dynamo with `example_value`s. Attentions that are not over a sharded sequence
are left as they are.
"""

from __future__ import annotations

import operator
from math import sqrt
from typing import Any, TypeGuard

import torch
from torch import fx

from cp_inductor.dtensor.axis import attention_placements, is_sequence_sharded
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import CPError
from cp_inductor.passes.attentions import CAPTURED, calls_to
from cp_inductor.passes.nodes import insert_call
from cp_inductor.region.flex_calls import FLEX
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.torch_private.tracing import fake_mode_of

SIDES = ("query", "key", "value")
OP = torch.ops.aten.scaled_dot_product_attention.default


def align_attention(gm: fx.GraphModule, *, has_axis: bool) -> None:
    """Align every attention of a Dynamo graph, in place.

    If it `has_axis`, a user named the mesh axis on which plain tensors are shards.
    """
    for node in calls_to(gm, CAPTURED):
        is_flex = node.target is FLEX
        call: dict[str, Any] = dict(zip(SIDES, node.args, strict=False))
        call = call if is_flex else bind_arguments(OP, node.args, node.kwargs)
        if not all(isinstance(call[side], fx.Node) for side in SIDES):
            continue
        values = [_value(call[side]) for side in SIDES]
        if any(value.ndim != 4 for value in values):
            continue
        if not has_axis and not any(map(is_sequence_sharded, values)):
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
    if _is_call(inserted, None, operator.getitem):
        is_inserted = inserted.args[1] in [(*whole, None, *whole[:rest]) for rest in range(3)]
    if not is_inserted:
        return None
    source = inserted.args[0]
    sizes = [[size_expression(size) for size in _value(one).shape] for one in (source, expanded)]
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
        placements = attention_placements(*(_value(call[side]) for side in SIDES), site="")
    except CPError:
        return
    for side in SIDES if placements is not None else ():
        value = _value(call[side])
        if value.placements != placements:
            with node.graph.inserting_before(node):
                call[side] = insert_call(
                    node, "redistribute", call[side], value.device_mesh, placements
                )
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
                call[side] = insert_call(node, torch.nn.functional.pad, call[side], [0, missing])
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
        node.meta["example_value"] = torch.nn.functional.pad(out, [0, widest - of_value])
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
