"""Megatron's tensor parallelism of the model in combinations.py, in four styles."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.combinations import Decoder


def split_projections(layout: Placement) -> dict[str, ParallelStyle]:
    """Return the styles of a block's projections; its input and its output have a layout."""
    column, row = ColwiseParallel(input_layouts=layout), RowwiseParallel(output_layouts=layout)
    return {**dict.fromkeys(("query", "key", "value", "up"), column), "out": row, "down": row}


BLOCK = split_projections(Replicate())
# Megatron's: norms and residuals on a part of this rank's shard.
NORMS = dict.fromkeys(("norm", "mlp_norm"), SequenceParallel())
SEQUENCE_BLOCK = {**split_projections(Shard(1)), **NORMS}
STYLES: dict[str, dict[str, ParallelStyle]] = {
    "blocks": {},
    "tied": {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    },
    "sequence": {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
    "loss": {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
}


def parallelize(model: Decoder, tp: DeviceMesh, style: str) -> None:
    block = SEQUENCE_BLOCK if style == "sequence" else BLOCK
    plan = {f"layers.*.{name}": one for name, one in block.items()} | STYLES[style]
    parallelize_module(model, tp, plan)
    if style == "tied":
        model.head.weight = model.tokens.weight


def split_llama(model: nn.Module, tp: DeviceMesh) -> None:
    """Split a Llama of transformers: heads, MLP, and the vocabulary."""
    column, row = ColwiseParallel, RowwiseParallel
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan: dict[str, ParallelStyle] = {
        **{f"{attention}.{name}_proj": column() for name in "qkv"},
        f"{attention}.o_proj": row(),
        **{f"{mlp}.{name}_proj": column() for name in ("gate", "up")},
        f"{mlp}.down_proj": row(),
        "model.embed_tokens": row(input_layouts=Replicate()),
        "lm_head": column(output_layouts=Replicate()),
    }
    parallelize_module(model, tp, plan)
