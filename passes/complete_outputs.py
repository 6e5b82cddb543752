"""Make a captured graph ready for AOTAutograd, and what it returns for its caller.

    policy(ctx, aten::_scaled_dot_product_flash_attention) => MUST_SAVE
      =>                                                                translate_policy
    policy(ctx, cp_inductor::attention)                    => MUST_SAVE

So policies of selective checkpoints, made by `create_selective_checkpoint_contexts`, apply to the
op in place of SDPA's kernels, unless they name `torch.ops.cp_inductor.attention.default` itself.
All results of the op are saved, fetched data as well, so that none of its exchanges is repeated.

    return loss               loss: DTensor () [Partial(sum)]: its item() is the part of this rank
      =>
    whole = loss.redistribute(mesh, [Replicate()])
    return whole

    tokens = layer_norm(...)              DTensor [Shard(1)]
    first = tokens[:, 0]
    return tokens, first                  AOTAutograd makes `first` from `tokens` by as_strided
      =>
    own = first.clone()
    return tokens, own

A sum over sharded tokens is a part on every rank, which torch's `DTensor.item()` returns: every log
of a loss would be wrong. The gradient of every part is that of the whole, so backwards stay as they
are. Tensors with dims keep their placements.

AOTAutograd returns the base of outputs that share memory, and makes the views of it again outside
of the graph. DTensor has no `as_strided` (torch 2.13 to 2.15), so that call fails. What is written
to one of the two in place would not reach the other: `dtensor/rules/writes.py` refuses that.

    def graph(mesh, q, k, v)      =>      def graph(q, k, v)           returns the places 1, 2, 3

Inputs that are neither tensors nor numbers, and that nothing reads, such as the mesh of a region,
are dropped: torch 2.13's partitioner with a memory budget takes it for an object of unknown size.

Assumes: a graph from Dynamo, before AOTAutograd, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import CheckpointPolicy

from cp_inductor.dtensor.rules.partials import is_partial
from cp_inductor.passes.nodes import insert_call
from cp_inductor.torch_private.first_dtensor import FORWARD_OPS

# What shares memory on one process, and does not here: places of outputs, and inputs.
Sharing = list[tuple[list[int], list[fx.Node]]]

# Where Dynamo leaves the `context_fn` of a checkpointed region (torch 2.13 to 2.15).
CONTEXT_FN = "_checkpoint_context_fn"
MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)


def translate_policy(gm: fx.GraphModule) -> None:
    """Translate the policies of all checkpointed regions of a graph; idempotent."""
    for module in gm.modules():
        meta = getattr(module, "meta", {})
        context_fn = meta.get(CONTEXT_FN)
        if context_fn is not None and getattr(context_fn, "func", None) is not _translated:
            meta[CONTEXT_FN] = partial(_translated, context_fn)


def _translated(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the contexts of a checkpointed region, with its policy translated."""
    modes = context_fn()
    for mode in modes:
        if hasattr(mode, "policy_fn"):
            mode.policy_fn = partial(_ask, mode.policy_fn)
    return modes


def _ask(policy: Callable[..., Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    own = policy(context, op, *args, **kwargs)
    if op is not torch.ops.cp_inductor.attention.default or own is True or own in MUST:
        return own
    named = [policy(context, kernel, *args, **kwargs) for kernel in FORWARD_OPS]
    firm = [answer for answer in named if answer is True or answer in MUST]
    saved = [answer for answer in named if answer is CheckpointPolicy.PREFER_SAVE]
    return (*firm, *saved, own)[0]


def complete_outputs(gm: fx.GraphModule) -> Sharing:
    """Sum the parts of scalars, and copy the views among outputs that share memory, in place.

    Returns the outputs and inputs that share memory on one process.
    """
    output, sharing = gm.graph.output_node(), _sharing(gm.graph)
    returned = {
        node: value
        for node in output.all_input_nodes
        if isinstance(value := node.meta.get("example_value"), DTensor)
    }
    calls: dict[fx.Node, tuple[Any, ...]] = {}
    for node, value in returned.items():
        if not value.ndim and value.device_mesh.get_coordinate() is not None and is_partial(value):
            placements = [Replicate()] * value.device_mesh.ndim
            calls[node] = ("redistribute", node, value.device_mesh, placements)
    made = {n: v for n, v in returned.items() if n.op != "placeholder" and n not in calls}
    names = Counter(map(_memory, made.values()))
    for node, value in made.items():
        if value._base is not None and names[_memory(value)] > 1:
            calls[node] = ("clone", node)
    with gm.graph.inserting_before(output):
        for node, (method, *arguments) in calls.items():
            own = insert_call(node, method, *arguments)
            own.meta["example_value"].requires_grad_(returned[node].requires_grad)
            output.replace_input_with(node, own)
    if calls:
        gm.recompile()
    return sharing


def _sharing(graph: fx.Graph) -> Sharing:
    inputs, (returned,) = graph.find_nodes(op="placeholder"), graph.output_node().args
    in_memory: defaultdict[int, list[tuple[int, fx.Node]]] = defaultdict(list)
    for place, node in enumerate([*inputs, *cast("Any", returned)], -len(inputs)):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, DTensor):
            in_memory[_memory(value)].append((place, node))
    return [
        ([place for place, _ in nodes if place >= 0], [node for place, node in nodes if place < 0])
        for nodes in in_memory.values()
        if nodes[-1][0] >= 0 and len({node for _, node in nodes}) > 1
    ]


def _memory(value: DTensor) -> int:
    return id(value if value._base is None else value._base)


def drop_idle_objects(gm: fx.GraphModule) -> tuple[int, ...]:
    """Drop them in place, and return the places of the remaining inputs."""
    kept = []
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if node.users or isinstance(value, (Tensor, int, float, SymInt, SymFloat, SymBool)):
            kept.append(place)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return tuple(kept)
