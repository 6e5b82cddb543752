"""Recognize the nodes of a graph that start a functional collective or wait for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cp_inductor.graph.exchange_rows import EXCHANGE_ROWS
from cp_inductor.graph.nodes import graphs_of

START = torch.ops._c10d_functional.all_to_all_single.default

# What plans start.
STARTS = frozenset({START, EXCHANGE_ROWS})


WAIT = torch.ops._c10d_functional.wait_tensor.default


COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a functional collective or waits for one."""
    return node.target is EXCHANGE_ROWS or (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in COLLECTIVE_NAMESPACES
    )


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a functional collective."""
    return is_collective(node) and node.target is not WAIT


# Ranks of a pipeline differ in these.
_OF_TWO_RANKS = ("isend", "irecv", "batch_p2p_ops")


@dataclass(frozen=True, slots=True)
class Collective:
    """What a graph starts among the ranks of a group.

    Attributes:
        op: its name, and the dtype of what arrives.
        shape: of what arrives, if all ranks of the group get as much; None if inputs decide it.
        group_name: c10d name of the group.
    """

    op: str
    shape: tuple[int, ...] | None
    group_name: str


def list_collectives(gm: fx.GraphModule) -> tuple[Collective, ...]:
    """Return what a graph starts, in order, but for what one rank sends to one other."""
    starts = [node for graph in graphs_of(gm) for node in graph.nodes if is_start(node)]
    return tuple(
        _describe(n) for n in starts if n.target.__name__.split(".")[0] not in _OF_TWO_RANKS
    )


def _describe(node: fx.Node) -> Collective:
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    group: Any = node.kwargs.get("group_name") or node.args[names.index("group_name")]
    value = node.meta["val"]
    tensors: list[Tensor] = list(value) if isinstance(value, (list, tuple)) else [value]
    # Plans say what ranks send each other in an all-to-all, where it differs between them.
    sizes = () if target in STARTS else tuple(size for tensor in tensors for size in tensor.shape)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Collective(
        f"{target.__name__.partition('.')[0]} of {dtype}",
        sizes if all(isinstance(size, int) for size in sizes) else None,
        group if isinstance(group, str) else group.group_name,
    )
