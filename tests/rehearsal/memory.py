"""The memory of a pretended device: it knows what was written, and who may touch it.

    buf3 = memory.empty((256, 64), (64, 1), torch.bfloat16)     guard bytes, 0xff..., guard bytes
    memory.load(addresses, mask, other, dtype)                  checked, then read

Fresh memory holds 0xff bytes: NaN in every floating dtype, -1 in every signed one. Beside the bytes
of a buffer stands for each whether it was written since. Buffers in flight have one more mark: a
receive buffer has not arrived until it is waited for, and a send buffer is frozen until then.

What is found is noted, and the access is mended: what may not be read is read as poison, what may
not be written is dropped. So one mistake does not end the rehearsal, or the process.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from tests.rehearsal.triton_interpreter import ADDRESS, NUMBER_SHIFT

Array = NDArray[Any]

ALIGNMENT = 512  # bytes, of CUDA's caching allocator
GUARD = 4096  # bytes before and behind a buffer that belong to nobody
POISON = 0xFF

_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass(eq=False)
class Buffer:
    """A piece of memory.

    Attributes:
        start, num_bytes: where it lies.
        name: of the variable of the generated code that held it first.
        written: 0xff for each byte that was written; None if all bytes are, because the buffer came
            from outside.
        awaited: the exchange that it receives from, until that has arrived.
        frozen: exchanges that send from it.
        on_host: whether it belongs to the host, and not to the device.
    """

    start: int
    num_bytes: int
    name: str
    written: Array | None = None
    awaited: str | None = None
    frozen: list[str] = field(default_factory=list)
    on_host: bool = False

    @property
    def stop(self) -> int:
        """The first address behind it."""
        return self.start + self.num_bytes


@dataclass(frozen=True)
class Argument:
    """A pointer that a kernel is given, by its name in the code: into a buffer, and no other."""

    name: str
    buffer: Buffer


class _Accesses:
    """What the lanes of a launch read and write of one buffer; the last argument points to it."""

    def __init__(self, argument: Argument) -> None:
        self.argument = argument
        self.read: list[tuple[Array, Array]] = []
        self.written: list[tuple[Array, Array]] = []

    def add(self, to: list[tuple[Array, Array]], addresses: Array, lanes: Array) -> None:
        """Add accesses: addresses, and the lane of each."""
        buffer = self.argument.buffer
        is_within = (addresses >= np.uint64(buffer.start)) & (addresses < np.uint64(buffer.stop))
        places = (addresses[is_within] - np.uint64(buffer.start)).astype(np.int64)
        to.append((lanes[is_within], places))


class DeviceMemory:
    """All buffers of a rank; `note` is told the kind of a finding, the buffer and what happened."""

    def __init__(self, note: Callable[[str, str, str], None]) -> None:
        self.note = note
        self.arguments: Sequence[Argument] = ()
        self._buffers: dict[int, Buffer] = {}
        self._inputs: frozenset[int] = frozenset()
        self._accesses: dict[int, _Accesses] = {}
        self._is_template = False

    def empty(
        self, shape: Any, stride: Any, dtype: torch.dtype, name: str, *, on_host: bool = False
    ) -> Tensor:
        """Return a fresh, poisoned tensor (any shape, strides in elements)."""
        num_bytes = _span(shape, stride) * dtype.itemsize
        raw = np.full(num_bytes + 2 * GUARD + ALIGNMENT, POISON, np.uint8)
        first = raw.ctypes.data + GUARD
        first += -first % ALIGNMENT
        start = first - raw.ctypes.data
        memory = raw[start : start + num_bytes]
        # What C++ kernels write on the host is not seen.
        written = None if on_host else np.zeros(num_bytes, np.uint8)
        buffer = Buffer(first, num_bytes, name, written, on_host=on_host)
        if num_bytes:
            self._buffers[first] = buffer
        weakref.finalize(memory, self._free, first, buffer)
        flat = torch.from_numpy(memory).view(dtype) if num_bytes else torch.empty(0, dtype=dtype)
        return flat.as_strided(tuple(shape), tuple(stride))

    def adopt(self, tensor: Tensor, name: str) -> Tensor:
        """Return a copy in this memory of a result that an op of torch has put elsewhere."""
        flat = self.empty((_span(tensor.shape, tensor.stride()),), (1,), tensor.dtype, name)
        copy = flat.as_strided(tensor.shape, tensor.stride())
        copy.copy_(tensor)
        self.mark(copy)
        return copy

    def buffer_of(self, tensor: Tensor, name: str = "") -> Buffer:
        """Return the buffer of a tensor; one from outside counts as written."""
        storage = tensor.untyped_storage()
        known = self._buffers.get(storage.data_ptr())
        return known or Buffer(
            storage.data_ptr(), storage.nbytes(), name or "a tensor from outside"
        )

    def keep(self, buffer: Buffer) -> None:
        """Know a buffer from outside as long as it is in flight."""
        if buffer.num_bytes:
            self._buffers.setdefault(buffer.start, buffer)

    def forget(self, buffer: Buffer) -> None:
        """Know a buffer from outside no longer."""
        if buffer.written is None and not buffer.frozen and not buffer.awaited:
            self._buffers.pop(buffer.start, None)

    def _free(self, start: int, buffer: Buffer) -> None:
        if self._buffers.get(start) is buffer:
            del self._buffers[start]
        if buffer.awaited:
            self.note(
                "freed in flight", buffer.name, f"freed before {buffer.awaited} was waited for"
            )

    @contextmanager
    def inputs_unchanged(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within this context, writes to these tensors are noted."""
        before = self._inputs
        starts = (tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())
        self._inputs = before | frozenset(starts)
        try:
            yield
        finally:
            self._inputs = before

    @contextmanager
    def launched(
        self, arguments: Sequence[Argument], in_place: frozenset[int], *, is_template: bool
    ) -> Iterator[None]:
        """Within this context, one launch of a kernel has these pointers.

        Args:
            arguments: in the order of their tags.
            in_place: tags of those that the kernel reads and writes.
            is_template: whether masked lanes hold zeros. Triton leaves them undefined, but torch's
                template of flex attention's backward computes with them (2.13).
        """
        self._is_template = is_template
        counts = Counter(one.buffer.start for one in arguments)
        self._accesses = {
            one.buffer.start: _Accesses(one)
            for tag, one in enumerate(arguments)
            if tag in in_place or counts[one.buffer.start] > 1
        }
        self.arguments = arguments
        yield
        for one in self._accesses.values():
            self._check_lanes(one)

    def _check_lanes(self, accesses: _Accesses) -> None:
        """Note elements that one lane of a launch reads and another one writes.

        The interpreter reads all before it writes; on a device nobody knows which comes first.
        """
        if not accesses.read or not accesses.written:
            return
        buffer = accesses.argument.buffer
        writer = np.full(buffer.num_bytes, -1, np.int64)
        for lanes, places in accesses.written:
            writer[places] = lanes
        raced = 0
        for lanes, places in accesses.read:
            by = writer[places]
            raced += int(np.count_nonzero((by >= 0) & (by != lanes)))
        if raced:
            what = f"{raced} elements are read by one lane and written by another"
            self.note("race", accesses.argument.name, what)

    # Whole tensors: what ops of torch read and write.

    def check_on_device(self, tensor: Tensor, name: str) -> None:
        """Note a tensor of the host where the device reads or writes."""
        if tensor.numel() and self.buffer_of(tensor).on_host:
            self.note("host memory", name, "the device does not reach it")

    def check_read(self, tensor: Tensor, name: str) -> None:
        """Note a tensor that has not arrived, or of which something was never written."""
        if tensor.numel():
            buffer = self.buffer_of(tensor)
            self._check_readable(buffer, name, self._shadow(tensor, buffer))

    def mark(self, tensor: Tensor, name: str = "") -> None:
        """Note that all of a tensor was written."""
        if not tensor.numel():
            return
        buffer = self.buffer_of(tensor, name)
        self._check_writable(buffer, name)
        shadow = self._shadow(tensor, buffer)
        if shadow is not None:
            shadow[...] = _full(shadow.dtype)

    def _shadow(self, tensor: Tensor, buffer: Buffer) -> Array | None:
        """Return of each element whether it was written."""
        if buffer.written is None:
            return None
        size = tensor.element_size()
        offset = tensor.storage_offset() * size
        word = _WORDS.get(size, _WORDS[1])  # complex numbers by their first byte
        flat = _shadow(buffer, word.itemsize)[offset // word.itemsize :]
        strides = [stride * size for stride in tensor.stride()]
        return as_strided(flat, tensor.shape, strides)

    # Accesses of kernels.

    def load(
        self, addresses: Array, mask: Array, other: Array | None, dtype: np.dtype[Any]
    ) -> Array:
        """Return what stands at tagged addresses where the mask is true, and `other` elsewhere.

        If there is no `other`, Triton does not say what the rest is. Addresses, masks and values
        have one shape, or broadcast to it; so they do below.
        """
        if other is None:
            has_zeros = self._is_template
            other = np.zeros((), dtype) if has_zeros else _undefined((), dtype)
        addresses, mask, other = np.broadcast_arrays(addresses, mask, other)
        result = np.array(other, dtype)
        if not mask.any():
            return result
        wanted = addresses[mask]
        values = np.empty(len(wanted), dtype)
        for argument, chosen, plain in self._groups(wanted):
            values[chosen] = self._read(argument, plain, dtype)
            accesses = self._accesses.get(argument.buffer.start)
            if accesses is not None:
                accesses.add(accesses.read, plain, _lanes(mask)[chosen])
        result[mask] = values
        return result

    def store(self, addresses: Array, values: Array, mask: Array) -> None:
        """Write where the mask is true."""
        addresses, mask, values = np.broadcast_arrays(addresses, mask, values)
        wanted, given = addresses[mask], values[mask]
        for argument, chosen, plain in self._groups(wanted):
            self._write(argument, plain, given[chosen])
            accesses = self._accesses.get(argument.buffer.start)
            if accesses is not None:
                accesses.add(accesses.written, plain, _lanes(mask)[chosen])

    def update(
        self,
        addresses: Array,
        values: Array,
        mask: Array,
        at: Callable[[Array, Array, Array], None],
    ) -> Array:
        """Combine what stands there with values, by `at` as of numpy; return what stood there."""
        addresses, mask, values = np.broadcast_arrays(addresses, mask, values)
        dtype = values.dtype
        old = self.load(addresses, mask, np.zeros_like(values), dtype)
        wanted, given = addresses[mask], values[mask]
        for argument, chosen, plain in self._groups(wanted):
            is_within = self._within(argument, plain, dtype.itemsize, "atomic update")
            buffer = argument.buffer
            self._check_writable(buffer, argument.name)
            memory = _memory_of(buffer, dtype)
            places = (plain[is_within] - np.uint64(buffer.start)) // np.uint64(dtype.itemsize)
            at(memory, places, given[chosen][is_within])
        return old

    def _groups(self, addresses: Array) -> Iterator[tuple[Argument, Any, Array]]:
        """Yield each argument that addresses were made from, which were, and these untagged."""
        numbers = addresses >> NUMBER_SHIFT
        if len(numbers) and (numbers == numbers[0]).all():  # mostly, and soon seen
            yield self.arguments[int(numbers[0])], slice(None), addresses & ADDRESS
            return
        for number in np.unique(numbers):
            chosen = numbers == number
            yield self.arguments[int(number)], chosen, addresses[chosen] & ADDRESS

    def _read(self, argument: Argument, addresses: Array, dtype: np.dtype[Any]) -> Array:
        buffer, size = argument.buffer, dtype.itemsize
        is_within = self._within(argument, addresses, size, "load")
        places = self._places(argument, addresses[is_within], size, "load")
        written = None if buffer.written is None else _shadow(buffer, size)[places]
        self._check_readable(buffer, argument.name, written)
        values = _undefined((len(addresses),), dtype)
        if len(places):
            values[is_within] = _memory_of(buffer, dtype)[places]
        return values

    def _write(self, argument: Argument, addresses: Array, values: Array) -> None:
        buffer, size = argument.buffer, values.dtype.itemsize
        is_within = self._within(argument, addresses, size, "store")
        self._check_writable(buffer, argument.name)
        places = self._places(argument, addresses[is_within], size, "store")
        if not len(places):
            return
        _memory_of(buffer, values.dtype)[places] = values[is_within]
        if buffer.written is not None:
            shadow = _shadow(buffer, size)
            shadow[places] = _full(shadow.dtype)

    def _places(self, argument: Argument, addresses: Array, size: int, what: str) -> Array:
        """Return which elements of a buffer these are, for addresses within it."""
        offsets = (addresses - np.uint64(argument.buffer.start)).astype(np.int64)
        if (offsets % size).any():
            self.note(f"misaligned {what}", argument.name, f"addresses are no multiples of {size}")
        return offsets // size

    def _check_readable(self, buffer: Buffer, name: str, written: Array | None) -> None:
        """Note a read of what has not arrived, or of elements that were never written."""
        if buffer.awaited:
            self.note("read before wait", name, f"{buffer.awaited} has not been waited for")
        unwritten = 0 if written is None else np.count_nonzero(written != _full(written.dtype))
        if written is not None and unwritten:
            what = f"{unwritten} of {written.size} elements were never written"
            self.note("read of unwritten memory", name, what)

    def _check_writable(self, buffer: Buffer, name: str) -> None:
        if buffer.frozen:
            what = f"{buffer.frozen[0]} may still send from it"
            self.note("write into a send buffer", name, what)
        if buffer.awaited:
            what = f"{buffer.awaited} may still write to it"
            self.note("write into a receive buffer", name, what)
        if buffer.start in self._inputs:
            self.note("write into an input", name, "the graph is not to change it")

    def _within(self, argument: Argument, addresses: Array, size: int, access: str) -> Any:
        buffer = argument.buffer
        low, high = int(addresses.min()), int(addresses.max())
        if low >= buffer.start and high + size <= buffer.stop:
            return slice(None)
        stop = np.uint64(max(buffer.stop - size + 1, 0))
        is_within = (addresses >= np.uint64(buffer.start)) & (addresses < stop)
        outside = int(np.count_nonzero(~is_within))
        what = (
            f"{outside} of {len(addresses)} elements of a {access} lie outside:"
            f" bytes {low - buffer.start} to {high + size - buffer.start} of {buffer.num_bytes}"
        )
        self.note("out of bounds", argument.name, what)
        return is_within


def _memory_of(buffer: Buffer, dtype: np.dtype[Any]) -> Array:
    """Return the bytes of a buffer, as elements of a dtype."""
    count = buffer.num_bytes // dtype.itemsize
    pointer = {"data": (buffer.start, False), "shape": (count,), "typestr": dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=pointer))


def _undefined(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return what a load has where its mask is false, and nobody has said what: NaN, or -1."""
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    return np.full((*shape, dtype.itemsize), POISON, np.uint8).view(dtype).reshape(shape)


def _lanes(mask: Array) -> Array:
    """Return which rows of a block access memory: a row of a reduction is one lane."""
    return np.nonzero(mask)[0] if mask.ndim else np.zeros(1, np.int64)


def _shadow(buffer: Buffer, size: int) -> Array:
    """Return which bytes of a buffer were written, as words of an element's size."""
    assert buffer.written is not None
    return buffer.written[: buffer.num_bytes // size * size].view(_WORDS[size])


def _full(word: np.dtype[Any]) -> Any:
    return word.type(np.iinfo(word).max)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
