"""Ops of which one thing is missing in DTensor: empty tensors in `cat`, pointwise ops.

    cat([tensor of shape (0,), keys (B, G, T, D) [Shard(2)]], dim=-2)  =>  keys, placed as they are

    torch.polar(DTensor [Shard(1)], DTensor [Shard(1)])  =>  DTensor [Shard(1)]

Caches of keys often begin with a tensor of shape (0,), which torch skips, however many dims the
others have. DTensor (2.13 to 2.15) looks for the sharded dim in it, and fails.

Rotary embeddings of some models (DeepSeek-V2, Llama 4) turn angles into complex numbers, and some
activations have rules in the forward alone. In the backward of `polar` is a number without a hash.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import dispatch_as_dtensor, register_dtensor_handler

aten = torch.ops.aten

# torch 2.13 has no rules for them.
ALONE = (
    *(aten.polar.default, aten.complex.default, aten.log_sigmoid_backward.default),
    *(aten.hardswish_backward.default, aten.hardsigmoid_backward.default),
    *(aten.hardtanh_backward.default, aten.hardshrink_backward.default),
    *(aten.softshrink_backward.default, aten._prelu_kernel_backward.default),
)


def complete_single_ops() -> None:
    """Register the handlers and the rules; a second call changes nothing."""
    register_dtensor_handler(aten.cat.default, _cat)
    register_dtensor_handler(aten.mul.Scalar, lambda op, args, kwargs: torch.mul(*args, **kwargs))
    for op in ALONE:
        register_sharding(op)(partial(_places, len(op._schema.returns)))


def _cat(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind_arguments(op, args, kwargs)
    given: list[Tensor] = list(bound["tensors"])
    rest = [tensor for tensor in given if tensor.shape != (0,)]
    if not rest or len(rest) == len(given):
        return dispatch_as_dtensor(op, args, kwargs)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in given))
    rest = [tensor.to(dtype) for tensor in rest]
    if len(rest) == 1:
        return rest[0].clone()  # DTensor would gather it first
    return dispatch_as_dtensor(op, (rest, bound["dim"]), {})


def _places(num_results: int, *given: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return placements of the results and of what is given, on one axis of a mesh.

    Args:
        num_results: of the op.
        given: tensors, some of which are broadcast to the shape of the result, then numbers.
    """
    tensors = [one for one in given if hasattr(one, "shape")]
    numbers = [None] * (len(given) - len(tensors))  # all behind the tensors
    num_dims = max(len(one.shape) for one in tensors)
    whole: list[Any] = [Replicate()]
    places = [(whole * num_results, [*whole * len(tensors), *numbers])]
    for dim in range(num_dims):
        inputs = [_place_of(one, dim - num_dims) for one in tensors]
        results: list[Any] = [Shard(dim)]
        places.append((results * num_results, [*inputs, *numbers]))
    return places


def _place_of(tensor: Any, dim: int) -> Any:
    """Return the placement of a tensor if a dim of the result, counted from its end, is sharded."""
    is_broadcast = len(tensor.shape) < -dim or tensor.shape[dim] == 1
    return Replicate() if is_broadcast else Shard(len(tensor.shape) + dim)
