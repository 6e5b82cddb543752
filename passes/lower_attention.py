"""Expand the op pair into starts, waits, tiles and sums: this rank's part of the ring.

    out, lse = cp_inductor::attention(q, k, v, ...)                   (rank 1 of 2, causal)
      =>
    kv = stack(k, v)
    arriving = _c10d_functional::all_to_all_single(kv[:0], [2, 0], [0, 0], group)
    out_0, lse_0 = aten::_scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    kv_0 = _c10d_functional::wait_tensor(arriving)
    out_1, lse_1 = aten::_scaled_dot_product_flash_attention(q, kv_0[0], kv_0[1])
    out, lse = combine((out_0, lse_0), (out_1, lse_1))

The expansion is not written here: it is the trace of `ring_forward` and `ring_backward` on fakes,
the functions that the op's eager kernel runs.

Assumes: a forward, backward or inference graph from AOTAutograd, whose nodes carry `val`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx

from cp_inductor.ring import Ring, ring_backward, ring_forward
from cp_inductor.torch_private import trace_fake

__all__ = ["START", "WAIT", "lower_attention"]

START = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

RING_FUNCTIONS: Mapping[object, tuple[Callable[..., tuple[Tensor, ...]], int]] = {
    torch.ops.cp_inductor.attention.default: (ring_forward, 3),
    torch.ops.cp_inductor.attention_backward.default: (ring_backward, 6),
}


def lower_attention(gm: fx.GraphModule, *, decompositions: Mapping[Any, Any]) -> int:
    """Expand every op of the pair, in subgraphs too.

    Args:
        gm: changed in place.
        decompositions: aten op to function: the opset that the rest of the graph is in.

    Returns:
        How many were expanded.
    """
    num_lowered = 0
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            nodes = [node for node in module.graph.nodes if node.target in RING_FUNCTIONS]
            for node in nodes:
                _lower(node, decompositions)
            if nodes:
                module.graph.lint()
                module.recompile()
            num_lowered += len(nodes)
    return num_lowered


def _lower(node: fx.Node, decompositions: Mapping[Any, Any]) -> None:
    function, num_tensors = RING_FUNCTIONS[node.target]
    inputs, arguments = node.args[:num_tensors], cast("tuple[Any, ...]", node.args[num_tensors:])
    ring = Ring(*arguments)
    # A tuple's users take its elements: getitem(node, index).
    used = {cast(int, user.args[1]): user for user in node.users}

    def run(*tensors: Tensor) -> list[Tensor | None]:
        # What nobody reads (the lse at inference) is left out, and dies with what computed it.
        results = function(ring, *tensors)
        return [result if index in used else None for index, result in enumerate(results)]

    values = [arg.meta["val"] for arg in inputs if isinstance(arg, fx.Node)]
    assert len(values) == num_tensors
    traced = trace_fake(run, values, decompositions)
    outputs = _inline(traced, node, inputs)
    for index, user in used.items():
        assert user.target is getitem
        user.replace_all_uses_with(outputs[index])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _inline(traced: fx.GraphModule, node: fx.Node, inputs: tuple[Any, ...]) -> list[fx.Node]:
    """Copy a traced graph before `node`; return what stands for its outputs."""
    traced.graph.eliminate_dead_code()
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with node.graph.inserting_before(node):
        outputs = node.graph.graph_copy(traced.graph, copies)
    for original, copy in copies.items():
        if original.op != "placeholder":
            copy.meta = {**_meta_of_site(node), "val": original.meta.get("val")}
    assert isinstance(outputs, (list, tuple))
    return list(outputs)


def _meta_of_site(node: fx.Node) -> dict[str, Any]:
    """What all nodes of a site share: where in the user's model they come from."""
    return {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
