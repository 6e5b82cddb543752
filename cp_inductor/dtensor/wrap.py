"""From DTensors to plain tensors and back: what a rank holds, the whole, and parts of a whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate


def held_by_rank(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its part of a DTensor, all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_whole(tensor: DTensor) -> bool:
    """Whether every rank holds all of a tensor."""
    return all(place.is_replicate() for place in tensor.placements)


def whole_tensor(tensor: DTensor) -> Tensor:
    """Return all of a tensor, plain, on every rank. What every rank holds is not copied."""
    placements = [Replicate()] * tensor.device_mesh.ndim
    whole: Tensor = tensor.redistribute(placements=placements).to_local()
    return whole


def wrap_whole(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a tensor that all ranks of a mesh have alike."""
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def wrap_parts(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Wrap this rank's part of a contiguous tensor of a given shape."""
    stride = tuple(prod(shape[place + 1 :]) for place in range(len(shape)))
    own, size = local.contiguous(), torch.Size(shape)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=size, stride=stride)


def wrap_shard(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Wrap this rank's part of a tensor of a given shape, which lies in memory as the part does."""
    size, stride = torch.Size(shape), stride_of(shape, local.stride())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def stride_of(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a shape whose dims are in memory in the order of other strides."""
    stride, length = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = length
        length *= shape[dim]
    return tuple(stride)
