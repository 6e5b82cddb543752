"""The attention of one module over a sharded sequence, as a style of `parallelize_module`.

    parallelize_module(model, cp_mesh, {"layers.*.attention": cp_inductor.ContextParallel()})

The module keeps its weights, its hooks and its signature; its forward runs in a `SequenceRegion`,
by a subclass of its class, as `fully_shard` does.

Assumes: the module is given this rank's shards, or DTensors that are sharded along the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_inductor.region.regions import SequenceRegion


class ContextParallel(ParallelStyle):
    """Attend over the whole sequence wherever a module calls scaled_dot_product_attention.

    For nn.MultiheadAttention (with need_weights=False, as nn.TransformerEncoderLayer calls its
    self_attn) and for attention modules of one's own. Weights stay plain tensors, and each rank's
    gradients are those of its tokens: reduce them as for data parallelism, over both axes.

    Args:
        seq_len: of the whole sequence, where the ranks do not divide it.
        layout: "contiguous", or "zigzag" for shards of batches that `cp_inductor.shard` or torch's
            head-tail load balancer has permuted. If it is not given, options and flags say.

    Raises:
        UnsupportedPlacement: when applied, the mesh is not 1-D, or the layout none of these.
    """

    def __init__(self, *, seq_len: int | None = None, layout: str | None = None) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        lengths = () if self.seq_len is None else (self.seq_len,)
        cls, region = type(module), SequenceRegion(device_mesh, lengths, layout=self.layout)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with region:
                out = cls.forward(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                region.judge()
                region.watch.start_again()
            return out

        names = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
        module.__class__ = type(f"ContextParallel{cls.__name__}", (cls,), names)
        # A layer around it asks for hooks before it takes nn.TransformerEncoderLayer's fast path,
        # which would read the weights and go past the forward.
        module.register_forward_pre_hook(_nothing)
        return module


def _nothing(module: nn.Module, args: Any) -> None:
    """Be a hook."""
