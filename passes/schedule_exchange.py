"""Reorder a lowered graph so that compute that is already there hides its exchanges.

    k = mm(x, wk)                           k = mm(x, wk)
    q = mm(x, wq)                           arriving = start(k)
    arriving = start(k)             =>      q = mm(x, wq)
    out_0 = tile(q, k)                      out_0 = tile(q, k)
    k_1 = wait(arriving)                    dw = mm(dy.t(), x)         of another layer
    out_1 = tile(q, k_1)                    k_1 = wait(arriving)
    dw = mm(dy.t(), x)                      out_1 = tile(q, k_1)

`cp_inductor.schedule.overlap` decides what to move; it knows times and bytes, but no graph. This
module describes the graph to it: what a node depends on, how long it takes, what memory it holds.
Nodes that a generated kernel computes inline (views, pointwise ops between other pointwise ops)
make no buffer and take no time: their users read what they read.

Assumes: a graph from AOTAutograd whose attentions were lowered. The order of collectives stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from operator import getitem
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.flags import AUTO
from cp_inductor.graph.collectives import WAIT, is_start
from cp_inductor.passes.nodes import BYTES_KEY, TILES_KEY, is_heavy, is_view, tiles_of
from cp_inductor.plan import Machine
from cp_inductor.schedule.overlap import Instruction, Measured, expose, measure, schedule
from cp_inductor.tiles.kernel_table import BACKWARD_TILE_OPS, FLEX_OPS
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.inductor import is_input_of_forward
from cp_inductor.torch_private.sizes import size_hint
from cp_inductor.torch_private.tracing import tensors_in
from cp_inductor.trust.agreement import NOTE_TABLES

# Nobody knows a link so well: each exchange is given more compute than it needs by estimate.
MARGIN = 1.25
# What generated kernels read from more buffers than these is not computed on the way to another.
MOST_READ = 8
MOST_USERS = 2
USUAL = {"cpu": Machine.parse("cpu:tcp")}


def schedule_exchange(
    graph: fx.Graph, kind: str, options: PlanOptions
) -> tuple[Measured, Measured, int]:
    """Reorder a lowered graph with exchanges, in place.

    Return the cost if nothing overlapped, that of the new order, and how many bytes the peak of
    memory was allowed to rise by.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    instructions = Description(nodes, kind, options).instructions
    budget = options.memory_budget_bytes
    if budget < 0:
        budget = 2 * max((step.num_bytes for step in instructions if step.is_start), default=0)
    exposed = expose(instructions)
    orders = {
        "none": lambda: exposed,
        "local": lambda: list(range(len(nodes))),
        "global": lambda: schedule(instructions, budget),
    }
    order = orders[options.schedule]()
    inputs = [index for index in order if instructions[index].is_input]
    assert inputs == order[: len(inputs)] == sorted(inputs), "the schedule moved an input"
    output = graph.output_node()
    for index in order:
        output.prepend(nodes[index])
    return measure(instructions, exposed), measure(instructions, order), budget


