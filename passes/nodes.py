"""Insert, replace and merge nodes, walk back from them, and classify those of lowered graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from operator import getitem
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.graph.collectives import is_collective
from cp_inductor.graph.nodes import call_target
from cp_inductor.graph.subgraphs import body_at
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.torch_private.tracing import fake_mode_of, tensors_in, unbacked_ignored

# What the nodes of one place in the user's model share.
OF_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack")


def insert_call(
    like: fx.Node, target: str | Callable[..., Any], *args: Any, **kwargs: Any
) -> fx.Node:
    """Insert a call of a function, or of a method by its name, where the graph of `like` inserts.

    `like` reads or returns a tensor; its place in the model is that of the call. Return the node.
    """
    values: Any = fx.map_arg(args, _value)
    kind = "call_method" if isinstance(target, str) else "call_function"
    node = like.graph.create_node(kind, target, args, kwargs)
    node.meta = {key: like.meta[key] for key in OF_PLACE if key in like.meta}
    near = [other.meta.get("example_value") for other in (like, *like.all_input_nodes)]
    local = held_by_rank(tensors_in(near)[0])
    # How many numbers a plan has is not known; the symbol of this value is nobody's.
    with torch.no_grad(), fake_mode_of(local), unbacked_ignored(local):
        node.meta["example_value"] = call_target(node, values, kwargs)
    return node


def insert_graph(
    traced: fx.GraphModule, inputs: Sequence[Any], before: fx.Node
) -> tuple[Any, dict[fx.Node, fx.Node]]:
    """Copy a graph, with inputs in the place of its own; return its output, and what it copied."""
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with before.graph.inserting_before(before):
        outputs = before.graph.graph_copy(traced.graph, copies)
    return outputs, {old: new for old, new in copies.items() if old.op != "placeholder"}


def replace_results(node: fx.Node, result_at: Callable[[Any], fx.Node]) -> None:
    """Put others in the place of what getitem takes of a node, by its index; erase the node."""
    for user in list(node.users):
        assert user.target is getitem
        if user.users:
            user.replace_all_uses_with(result_at(user.args[1]))
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def free_name(module: nn.Module, prefix: str) -> str:
    """Return the first of `prefix_0`, `prefix_1`, ... that a module has no attribute of."""
    names = (f"{prefix}_{number}" for number in count())
    return next(name for name in names if not hasattr(module, name))


def _value(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return body_at(node)
    value = node.meta["example_value"]
    # DTensor warns where it wraps a leaf without autograd.
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return value.detach() if is_plain and value.is_leaf else value


def walk_back(
    nodes: Iterable[fx.Node],
    is_end: Callable[[fx.Node], bool] = lambda node: False,
    origin: Callable[[fx.Node], fx.Node] = lambda node: node,
) -> Iterator[fx.Node]:
    """Yield nodes, or their origins, and what they are computed of as far as an end; each once."""
    stack, seen = list(nodes), set[fx.Node]()
    while stack:
        node = origin(stack.pop())
        if node not in seen:
            seen.add(node)
            yield node
            stack += () if is_end(node) else node.all_input_nodes


SIZE = torch.ops.aten.sym_size.int

# In the meta of a start: what the rank moves that moves most in this exchange, in bytes.
BYTES_KEY = "cp_inductor_bytes"
# In the meta of a start, or a tile: its number among those of its attention, from 1, and theirs.
EXCHANGE_KEY, TILE_KEY = "cp_inductor_exchange", "cp_inductor_tile"
# In the meta of the call of a piece (see `lower_attention`): the tiles in it.
TILES_KEY = "cp_inductor_tiles"


def tiles_of(node: fx.Node) -> Sequence[fx.Node]:
    """Return the tiles that a node is: itself, or those of a piece that it calls."""
    tiles: Sequence[fx.Node] = node.meta.get(TILES_KEY, ())
    return (node,) if node.target in TILE_OPS else tiles


def is_heavy(node: fx.Node) -> bool:
    """Whether a node is a tile, or another op that is dominated by matrix multiplication."""
    return bool(tiles_of(node)) or (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.overloadpacket in flop_registry
    )


def is_view(node: fx.Node) -> bool:
    """Whether a node's value shares the memory of another's."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if node.target in (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default):
        return True
    returns = node.target._schema.returns
    return any(r.alias_info is not None for r in returns) and not is_collective(node)


def computes_numbers(node: fx.Node) -> bool:
    """Whether a node computes sizes, integers or conditions alone, and the same each time."""
    if node.op != "call_function" or is_collective(node):
        return False
    values = node.meta.get("val")
    if values is None or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return not any(t.is_floating_point() or t.is_complex() for t in tensors_in(values))


def merge_equal(graph: fx.Graph, is_wanted: Callable[[fx.Node], bool]) -> None:
    """Keep the first of the wanted nodes that call the same of the same, or of equal sizes."""
    first: dict[Any, fx.Node] = {}
    for node in filter(is_wanted, list(graph.nodes)):
        words = torch.utils._pytree.tree_map(_word, (node.args, node.kwargs))
        known = first.setdefault((node.target, repr(words)), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _word(argument: Any) -> Any:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    return size_expression(value) if isinstance(value, SymInt) else argument
