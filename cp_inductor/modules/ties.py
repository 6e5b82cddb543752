"""Find parameters of a compiled graph that were one parameter before they were distributed.

    embedding(ids, weight_0); linear(x, weight_1)    two DTensors, one memory  =>  UntiedWeights

torch's `distribute_module` makes a new parameter for each name. On the CPU, and if the model was
already on the device, the two still share the memory that they were made from. That is never
intended, so it is refused. If the weights were copied to the device, only their values are equal,
which may be intended. For an embedding's table, a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.axis import is_first_rank
from cp_inductor.errors import UntiedWeights
from cp_inductor.kept import cache
from cp_inductor.torch_private.dynamo import graph_inputs

log = logging.getLogger("cp_inductor")

REMEDY = "call cp_inductor.parallelize(model, mesh), which keeps ties, not distribute_module"

# So many elements of two tables are compared before all are.
NUM_PROBED = 64


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter that a graph reads.

    Attributes:
        name: in the model.
        tensor: the parameter.
        local: this rank's part of it.
        is_table: whether an embedding looks up its rows.
    """

    name: str
    tensor: DTensor
    local: Tensor
    is_table: bool


def check_ties(graph: fx.Graph) -> None:
    """Refuse, or warn of, parameters of a Dynamo graph that were tied and no longer are.

    Without gradients nothing is checked: both parameters still have the same values.

    Raises:
        UntiedWeights: two parameters share memory.
    """
    if not torch.is_grad_enabled():
        return
    for one, other in _pairs(graph):
        if _is_one_memory(one.local, other.local):
            raise UntiedWeights(
                site=f"{one.name} and {other.name}",
                expected="one parameter under both names",
                got="two that share memory: they were one before they were distributed, and"
                " each would get only a part of the gradient",
                remedy=REMEDY,
            )
        is_said = (one.is_table or other.is_table) and is_first_rank(one.tensor.device_mesh)
        if is_said and _is_alike(one.local, other.local):
            _warn(one.name, other.name)


def _pairs(graph: fx.Graph) -> Iterator[tuple[_Weight, _Weight]]:
    """Yield pairs that could have been one: same shape and dtype, at least one trained."""
    alike: dict[tuple[object, ...], list[_Weight]] = {}
    for node, name, value in graph_inputs(graph):
        if isinstance(value, DTensor) and isinstance(value, nn.Parameter):
            is_table = any(
                # F.embedding takes the table second, the op first.
                user.target in (F.embedding, torch.embedding)
                and node in (*user.args[:2], user.kwargs.get("weight"))
                for user in node.users
            )
            local = value.to_local().detach()
            key = (value.shape, value.dtype, value.placements, local.device)
            alike.setdefault(key, []).append(_Weight(name, value, local, is_table))
    for group in alike.values():
        for one, other in combinations(group, 2):
            is_trained = one.tensor.requires_grad or other.tensor.requires_grad
            if is_trained and one.tensor is not other.tensor:
                yield one, other


def _is_one_memory(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or not one.numel():
        return False
    address = one.untyped_storage().data_ptr()
    # A weight that FSDP has freed has no address.
    is_same = address != 0 and address == other.untyped_storage().data_ptr()
    return is_same and share_elements(one, other)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether all values are equal, and not all the same number, as in initialized weights."""
    if one.is_meta or one.shape != other.shape or one.numel() < 2:
        return False
    probe, other_probe = (t.flatten()[:NUM_PROBED] for t in (one, other))
    if not torch.equal(probe, other_probe) or bool((probe == probe[0]).all()):
        return False
    return torch.equal(one, other)


@cache
def _warn(name: str, other: str) -> None:
    log.warning(
        "UntiedWeights: %s and %s are two parameters of equal values. If they were one before"
        " the model was distributed, each now gets only a part of the gradient, and they will"
        " train apart: %s. If they are separate weights, ignore this.",
        name,
        other,
        REMEDY,
    )


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors of one storage have an element in common.

    Bytes in common are not enough: interleaved parts of one tensor, such as its even and its odd
    columns, have no element in common.
    """
    first, second = (_extent(tensor) for tensor in (one, other))
    if first[0] >= second[1] or second[0] >= first[1]:
        return False
    if one.element_size() != other.element_size():
        return True
    start = min(first[0], second[0])
    marks = torch.zeros((max(first[1], second[1]) - start) // one.element_size(), dtype=torch.bool)
    offsets = ((extent[0] - start) // one.element_size() for extent in (first, second))
    views = [
        marks.as_strided(tensor.size(), tensor.stride(), offset)
        for tensor, offset in zip((one, other), offsets, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor reads, and the byte after the last."""
    start = int(tensor.storage_offset())
    span = zip(tensor.size(), tensor.stride(), strict=True)
    last = start + sum((int(size) - 1) * int(stride) for size, stride in span)
    return start * tensor.element_size(), (last + 1) * tensor.element_size()