class Description:
    """The nodes of a graph as instructions."""

    def __init__(self, nodes: Sequence[fx.Node], kind: str, options: PlanOptions) -> None:
        self.nodes = nodes
        self.index = {node: index for index, node in enumerate(nodes)}
        self.is_backward = kind == "backward"
        self.options = options
        # The buffers that a node's value consists of: itself, or what it shares or is inlined with.
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        # Where a node's value is used, views looked through: from the last node to the first.
        self.users: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(nodes):
            users = (self.users[u] if looks_through(u) else [u] for u in node.users)
            self.users[node] = list(chain.from_iterable(users))
        for node in nodes:
            self._find_sources(node)
        effects = _Effects()
        self.instructions: list[Instruction] = []
        for index, node in enumerate(nodes):
            inputs = {self.index[source] for source in node.all_input_nodes}
            inputs |= effects.before(index, node)
            self.instructions.append(self._instruction(node, tuple(sorted(inputs))))

    def _read_by(self, node: fx.Node) -> frozenset[fx.Node]:
        return frozenset().union(*(self.sources[source] for source in node.all_input_nodes))

    def _find_sources(self, node: fx.Node) -> None:
        read = self._read_by(node)
        passes = looks_through(node) or node.target is WAIT
        if not passes and is_fusible(node):
            passes = self._is_inlined(node, read)
        self.sources[node] = read if passes else frozenset((node,))

    def _is_inlined(self, node: fx.Node, read: frozenset[fx.Node]) -> bool:
        users = self.users[node]
        is_cheap = 0 < len(users) <= MOST_USERS and len(read) <= MOST_READ
        return is_cheap and all(map(is_fusible, users))

    def _instruction(self, node: fx.Node, inputs: tuple[int, ...]) -> Instruction:
        if node not in self.sources[node] and node.target is not WAIT:
            return Instruction(inputs, is_view=True)
        read = self._read_by(node)
        reads = tuple(sorted(self.index[source] for source in read))
        if node.target is WAIT:
            start = _start_of(node)
            waits_for = None if start is None else self.index[start]
            return Instruction(inputs, waits_for=waits_for, reads=reads, is_view=waits_for is None)
        return Instruction(
            inputs,
            seconds=self._seconds(node, read),
            is_input=node.op == "placeholder",
            is_start=is_start(node),
            num_bytes=self._bytes_held(node),
            reads=reads,
            is_kept=any(user.op == "output" for user in self.users[node]),
        )

    def _bytes_held(self, node: fx.Node) -> int:
        # What the caller passes in stays alive but for what the forward saved for the backward.
        is_input = node.op == "placeholder"
        is_callers = is_input and (not self.is_backward or is_input_of_forward(node))
        return 0 if is_callers or node.op == "get_attr" else num_bytes_of(node)

    def _seconds(self, node: fx.Node, read: frozenset[fx.Node]) -> float:
        if node.op != "call_function" or not isinstance(_value(node), (Tensor, list, tuple)):
            return 0.0
        tensors = tensors_in(_value(node))
        usual = USUAL.get(tensors[0].device.type if tensors else "cpu", Machine())
        options, is_usual = self.options, self.options.machine in ("", AUTO)
        machine = usual if is_usual else Machine.parse(options.machine)
        machine = machine.with_speeds(options.link_bytes_per_s, options.device_flops_per_s)
        link, device = machine.levels[-1], machine.device
        if is_start(node):
            own = max(num_bytes_of(node), sum(map(num_bytes_of, node.all_input_nodes)))
            moved = node.meta.get(BYTES_KEY, own)
            return MARGIN * (link.latency_s + moved / link.bytes_per_s)
        if is_heavy(node):
            return num_flops_of(node) / device.flops_per_s
        return (num_bytes_of(node) + sum(map(num_bytes_of, read))) / device.bytes_per_s


class _Effects:
    """Nodes that keep their order without a data dependency: random numbers, notes, and writes."""

    def __init__(self) -> None:
        # The last instruction of each kind, in a set.
        self.barrier, self.random, self.note = set[int](), set[int](), set[int]()

    def before(self, index: int, node: fx.Node) -> set[int]:
        """Return the instructions that a node must stay behind."""
        earlier, target = set(self.barrier), node.target
        if node.op != "call_function":
            return earlier
        if target is NOTE_TABLES:
            # They keep their order, and nothing waits for them.
            earlier, self.note = earlier | self.note, {index}
            return earlier
        if isinstance(target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in target.tags:
                earlier, self.random = earlier | self.random, {index}
            is_barrier = target._schema.is_mutable and target is not WAIT
        else:
            is_subgraph = isinstance(target, torch._ops.HigherOrderOperator)
            is_barrier = is_subgraph and target not in FLEX_OPS and TILES_KEY not in node.meta
        is_barrier |= target is WAIT and _start_of(node) is None
        if is_barrier:
            earlier |= set(range(max(self.barrier, default=0), index))
            self.barrier = {index}
        return earlier


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def num_bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's tensors."""
    return sum(prod(map(size_hint, t.shape)) * t.element_size() for t in tensors_in(_value(node)))


def looks_through(node: fx.Node) -> bool:
    """Whether a node's value shares the memory of another's."""
    return node.target is getitem or is_view(node)


def is_fusible(node: fx.Node) -> bool:
    """Whether a generated kernel can compute a node together with others."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in ("aten", "prims")
        and isinstance(_value(node), Tensor)
        and not is_heavy(node)
    )


def _start_of(wait: fx.Node) -> fx.Node | None:
    """Return the start that a wait is for, if it is in this graph."""
    (node,) = wait.all_input_nodes[:1]
    while looks_through(node):
        node = node.all_input_nodes[0]
    return node if is_start(node) else None


def num_flops_of(node: fx.Node) -> float:
    """Return the floating-point operations of a heavy node."""
    if tiles := tiles_of(node):
        return sum(map(_flops_of_tile, tiles))
    op, args, kwargs = _called(node)
    flops = flop_registry[op.overloadpacket](*args, **kwargs, out_val=_value(node))
    return float(size_hint(flops))


def _flops_of_tile(tile: fx.Node) -> float:
    op, args, kwargs = _called(tile)
    is_flex = op in FLEX_OPS
    call = {"query": args[0], "key": args[1]} if is_flex else bind_arguments(op, args, kwargs)
    pairs = prod(map(size_hint, call["query"].shape)) * size_hint(call["key"].shape[2])
    num_matmuls = 5 if op in BACKWARD_TILE_OPS else 2
    return 2.0 * num_matmuls * pairs / (2 if call.get("is_causal") else 1)


def _called(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return the op that a node calls, and the values of its arguments."""
    return node.target, *pytree.tree_map_only(fx.Node, _value, (node.args, node.kwargs))
