"""What the modes of this room share: which functions compute an attention, and how one is refused.

    class SomeRegion(RegionMode):
        def call(self, func, args, kwargs): ...     called with every function of torch inside

A region is a function mode. Eager code and Dynamo, while it traces, call it with the functions of
torch that run inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from cp_inductor.dtensor.wrap import wrap_shard
from cp_inductor.errors import CPError
from cp_inductor.torch_private.checkpoint import rerun_within
from cp_inductor.torch_private.dtensor import flex_attention_op, varlen_op
from cp_inductor.torch_private.modes import function_modes, let_modes_see, run_uncompiled

SITE = "attention over a sharded sequence"

# torch.nn.functional has this function, unless torch's context_parallel replaces it there.
SDPA = torch._C._nn.scaled_dot_product_attention
let_modes_see(SDPA)

FLEX = flex_attention_op()
MULTI_HEAD = F.multi_head_attention_forward

_ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention.default

_VARLEN = varlen_op()

# As graphs and modes see it.
VARLEN_OPS = frozenset() if _VARLEN is None else frozenset({_VARLEN, _VARLEN.overloadpacket})

# Attention that calls no scaled_dot_product_attention: Dynamo captures it whole, and it would run
# over the local shard alone.
OPAQUE_ATTENTION = VARLEN_OPS | {
    torch._transformer_encoder_layer_fwd,
    torch._native_multi_head_attention,
}


class RegionMode(TorchFunctionMode):
    """A mode that decides how each function of torch is called inside.

    Attributes:
        has_attention: whether it decides over what an attention is.
    """

    has_attention = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            # A mode makes Dynamo (2.13 to 2.15) trace the super() in it, which it cannot.
            return args[0].unflatten(*args[1:], **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function, or what takes its place in this region."""
        raise NotImplementedError


run_uncompiled(RegionMode.__torch_function__)


def note_compiled() -> None:
    """Let checkpoints around compiled code recompute within the regions around it."""
    for mode in function_modes():
        if isinstance(mode, RegionMode) and mode.has_attention:
            rerun_within(mode)


def is_sdpa(func: Callable[..., Any]) -> bool:
    """Whether a function is scaled_dot_product_attention, or the op behind it."""
    return func is SDPA or func is _ATEN_SDPA


def is_opaque(func: Callable[..., Any]) -> bool:
    """Whether a function computes an attention into which no mode can look."""
    return func is FLEX or func in OPAQUE_ATTENTION


def has_body(func: Callable[..., Any]) -> bool:
    """Whether Dynamo is about to trace a body in which it calls no mode."""
    return torch.compiler.is_compiling() and (
        func is checkpoint or isinstance(func, torch._ops.HigherOrderOperator)
    )


def placed_like(out: Tensor, like: Tensor) -> Tensor:
    """Wrap the local result of an attention like its query."""
    if not isinstance(like, DTensor):
        return out
    return wrap_shard(out, like.device_mesh, like.placements, (*like.shape[:3], *out.shape[3:]))


def refuse(error: type[CPError], *, expected: str, got: str, remedy: str) -> NoReturn:
    """Raise an error so that users see it even if Dynamo is tracing.

    While Dynamo traces, this requests a graph break, after which eager code meets the same error.
    With fullgraph=True, Dynamo raises with this message.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{SITE}: expected {expected}, got {got}; {remedy}")
    raise error(site=SITE, expected=expected, got=got, remedy=remedy)
