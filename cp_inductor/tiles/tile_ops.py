"""The ops that are tiles, for passes that look for them in a graph."""

from __future__ import annotations

from typing import Any

import torch

from cp_inductor.tiles.kernel_table import KERNELS
from cp_inductor.torch_private.flex_kernels import FLEX_BACKWARD, FLEX_FORWARD

_KERNELS = [kernel for row in KERNELS.values() for kernel in (row.plain, row.under_rule)]
BACKWARD_TILE_OPS: frozenset[Any] = frozenset(kernel.backward_op for kernel in _KERNELS)
TILE_OPS: frozenset[Any] = BACKWARD_TILE_OPS | {kernel.forward_op for kernel in _KERNELS}

# Those with subgraphs, and the places of what they read beside tokens: the block mask, and the
# tensors that the functions capture.
FLEX_TABLES = {FLEX_FORWARD: (4, 7, 8), FLEX_BACKWARD: (9, 12, 13)}
FLEX_OPS = frozenset(FLEX_TABLES)

# The arguments of aten's that `kernels.with_whole_rows` is for, and the places of these.
ROWS = frozenset({"query", "key", "value", "out"})
ROWS_OF_TILES = {
    op: tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in ROWS)
    for op in TILE_OPS
    if isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
}

# Makes the table that tiles under one rule and in one place share.
TABLE_OP = torch.ops.cp_inductor.block_table.default
