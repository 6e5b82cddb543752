"""Classify nodes of a lowered graph: heavy compute, and starts with their bytes."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from cp_inductor.tiles.tile_ops import TILE_OPS

# In the meta of a start: what the rank moves that moves most in this exchange, in bytes.
BYTES_KEY = "cp_inductor_bytes"


def is_heavy(node: fx.Node) -> bool:
    """Whether a node is a tile, or another op that is dominated by matrix multiplication."""
    return node.target in TILE_OPS or (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.overloadpacket in flop_registry
    )
