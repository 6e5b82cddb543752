"""Inline the multi-head attention that Dynamo keeps as one call, so that its SDPA can be found.

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

Assumes: a graph from Dynamo with `example_value`s.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cp_inductor.errors import UnsupportedAttention
from cp_inductor.graph.nodes import name_of
from cp_inductor.passes.attentions import calls_to
from cp_inductor.passes.insert_call import insert_graph
from cp_inductor.region.marks import regions_of
from cp_inductor.torch_private.tracing import trace_pre_dispatch


def inline_multi_head(gm: fx.GraphModule, *, has_axis: bool) -> None:
    """Replace calls of F.multi_head_attention_forward on DTensors and on shards by its body.

    Args:
        gm: from Dynamo.
        has_axis: whether a user named the mesh axis on which plain tensors are shards.

    Raises:
        UnsupportedAttention: a call on shards returns attention weights, for which it uses no SDPA.
    """
    wanted, regions = [], regions_of(gm)
    for node in calls_to(gm, {F.multi_head_attention_forward}):
        needs_weights = node.kwargs.get("need_weights", True)
        if any(isinstance(arg.meta["example_value"], DTensor) for arg in node.all_input_nodes):
            wanted += [] if needs_weights else [node]
        elif has_axis or node.graph in regions:
            if needs_weights:
                raise UnsupportedAttention(
                    site=name_of(node),
                    expected="need_weights=False",
                    got="need_weights=True, which uses no attention kernel",
                    remedy="pass need_weights=False to nn.MultiheadAttention",
                )
            wanted.append(node)
    for node in wanted:
        _inline(node)


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
    out, copies = insert_graph(traced, inputs, before=node)
    for original, copy in copies.items():
        copy.meta = {**node.meta, "example_value": original.meta.get("val")}
    for user in list(node.users):
        # The result is (out, None). Dynamo knows the None for what it is and takes the out alone.
        assert user.args[1] == 0
        user.replace_all_uses_with(out)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
