"""What a lowered graph of one rank takes: seconds by a roofline, and the most bytes alive at once.

    mm     2 m n k operations at the rate of matrix multiplications
    tile   the pairs it computes at the published rate of its kernel, or the device's
    else   bytes read and written at the rate of memory, at which the others take no less either

Time and memory are those of the schedule (`passes.schedule_exchange`), in whose order the graph is:
an exchange takes time where no compute hides it, and what a generated kernel computes inline takes
neither time nor memory. Besides, subgraphs that a graph calls are looked into (logits in chunks,
pieces of attentions), elementwise kernels write over what is read there for the last time, as
Inductor has it, and inputs of a backward that are the same memory count once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx
from torch._inductor import config
from torch.fx.node import map_arg

from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.graph.collectives import WAIT, is_start
from cp_inductor.passes.lower_attention import Piece
from cp_inductor.passes.nodes import BYTES_KEY, is_heavy
from cp_inductor.passes.schedule_exchange import (
    Description,
    is_fusible,
    looks_through,
    num_bytes_of,
    num_flops_of,
)
from cp_inductor.plan import Device, Machine
from cp_inductor.plan.machine import DEVICES
from cp_inductor.schedule.overlap import measure
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.kernel_table import BACKWARD_TILE_OPS, KERNELS, TILE_OPS
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.sizes import size_hint
from cp_inductor.torch_private.tracing import INVOKE_SUBGRAPH

# op of a tile => the kernel whose rate is its
_KERNEL_OF = {
    op: name
    for row in KERNELS.values()
    for kernel, name in ((row.plain, row.plain.switch.name), (row.under_rule, row.under_rule.name))
    for op in (kernel.forward_op, kernel.backward_op)
}
# A backward has two multiplications for each of the forward, by which a model's use is counted.
FORWARD_AND_BACKWARD = 3
TIMES_COUNTED = {"forward": FORWARD_AND_BACKWARD, "backward": 0, "inference": 1}

_C10D = torch.ops._c10d_functional
_SUMS = (_C10D.all_reduce.default, _C10D.all_reduce_.default)


def _rate_of_tile(device: Device, node: fx.Node) -> float:
    """Return the operations per second of a tile: those published, unless others were given."""
    known = DEVICES.get(device.name)
    is_changed = known is None or device.flops_per_s != known.flops_per_s
    rate = None if is_changed else device.rate_of(_KERNEL_OF[node.target])
    if rate is None:
        return device.flops_per_s
    return rate.backward if node.target in BACKWARD_TILE_OPS else rate.forward


def _computed(device: Device, node: fx.Node) -> float:
    """Return the pairs that a tile computes, over those that it is asked for."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return 1.0  # under a rule, whose blocks are listed
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    call = bind_arguments(target, args, kwargs)
    if not call.get("is_causal"):
        return 1.0
    num_keys = size_hint(call["key"].shape[SEQUENCE_DIM])
    return 1 + min(1.0, device.causal_keys / num_keys)


@dataclass(frozen=True, slots=True)
class Price:
    """What a graph takes."""

    # seconds: of its compute, by "attention", "matmuls" and "elementwise"; and "exposed exchanges":
    # what no compute hides of them, or cannot hide by the device's `hidden`.
    seconds: Mapping[str, float]
    # model_flops: of attention and matrix multiplications, forward and, in training, backward, as a
    # forward has them: what is computed again does not count.
    model_flops: float
    peak_bytes: int  # most bytes alive at once, besides what the caller passed in
    saved_bytes: int  # of what a forward leaves to the backward, and of what a backward returns
    exchange_bytes: int  # most bytes of received buffers at once
    chunk_bytes: int  # the most that a chunk of logits holds; 0 without chunks
    # The largest buffers at the peak, as (op, bytes), the largest first.
    largest: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Pricing:
    """What graphs are priced by."""

    # Its outermost link joins the ranks.
    machine: Machine
    # The size of the group that sums gradients.
    world_size: int
    # Names of inputs that take no memory of their own, as `shared_with_inputs` has them.
    free: frozenset[str] = frozenset()
    # Whether the graph's own sums of gradients take time.
    sums_gradients: bool = True


def price_graph(gm: fx.GraphModule, kind: str, pricing: Pricing) -> Price:
    """Price a lowered and scheduled graph, a "forward", "backward" or "inference"."""
    priced = _Priced(gm, kind, pricing)
    instructions = priced.instructions
    measured = measure(instructions, range(len(instructions)))
    # What the cores that compute must move is not hidden by what they compute.
    moving_s = sum(step.seconds for step in instructions if step.is_start)
    hidden_s = pricing.machine.device.hidden * (moving_s - measured.exposed_s)
    peak, largest = priced.peak()
    return Price(
        priced.seconds | {"exposed exchanges": moving_s - hidden_s},
        priced.model_flops,
        peak,
        sum(step.num_bytes for step in instructions if step.is_kept),
        measured.exchange_bytes,
        priced.chunk_bytes,
        largest,
    )


def shared_with_inputs(gm: fx.GraphModule) -> frozenset[str]:
    """Return which results of a forward are no memory of their own.

    They are views of its inputs, such as transposed weights, or of another result.
    """
    description = Description([*gm.graph.nodes][:-1], "forward", PlanOptions.read({})[0])
    seen: set[fx.Node] = set()
    shared = set()
    for node in gm.graph.output_node().all_input_nodes:
        sources = {source for source in description.sources[node] if source.op != "placeholder"}
        if sources <= seen:
            shared.add(node.name)
        seen |= sources
    return frozenset(shared)


