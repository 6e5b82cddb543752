"""Function modes: what those of this room share, and those in which ranks stay within their shards.

    class SomeRegion(RegionMode):
        def _call(self, func, args, kwargs): ...    called with every function of torch inside

    with local_attention(): sdpa(q, k, v)           each rank attends within its own shard
    with per_rank(): x.roll(1, dims=1)              each rank rolls its own tokens, unchecked

Eager code and Dynamo, while it traces, call a mode with the functions of torch that run inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from cp_inductor.dtensor.wrap import held_by_rank, wrap_shard
from cp_inductor.errors import CPError, UnsupportedAttention
from cp_inductor.region.marks import FLEX, LEFT_ALONE, PER_RANK
from cp_inductor.sequence.eager import TRUST, EagerTyper
from cp_inductor.torch_private.checkpoint import rerun_within
from cp_inductor.torch_private.dtensor import varlen_op
from cp_inductor.torch_private.modes import (
    function_modes,
    function_modes_of_program,
    let_modes_see,
    name_of_function,
    run_uncompiled,
)

SITE = "attention over a sharded sequence"

# torch.nn.functional has this function, unless torch's context_parallel replaces it there.
SDPA = torch._C._nn.scaled_dot_product_attention
let_modes_see(SDPA)

_ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention.default

MULTI_HEAD = F.multi_head_attention_forward
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
    """A mode that decides how each function of torch is called inside."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            # A mode makes Dynamo (2.13 to 2.15) trace the super() in it, which it cannot.
            return args[0].unflatten(*args[1:], **kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function, or what takes its place in this region."""
        raise NotImplementedError

    def typing(self) -> EagerTyper | None:
        """Return what types the program inside; None if nothing does."""
        return None


run_uncompiled(RegionMode.__torch_function__)


class local_attention(RegionMode):  # noqa: N801
    """Keep the attentions inside local: each rank attends within its own shard.

    Use it for an attention that is meant to be local: a window that never leaves the shard, or an
    encoder whose input every rank has whole. It works in eager and compiled code, on plain tensors
    and on DTensors, under `context_parallel`, `ContextParallel` and ``options={"mesh": mesh}``.

        with cp_inductor.local_attention():
            out = F.scaled_dot_product_attention(q, k, v)
    """

    def _call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if is_sdpa(func):
            return self._attend(args, kwargs)
        if func is MULTI_HEAD or is_opaque(func) or has_body(func):
            if any(isinstance(argument, DTensor) for argument in (*args, *kwargs.values())):
                refuse(
                    UnsupportedAttention,
                    expected="local_attention directly around scaled_dot_product_attention",
                    got="DTensors passed to a multi-head attention, a checkpoint or another"
                    " higher-order op",
                    remedy="pass their to_local(), and wrap the result",
                )
            return _leave_alone(func, args, kwargs)
        return func(*args, **kwargs)

    def _attend(self, args: Any, kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            rerun_within(self)
        local = [held_by_rank(arg) for arg in args]
        named = {name: held_by_rank(arg) for name, arg in kwargs.items()}
        out = _leave_alone(SDPA, local, named)
        out = placed_like(out, args[0] if args else kwargs["query"])
        if not torch.compiler.is_compiling():
            names = ("query", "key", "value")
            type_attended((*args[:3], *(kwargs[name] for name in names[len(args) :])), out)
        return out


class per_rank(RegionMode):  # noqa: N801
    """Say that each rank computes what is inside within its own shard, on purpose.

    Plain shards are checked: an operation is refused unless it is known to compute each token by
    itself. Inside, nothing is checked, and the results may be used with anything. Attention stays
    over the whole sequence. It works in `context_parallel`, under ``options={"mesh": mesh}``, and
    in compiled code.

        with cp_inductor.per_rank():
            x = x + x.roll(1, dims=1)           each rank rolls its own tokens
    """

    def _call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            with annotate(PER_RANK):
                return func(*args, **kwargs)
        TRUST.depth += 1
        try:
            return func(*args, **kwargs)
        finally:
            TRUST.depth -= 1


def _leave_alone(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an attention so that neither enclosing regions nor the graph pass see it."""
    if torch.compiler.is_compiling():
        with annotate(LEFT_ALONE), torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def note_compiled() -> None:
    """Let checkpoints around compiled code recompute within the regions around it."""
    for mode in function_modes():
        if isinstance(mode, RegionMode) and not isinstance(mode, per_rank):
            rerun_within(mode)


def typers_of_program(inner: RegionMode | None = None) -> list[EagerTyper]:
    """Return what types the program here, also while Dynamo compiles a part of it.

    Among the modes of the program, the one that torch is calling is not: `inner`.
    """
    modes = (*function_modes_of_program(), inner)
    typers = (mode.typing() for mode in modes if isinstance(mode, RegionMode))
    return list(dict.fromkeys(typer for typer in typers if typer is not None))


def type_attended(tensors: Sequence[Tensor], out: Tensor, inner: RegionMode | None = None) -> None:
    """Let all enclosing regions know of a result; it is over shards if `inner` computed it."""
    own = None if inner is None else inner.typing()
    for typer in typers_of_program(inner):
        is_local = own is None or typer.group_name != own.group_name
        typer.attended(out, tensors, is_local=is_local)


def is_sdpa(func: Callable[..., Any]) -> bool:
    """Whether a function is scaled_dot_product_attention, or the op behind it."""
    return func is SDPA or func is _ATEN_SDPA


def is_opaque(func: Callable[..., Any]) -> bool:
    """Whether a function computes an attention into which no mode can look."""
    return func is FLEX or func in OPAQUE_ATTENTION


def has_body(func: Callable[..., Any]) -> bool:
    """Whether Dynamo is about to trace a body in which it calls no mode."""
    is_caller = func is checkpoint or isinstance(func, torch._ops.HigherOrderOperator)
    return torch.compiler.is_compiling() and is_caller


def placed_like(out: Tensor, like: Tensor) -> Tensor:
    """Wrap the local result of an attention like its query."""
    if not isinstance(like, DTensor):
        return out
    return wrap_shard(out, like.device_mesh, like.placements, (*like.shape[:3], *out.shape[3:]))


def words_of_opaque(function: object) -> dict[str, str]:
    """Return how an attention is refused into which neither modes nor graphs can look."""
    return {
        "expected": "attention as torch.nn.functional.scaled_dot_product_attention",
        "got": f"{name_of_function(function)}, which would attend within the local shard only",
        "remedy": "call varlen_attn on DTensors whose tokens are sharded, or flex_attention with a"
        " mask_mod that compares document numbers"
        if function in VARLEN_OPS
        else "call scaled_dot_product_attention, or wrap the call in cp_inductor.local_attention;"
        " for nn.TransformerEncoderLayer, use torch.backends.mha.set_fastpath_enabled(False)",
    }


# How a multi-head attention is refused that returns its weights.
WORDS_OF_WEIGHTS = {
    "expected": "need_weights=False",
    "got": "need_weights=True, which uses no attention kernel",
    "remedy": "pass need_weights=False to nn.MultiheadAttention",
}


def refuse(error: type[CPError], *, expected: str, got: str, remedy: str) -> NoReturn:
    """Raise an error so that users see it even if Dynamo is tracing.

    While Dynamo traces, this requests a graph break, after which eager code meets the same error.
    With fullgraph=True, Dynamo raises with this message.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{SITE}: expected {expected}, got {got}; {remedy}")
    raise error(site=SITE, expected=expected, got=got, remedy=remedy)
