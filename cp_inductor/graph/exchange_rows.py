"""The collective of plans that the batch decides: an all-to-all of rows, as many as data says.

    message = exchange_rows([key, value], numbers, sizes, ...)  packs rows, and starts to send them
    wait_tensor(message)                                        of torch's functional collectives

Which rows a rank sends to which is not in the graph: the op reads it from a plan's numbers, and how
many they are from a tensor on the CPU.
So one graph serves all ranks, and a graph of many ranks is no longer than one of few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import new_size

# Rows are so many elements, or a multiple: numbers in float32 are two of a half type.
WORDS = 2


@torch.library.custom_op("cp_inductor::exchange_rows", mutates_args=())
def exchange_rows(
    tensors: list[Tensor],
    numbers: Tensor,
    sizes: Tensor,
    rows: int,
    counts: int,
    world_size: int,
    group_name: str,
) -> Tensor:
    """Start to send rows of some tensors to other ranks, and to receive what they send.

    The op packs a message of its own, so that nothing that the graph knows is in flight but what
    arrives. That must be waited for, by `_c10d_functional.wait_tensor`.

    Args:
        tensors: (n, ...) each, contiguous within a row. The dtype of the last is that of the
            message; those before it may be wider, and are moved as bits, in several elements each.
        numbers: of a plan. A part of them says which rows are sent: those for each rank together,
            in rank order.
        sizes: int64, on the CPU.
        rows: where the sizes say which part this is; see `read_part`.
        counts: where they hold the rows sent to each rank, then those received from each, then the
            number of all rows that any rank sends.
        world_size: P.
        group_name: c10d name of the process group.

    Returns:
        (rows that arrive, W): by source; a row has the rows of all tensors, one behind the other.
        W is even.
    """
    *of_ranks, total = sizes[counts : counts + 2 * world_size + 1].tolist()
    sent, received = of_ranks[:world_size], of_ranks[world_size:]
    message = _pack(tensors, read_part(numbers, sizes, rows))
    if not total:
        return message  # no rank has anything to send: all know
    if dist.get_backend(group_of(group_name)) == "fake":
        # A pretended group moves nothing. It refuses to receive where nothing is sent.
        return message.new_zeros((sum(received), message.shape[1]))
    arriving: Tensor = torch.ops._c10d_functional.all_to_all_single(
        message, received, sent, group_name
    )
    return arriving


@exchange_rows.register_fake
def _(tensors: list[Tensor], *_: object) -> Tensor:
    return tensors[-1].new_empty((new_size(0), message_width(tensors)))


def read_part(numbers: Tensor, sizes: Tensor, place: int) -> Tensor:
    """Return a part of a plan's numbers; the sizes hold its start and its length at `place`."""
    start, length = sizes[place : place + 2].tolist()
    return numbers[start : start + length]


def message_width(tensors: Sequence[Tensor]) -> int:
    """Return the elements of a row of a message."""
    return -(-_edges(tensors)[-1] // WORDS) * WORDS


def _edges(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the row of each tensor begins in one of a message, and where the last ends."""
    itemsizes = [tensor.dtype.itemsize for tensor in tensors]
    assert itemsizes == sorted(itemsizes, reverse=True), "wide numbers begin at multiples of theirs"
    sizes = (prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in tensors)
    return [size // itemsizes[-1] for size in accumulate(sizes, initial=0)]


def _pack(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    message, edges = tensors[-1].new_empty((len(rows), message_width(tensors))), _edges(tensors)
    for tensor, part in zip(tensors, pairwise(edges), strict=True):
        message[:, slice(*part)] = tensor.flatten(1).index_select(0, rows).view(message.dtype)
    message[:, edges[-1] :] = 0
    return message


def unpack(message: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows, by name, of the tensors in a message that has arrived.

    Args:
        message: (m, W).
        like: what was sent: (n, ...) each. Those of a wider dtype come first.
    """
    parts = {}
    for (name, tensor), start in zip(like.items(), _edges([*like.values()]), strict=False):
        ratio = tensor.dtype.itemsize // message.dtype.itemsize
        source = message.view(tensor.dtype) if ratio > 1 else message
        part, shape = source.narrow(1, start // ratio, prod(tensor.shape[1:])), tensor.shape[1:]
        parts[name] = part.view(-1, *shape) if len(shape) == 1 else part.unflatten(1, shape)
    return parts


EXCHANGE_ROWS: Any = torch.ops.cp_inductor.exchange_rows.default
