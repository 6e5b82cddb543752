"""Gather what models return: whole sequences, and the samples of ranks with other batches."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.utils.operations import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def gather_outputs(data: Any, num: int | None = None, others: DeviceMesh | None = None) -> Any:
    """Return samples of tensors in tuples, lists and mappings, or of a list of other objects.

    Args:
        data: DTensors, such as logits, come back whole.
        num: how many samples to return; None returns all.
        others: the ranks with other samples, which are returned as well.
    """

    def gather_tensor(tensor: Tensor) -> Tensor:
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if others is not None:
            own = whole.detach() if whole.ndim else whole.detach()[None]
            whole = DTensor.from_local(own, others, [Shard(0)], run_check=False).full_tensor()
        return whole[:num] if whole.ndim else whole

    try:
        return recursively_apply(gather_tensor, data, error_on_other_type=True)
    except TypeError:
        return gather_objects(data, num, others)


def gather_objects(data: list[Any], num: int | None, others: DeviceMesh | None) -> list[Any]:
    """Return the first objects of a list, in which those of other ranks follow this rank's."""
    if others is None:
        return data[:num]
    gathered: list[Any] = [None] * others.size()
    dist.all_gather_object(gathered, data, group=others.get_group())
    return [item for part in gathered for item in part][:num]
