"""Let Python read the number of the whole, on every rank, wherever a number leaves a DTensor.

    (labels != -100).sum().item()      summed where it is made (`partials`): reads what the rank has
    x[:, 3, 0].tolist()                reads what all ranks gather
    if mask.all(): ...                 all ranks take the same branch
    F.one_hot(labels)                  all ranks make tensors of the same size

A rank that reads only its own part divides its loss by its own count, takes another branch than the
others, or makes a tensor of another size, and then waits for them for ever. All ways in which
Python reads a number go through one op (`item`, `int`, `float`, `bool`, `if`, an index, a
format), in eager code and where a graph is traced: there the sum over ranks stands in the graph.
`tolist` and `numpy` read memory, which torch refuses for every DTensor: eager code reads a copy of
the whole.

Assumes: all ranks ask for a number that none of them has whole, as they run the same program.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_inductor.dtensor.sequence_meshes import holds_sequences
from cp_inductor.dtensor.wrap import whole_tensor
from cp_inductor.torch_private.dtensor import (
    follow_memory,
    register_dtensor_handler,
    without_handler,
)

ITEM = torch.ops.aten._local_scalar_dense.default


def read_on_all() -> None:
    """Register what reads; a second call changes nothing."""
    register_dtensor_handler(ITEM, _item)
    follow_memory(
        lambda tensor: whole_tensor(tensor) if holds_sequences(tensor.device_mesh) else None
    )


def _item(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Any = args[0]
    if not holds_sequences(tensor.device_mesh):
        return without_handler(op, args, kwargs)
    return op(whole_tensor(tensor.detach()))
