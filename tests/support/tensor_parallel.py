"""Megatron's tensor parallelism of the model in combinations.py, in four styles."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.combinations import Decoder

BLOCK = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
# Megatron's: norms and residuals on a part of this rank's shard.
SEQUENCE_BLOCK = {
    "norm": SequenceParallel(),
    "query": ColwiseParallel(input_layouts=Shard(1)),
    "key": ColwiseParallel(input_layouts=Shard(1)),
    "value": ColwiseParallel(input_layouts=Shard(1)),
    "out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
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
