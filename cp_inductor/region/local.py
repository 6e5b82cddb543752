"""Regions in which ranks compute within their own shards, because the program says so.

with local_attention(): sdpa(q, k, v)       each rank attends within its own shard
with per_rank(): x.roll(1, dims=1)          each rank rolls its own tokens; nothing is checked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx.traceback import annotate

from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import UnsupportedAttention
from cp_inductor.region.marks import LEFT_ALONE, PER_RANK
from cp_inductor.region.modes import (
    MULTI_HEAD,
    SDPA,
    RegionMode,
    has_body,
    is_opaque,
    is_sdpa,
    placed_like,
    refuse,
)
from cp_inductor.region.regions import type_attended
from cp_inductor.sequence.eager import TRUST
from cp_inductor.torch_private.checkpoint import rerun_within


def local_attention() -> LocalRegion:
    """Keep the attentions inside local: each rank attends within its own shard.

    Use it for an attention that is meant to be local: a window that never leaves the shard, or an
    encoder whose input every rank has whole. It works in eager and compiled code, on plain tensors
    and on DTensors, under `context_parallel`, `ContextParallel` and ``options={"mesh": mesh}``.

        with cp_inductor.local_attention():
            out = F.scaled_dot_product_attention(q, k, v)
    """
    return LocalRegion()


def per_rank() -> PerRank:
    """Say that each rank computes what is inside within its own shard, on purpose.

    Plain shards are checked: an operation is refused unless it is known to compute each token by
    itself. Inside, nothing is checked, and the results may be used with anything. Attention stays
    over the whole sequence. It works in `context_parallel`, under ``options={"mesh": mesh}``, and
    in compiled code.

        with cp_inductor.per_rank():
            x = x + x.roll(1, dims=1)           each rank rolls its own tokens
    """
    return PerRank()


class LocalRegion(RegionMode):
    """Attend within this rank's shard, whatever regions and placements say."""

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an attention on local tensors, and anything else as it is."""
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
            given = (*args[:3], *(kwargs[name] for name in names[len(args) :]))
            type_attended(given, out, inner=None)
        return out


class PerRank(RegionMode):
    """Let each rank compute within its own shard, and check nothing of it."""

    has_attention = False

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function, in a graph or a region that does not check it."""
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
