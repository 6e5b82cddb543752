"""Real collectives between the ranks, carried out behind the backs of the programs' buffers.

    buf2 = all_to_all_single(buf1, ...)     a copy of buf1 leaves; buf1 is frozen, buf2 is poison
    ...                                     what reads buf2 or writes to buf1 now is a finding
    wait_tensor(buf2)                       what came is copied into buf2; buf1 is free again

So what a program computes does not depend on when messages happen to arrive: a read that comes too
early always reads poison. Before each collective the ranks tell each other which one it is and how
much they send, so that ranks which do not fit say so, and do not hang or read each other's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.errors import CPError
from cp_inductor.graph.exchange_rows import message_width
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.groups import group_of
from tests.rehearsal.memory import Buffer

if TYPE_CHECKING:
    from tests.rehearsal.device import Device

c10d = torch.ops._c10d_functional
ALL_TO_ALL = c10d.all_to_all_single.default
WAIT = c10d.wait_tensor.default
ROWS = torch.ops.cp_inductor.exchange_rows.default


class ExchangeMismatch(CPError):
    """Ranks meet in different collectives, or one sends what the other does not expect."""


Counts = tuple[list[int], list[int]]


def _of_all_to_all(call: Mapping[str, Any], size: int) -> Counts:
    row = math.prod(call["input"].shape[1:])
    sent, received = call["input_split_sizes"], call["output_split_sizes"]
    return [n * row for n in sent], [n * row for n in received]


def _of_rows(call: Mapping[str, Any], size: int) -> Counts:
    start = call["counts"]
    numbers = call["sizes"][start : start + 2 * size].tolist()
    width = message_width(call["tensors"])
    return [n * width for n in numbers[:size]], [n * width for n in numbers[size:]]


def _even(share: Callable[[int], int | float]) -> Callable[[Mapping[str, Any], int], Counts]:
    """To each rank goes, and from each comes, a share of the tensor, by the number of ranks."""

    def of(call: Mapping[str, Any], size: int) -> Counts:
        count = int(call["input"].numel() * share(size))
        return [count] * size, [count] * size

    return of


# A ring sends 2 (P - 1) / P of the tensor, and receives as much.
_of_reduce = _even(lambda size: 2 / size)
# collective => from its arguments, the elements that go to each rank of its group, and that come
COLLECTIVES: Mapping[Any, Callable[[Mapping[str, Any], int], Counts]] = {
    ALL_TO_ALL: _of_all_to_all,
    c10d.all_gather_into_tensor.default: _even(lambda size: 1),
    c10d.reduce_scatter_tensor.default: _even(lambda size: 1 / size),
    c10d.all_reduce.default: _of_reduce,
    c10d.all_reduce_.default: _of_reduce,
    ROWS: _of_rows,
}
NUMBERS = {op: number for number, op in enumerate(COLLECTIVES)}


@dataclass(frozen=True)
class Flight:
    """A collective that was started and not waited for.

    Attributes:
        name: such as ``exchange 3 (all_to_all_single, rank0_graph0_forward.py:171)``.
        arriving: that the collective writes to.
        received: the program's buffer, where it will be copied to.
        sent: the program's buffers that it sends from.
    """

    name: str
    arriving: Tensor
    received: Buffer
    sent: Sequence[Buffer]


class Exchanges:
    """The collectives of a rank.

    Args:
        device: whose buffers they read and write.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.count = 0
        self.flights: dict[str, Flight] = {}

    def start(self, op: Any, args: Any, kwargs: Any) -> Tensor:
        """Start a collective; return the program's buffer for what it will bring."""
        call = bind_arguments(op, args, kwargs)
        memory = self.device.memory
        # A message of rows is packed by the op itself: it has read the program's tensors at once.
        sent = call["tensors"] if op is ROWS else [call["input"]]
        for tensor in sent:
            memory.check_read(tensor, self.device.argument_at(0))
            memory.check_on_device(tensor, self.device.argument_at(0))
        self._agree(op, call, sent[-1].element_size())
        name = self._name(op)
        # Send copies: gloo may still read when a program that does not wait writes.
        copied = call if op is ROWS else {**call, "input": call["input"].clone()}
        visible: Any
        if op is c10d.all_reduce_.default:
            arriving, visible = c10d.all_reduce.default(**copied), call["input"]
        else:
            arriving = op(**copied)
            given = arriving.shape, arriving.stride(), arriving.dtype
            visible = memory.empty(*given, self.device.target())
        buffers = [] if op is ROWS else [memory.buffer_of(one, name) for one in sent]
        self._take_off(Flight(name, arriving, memory.buffer_of(visible), buffers))
        visible.cp_flight = name
        result: Tensor = visible
        return result

    def _take_off(self, flight: Flight) -> None:
        for buffer in flight.sent:
            if buffer is not flight.received:
                self.device.memory.keep(buffer)
                buffer.frozen.append(flight.name)
        flight.received.awaited = flight.name
        self.device.memory.keep(flight.received)
        self.flights[flight.name] = flight

    def wait(self, tensor: Tensor) -> Tensor:
        """Wait for a collective; copy what it brought into the program's buffer."""
        memory = self.device.memory
        buffer = memory.buffer_of(tensor)
        name = getattr(tensor, "cp_flight", None) or buffer.awaited
        flight = self.flights.pop(name, None) if name else None
        if flight is None:
            return tensor  # it was waited for before
        WAIT(flight.arriving)
        flight.received.awaited = None
        for one in flight.sent:
            if flight.name in one.frozen:
                one.frozen.remove(flight.name)
            memory.forget(one)
        if flight.arriving.numel():
            arrived = flight.arriving
            whole = torch.as_strided(tensor, arrived.shape, arrived.stride())
            whole.copy_(arrived)
            memory.mark(whole)
        memory.forget(flight.received)
        return tensor

    def finish(self) -> None:
        """Note what was never waited for."""
        for flight in self.flights.values():
            self.device.note("never waited for", flight.received.name, flight.name)

    def _name(self, op: Any) -> str:
        self.count += 1
        place = self.device.place()
        at = f", {place.file}:{place.line}" if place else ""
        return f"exchange {self.count} ({_plain_name(op)}{at})"

    def _agree(self, op: Any, call: Mapping[str, Any], itemsize: int) -> None:
        """Compare what this rank sends and expects with what the others say, and count it."""
        group = group_of(call["group_name"])
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        sent, received = COLLECTIVES[op](call, size)
        if op is ALL_TO_ALL and sum(sent) != call["input"].numel():
            # The collective itself would say so when it is waited for: the others wait for ever.
            raise ExchangeMismatch(
                site=f"rank {self.device.rank}, {self._name(op)}",
                expected=f"a send buffer of {sum(sent)} elements, as its split sizes say",
                got=f"{call['input'].numel()} elements",
                remedy="report it: the program does not fit itself",
            )
        mine = torch.tensor([NUMBERS[op], itemsize, *sent])
        told = torch.empty(size * len(mine), dtype=mine.dtype)
        dist.all_gather_into_tensor(told, mine, group=group)
        for other, (number, width, *counts) in enumerate(told.view(size, -1).tolist()):
            if (number, width, counts[rank]) != (NUMBERS[op], itemsize, received[other]):
                raise ExchangeMismatch(
                    site=f"rank {self.device.rank}, {self._name(op)}",
                    expected=f"{received[other]} elements of {itemsize} bytes from rank {other}",
                    got=f"{counts[rank]} of {width} bytes in {_plain_name(list(NUMBERS)[number])}",
                    remedy="report it: the programs of these ranks do not fit together",
                )
        report = self.device.report
        report.sent_bytes += itemsize * (sum(sent) - sent[rank])
        report.received_bytes += itemsize * (sum(received) - received[rank])


def _plain_name(op: Any) -> str:
    return str(op._schema.name).partition("::")[2]
