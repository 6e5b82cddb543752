"""Classify nodes of a lowered graph: heavy compute, views, numbers; and merge equal ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.utils.flop_counter import flop_registry

from cp_inductor.graph.collectives import is_collective
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.sizes import size_expression

# In the meta of a start: what the rank moves that moves most in this exchange, in bytes.
BYTES_KEY = "cp_inductor_bytes"

# In the meta of a start: its number among those of its attention, from 1, and theirs.
EXCHANGE_KEY = "cp_inductor_exchange"

# In the meta of a tile: its number among those of its attention, from 1, and theirs.
TILE_KEY = "cp_inductor_tile"

# In the meta of the call of a piece (see `share_pieces`): the tiles in it.
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
    return (
        values is not None
        and not isinstance(node.target, torch._ops.HigherOrderOperator)
        and not any(
            isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex())
            for one in (values if isinstance(values, (list, tuple)) else [values])
        )
    )


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
