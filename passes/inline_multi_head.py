"""Inline the multi-head attention that Dynamo keeps as one call, so that its SDPA can be found.

    out, _ = multi_head_attention_forward(x, x, x, 32, 8, w, b, ...)
      =>
    qkv = aten::linear(x, w, b)
    ...
    out = aten::scaled_dot_product_attention(q, k, v, None, 0.0, True)
    ...

nn.MultiheadAttention, and with it nn.TransformerEncoderLayer, reaches a Dynamo graph as this one
function. On DTensors that does no harm: AOTAutograd runs the function, and DTensor's handler sees
the attention inside. On plain tensors, which are shards only because the user says so, it would
attend within the shard.

Assumes: a graph from Dynamo with `example_value`s; called only where plain tensors are shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cp_inductor.errors import UnsupportedAttention
from cp_inductor.graph.nodes import source_line
from cp_inductor.region.marks import is_left_alone
from cp_inductor.torch_private.tracing import trace_pre_dispatch


def inline_multi_head(graphs: Iterable[fx.Graph]) -> None:
    """Replace every call of F.multi_head_attention_forward on plain tensors by its body.

    Args:
        graphs: the graphs of a Dynamo graph module, or below it, in which plain tensors are shards.

    Raises:
        UnsupportedAttention: the call returns attention weights, for which it uses no SDPA.
    """
    calls = [
        node
        for graph in graphs
        for node in graph.nodes
        if node.target is F.multi_head_attention_forward
        and not _is_distributed(node)
        and not is_left_alone(node)
    ]
    for node in calls:
        _check_no_weights(node)
    for node in calls:
        _inline(node)


def _is_distributed(node: fx.Node) -> bool:
    return any(isinstance(arg.meta["example_value"], DTensor) for arg in node.all_input_nodes)


def _check_no_weights(node: fx.Node) -> None:
    if node.kwargs.get("need_weights", True):
        raise UnsupportedAttention(
            site=f"{node.name} ({source_line(node)})",
            expected="need_weights=False",
            got="need_weights=True, which uses no attention kernel",
            remedy="pass need_weights=False to nn.MultiheadAttention",
        )


def _inline(node: fx.Node) -> None:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def run(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec
        )
        return F.multi_head_attention_forward(*args, **kwargs)[0]

    traced = trace_pre_dispatch(run, [leaf.meta["example_value"] for leaf in inputs])
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with node.graph.inserting_before(node):
        out = cast(fx.Node, node.graph.graph_copy(traced.graph, copies))
    for original, copy in copies.items():
        if original.op != "placeholder":
            copy.meta = {**node.meta, "example_value": original.meta.get("val")}
    for user in list(node.users):
        # The result is (out, None). Dynamo knows the None for what it is and takes the out alone.
        assert user.args[1] == 0
        user.replace_all_uses_with(out)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
