"""The kinds of nodes that a lowered graph is made of: exchanges, heavy compute, and all else."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from cp_inductor.kernels import TILE_OPS

__all__ = ["BYTES_KEY", "START", "WAIT", "is_collective", "is_heavy", "is_start"]

START = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


# In the meta of a start: what the rank moves that moves most in this exchange, in bytes.
BYTES_KEY = "cp_inductor_bytes"


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts, or waits for, a functional collective."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in COLLECTIVE_NAMESPACES
    )


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a functional collective."""
    return is_collective(node) and node.target is not WAIT


def is_heavy(node: fx.Node) -> bool:
    """Whether the node is a tile, or another op that is dominated by matrix multiplication."""
    return node.target in TILE_OPS or (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.overloadpacket in flop_registry
    )
