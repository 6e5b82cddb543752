"""Sum the gradients of small weights together, in one collective for many.

    a = wait(all_reduce(da));  b = wait(all_reduce(db))
      =>
    both = wait(all_reduce(cat([da.reshape(-1), db.reshape(-1)])));  a, b = split(both)

A parallelized model reads its weights one by one, so their gradients are summed one by one. A small
sum takes as long as a message takes at all. Large ones stay alone: they hide behind the rest of the
backward, and are not copied.

Assumes: a backward of AOTAutograd. Gradients have the same sizes on all ranks, and their sums the
same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from cp_inductor.graph.collectives import WAIT
from cp_inductor.torch_private.tracing import fake_mode_of

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
# A sum of more bytes is not waited for by its latency alone.
MOST_BYTES = 2**20
# What is summed at once: as in torch's DDP.
BUCKET_BYTES = 25 * 2**20


def bucket_sums(graph: fx.Graph) -> None:
    """Make one sum of the sums of small gradients, in place."""
    buckets: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    num_bytes: defaultdict[Any, int] = defaultdict(int)
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        (start,) = wait.all_input_nodes
        value = wait.meta["val"]
        is_known = all(type(size) is int for size in value.shape)
        is_result = all(user.op == "output" for user in wait.users) and len(start.users) == 1
        if start.target is ALL_REDUCE and is_known and is_result and value.nbytes <= MOST_BYTES:
            kind = value.dtype, value.device, start.args[1:]
            num_bytes[kind] += value.nbytes
            buckets[kind, num_bytes[kind] // BUCKET_BYTES].append(wait)
    for waits in buckets.values():
        if len(waits) > 1:
            _merge(graph, waits)


def _merge(graph: fx.Graph, waits: Sequence[fx.Node]) -> None:
    """Put one sum where the last of its parts is known."""
    starts = [start for wait in waits for start in wait.all_input_nodes]
    values = [wait.meta["val"] for wait in waits]
    aten = torch.ops.aten

    def insert(target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return node

    with graph.inserting_before(waits[-1]), fake_mode_of(values[0]):
        flat = [insert(aten.reshape.default, start.args[0], [-1]) for start in starts]
        both = insert(ALL_REDUCE, insert(aten.cat.default, flat), *starts[0].args[1:])
        sizes = [value.numel() for value in values]
        parts = insert(aten.split_with_sizes.default, insert(WAIT, both), sizes)
        for place, (wait, value) in enumerate(zip(waits, values, strict=True)):
            part = insert(getitem, parts, place)
            whole = graph.call_function(aten.reshape.default, (part, [*value.shape]))
            whole.meta["val"] = value.contiguous()
            wait.replace_all_uses_with(whole)
    for node in (*waits, *starts):
        graph.erase_node(node)
