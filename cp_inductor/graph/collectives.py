"""Recognize the nodes of a graph that start a functional collective or wait for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cp_inductor.graph.exchange_rows import EXCHANGE_ROWS
from cp_inductor.graph.nodes import nodes_of

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


@dataclass(frozen=True, slots=True)
class Collective:
    """What a graph starts among the ranks of a group."""

    op: str  # its name, and the dtype of what arrives
    # What arrives has this shape, if all ranks of the group get as much; None if inputs decide it.
    shape: tuple[int, ...] | None
    group_name: str  # c10d name of the group


def list_collectives(gm: fx.GraphModule) -> tuple[Collective, ...]:
    """Return what a graph starts among all ranks of groups, in order.

    Ranks also meet to plan a batch, where they compare its tables, and in attentions that are not
    yet lowered. Not counted is what one rank sends to one other, as in a pipeline, where ranks
    differ.
    """
    collectives, ops = [], torch.ops.cp_inductor
    ours = {op.default for op in (ops.plan_batch, ops.attention, ops.attention_backward)}
    for node in nodes_of(gm):
        target: Any = node.target
        if not (target in ours or is_start(node)):
            continue
        names = [argument.name for argument in target._schema.arguments]
        if "group_name" not in names or {"tag", "tag_list"} & {*names}:
            continue
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        group, value = arguments["group_name"], node.meta["val"]
        tensors: list[Tensor] = list(value) if isinstance(value, (list, tuple)) else [value]
        # Plans say what ranks send each other in an all-to-all, where it differs between them.
        own = () if target in ours | STARTS else tensors
        sizes = tuple(size for tensor in own for size in tensor.shape)
        is_static = all(isinstance(size, int) for size in sizes)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        collectives.append(
            Collective(
                f"{target.__name__.partition('.')[0]} of {dtype}",
                sizes if is_static else None,
                group if isinstance(group, str) else group.group_name,
            )
        )
    return tuple(collectives)
