"""Attention sinks of transformers on the CPU: gpt_oss over `flex_attention`.

    with flex_sinks_on_cpu():
        compiled(**batch).loss.backward()

A sink is a logit per head that takes part in the softmax, and has no value. transformers (5.23)
computes it from the lse of `flex_attention`: out * exp(lse - logaddexp(lse, sink)). On the CPU it
asks for no lse, because torch's own `flex_attention` cannot return one there, and refuses sinks.
The attention of this library returns one everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.flex_attention import (
    compile_friendly_flex_attention,
    flex_attention_forward,
    get_flex_attention_lse_kwargs,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cp_inductor.torch_private.flex import flex_gradients_on_cpu

NAME = "flex_attention"


@contextmanager
def flex_sinks_on_cpu() -> Iterator[None]:
    """Within this context, let transformers train `flex_attention` with sinks on the CPU.

    Models with ``attn_implementation="flex_attention"`` that are compiled and called within compute
    their sinks on CPU tensors as they do on other devices. Everything else is left to transformers.
    `flex_gradients_on_cpu` is entered as well.
    """
    functions: Any = ALL_ATTENTION_FUNCTIONS
    functions[NAME] = _attend
    try:
        with flex_gradients_on_cpu():
            yield
    finally:
        del functions[NAME]  # what transformers has is behind it


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute what `flex_attention_forward` of transformers does, with sinks on the CPU."""
    unknown = [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]
    is_tensor = isinstance(attention_mask, Tensor)
    if s_aux is None or query.device.type != "cpu" or unknown or is_tensor:
        result: tuple[Tensor, Tensor | None] = flex_attention_forward(
            module, query, key, value, attention_mask, scaling, s_aux=s_aux, **kwargs
        )
        return result
    out, lse = compile_friendly_flex_attention(
        query,
        key,
        value,
        block_mask=attention_mask,
        enable_gqa=True,
        scale=scaling,
        training=module.training,
        **get_flex_attention_lse_kwargs(True),
    )
    lse = getattr(lse, "lse", lse).to(value.dtype)
    with_sink = torch.logaddexp(lse, s_aux.view(1, -1, 1).expand_as(lse).to(lse.dtype))
    out = (out * torch.exp(lse - with_sink).unsqueeze(-1)).to(query.dtype)
    return out.transpose(1, 2).contiguous(), lse
