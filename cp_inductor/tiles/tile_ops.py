"""The ops that are tiles, for passes that look for them in a graph."""

from __future__ import annotations

from typing import Any

import torch

from cp_inductor.tiles import masked_tiles  # noqa: F401 - registers its ops
from cp_inductor.torch_private.flex_kernels import FLEX_BACKWARD, FLEX_FORWARD

aten, ours = torch.ops.aten, torch.ops.cp_inductor

BACKWARD_TILE_OPS: frozenset[Any] = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        ours.masked_tile_backward.default,
        FLEX_BACKWARD,
    }
)
TILE_OPS: frozenset[Any] = BACKWARD_TILE_OPS | {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    ours.masked_tile.default,
    FLEX_FORWARD,
}

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
TABLE_OP = ours.block_table.default
