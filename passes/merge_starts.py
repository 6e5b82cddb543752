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
Order of these sums, and their sizes in a call, are the same on all ranks. A size may be a number on
one and a formula on another, which has max(0, s - 2 * n) of s tokens: so the call decides.

Assumes: graphs of AOTAutograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx

from cp_inductor.graph.collectives import STARTS, WAIT, is_collective
from cp_inductor.ops.plan_batch import PLAN_BATCH
from cp_inductor.passes.nodes import is_view, merge_equal, walk_back
from cp_inductor.torch_private.sizes import has_hint, is_number, size_hint
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


def bucket_sums(graph: fx.Graph) -> None:
    """Make one sum of the sums of small gradients, in place."""
    buckets: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    num_bytes: defaultdict[Any, int] = defaultdict(int)
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        (start,) = wait.all_input_nodes
        value = wait.meta["val"]
        num_elements = value.numel()
        is_known = is_number(num_elements) or has_hint(num_elements)
        is_result = all(user.op == "output" for user in wait.users) and len(start.users) == 1
        if start.target is not ALL_REDUCE or not is_known or not is_result:
            continue
        if (size := size_hint(num_elements) * value.itemsize) <= MOST_BYTES:
            kind = value.dtype, value.device, start.args[1:]
            num_bytes[kind] += size
            buckets[kind, num_bytes[kind] // BUCKET_BYTES].append(wait)
    for waits in buckets.values():
        if len(waits) > 1:
            _sum_together(graph, waits)


def _sum_together(graph: fx.Graph, waits: Sequence[fx.Node]) -> None:
    """Put one sum where the last of its parts is known."""
    starts = [start for wait in waits for start in wait.all_input_nodes]
    values = [wait.meta["val"] for wait in waits]
    aten = torch.ops.aten

    def insert(target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return node

    def size_of(node: Any, size: int | torch.SymInt, dim: int) -> Any:
        return size if is_number(size) else insert(aten.sym_size.int, node, dim)

    with graph.inserting_before(waits[-1]), fake_mode_of(values[0]):
        flat = [insert(aten.reshape.default, start.args[0], [-1]) for start in starts]
        both = insert(ALL_REDUCE, insert(aten.cat.default, flat), *starts[0].args[1:])
        sizes = [size_of(node, node.meta["val"].numel(), 0) for node in flat]
        parts = insert(aten.split_with_sizes.default, insert(WAIT, both), sizes)
        for place, (wait, value) in enumerate(zip(waits, values, strict=True)):
            part = insert(getitem, parts, place)
            source = starts[place].args[0]
            shape = [size_of(source, size, dim) for dim, size in enumerate(value.shape)]
            whole = graph.call_function(aten.reshape.default, (part, shape))
            whole.meta["val"] = value.contiguous()
            wait.replace_all_uses_with(whole)
    for node in (*waits, *starts):
        graph.erase_node(node)
