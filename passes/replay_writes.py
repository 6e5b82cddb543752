"""Compute writes in place to parts of sharded DTensors on the whole tensor, and read views anew.

    z = y[:, 5:9]
    y[:, 1:] = h[:, :-1]             y (B, S, D) [Shard(1)]
    return z + y
      =>
    old = y.clone()
    new = aten.slice_scatter(old, h[:, :-1], 1, 1, S)
    y.copy_(new)                     DTensor keeps the placements of what it writes to
    z = y[:, 5:9]
    return z + y

DTensor (torch 2.13 to 2.15) gathers a sharded dim before it cuts it. So what is a view on one
process is a copy here: what is written to it is lost, and what was cut before a write is stale.

What shares memory with what, and what is written, is found on plain fake tensors of the whole size,
which do what one process does. A write becomes what `torch.func.functionalize` makes of it and of
the views between the tensor and what is written; views that are read after it are computed again.
Autograd sees a write to the whole tensor, if it follows the write: not under `no_grad`, nor through
`detach`. So parts of what every rank has whole are rewritten as well: gradients may be sharded.

Assumes: a graph from Dynamo, before AOTAutograd, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.func import functionalize

from cp_inductor.dtensor.rules import writes
from cp_inductor.dtensor.wrap import is_whole
from cp_inductor.errors import UnsupportedWrite
from cp_inductor.graph.nodes import call_target, graphs_of, name_of, recompile_all
from cp_inductor.graph.subgraphs import Calls, calls_of
from cp_inductor.modules.whole_batches import PART_OF_BATCH, write_to_part
from cp_inductor.passes.nodes import merge_equal
from cp_inductor.torch_private.dtensor import local_of
from cp_inductor.torch_private.tracing import (
    fake_copy,
    fake_mode_of,
    get_data,
    map_tensors,
    memory_of,
    tensors_in,
    trace_fake,
    unbacked_ignored,
    writes_of,
)

aten = torch.ops.aten
_SIMPLE = (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default)


def replay_writes(gm: fx.GraphModule) -> None:
    """Rewrite the writes, in place; a graph in which one of them is refused is unusable."""
    graphs = (graph for graph in graphs_of(gm) if any(map(_may_write, graph.nodes)))
    aliases_of, calls = {graph: _Aliases(graph) for graph in map(_read_once, graphs)}, calls_of(gm)
    for aliases in aliases_of.values():
        _check_outside(aliases, calls)
    for graph, aliases in aliases_of.items():
        _Replay(graph, aliases).run()
    if aliases_of:
        recompile_all(gm)


def _read_once(graph: fx.Graph) -> fx.Graph:
    """Have a graph read what it writes to as one DTensor, so that autograd knows of the writes."""
    inputs = graph.find_nodes(op="placeholder")
    reads = graph.find_nodes(op="call_function", target=DTensor.from_local)
    written = {read.args[0] for read in reads if _may_write(read)}
    alike = [r for r in reads if r.args[0] in written and {*r.all_input_nodes} <= {*inputs}]
    for read in sorted(alike, key=_is_differentiated):
        inputs[-1].append(read)  # ahead of those under no_grad
    merge_equal(graph, alike.__contains__)
    return graph


def _dtensors_of(node: fx.Node) -> list[DTensor]:
    values = tensors_in(node.meta.get("example_value"))
    return [value for value in values if isinstance(value, DTensor)]


def _memory_of(node: fx.Node) -> set[torch.UntypedStorage]:
    """Return the memory in which this rank has the value of a node."""
    return {memory_of(local_of(value)) for value in _dtensors_of(node)}


def _may_write(node: fx.Node) -> bool:
    """Whether a node's value has been written to, or may be: foreach ops count no versions."""
    values = _dtensors_of(node)
    inputs = {id(value) for source in node.all_input_nodes for value in _dtensors_of(source)}
    is_list = not isinstance(node.meta.get("example_value"), Tensor)
    return any(value._version > 0 or (is_list and id(value) in inputs) for value in values)


def _is_cut(node: fx.Node) -> bool:
    """Whether ranks have parts of the value of a node."""
    value = node.meta["example_value"]
    is_here = isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None
    return is_here and not is_whole(value)


@dataclass(eq=False)
class _Family:
    """Nodes whose values share memory on one process: the first, and the others in order."""

    base: fx.Node
    views: list[fx.Node] = field(default_factory=list)
    is_clear: bool = True  # each of the views is computed from a node before it


