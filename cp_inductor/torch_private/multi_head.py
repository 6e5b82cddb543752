"""Multi-head attention whose inner functions are seen by function modes.

    F.multi_head_attention_forward(x, ...)      calls the mode once, and runs its body outside of it
      =>
    multi_head_attention(x, ...)                runs the body, whose SDPA calls the mode

Read in torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

_NEED_WEIGHTS = list(signature(F.multi_head_attention_forward).parameters).index("need_weights")


def needs_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of F.multi_head_attention_forward asks for the weights of its attention."""
    is_given = len(args) > _NEED_WEIGHTS
    return bool(args[_NEED_WEIGHTS] if is_given else kwargs.get("need_weights", True))


def _has_no_override(tensors: object) -> bool:
    return False


# The function calls `has_torch_function`, a global of its module, which is true in every mode, and
# then calls the mode with itself. No argument stops that, and with the mode left, nothing in the
# body would call it. So this is its code with other globals. They have no module name, so that
# Dynamo looks them up where they are. To be removed once torch lets a mode call a function within
# itself.
_torchs: Any = F.multi_head_attention_forward
_globals = {
    **_torchs.__globals__,
    "has_torch_function": _has_no_override,
    # F has another function in its place while torch's context_parallel is entered.
    "scaled_dot_product_attention": torch._C._nn.scaled_dot_product_attention,
}
del _globals["__name__"]
multi_head_attention = FunctionType(
    _torchs.__code__, _globals, _torchs.__name__, _torchs.__defaults__, _torchs.__closure__
)