class _Priced(Description):
    """A graph as instructions, whose seconds and bytes are a device's."""

    def __init__(self, gm: fx.GraphModule, kind: str, pricing: Pricing) -> None:
        self.gm, self.kind, self.pricing = gm, kind, pricing
        self.seconds: dict[str, float] = defaultdict(float)
        self.model_flops = 0.0
        # What called subgraphs hold, by their calls.
        self.inside: dict[int, int] = {}
        self.chunk_bytes = 0
        nodes = [node for node in gm.graph.nodes if node.op != "output"]
        # How many calls that no generated kernel computes are at most on a way to a node.
        self.depth: dict[fx.Node, int] = {}
        for node in nodes:
            passes = node.op != "call_function" or looks_through(node) or is_fusible(node)
            before = max((self.depth[source] for source in node.all_input_nodes), default=0)
            self.depth[node] = before + (not passes)
        super().__init__(nodes, kind, PlanOptions.read({})[0])
        # What is received is kept as well, if a wait for it is returned.
        results = gm.graph.output_node().all_input_nodes
        kept = {self.index[source] for result in results for source in self.sources[result]}
        self.instructions = [
            replace(step, is_kept=index in kept) for index, step in enumerate(self.instructions)
        ]

    def _find_sources(self, node: fx.Node) -> None:
        if node.target is getitem and node.all_input_nodes[0].target is INVOKE_SUBGRAPH:
            # The results of a subgraph do not end together.
            self.sources[node] = frozenset((node,))
        else:
            super()._find_sources(node)

    def _is_inlined(self, node: fx.Node, read: frozenset[fx.Node]) -> bool:
        # As Inductor has it: a kernel computes all between two calls, and again what reads little.
        users = self.users[node]
        if not users or not all(map(is_fusible, users)):
            return False
        is_one_kernel = {self.depth[user] for user in users} == {self.depth[node]}
        return is_one_kernel or len(read) <= config.realize_reads_threshold

    def peak(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Return the most bytes alive at once, and the largest buffers among them."""
        last: dict[int, int] = {}
        for index, step in enumerate(self.instructions):
            last |= dict.fromkeys((index, *step.reads), index)
        alive: dict[int, int] = {}
        most, at_peak = 0, list[tuple[str, int, int]]()
        for index, step in enumerate(self.instructions):
            ends = [i for i in (index, *step.reads) if last[i] == index]
            ends = [i for i in ends if not self.instructions[i].is_kept]
            over = max((alive[i] for i in ends if i in alive), default=0)
            is_written_over = is_fusible(self.nodes[index]) and 0 < step.num_bytes <= over
            if step.num_bytes:
                alive[index] = step.num_bytes
            inside = self.inside.get(index, 0)
            now = sum(alive.values()) + inside - step.num_bytes * is_written_over
            if now > most:
                held = [("", i, size) for i, size in alive.items()]
                most, at_peak = now, [*held, ("inside ", index, inside)]
            for i in ends:
                alive.pop(i, None)
        ranked = sorted(at_peak, key=lambda part: -part[2])[:8]
        names = [n.name if n.op == "placeholder" else str(n.target) for n in self.nodes]
        return most, tuple((what + names[i], size) for what, i, size in ranked if size)

    def _bytes_held(self, node: fx.Node) -> int:
        is_free = node.name in self.pricing.free or node.target is INVOKE_SUBGRAPH
        return 0 if is_free else super()._bytes_held(node)

    def _seconds(self, node: fx.Node, read: frozenset[fx.Node]) -> float:
        if node.op != "call_function" or "val" not in node.meta or node.target in (WAIT, getitem):
            return 0.0
        own, device = num_bytes_of(node), self.pricing.machine.device
        if is_start(node):
            return self._seconds_of_exchange(node, own)
        if node.target is INVOKE_SUBGRAPH:
            return self._seconds_of_subgraph(node)
        in_memory = (own + sum(map(num_bytes_of, read))) / device.bytes_per_s
        if not is_heavy(node):
            self.seconds["elementwise"] += in_memory
            return in_memory
        flops = num_flops_of(node)
        is_tile = node.target in TILE_OPS
        rate = device.matmul_flops_per_s or device.flops_per_s
        rate = _rate_of_tile(device, node) if is_tile else rate
        work = _computed(device, node) * flops if is_tile else flops
        seconds = max(work / rate, in_memory)
        self.seconds["attention" if is_tile else "matmuls"] += seconds
        self.model_flops += TIMES_COUNTED[self.kind] * flops
        return seconds

    def _seconds_of_exchange(self, node: fx.Node, own: int) -> float:
        link = self.pricing.machine.levels[-1]
        moved = node.meta.get(BYTES_KEY, own)
        if node.target in _SUMS:
            is_of_gradients = all(u.op == "output" for wait in node.users for u in self.users[wait])
            if is_of_gradients and not self.pricing.sums_gradients:
                return 0.0
            moved = 2 * own * (self.pricing.world_size - 1) / self.pricing.world_size
        return float(link.latency_s + moved / link.bytes_per_s)

    def _seconds_of_subgraph(self, node: fx.Node) -> float:
        called = node.args[0]
        assert isinstance(called, fx.Node)
        inner = getattr(self.gm, str(called.target))
        pricing = replace(self.pricing, free=frozenset(), sums_gradients=True)
        is_inference = self.kind == "inference"
        priced = _Priced(inner, "inference" if is_inference else "forward", pricing)
        for name, value in priced.seconds.items():
            self.seconds[name] += value
        is_chunk = not isinstance(inner, Piece)
        if self.kind != "backward":
            # A chunk of logits has the multiplications of its backward in it.
            has_backward = is_chunk and not is_inference
            self.model_flops += priced.model_flops / (FORWARD_AND_BACKWARD if has_backward else 1)
        held = self.inside[self.index[node]] = priced.peak()[0]
        self.chunk_bytes = max(self.chunk_bytes, held * is_chunk)
        return sum(priced.seconds.values())
