"""Sharding rules for ops that compute each element by itself, and that torch has no rules for.

    torch.polar(DTensor [Shard(1)], DTensor [Shard(1)])  =>  DTensor [Shard(1)]

Rotary embeddings of some models (DeepSeek-V2, Llama 4) turn angles into complex numbers, and some
activations have rules in the forward alone. The rules are registered once a model is parallelized
or a backend of this library is loaded; until then, DTensor's table is unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten

# torch 2.13 has no rules for them.
ALONE = (
    *(aten.polar.default, aten.complex.default, aten.log_sigmoid_backward.default),
    *(aten.hardswish_backward.default, aten.hardsigmoid_backward.default),
    *(aten.hardtanh_backward.default, aten.hardshrink_backward.default),
    *(aten.softshrink_backward.default, aten._prelu_kernel_backward.default),
)


def shard_pointwise() -> None:
    """Register the rules; a second call changes nothing."""
    for op in ALONE:
        register_sharding(op)(partial(_places, len(op._schema.returns)))


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
