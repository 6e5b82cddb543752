"""Messages: from the transfers of an exchange to one all_to_all_single, and back to views of it.

    q[0:2] and kv[0:2] to rank 1, kv[1:2] to rank 2
      =>
    record(q, k, v of chunks 0:2)  record(k, v of chunk 1)      one flat buffer, uneven splits
      =>
    store: query, key and value of chunks 0:2 on rank 1; key and value of chunk 1 on rank 2

A record has the heads of a token side by side, and behind them statistics, float32 bit by bit in
words of the records' dtype; see `cp_inductor.run.records`. What several exchanges send, or several
ranks get, is packed once. What many ranks get of one span, each other heads, is one strided copy;
so is what many send, one strided tensor over all of them. What comes home is not kept: it is
returned, to be merged.

Shapes: B batch, h heads, t tokens, D head dim, W elements of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import SymInt, Tensor

from cp_inductor.plan import Payload, Span, Transfer
from cp_inductor.plan.grid import join_spans
from cp_inductor.run.records import (
    Contents,
    Groups,
    Record,
    find_repetitions,
    groups_of,
    num_rows,
    num_statistics,
    records_of,
)
from cp_inductor.run.store import ALL, Piece, Store, bitcast, concatenate, in_runs, narrow
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.dims import HEADS_DIM, SEQUENCE_DIM

# Bits of statistics, as many at once as an element of a half type has.
WORD = torch.int16


@dataclass(frozen=True, slots=True)
class Arriving:
    """An exchange that was started: what will arrive, in which order, and its number."""

    started: Tensor
    records: tuple[Record, ...]
    number: int

    def wait(self) -> Tensor:
        """Wait for it, and return the buffer that arrived."""
        try:
            buffer: Tensor = torch.ops._c10d_functional.wait_tensor(self.started)
        except RuntimeError as error:
            raise StepFailed(self.number) from error
        return buffer


class StepFailed(RuntimeError):
    """The backend could not start an exchange, or wait for it; see `failures`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"exchange {number} has failed")
        self.number = number


