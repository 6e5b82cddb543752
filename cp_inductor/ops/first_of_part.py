"""The op that tells a graph where this rank's part of a dimension begins, as data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.torch_private.groups import group_of


@torch.library.custom_op("cp_inductor::first_of_part", mutates_args=())
def first_of_part(length: int, group_name: str, device: torch.device) -> Tensor:
    """Return the index at which this rank's part of a dimension begins.

    Args:
        length: of each rank's part.
        group_name: c10d name of the process group that shares the dimension, in the order of its
            ranks.
        device: of the result.

    Returns:
        () int64.
    """
    first = dist.get_rank(group_of(group_name)) * length
    return torch.full((), first, dtype=torch.int64, device=device)


@first_of_part.register_fake
def _(length: int, group_name: str, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


FIRST_OF_PART: Any = torch.ops.cp_inductor.first_of_part.default