class _Aliases:
    """What a graph would do on one process: it is run on fake plain tensors of the whole size."""

    def __init__(self, graph: fx.Graph) -> None:
        # To whose memory a node writes in place, and whose memory its value is.
        self.writes: dict[fx.Node, list[_Family]] = {}
        self.families: defaultdict[fx.Node, list[_Family]] = defaultdict(list)
        # Nodes that write elements alone, and not to views that they make, as `y[:, 1:] = x`.
        self.simple: set[fx.Node] = set()
        # A node that returns a tensor which it was given => the node that it was given.
        self.same: dict[fx.Node, fx.Node] = {}
        self._values: dict[fx.Node, Any] = {}
        self._by_memory: dict[torch.UntypedStorage, _Family] = {}
        self.like = local_of(next(v for node in graph.nodes for v in _dtensors_of(node)))
        for node in graph.nodes:
            self._follow(node)

    def _follow(self, node: fx.Node) -> None:
        is_of_tensors = "example_value" in node.meta or any(map(_dtensors_of, node.all_input_nodes))
        if node.op in ("output", "get_attr") or not is_of_tensors:
            return
        value, written = self._run(node)
        self._values[node] = value
        families = [family for source in node.all_input_nodes for family in self.families[source]]
        for leaf in tensors_in(value):
            family = self._by_memory.get(memory_of(leaf))
            if family is None:
                if not isinstance(value, Tensor):
                    continue
                family = self._by_memory[memory_of(leaf)] = _Family(node)
            elif node is not family.base and node not in family.views:
                family.is_clear &= family in families
                family.views.append(node)
            if family not in self.families[node]:
                self.families[node].append(family)
        if written:
            self._note_write(node, value, written)

    def _run(self, node: fx.Node) -> tuple[Any, list[tuple[Any, Tensor]]]:
        if node.op in ("call_function", "call_method"):
            made: list[Any] = []
            with unbacked_ignored(self.like), suppress(Exception):  # DTensor's own, bodies, items
                run = partial(_call, node, self._values.__getitem__)
                written = writes_of(lambda: made.append(run()), self.like)
                return made[0], written
        return map_tensors(fake_copy, node.meta.get("example_value")), []

    def _note_write(self, node: fx.Node, value: Any, written: list[tuple[Any, Tensor]]) -> None:
        sources = [source for source in node.all_input_nodes if source in self._values]
        read = {id(leaf) for source in sources for leaf in tensors_in(self._values[source])}
        known = dict.fromkeys(self._by_memory.get(memory_of(tensor)) for _, tensor in written)
        families = [f for f in known if f and (_is_cut(f.base) or _is_differentiated(f.base))]
        for family in families:
            part = family.base.meta.get("custom", {}).get(PART_OF_BATCH)
            if part is not None:
                raise write_to_part(name_of(node), part)
        if families:
            is_simple = all(op in _SIMPLE or torch.Tag.pointwise in op.tags for op, _ in written)
            if is_simple and all(id(tensor) in read for _, tensor in written):
                self.simple.add(node)
            self.writes[node] = families
            self.same.update((node, source) for source in sources if self._values[source] is value)


def _call(node: fx.Node, value_of: Callable[[fx.Node], Any], arguments: Any = None) -> Any:
    """Call what a node calls, on its arguments or others, of which values are taken."""
    args, kwargs = fx.map_arg(arguments or (node.args, node.kwargs), value_of)
    if node.target in writes.BY_ENTRY:  # `functionalize` (2.13) would read all at once
        for entry in writes.entries_of(args):
            call_target(node, entry, kwargs)
        return args[0]
    return Tensor.detach(*args) if node.target is get_data else call_target(node, args, kwargs)


def _check_outside(aliases: _Aliases, calls: Calls) -> None:
    """Refuse writes in a body to what is read outside of it by another name: it is not followed."""
    for node, written in aliases.writes.items():
        for tensor in (family.base for family in written):
            while tensor.op == "placeholder" and tensor.graph in calls:
                call = calls[tensor.graph]
                inputs = tensor.graph.find_nodes(op="placeholder")
                tensor = cast(fx.Node, call.args[1 + inputs.index(tensor)])
                families = _Aliases(call.graph).families[tensor]
                names = {name for f in families for name in (f.base, *f.views)} - {tensor}
                places = {other: place for place, other in enumerate(call.graph.nodes)}
                users = {user for name in names for user in name.users}
                if any(places[user] >= places[call] for user in users):
                    got = f"one in {call.target}, to what is read outside of it by another name"
                    raise _refusal(node, got)