class Messages:
    """Starts this rank's part of exchanges, waits for them, and takes apart what they brought."""

    def __init__(self, store: Store, rank: int, group_name: str) -> None:
        self.store, self.rank, self.group_name = store, rank, group_name
        self.sent_again: dict[Contents, tuple[Span, ...]] = {}
        self.num_started = 0

    def note_sent(self, exchanges: Iterable[Sequence[Transfer]]) -> None:
        """Note what several of these exchanges send of this rank's own: it is packed once."""
        spans_of: dict[Contents, list[tuple[int, Span]]] = {}
        for index, transfers in enumerate(exchanges):
            for record in self._records(transfers, are_sent=True):
                spans_of.setdefault(record.contents, []).append((index, record.span))
        own = self.store.tokens.grid.own(self.rank)
        self.sent_again = {
            contents: join_spans(span for _, span in sent)
            for contents, sent in spans_of.items()
            if len({index for index, _ in sent}) > 1
            and all(span.intersect(own) == span for _, span in sent)
        }

    def start(self, transfers: Sequence[Transfer]) -> Arriving:
        """Start an exchange, in which a rank takes part also with nothing to give."""
        sent, received = (self._records(transfers, are_sent=sends) for sends in (True, False))
        flat = self._flatten(sent)
        buffer = concatenate(flat) if flat else self.store.like.new_empty((0,))
        buffer = bitcast(buffer, self.store.like.dtype)
        sizes = (
            self._splits(received, lambda record: record.source),
            self._splits(sent, lambda record: record.destination),
        )
        self.num_started += 1
        try:
            exchange = torch.ops._c10d_functional.all_to_all_single
            started: Tensor = exchange(buffer, *sizes, self.group_name)
        except RuntimeError as error:
            raise StepFailed(self.num_started) from error
        return Arriving(started, received, self.num_started)

    def _records(self, transfers: Iterable[Transfer], *, are_sent: bool) -> tuple[Record, ...]:
        return records_of(transfers, self.rank, self.store.tokens.grid, are_sent=are_sent)

    def _flatten(self, sent: Sequence[Record]) -> list[Tensor]:
        """Return what is sent, in order, in as few tensors as it takes."""
        # Words of statistics are no numbers of the dtype: beside them everything is moved as bits.
        has_words = self.store.words_per_statistic > 1 and any(
            num_statistics(record.contents) for record in sent
        )
        dtype = WORD if has_words else self.store.like.dtype
        flat, singles = [], list[Record]()

        def flush() -> None:
            for contents, group in groupby(singles, lambda record: record.contents):
                spans = [record.span for record in group]
                flat.append(bitcast(self._packed(contents, spans), dtype).reshape(-1))
            singles.clear()

        for at, count in find_repetitions(
            sent, lambda at, count: count > 1 or self._is_packed_together(sent[at])
        ):
            unit = sent[at]
            if count > 1:
                # Several ranks get the same.
                flush()
                once = concatenate([bitcast(part, dtype) for part in self._flatten(unit)])
                flat.append(once.repeat(count))
            elif len(unit) > 1:
                flush()
                groups = groups_of(unit)
                packed = self._pack(unit[0].contents, [unit[0].span], groups)
                flat.append(bitcast(packed, dtype).reshape(-1))
            else:
                singles += unit
        flush()
        return flat

    def _is_packed_together(self, unit: Sequence[Record]) -> bool:
        """Whether records are this rank's own tokens, for ranks whose heads follow a rule."""
        groups = groups_of(unit)
        return groups is not None and all(
            any(
                not piece.has_arrived and piece.span_at(unit[0].span.start) and piece.has(of.whole)
                for piece in self.store.named(payload.tensors[0])
            )
            for (payload, _), of in zip(unit[0].contents, groups, strict=True)
        )

    def _splits(self, records: Sequence[Record], to: Callable[[Record], int]) -> list[int | SymInt]:
        """Return how many elements go to, or come from, each rank."""
        splits: list[int | SymInt] = [0] * self.store.tokens.grid.world_size
        for record in records:
            splits[to(record)] += self.store.numel(record)
        return splits

    def _packed(self, contents: Contents, spans: Sequence[Span]) -> Tensor:
        """Return records (t, B, W): what was packed, or a part of it, or packed now."""
        again = self.sent_again.get(contents)
        if again and not self.store.holds(contents, spans[:1]):
            of_keys = contents[0][0].is_of_keys
            packed = self._pack(contents, again)
            self.store.pieces.append(Piece(again, ALL, of_keys, {contents: packed}))
        if self.store.holds(contents, spans):
            return self.store.records(contents, spans)
        return self._pack(contents, spans)

    def _pack(
        self, contents: Contents, spans: Sequence[Span], groups: Sequence[Groups] | None = None
    ) -> Tensor:
        """Return records (t, B, W) of spans; or those of several ranks, (n, t, B, W).

        Then contents are the first rank's, and groups have, for each part of these, the heads of
        all. Records with statistics are words, if the dtype is half as wide as a statistic.
        """
        rows, statistics = list[Tensor](), list[Tensor]()
        for index, (payload, heads) in enumerate(contents):
            of = groups[index] if groups else None
            order = (1, 3, 0, 2, 4) if of else (2, 0, 1, 3)
            for name in payload.parts:
                tensor = self._of_groups(name, spans, heads, of)
                side_by_side = rows if name in payload.tensors else statistics
                side_by_side.append(tensor.permute(order[: tensor.ndim]))
        if statistics:
            # One concatenation of everything: one within another is stored by a kernel of its own.
            if self.store.words_per_statistic > 1:
                rows = [row.view(WORD) for row in rows]
            parts = [row.flatten(-2) for row in rows]
            parts += self._zeros(parts, up_to=self.store.first_word(contents))
            parts += map(self._as_words, statistics)
        else:
            is_single, dim = len(rows) == 1, 3 if groups else 2
            parts = [(rows[0].contiguous() if is_single else torch.cat(rows, dim)).flatten(-2)]
        parts += self._zeros(parts, up_to=self.store.width(contents))
        return concatenate(parts, -1)

    def _of_groups(
        self, name: str, spans: Sequence[Span], heads: Span, by: Groups | None
    ) -> Tensor:
        """Return a tensor over spans (B, h, t, ...); with groups of heads (B, n, h, t, ...)."""
        parts = self.store.parts(name, spans, by.whole if by else heads)
        tensor = concatenate(parts, SEQUENCE_DIM)
        if by is None:
            return tensor
        tensor = tensor.unflatten(HEADS_DIM, (by.count, by.step))
        if by.size < by.step:
            tensor = tensor.narrow(2, by.start - by.whole.start, by.size)
        if by.repeat > 1:
            shape = (*tensor.shape[:2], by.repeat, *tensor.shape[2:])
            tensor = tensor.unsqueeze(2).expand(shape).flatten(1, 2)
        return tensor

    def _zeros(self, parts: Sequence[Tensor], *, up_to: int) -> list[Tensor]:
        """Return what fills the parts of a token up to a number of elements."""
        missing = up_to - sum(part.shape[-1] for part in parts)
        # Not F.pad, which makes a constant of a symbolic length.
        return [parts[0].new_zeros((*parts[0].shape[:-1], missing))] if missing else []

    def _as_words(self, statistic: Tensor) -> Tensor:
        """(..., t, B, h) => (..., t, B, words): numbers in float32 bit by bit, lower half first."""
        statistic = statistic.to(accumulation_dtype(self.store.like))
        if self.store.words_per_statistic == 1:
            return statistic
        # Not by a view of other width, for which Inductor stores the numbers first.
        bits = statistic.view(torch.int32).unsqueeze(-1)
        shifts = torch.arange(0, 32, 16, dtype=torch.int32, device=bits.device)
        return (bits >> shifts << 16 >> 16).to(WORD).flatten(-2)

    # --- Receiving --------------------------------------------------------------------------------

    def arrive(self, arriving: Arriving) -> list[tuple[Payload, Span, Groups, list[Tensor]]]:
        """Wait for an exchange and return what it brought, without keeping it.

        Tensors have a dim more, the first, for the ranks that sent the same groups of heads.
        """
        buffer, records = arriving.wait(), arriving.records
        units, together = [], []
        for at, count in find_repetitions(
            records, lambda at, _: groups_of(records[at]) is not None
        ):
            unit = records[at]
            units.append(unit)
            shape = count, len(unit), self.store.length(unit[0]), self.store.like.shape[0]
            together.append((records[at.start : at.start + count * len(unit)], shape))
        arrived = []
        for unit, (_, parts) in zip(units, self._take_apart(buffer, together), strict=True):
            groups = groups_of(unit)
            assert groups is not None
            for (payload, _), part, of in zip(unit[0].contents, parts, groups, strict=True):
                arrived.append((payload, unit[0].span, of, [_by_groups(t, of) for t in part]))
        return arrived

    def unpack(self, buffer: Tensor, records: Sequence[Record]) -> list[Piece]:
        """Put the records of a buffer at hand; return a piece of each payload.

        Records of one contents are one tensor (B, h, t, D) for each name.
        """
        alike = [list(of) for _, of in groupby(records, lambda record: record.contents)]
        batch, pieces = self.store.like.shape[0], []
        together = [(of, (sum(map(self.store.length, of)), batch)) for of in alike]
        for of, (packed, parts) in zip(alike, self._take_apart(buffer, together), strict=True):
            contents, spans = of[0].contents, in_runs(record.span for record in of)
            named: dict[str | Contents, Tensor] = {contents: packed}
            of_keys = contents[0][0].is_of_keys
            self.store.pieces.append(Piece(spans, ALL, of_keys, named, has_arrived=True))
            for (payload, heads), tensors in zip(contents, parts, strict=True):
                pieces.append(Piece.of(payload, spans, heads, tensors, has_arrived=True))
                self.store.pieces.append(pieces[-1])
        return pieces

    def _take_apart(
        self, buffer: Tensor, together: Sequence[tuple[Sequence[Record], tuple[int | SymInt, ...]]]
    ) -> Iterator[tuple[Tensor, list[list[Tensor]]]]:
        """Yield records (..., t, B, W), and of each of their payloads what it consists of.

        That is its tensors (..., B, h, t, D), then its statistics (..., B, h, t).

        Args:
            buffer: that arrived.
            together: its records, those together that make one tensor, and its shape, (..., t, B).
        """
        like, ratio, words = self.store.like, self.store.words_per_statistic, buffer
        if any(num_statistics(records[0].contents) for records, _ in together):
            # Bits are cast for all at once, in one dim.
            words = bitcast(buffer, accumulation_dtype(like))
        flat, flat_words = [buffer] * len(together), [words] * len(together)
        if len(together) > 1:
            sizes = [sum(map(self.store.numel, records)) for records, _ in together]
            flat = flat_words = list(buffer.split(sizes))
            if words is not buffer:
                flat_words = list(words.split([size // ratio for size in sizes]))
        for at, (records, shape) in enumerate(together):
            contents = records[0].contents
            num_heads, width = num_rows(contents), self.store.width(contents)
            packed = flat[at].view(*shape, width)
            rows = narrow(packed, -1, 0, num_heads * like.shape[-1])
            rows = rows.unflatten(-1, (num_heads, like.shape[-1])).movedim(-4, -2)
            statistics = rows  # read only where there are some
            if num_statistics(contents):
                statistics = flat_words[at].view(*shape, width // ratio)
            row, statistic, parts = 0, self.store.first_word(contents) // ratio, []
            for payload, heads in contents:
                part = []
                for _ in payload.tensors:
                    part.append(rows.narrow(-3, row, len(heads)))
                    row += len(heads)
                for _ in payload.statistics:
                    part.append(statistics.narrow(-1, statistic, len(heads)).movedim(-3, -1))
                    statistic += len(heads)
                parts.append(part)
            yield packed, parts


def _by_groups(tensor: Tensor, of: Groups) -> Tensor:
    """(c, ranks, B, h, ...) => (n, B, count, h, ...): n of the same groups, from c times.

    One group has no dim of its own.
    """
    if of.count == 1:
        return tensor.flatten(0, 1)
    if of.repeat > 1:
        tensor = tensor.unflatten(1, (of.count, of.repeat)).movedim(2, 1).flatten(0, 1)
    return tensor.movedim(1, 2)
