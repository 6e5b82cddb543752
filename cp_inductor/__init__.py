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
)
from cp_inductor.parallel import register_dtensor_attention

__all__ = [
    "CPError",
    "ProcessGroupError",
    "UnevenSequence",
    "UnsupportedAttention",
    "UnsupportedKernel",
    "UnsupportedPlacement",
    "config",
]

register_dtensor_attention()
