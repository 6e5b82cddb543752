"""Sharding rules for ops that compute every element alone, and that torch has no rules for.

    torch.polar(DTensor [Shard(1)], DTensor [Shard(1)])  =>  DTensor [Shard(1)]

Rotary embeddings of some models (DeepSeek-V2, Llama 4) turn angles into complex numbers. The rules
are registered once a backend of this library is loaded; until then, DTensor's table is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# Of two tensors; torch 2.13 has no rules for them.
OF_TWO = (torch.ops.aten.polar.default, torch.ops.aten.complex.default)


def shard_pointwise() -> None:
    """Register the rules; a second call changes nothing."""
    for op in OF_TWO:
        register_sharding(op)(_of_two)


def _of_two(first: Any, second: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return placements of the result and of both, on one axis of a mesh."""
    places: list[Any] = [Replicate()]
    if first.shape == second.shape:  # else one is broadcast, and their dims are not alike
        places += [Shard(dim) for dim in range(len(first.shape))]
    return [([place], [place, place]) for place in places]
