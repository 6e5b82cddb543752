"""A style of `parallelize_module`: the attention of one module sees the whole sharded sequence.

    parallelize_module(model, cp_mesh, {"layers.*.attention": cp_inductor.ContextParallel()})

The module keeps its weights, hooks and signature. Its class is replaced by a subclass, as
`fully_shard` does, whose forward runs in a `SequenceRegion`.

Assumes: the module is given this rank's shards, or DTensors that are sharded along the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.fx.traceback import annotate

from cp_inductor.region.marks import IN_REGION
from cp_inductor.region.regions import SequenceRegion


class ContextParallel(ParallelStyle):
    """Let every scaled_dot_product_attention of a module see the whole sequence.

    Works for your own attention modules and for nn.MultiheadAttention with need_weights=False,
    which is how nn.TransformerEncoderLayer calls its self_attn. Weights stay plain tensors, and
    each rank's gradients cover only its tokens: reduce them as for data parallelism, over both
    axes.

    Args:
        seq_len: number of tokens of the whole sequence; needed if it does not divide by the number
            of ranks.

    Raises:
        UnsupportedPlacement: when applied, if the mesh is not 1-D.
    """

    def __init__(self, *, seq_len: int | None = None) -> None:
        super().__init__()
        self.seq_len = seq_len

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        lengths = () if self.seq_len is None else (self.seq_len,)
        cls, region = type(module), SequenceRegion(device_mesh, lengths)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with region, annotate({IN_REGION: region.group_name}):
                out = cls.forward(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                region.judge()
            return out

        names = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
        module.__class__ = type(f"ContextParallel{cls.__name__}", (cls,), names)
        # A layer around it asks for hooks before it takes nn.TransformerEncoderLayer's fast path,
        # which would read the weights and go past the forward.
        module.register_forward_pre_hook(_nothing)
        return module


def _nothing(module: nn.Module, args: Any) -> None:
    """Be a hook."""
