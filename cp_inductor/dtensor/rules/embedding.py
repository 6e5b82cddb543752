"""Say what is missing where eager code looks plain ids up in a distributed model.

    embedding(weight: DTensor, ids: Tensor)     torch: "got mixed torch.Tensor and DTensor"
      =>  UnsupportedPlacement: expected ids as a DTensor; distribute_tensor(ids, mesh, [Shard(1)])

Within `implicit_replication` every rank has all ids, and looks all of them up, as torch does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.limits import refuse_plain_ids
from cp_inductor.sequence.eager import place_of_caller
from cp_inductor.torch_private.dtensor import (
    are_plain_tensors_replicated,
    register_dtensor_handler,
    without_handler,
)
from cp_inductor.torch_private.tracing import is_fake

EMBEDDING = torch.ops.aten.embedding.default


def name_plain_ids() -> None:
    """Register the function; a second call changes nothing."""
    register_dtensor_handler(EMBEDDING, _embedding)


def _embedding(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, ids = args[:2]
    # torch takes a tensor of one element for replicated; positions have one dim.
    is_plain = isinstance(weight, DTensor) and not isinstance(ids, DTensor) and ids.ndim > 1
    if is_plain and not is_fake(ids) and not are_plain_tensors_replicated():
        refuse_plain_ids(f"embedding ({place_of_caller()})", ids)
    return without_handler(op, args, kwargs)
