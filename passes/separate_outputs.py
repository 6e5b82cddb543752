"""Return DTensors that are parts of other outputs as tensors of their own.

    tokens = layer_norm(...)              DTensor [Shard(1)]
    first = tokens[:, 0]
    return tokens, first                  AOTAutograd makes `first` from `tokens` by as_strided
      =>
    own = first.clone()
    return tokens, own

AOTAutograd returns the base of outputs that share memory, and makes the views of it again outside
of the graph. DTensor has no `as_strided` (torch 2.13 to 2.15), so that call fails. What a user
writes to one of the two in place does not reach the other. In eager code it does not, either, where
DTensor has redistributed the one to make the other.

Assumes: a graph from Dynamo, before AOTAutograd, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.tracing import fake_mode_of


def separate_outputs(gm: fx.GraphModule) -> None:
    """Copy the views among outputs that share memory, in place."""
    (output,) = gm.graph.find_nodes(op="output")
    returned = [node for node in output.all_input_nodes if _is_of_graph(node)]
    shared = Counter(id(_base_of(node.meta["example_value"])) for node in returned)
    views = [node for node in returned if _is_view_of(node.meta["example_value"], shared)]
    with gm.graph.inserting_before(output):
        for node in views:
            value = node.meta["example_value"]
            own = gm.graph.call_method("clone", (node,))
            with fake_mode_of(value.to_local()):
                own.meta["example_value"] = value.clone()
            output.replace_input_with(node, own)
    if views:
        gm.recompile()


def _is_of_graph(node: fx.Node) -> bool:
    return node.op != "placeholder" and isinstance(node.meta.get("example_value"), DTensor)


def _base_of(value: Tensor) -> Tensor:
    return value if value._base is None else value._base


def _is_view_of(value: Tensor, shared: Counter[int]) -> bool:
    return value._base is not None and shared[id(value._base)] > 1
