"""Concatenate DTensors with an empty tensor, as caches of keys begin.

    cat([tensor of shape (0,), keys (B, G, T, D) [Shard(2)]], dim=-2)  =>  keys, placed as they are

torch skips tensors of shape (0,), however many dims the others have. Caches of keys often begin
with one. DTensor (torch 2.13 to 2.15) looks for the sharded dim in such a tensor, and fails. The
handler leaves the empty tensor out. It is registered once a backend of this library is loaded or a
model is parallelized; until then, DTensor's table of handlers is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import dispatch_as_dtensor, register_dtensor_handler

CAT = torch.ops.aten.cat.default


def skip_empty_in_cat() -> None:
    """Let DTensors be concatenated with tensors of shape (0,); a second call changes nothing."""
    register_dtensor_handler(CAT, _cat)


def _cat(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind_arguments(op, args, kwargs)
    given: list[Tensor] = list(bound["tensors"])
    rest = [tensor for tensor in given if tensor.shape != (0,)]
    if not rest or len(rest) == len(given):
        return dispatch_as_dtensor(op, args, kwargs)
    dtype = given[0].dtype
    for tensor in given[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    rest = [tensor.to(dtype) for tensor in rest]
    if len(rest) == 1:
        return rest[0].clone()  # DTensor would gather it first
    return dispatch_as_dtensor(op, (rest, bound["dim"]), {})
