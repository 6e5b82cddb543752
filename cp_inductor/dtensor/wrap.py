"""Wrap a rank's part of a tensor as a DTensor, whose shape and strides are those of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def wrap_parts(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Wrap this rank's part of a tensor of a given shape."""
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(prod(shape[place + 1 :]) for place in range(len(shape))),
    )
