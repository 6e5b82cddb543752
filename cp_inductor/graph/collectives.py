"""Recognize the nodes of a graph that start a functional collective or wait for one."""

from __future__ import annotations

import torch
from torch import fx

from cp_inductor.graph.exchange_rows import EXCHANGE_ROWS

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
