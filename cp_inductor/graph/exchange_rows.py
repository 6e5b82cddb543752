"""The collective of plans that the batch decides: an all-to-all of rows, as many as data says.

    message = exchange_rows([key, value], numbers, sizes, ...)  packs rows, and starts to send them
    wait_tensor(message)                                        of torch's functional collectives

Which rows a rank sends to which is not in the graph: the op reads it from a plan's numbers, and how
many they are from a tensor on the CPU.
So one graph serves all ranks, and a graph of many ranks is no longer than one of few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import new_size


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
            message; others may be wider, and are moved as bits.
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
def _(
    tensors: list[Tensor],
    numbers: Tensor,
    sizes: Tensor,
    rows: int,
    counts: int,
    world_size: int,
    group_name: str,
) -> Tensor:
    number = new_size(0)
    return tensors[-1].new_empty((number, message_width(tensors)))


def read_part(numbers: Tensor, sizes: Tensor, place: int) -> Tensor:
    """Return a part of a plan's numbers; the sizes hold its start and its length at `place`."""
    start, length = sizes[place : place + 2].tolist()
    return numbers[start : start + length]


def message_width(tensors: Sequence[Tensor]) -> int:
    """Return the elements of a row of a message: an even number of them."""
    itemsize = tensors[-1].dtype.itemsize
    width = sum(_row_length(one) * (one.dtype.itemsize // itemsize) for one in tensors)
    return width + width % 2


def _row_length(tensor: Tensor) -> int:
    length = 1
    for size in tensor.shape[1:]:
        length *= size
    return length


def _pack(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    dtype, start = tensors[-1].dtype, 0
    message = tensors[-1].new_empty((len(rows), message_width(tensors)))
    for tensor in tensors:
        part = tensor.flatten(1).index_select(0, rows).view(dtype)
        message[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    message[:, start:] = 0
    return message


def unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of the tensors in a message that has arrived.

    Args:
        message: (m, W).
        like: what was sent: (n, ...) each. Those of a wider dtype come first.
    """
    start, parts = 0, []
    for tensor in like:
        ratio = tensor.dtype.itemsize // message.dtype.itemsize
        length = _row_length(tensor)
        source = message.view(tensor.dtype) if ratio > 1 else message
        part = source.narrow(1, start // ratio, length)
        parts.append(
            part.view(-1, *tensor.shape[1:])
            if tensor.ndim == 2
            else part.unflatten(1, tensor.shape[1:])
        )
        start += length * ratio
    return parts


EXCHANGE_ROWS: Any = torch.ops.cp_inductor.exchange_rows.default
