"""The op behind torch.nn.attention.varlen.varlen_attn, which is public, and its arguments.

Read in torch 2.13.0.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def varlen_op() -> Any:
    """Return the op that varlen_attn calls; None in releases that have none of these arguments.

    `torch_attn::_varlen_attn` (torch.nn.attention.varlen).
    """
    try:
        import_module("torch.nn.attention.varlen")
        op = torch.ops.torch_attn._varlen_attn.default
    except (ImportError, AttributeError):
        return None
    names = {argument.name for argument in op._schema.arguments}
    return op if {"cu_seq_q", "window_size", "seqused_k", "block_table"} <= names else None


_OP = varlen_op()

# As graphs and modes see it.
VARLEN_OPS = frozenset() if _OP is None else frozenset({_OP, _OP.overloadpacket})
