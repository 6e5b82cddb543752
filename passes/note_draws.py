"""Note what a graph draws for all ranks, so that they compare it behind the graph.

    kept = torch.rand(B, 1, 1)                 plain: each rank draws its own
    out = hidden * kept                        hidden (B, S, H) [Shard(1)]: `kept` is taken as equal
    token = torch.multinomial(p, 1)            p [Replicate]: so is the token
      =>
    noted = cp_inductor::note_draw(kept, 0)
    out = hidden * noted
    token = note_drawn(torch.multinomial(p, 1), 1)

Ranks that are not seeded alike draw other numbers, with which DTensor would silently go on. Draws
over shards, plain or of a DTensor, stay: there each rank is meant to have its own. What is drawn in
one graph and read in the next, or drawn by eager code and handed in, is not followed.

Assumes: a graph from Dynamo, before AOTAutograd, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.rules.in_parts import note_drawn
from cp_inductor.graph.nodes import graphs_of, name_of, nodes_of, recompile_all
from cp_inductor.graph.subgraphs import bodies_of, method_of
from cp_inductor.kept import cache
from cp_inductor.torch_private.dtensor import local_of
from cp_inductor.torch_private.tracing import memory_of, tensors_in
from cp_inductor.trust.agreement import NOTE_DRAW

# Attention draws by a seed, which the ranks compare. Recurrent layers draw as dropout between
# layers only, and run on the whole sequence, on each rank for its own tokens.
NOT_OURS = frozenset({"scaled_dot_product_attention", "gru", "lstm", "rnn_relu", "rnn_tanh"})
# Functions of torch.nn.functional that draw, and have other names than the ops which they call.
OF_OTHER_NAME = ("dropout1d", "dropout2d", "dropout3d", "gumbel_softmax")


def note_draws(gm: fx.GraphModule) -> None:
    """Insert the notes, in place; a graph without such draws stays as it is."""
    numbers = count()
    for graph in graphs_of(gm):
        if any(_is_distributed(node) for node in graph.nodes):
            _note_in(graph, numbers)
    if next(numbers):
        recompile_all(gm)


def has_notes(gm: fx.GraphModule) -> bool:
    """Whether a graph notes draws."""
    return any(node.target in (NOTE_DRAW, note_drawn) for node in nodes_of(gm))


def _note_in(graph: fx.Graph, numbers: Iterator[int]) -> None:
    # Nodes that draw, or read what is drawn, and the memory of plain tensors that hold it.
    drawn = set[object]()
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes
        sources = [read for read in inputs if not drawn.isdisjoint((read, *_storages(read)))]
        beside = [source for source in inputs if _is_distributed(source)]
        if beside:
            mesh = beside[0].meta["example_value"].device_mesh
            for source in sources:
                _note_plain(node, source, mesh, numbers)
        if _is_distributed(node):
            if _is_draw(node):
                _note_distributed(node, numbers)
        elif sources or _is_draw(node):
            drawn.update((node, *_storages(node)))
            if not _storages(node) or "out" in node.kwargs:  # x[...] = drawn, and the like
                for written in (*node.args[:1], node.kwargs.get("out")):
                    if isinstance(written, fx.Node):
                        drawn.update(_storages(written))


def _storages(node: fx.Node) -> list[torch.UntypedStorage]:
    """Return the memory of a node's plain tensors."""
    return [
        memory_of(tensor)
        for tensor in tensors_in(node.meta.get("example_value"))
        if not isinstance(tensor, DTensor) and tensor.layout == torch.strided
    ]


def _is_distributed(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None


def _is_draw(node: fx.Node) -> bool:
    target = node.target if node.op == "call_function" else method_of(node)
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    if isinstance(target, torch._ops.HigherOrderOperator) and node.graph.owning_module is not None:
        bodies = bodies_of(node, node.graph.owning_module)
        return any(_is_draw(inner) for body in bodies for inner in body.graph.nodes)
    return target in _functions_that_draw()


@cache
def _functions_that_draw() -> frozenset[Any]:
    """Return the functions of torch, and methods of tensors, whose ops draw."""
    spaces, drawing = (torch, torch.nn.functional, Tensor), {*OF_OTHER_NAME}
    for name in {name for space in spaces for name in dir(space)} - NOT_OURS:
        packet = getattr(torch.ops.aten, name, None)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            ops = (getattr(packet, overload) for overload in packet.overloads())
            if any(torch.Tag.nondeterministic_seeded in op.tags for op in ops):
                drawing.add(name)
    functions = (getattr(space, name, None) for space in spaces for name in drawing)
    return frozenset(function for function in functions if callable(function))


def _note_plain(node: fx.Node, source: fx.Node, mesh: DeviceMesh, numbers: Iterator[int]) -> None:
    """Let a node read a copy of a plain tensor, noted."""
    noted = source
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1 and isinstance(source.meta.get("example_value"), Tensor):
            place = (next(numbers), name_of(source), mesh.get_group(axis).group_name)
            with node.graph.inserting_before(node):
                noted = node.graph.call_function(NOTE_DRAW, (noted, *place))
            noted.meta = dict(source.meta)
    node.replace_input_with(source, noted)


def _note_distributed(node: fx.Node, numbers: Iterator[int]) -> None:
    """Let all that comes later read a copy of a DTensor that was drawn, noted.

    What is drawn into a tensor that was there is written to it again: it may have other names.
    """
    value: DTensor = node.meta["example_value"]
    places, sizes = value.placements, value.device_mesh.shape
    if not any(p.is_replicate() and size > 1 for p, size in zip(places, sizes, strict=True)):
        return
    with node.graph.inserting_after(node):
        noted = node.graph.call_function(note_drawn, (node, next(numbers), name_of(node)))
    noted.meta = dict(node.meta)
    drawn = memory_of(local_of(value))
    sources = filter(_is_distributed, node.all_input_nodes)
    if any(memory_of(local_of(source.meta["example_value"])) == drawn for source in sources):
        with node.graph.inserting_after(noted):
            again = node.graph.call_method("copy_", (node, noted))
        again.meta = dict(node.meta)
        return
    node.replace_all_uses_with(noted, delete_user_cb=lambda user: user is not noted)
