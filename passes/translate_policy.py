"""Apply policies of selective checkpoints that name SDPA's kernels to the op that replaces them.

    policy(ctx, aten::_scaled_dot_product_flash_attention) => MUST_SAVE
      =>
    policy(ctx, cp_inductor::attention)                    => MUST_SAVE

If a policy names `torch.ops.cp_inductor.attention.default` itself, that decides. All results of the
op are saved: out, lse, and the fetched data that the recipe keeps, so that none of its exchanges is
repeated.

Assumes: a graph from Dynamo; policies made by `create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from cp_inductor.torch_private.first_dtensor import FORWARD_OPS

# Where Dynamo leaves the `context_fn` of a checkpointed region (torch 2.13 to 2.15).
CONTEXT_FN = "_checkpoint_context_fn"

MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)


def translate_policy(gm: fx.GraphModule) -> None:
    """Translate the policies of all checkpointed regions of a graph; idempotent."""
    for module in gm.modules():
        meta = getattr(module, "meta", {})
        context_fn = meta.get(CONTEXT_FN)
        if context_fn is not None and getattr(context_fn, "func", None) is not _translated:
            meta[CONTEXT_FN] = partial(_translated, context_fn)


def _translated(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the contexts of a checkpointed region, with its policy translated."""
    modes = context_fn()
    for mode in modes:
        if hasattr(mode, "policy_fn"):
            mode.policy_fn = partial(_ask, mode.policy_fn)
    return modes


def _ask(policy: Callable[..., Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    own = policy(context, op, *args, **kwargs)
    if op is not torch.ops.cp_inductor.attention.default or own is True or own in MUST:
        return own
    named = [policy(context, kernel, *args, **kwargs) for kernel in FORWARD_OPS]
    firm = [answer for answer in named if answer is True or answer in MUST]
    saved = [answer for answer in named if answer is CheckpointPolicy.PREFER_SAVE]
    return (*firm, *saved, own)[0]
