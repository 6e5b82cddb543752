"""Compile long-context attention over a sharded sequence.

model = torch.compile(model, backend="cp_inductor", fullgraph=True)
"""

from cp_inductor import config
from cp_inductor.errors import (
    CPError,
    ProcessGroupError,
    UnevenSequence,
    UnsupportedAttention,
    UnsupportedKernel,
    UnsupportedPlacement,
    UnsupportedStrategy,
)
from cp_inductor.layouts import shard, unshard
from cp_inductor.parallel import register_dtensor_attention
from cp_inductor.plan import Device, Link, Plan, plan_attention

__all__ = [
    "CPError",
    "Device",
    "Link",
    "Plan",
    "ProcessGroupError",
    "UnevenSequence",
    "UnsupportedAttention",
    "UnsupportedKernel",
    "UnsupportedPlacement",
    "UnsupportedStrategy",
    "config",
    "plan_attention",
    "shard",
    "unshard",
]

register_dtensor_attention()
