"""Take this rank's part of a replicated tensor by a number that the graph reads when it runs.

    labels, replicated => sharded, on rank 2 of 4

    split(labels, 16)[2]                          as DTensor traces it: the code of rank 2 alone
    labels[first_of_part(16) + arange(16)]        here: the code of all ranks

If the graphs of all ranks are the same text, ranks share what Inductor compiles. Otherwise the
labels of a loss, or positions that a model makes, would make each rank compile the whole model.

Assumes: equally long parts of a contiguous tensor. Other tensors are cut as DTensor cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_inductor.ops.first_of_part import FIRST_OF_PART
from cp_inductor.torch_private.dtensor import parts_taken_by
from cp_inductor.torch_private.sizes import is_known


@contextmanager
def parts_as_data() -> Iterator[None]:
    """Within this context, graphs that are traced do not depend on which part a rank takes."""
    with parts_taken_by(_own_part):
        yield


def _own_part(tensor: Tensor, dim: int, mesh: DeviceMesh, axis: int, place: int) -> Tensor | None:
    """Return this rank's part of a tensor; None if DTensor shall cut the tensor.

    Args:
        tensor: whole on this rank.
        dim: the dim that is cut, into as many parts as the axis has ranks.
        mesh, axis: the mesh, and the axis whose ranks take the parts.
        place: the position of this rank on the axis.
    """
    size, group = tensor.shape[dim], mesh.get_group(axis)
    is_even = is_known(size % mesh.size(axis) == 0) and not is_known(size == 0)
    if not is_even or not _is_contiguous(tensor) or dist.get_rank(group) != place:
        return None
    length = size // mesh.size(axis)
    first = FIRST_OF_PART(length, group.group_name, tensor.device)
    rows = torch.arange(length, device=tensor.device) + first
    return tensor.index_select(dim, rows)


def _is_contiguous(tensor: Tensor) -> bool:
    expected: int | torch.SymInt = 1
    for size, stride in reversed([*zip(tensor.shape, tensor.stride(), strict=True)]):
        if not is_known(size == 1) and not is_known(stride == expected):
            return False
        expected = expected * size
    return True
