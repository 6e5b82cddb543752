"""Receiving: from the buffer of an exchange to views of it, by name, chunks and heads.

    record(q, k, v of chunks 0:2)  record(k, v of chunk 2)      one flat buffer
      =>
    store: query of chunks 0:2, key and value of chunks 0:2 and 2

What comes home is not kept: it is returned, to be merged. What many ranks sent of one
span, each other heads, is one strided tensor over all of them.

Shapes: B batch, h heads, t tokens, D head dim, W elements of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import SymInt, Tensor

from cp_inductor.plan import Payload, Span
from cp_inductor.run.records import (
    Contents,
    Groups,
    Record,
    find_repetitions,
    groups_of,
    num_rows,
    num_statistics,
)
from cp_inductor.run.store import ALL, Piece, Store, bitcast, in_runs
from cp_inductor.tiles.combine import accumulation_dtype

# What several ranks sent of the same chunks: their span, the heads of all of them, and the tensors
# of the payload, each (n, B, count, size, t, ...), in which n is how many ranks sent the same
# groups of heads; one group has no dim of its own.
Arrived = tuple[Payload, Span, Groups, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Arriving:
    """An exchange that was started: what will arrive, in which order, and its number."""

    started: Tensor
    records: tuple[Record, ...]
    number: int


class StepFailed(RuntimeError):
    """The backend could not start an exchange, or wait for it; see `failures`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"exchange {number} has failed")
        self.number = number


class Receiver:
    """Waits for exchanges, and takes what they brought apart.

    Args:
        store: what the rank has at hand.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def wait(self, arriving: Arriving) -> tuple[Tensor, list[dict[str, Piece]]]:
        """Wait for an exchange, also where it brings nothing, and put at hand what it brought.

        Returns:
            The buffer; and see `unpack`.
        """
        buffer = _wait(arriving)
        return buffer, self.unpack(buffer, arriving.records)

    def arrive(self, arriving: Arriving) -> list[Arrived]:
        """Wait for an exchange and return what it brought, without keeping it."""
        buffer = _wait(arriving)
        records = arriving.records
        repeats = find_repetitions(
            [(record.contents, record.span) for record in records],
            fits=lambda start, period: groups_of(records[start : start + period]) is not None,
            must_fit=True,
        )
        units = [(records[unit], count) for unit, count in repeats]
        sizes = [sum(self.store.numel(record) for record in unit) * count for unit, count in units]
        arrived = []
        parts_of = self._split_buffer(buffer, sizes, [unit[0].contents for unit, _ in units])
        for (unit, count), (flat, flat_words) in zip(units, parts_of, strict=True):
            first, groups = unit[0], groups_of(unit)
            assert groups is not None
            shape = (count, len(unit), self.store.length(first), self.store.like.shape[0])
            _, parts = self._unpack(first.contents, flat, flat_words, shape)
            for (payload, _), part, of in zip(first.contents, parts, groups, strict=True):
                tensors = tuple(_by_groups(tensor, of) for tensor in part)
                arrived.append((payload, first.span, of, tensors))
        return arrived

    def unpack(self, buffer: Tensor, records: Sequence[Record]) -> list[dict[str, Piece]]:
        """Put the records of a buffer at hand; return the pieces of each payload, by name."""
        groups = [list(group) for _, group in groupby(records, lambda record: record.contents)]
        sizes = [sum(self.store.numel(record) for record in group) for group in groups]
        all_contents = [group[0].contents for group in groups]
        parts = self._split_buffer(buffer, sizes, all_contents)
        by_group = zip(groups, parts, strict=True)
        return [pieces for group, flat in by_group for pieces in self._unpack_group(group, *flat)]

    def _split_buffer(
        self, buffer: Tensor, sizes: Sequence[int | SymInt], all_contents: Sequence[Contents]
    ) -> list[tuple[Tensor, Tensor]]:
        """Split a buffer, as it is and as the words of statistics, if there are any."""
        words, ratio = buffer, 1
        if any(map(num_statistics, all_contents)):
            # Bits are cast for all at once, in one dim.
            words = bitcast(buffer, accumulation_dtype(self.store.like))
            ratio = self.store.words_per_statistic
        if len(sizes) <= 1:
            return [(buffer, words)] * len(sizes)
        flat = buffer.split(list(sizes))
        if words is buffer:
            return list(zip(flat, flat, strict=True))
        return list(zip(flat, words.split([size // ratio for size in sizes]), strict=True))

    def _unpack_group(
        self, group: Sequence[Record], flat: Tensor, flat_words: Tensor
    ) -> Iterator[dict[str, Piece]]:
        """Put records of one contents at hand: one tensor for all, (B, h, t, D), for each name."""
        contents = group[0].contents
        spans = in_runs(record.span for record in group)
        length = sum(self.store.length(record) for record in group)
        shape = (length, self.store.like.shape[0])
        packed, parts = self._unpack(contents, flat, flat_words, shape)
        whole = Piece(spans, ALL, contents[0][0].is_of_keys, packed, has_arrived=True)
        self.store.put(contents, whole)
        for (payload, heads), tensors in zip(contents, parts, strict=True):
            of_payload = replace(whole, heads=heads, of_keys=payload.is_of_keys)
            pieces = {
                name: replace(of_payload, tensor=tensor)
                for name, tensor in zip(payload.parts, tensors, strict=True)
            }
            for name, piece in pieces.items():
                self.store.put(name, piece)
            yield pieces

    def _unpack(
        self, contents: Contents, flat: Tensor, flat_words: Tensor, shape: tuple[int | SymInt, ...]
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the records (..., t, B, W), and of each part of the contents what it consists of.

        Args:
            contents: of the records.
            flat: the records.
            flat_words: the same, as statistics.
            shape: of the records, without their widths W: (..., t, B).

        Returns:
            Of each part its tensors (..., B, h, t, D), then its statistics (..., B, h, t).
        """
        num_heads, head_dim = num_rows(contents), self.store.like.shape[-1]
        layout, ratio = self.store.layout(contents), self.store.words_per_statistic
        packed = flat.view(*shape, layout.width)
        rows = packed
        if layout.width > num_heads * head_dim:
            rows = packed.narrow(-1, 0, num_heads * head_dim)
        rows = rows.unflatten(-1, (num_heads, head_dim)).movedim(-4, -2)
        has_statistics = num_statistics(contents) > 0
        words = flat_words.view(*shape, layout.width // ratio) if has_statistics else None
        row, statistic = 0, layout.starts[-1] // ratio
        parts = []
        for payload, heads in contents:
            part = []
            for _ in payload.tensors:
                part.append(rows.narrow(-3, row, len(heads)))
                row += len(heads)
            for _ in payload.statistics:
                assert words is not None
                part.append(words.narrow(-1, statistic, len(heads)).movedim(-3, -1))
                statistic += len(heads)
            parts.append(part)
        return packed, parts


def _wait(arriving: Arriving) -> Tensor:
    try:
        buffer: Tensor = torch.ops._c10d_functional.wait_tensor(arriving.started)
    except RuntimeError as error:
        raise StepFailed(arriving.number) from error
    return buffer


def _by_groups(tensor: Tensor, of: Groups) -> Tensor:
    """(c, ranks, B, h, ...) => (n, B, count, h, ...): n of the same groups, from c times.

    One group has no dim of its own.
    """
    if of.count == 1:
        return tensor.flatten(0, 1)
    if of.repeat > 1:
        tensor = tensor.unflatten(1, (of.count, of.repeat)).movedim(2, 1).flatten(0, 1)
    return tensor.movedim(1, 2)
