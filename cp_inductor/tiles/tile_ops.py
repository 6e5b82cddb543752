"""The ops that are tiles, for passes that look for them in a graph."""

from __future__ import annotations

from typing import Any

import torch

from cp_inductor.tiles.kernel_table import KERNELS
from cp_inductor.torch_private.flex import FLEX_BACKWARD, FLEX_FORWARD

_KERNELS = [kernel for row in KERNELS.values() for kernel in (row.plain, row.under_rule)]
BACKWARD_TILE_OPS: frozenset[Any] = frozenset(kernel.backward_op for kernel in _KERNELS)
TILE_OPS: frozenset[Any] = BACKWARD_TILE_OPS | {kernel.forward_op for kernel in _KERNELS}

# Those with subgraphs.
FLEX_OPS = frozenset({FLEX_FORWARD, FLEX_BACKWARD})

# The arguments of aten's that `kernels.with_whole_rows` is for, and the places of these.
ROWS = frozenset({"query", "key", "value", "out"})
ROWS_OF_TILES = {
    op: tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in ROWS)
    for op in TILE_OPS
    if isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
}
