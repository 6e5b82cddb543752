"""Start fewer collectives: one for several that are equal, and one for the sums of small gradients.

    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]));         plan_batch([view(a)], ...)
    b = all_gather(constant_pad_nd(x, [0, n - (s - n)]));       plan_batch([view(b)], ...)
      =>
    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]));  b = a; plan_batch([view(a)], ...)

The shards of other ranks may need no padding. There AOTAutograd finds the two gathers equal, and
starts one, and so with what is computed of them, up to the plan of a batch, for which ranks meet as
well. The graphs of all ranks have to be alike.

Two outputs may then be waits for one collective, as the gradients of two biases that are added to
one tensor. All but the first are copied, as they would share memory: to scale one would scale both.

    a = wait(all_reduce(da));  b = wait(all_reduce(db))
      =>
    both = wait(all_reduce(cat([da.reshape(-1), db.reshape(-1)])));  a, b = split(both)

A parallelized model reads its weights one by one, so their gradients are summed one by one. A small
sum takes as long as any message. Large ones stay alone: they hide behind the rest of the backward.
Order of these sums, and sizes of weights, are the same on all ranks. Sizes of gradients may not be:
a rank that has `max(0, s - 2 * n)` of s tokens may have them as formulas of s.

Assumes: graphs of AOTAutograd.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx

from cp_inductor.graph.collectives import STARTS, WAIT, is_collective
from cp_inductor.ops.plan_batch import PLAN_BATCH
from cp_inductor.passes.nodes import is_view, merge_equal, walk_back
from cp_inductor.torch_private.tracing import fake_mode_of, memory_of

PAD = torch.ops.aten.constant_pad_nd.default
CLONE = torch.ops.aten.clone.default
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
# A sum of more bytes is not waited for by its latency alone.
MOST_BYTES = 2**20
# What is summed at once: as in torch's DDP.
BUCKET_BYTES = 25 * 2**20


def merge_starts(graph: fx.Graph) -> None:
    """Merge equal collectives, what pads their inputs, their waits, and plans; in place."""
    plans = graph.find_nodes(op="call_function", target=PLAN_BATCH)
    # Besides plans, what they are computed of, and what is taken of them.
    of_plans = {*walk_back(plans), *(user for plan in plans for user in plan.users)}

    def is_merged(node: fx.Node) -> bool:
        if is_collective(node):
            return node.target not in STARTS
        return node.target is PAD or (node in of_plans and _is_pure(node))

    results = graph.output_node().args[0]
    merge_equal(graph, is_merged)
    _copy_shared(graph, results, lambda node: is_collective(node) or is_merged(node))


def _copy_shared(graph: fx.Graph, before: Any, is_shared: Callable[[fx.Node], bool]) -> None:
    """Copy outputs that had memory of their own `before`, and share a node that `is_shared` now."""
    output = graph.output_node()
    if isinstance(output.args[0], fx.Node):  # one output
        return
    first: dict[fx.Node, fx.Node] = {}
    results: list[Any] = []
    for node, old in zip(cast("Any", output.args[0]), before, strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and is_shared(maker := _maker(node)):
            known = first.setdefault(maker, old)
            if memory_of(known.meta["val"]) != memory_of(old.meta["val"]):
                with graph.inserting_before(output), fake_mode_of(value):
                    node = graph.call_function(CLONE, (node,))
                    node.meta["val"] = CLONE(value)
        results.append(node)
    output.args = (tuple(results),)


def _maker(node: fx.Node) -> fx.Node:
    """Return the node that makes the memory which a node's value is in."""
    while node.target is WAIT or is_view(
        node.all_input_nodes[0] if node.target is getitem else node
    ):
        node = node.all_input_nodes[0]
    return node


def _is_pure(node: fx.Node) -> bool:
    """Whether a node computes the same again of the same."""
    target = node.target
    return target is getitem or (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def bucket_sums(graph: fx.Graph, shapes: Sequence[Sequence[Any]]) -> None:
    """Make one sum of the sums of small gradients, in place.

    Args:
        graph: of a backward.
        shapes: of the inputs of its forward, in the order of the gradients.
    """
    buckets: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    num_bytes: defaultdict[Any, int] = defaultdict(int)
    results: Any = graph.output_node().args[0]
    shape_of = dict(zip(results, shapes, strict=False)) if isinstance(results, tuple) else {}
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        (start,) = wait.all_input_nodes
        value, shape = wait.meta["val"], shape_of.get(wait, [None])
        is_known = all(type(size) is int for size in shape)
        is_result = all(user.op == "output" for user in wait.users) and len(start.users) == 1
        if start.target is not ALL_REDUCE or not is_known or not is_result:
            continue
        size = math.prod(shape) * value.itemsize
        if size <= MOST_BYTES:
            kind = value.dtype, value.device, start.args[1:]
            num_bytes[kind] += size
            buckets[kind, num_bytes[kind] // BUCKET_BYTES].append(wait)
    for waits in buckets.values():
        if len(waits) > 1:
            _sum_together(graph, waits, [shape_of[wait] for wait in waits])


def _sum_together(
    graph: fx.Graph, waits: Sequence[fx.Node], shapes: Sequence[Sequence[int]]
) -> None:
    """Put one sum where the last of its parts is known."""
    starts = [start for wait in waits for start in wait.all_input_nodes]
    sizes = [math.prod(shape) for shape in shapes]
    like, aten = waits[0].meta["val"], torch.ops.aten

    def insert(value: Any, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    with graph.inserting_before(waits[-1]), fake_mode_of(like):
        values = [like.new_empty(size) for size in sizes]
        flat = [
            insert(value, aten.reshape.default, start.args[0], [size])
            for start, size, value in zip(starts, sizes, values, strict=True)
        ]
        whole = torch.cat(values)
        both = insert(whole, ALL_REDUCE, insert(whole, aten.cat.default, flat), *starts[0].args[1:])
        parts = whole.split(sizes)
        split = insert(parts, aten.split_with_sizes.default, insert(whole, WAIT, both), sizes)
        for place, (wait, shape) in enumerate(zip(waits, shapes, strict=True)):
            part = insert(parts[place], getitem, split, place)
            value = like.new_empty(shape)
            wait.replace_all_uses_with(insert(value, aten.reshape.default, part, [*shape]))
    for node in (*waits, *starts):
        graph.erase_node(node)