class _Replay:
    """Rewrites the writes of a graph, in the order in which they run."""

    def __init__(self, graph: fx.Graph, aliases: _Aliases) -> None:
        self.graph, self.aliases = graph, aliases
        # A node of before => the node that has its value at this place of the graph.
        self.current: dict[fx.Node, fx.Node] = {}
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self.users = {node: list(node.users) for node in graph.nodes}
        self.args = {node: (node.args, node.kwargs) for node in graph.nodes}
        self.read = {node: node.all_input_nodes for node in graph.nodes}
        # Whether autograd follows what runs at this place, and at that of a node of before.
        self.is_tracked = torch.is_grad_enabled()
        self.tracked: dict[fx.Node, bool] = {}

    def run(self) -> None:
        """Rewrite."""
        replaced: list[fx.Node] = []
        for node in self.places:
            node.args, node.kwargs = self._now((node.args, node.kwargs))
            if node.target is torch._C._set_grad_enabled:
                self.is_tracked = bool(node.args[0])
            self.tracked[node] = self.is_tracked
            families = self.aliases.writes.get(node)
            if families is not None and self._is_lost(node, families):
                self._replace(node, families)
                replaced.append(node)
        # Views of what a node writes to may have been computed for nothing.
        written = [family for node in replaced for family in self.aliases.writes[node]]
        views = {view for family in written for view in family.views} - self.aliases.writes.keys()
        for node in sorted(views.union(replaced), key=self.places.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)

    def _now(self, value: Any) -> Any:
        return fx.map_arg(value, lambda node: self.current.get(node, node))

    def _is_lost(self, node: fx.Node, families: list[_Family]) -> bool:
        """Whether DTensor does not write as one process does."""
        place = self.places[node]
        copies = any(
            not _memory_of(view) <= _memory_of(family.base)
            for family in families
            for view in family.views
            if self.places[view] < place and self._is_read(view, place)
        )
        # Autograd writes to the same part of a gradient, which may be sharded.
        bases = [family.base for family in families]
        is_part = any(not _is_cut(base) and base not in self.args[node][0] for base in bases)
        return copies or is_part or node not in self.aliases.simple or not _runs(node)

    def _is_read(self, view: fx.Node, place: int) -> bool:
        """Whether the value of a view is used at a place or later."""
        return any(
            self.places[user] >= place
            or (bool(self.aliases.families[user]) and self._is_read(user, place))
            for user in self.users[view]
        )

    def _replace(self, node: fx.Node, families: list[_Family]) -> None:
        """Write to the whole tensors instead of a part, and compute the views anew."""
        if not all(family.is_clear for family in families):
            raise _refusal(node, "views whose tensor is not in the graph")
        if self.users[node] and node not in self.aliases.same:
            raise _refusal(node, f"{node.target}, which returns something else than it writes to")
        with self.graph.inserting_before(node):
            written = self._insert(node, families)
            bases = [family.base for family in families]
            was_tracked = self.is_tracked
            self._track(was_tracked and self._tracks(node, bases))
            for base, new in zip(bases, written, strict=True):
                self._add(node, "copy_", base, new)
            self._track(was_tracked)
            if node in self.aliases.same:
                self.current[node] = self._now(self.aliases.same[node])
            for family in families:
                self._renew(family, node)

    def _insert(self, node: fx.Node, families: list[_Family]) -> list[fx.Node]:
        """Insert what computes the tensors as they are after a write; return them."""
        bases = [family.base for family in families]
        steps = self._steps_to(node, families)
        read = [source for step in (*steps, node) for source in self.read[step]]
        inputs = list(dict.fromkeys([*bases, *(source for source in read if source not in steps)]))
        fakes = [map_tensors(fake_copy, source.meta["example_value"]) for source in inputs]

        def compute(*values: Any) -> list[Tensor]:
            env = dict(zip(inputs, values, strict=True))
            # It writes to a copy, so that what a backward reads stays.
            env.update((base, env[base].clone()) for base in bases)
            for step in steps:
                same = self.aliases.same.get(step)
                env[step] = env[same] if same else _call(step, env.__getitem__, self.args[step])
            _call(node, env.__getitem__, self.args[node])
            return [env[base] for base in bases]

        traced = trace_fake(functionalize(compute), fakes, _DECOMPOSITIONS, like=self.aliases.like)
        traced.graph.eliminate_dead_code()
        return self._inline(traced, [self._now(source) for source in inputs], node)

    def _steps_to(self, node: fx.Node, families: list[_Family]) -> list[fx.Node]:
        """Return the views of families from which a node is computed, in order."""
        views = {view for family in families for view in family.views}
        steps, stack = set[fx.Node](), [node]
        while stack:
            new = views.intersection(self.read[stack.pop()]) - steps
            steps.update(new)
            stack += new
        return sorted(steps, key=self.places.__getitem__)

    def _inline(
        self, traced: fx.GraphModule, inputs: Sequence[fx.Node], node: fx.Node
    ) -> list[fx.Node]:
        env = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
        like = inputs[0]
        for copied in traced.graph.nodes:
            if copied.op == "get_attr":
                numbers: Tensor = getattr(traced, copied.target)
                made = (numbers.tolist(), numbers.dtype, like)
                env[copied] = self._add(node, writes.replicated_numbers, *made)
            elif copied.op == "call_function":
                if torch.Tag.nondeterministic_seeded in getattr(copied.target, "tags", ()):
                    raise _refusal(node, f"{copied.target}, which draws random numbers")
                args, kwargs = fx.map_arg((copied.args, copied.kwargs), env.__getitem__)
                if copied.target is aten.lift_fresh_copy.default:
                    env[copied] = args[0]
                    continue
                env[copied] = self._add(node, copied.target, *args, **kwargs)
                if not copied.all_input_nodes:
                    env[copied] = self._add(node, writes.replicated_like, env[copied], like)
        results: Any = traced.graph.output_node().args[0]
        return [env[copied] for copied in results]

    def _renew(self, family: _Family, node: fx.Node) -> None:
        """Compute the views anew that are used after a write."""
        place = self.places[node]
        for view in family.views:
            if self.places[view] >= place or not self._is_read(view, place + 1):
                continue
            same = self.aliases.same.get(view)
            if same is not None:
                self.current[view] = self._now(same)
                continue
            args, kwargs = self._now(self.args[view])
            was_tracked = self.is_tracked
            self._track(self.tracked[view])
            self.current[view] = self._add(view, view.target, *args, **kwargs)
            self._track(was_tracked)

    def _tracks(self, node: fx.Node, bases: list[fx.Node]) -> bool:
        """Whether autograd sees that a node writes to these tensors: not through `detach`."""
        if not any(map(_is_differentiated, bases)):
            return True
        return any(
            _is_differentiated(written)
            for written in self.read[node]
            if any(family.base in bases for family in self.aliases.families[written])
        )

    def _track(self, is_tracked: bool) -> None:
        """Have what is inserted from here on run with or without autograd."""
        if is_tracked != self.is_tracked:
            self.graph.call_function(torch._C._set_grad_enabled, (is_tracked,))
            self.is_tracked = is_tracked

    def _add(self, source: fx.Node, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of a function or method, which stands for another node in errors."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        kept = ("stack_trace", "nn_module_stack", "custom")
        node.meta = {key: source.meta[key] for key in kept if key in source.meta}
        if target == "copy_":  # the value of what it writes to is known, and must not be written
            node.meta["example_value"] = args[0].meta["example_value"]
        else:
            with torch.set_grad_enabled(self.is_tracked), fake_mode_of(self.aliases.like):
                node.meta["example_value"] = _call(node, lambda read: read.meta["example_value"])
        return node


def _is_differentiated(node: fx.Node) -> bool:
    try:
        return any(value.requires_grad for value in _dtensors_of(node))
    except RuntimeError:  # a view that was made under no_grad, of what has been written to
        return False


def _runs(node: fx.Node) -> bool:
    """Whether DTensor can write as a node does."""
    values = {source: source.meta.get("example_value") for source in node.all_input_nodes}
    like = next(value for source in values for value in _dtensors_of(source))
    with torch.no_grad(), fake_mode_of(local_of(like)), writes.writes_as_dtensor():
        copies = {source: map_tensors(torch.clone, value) for source, value in values.items()}
        try:
            _call(node, copies.__getitem__)
        except Exception:
            return False
    return True


def _refusal(node: fx.Node, got: str) -> UnsupportedWrite:
    return UnsupportedWrite(
        site=name_of(node),
        expected="a write in place that can be computed on the whole of a sharded DTensor",
        got=got,
        remedy="compute a new tensor instead, as torch.where or torch.cat do",
    )


def _copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    # A copy, because who computes `slice_scatter` backward reads the source.
    return source.to(tensor.dtype).expand(tensor.shape).clone()


def _index_put(
    tensor: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or values.numel() != 1 or accumulate:
        return NotImplemented
    mask = mask.reshape(*mask.shape, *(1 for _ in tensor.shape[mask.ndim :]))
    return torch.where(mask, values.to(tensor.dtype), tensor)


# What functionalization leaves, in ops that DTensor has rules for, and autograd formulas.
_DECOMPOSITIONS: dict[Any, Callable[..., Tensor]] = {
    aten.copy.default: _copy,
    aten.fill.Tensor: _copy,
    aten.fill.Scalar: lambda tensor, number: torch.full_like(tensor, number),
    aten.zero.default: torch.zeros_like,
    aten.index_put.default: _index_put,
}
