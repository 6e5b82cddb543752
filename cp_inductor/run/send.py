"""Sending: from the transfers of an exchange to one all_to_all_single.

    q[0:2] and kv[0:2] to rank 1, kv[1:2] to rank 2
      =>
    record(q, k, v of chunks 0:2)  record(k, v of chunk 1)      one flat buffer, uneven splits

A record has the heads of a token side by side, and behind them statistics, float32 bit by bit in
words of the records' dtype; see `cp_inductor.run.records`. What several exchanges send, or several
ranks get, is packed once. What many ranks get of one span, each other heads, is one strided copy.

Shapes: B batch, h heads, t tokens, D head dim, W elements of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import SymInt, Tensor

from cp_inductor.plan import Span, Transfer
from cp_inductor.plan.grid import join_spans
from cp_inductor.run.receive import Arriving, StepFailed
from cp_inductor.run.records import (
    Contents,
    Groups,
    Record,
    find_repetitions,
    groups_of,
    num_statistics,
    records_of,
    records_received,
)
from cp_inductor.run.store import (
    ALL,
    Piece,
    Store,
    bitcast,
    concatenate,
)
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.dims import HEADS_DIM, SEQUENCE_DIM

# Bits of statistics, as many at once as an element of a half type has.
WORD = torch.int16


class Sender:
    """Starts this rank's part of exchanges.

    Args:
        store: what the rank has at hand.
        rank: this one.
        group_name: c10d name of the process group.
    """

    def __init__(self, store: Store, rank: int, group_name: str) -> None:
        self.store, self.rank, self.group_name = store, rank, group_name
        self.sent_again: dict[Contents, tuple[Span, ...]] = {}
        self.num_started = 0

    def note_sent(self, exchanges: Iterable[Sequence[Transfer]]) -> None:
        """Note what several of these exchanges send of this rank's own: it is packed once."""
        spans_of: dict[Contents, list[tuple[int, Span]]] = {}
        for index, transfers in enumerate(exchanges):
            for record in records_of(self._sent(transfers), self.store.tokens.grid):
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
        sent = records_of(self._sent(transfers), self.store.tokens.grid)
        received = records_received(transfers, self.rank, self.store.tokens.grid)
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

    def _sent(self, transfers: Iterable[Transfer]) -> Iterator[Transfer]:
        return (transfer for transfer in transfers if transfer.source == self.rank)

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
            [(record.contents, record.span) for record in sent],
            fits=lambda start, period: self._is_packed_together(sent[start : start + period]),
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
                not piece.has_arrived
                and piece.span_at(unit[0].span.start)
                and piece.heads.start <= of.whole.start
                and of.whole.stop <= piece.heads.stop
                for piece in self.store.pieces.get(payload.tensors[0], [])
            )
            for (payload, _), of in zip(unit[0].contents, groups, strict=True)
        )

    def _splits(
        self, records: Sequence[Record], end: Callable[[Record], int]
    ) -> list[int | SymInt]:
        """Return how many elements go to, or come from, each rank."""
        splits: list[int | SymInt] = [0] * self.store.tokens.grid.world_size
        for record in records:
            splits[end(record)] += self.store.numel(record)
        return splits

    def _packed(self, contents: Contents, spans: Sequence[Span]) -> Tensor:
        """Return records (t, B, W): what was packed, or a part of it, or packed now."""
        again = self.sent_again.get(contents)
        if again and not self.store.holds(contents, spans[:1]):
            of_keys = contents[0][0].is_of_keys
            packed = Piece(again, ALL, of_keys, self._pack(contents, again))
            self.store.put(contents, packed)
        if self.store.holds(contents, spans):
            return self.store.records(contents, spans)
        return self._pack(contents, spans)

    def _pack(
        self, contents: Contents, spans: Sequence[Span], groups: Sequence[Groups] | None = None
    ) -> Tensor:
        """Return records (t, B, W) of spans; or those of several ranks, (n, t, B, W).

        Records with statistics are words, if the dtype is half as wide as a statistic.

        Args:
            contents: of the records, or of the first rank's.
            spans: chunks.
            groups: for each part of the contents, the heads of all ranks.
        """
        rows, statistics, layout = [], [], self.store.layout(contents)
        for index, (payload, heads) in enumerate(contents):
            of = groups[index] if groups else None
            for name in payload.tensors:
                tensor = self._of_groups(name, spans, heads, of)
                rows.append(tensor.permute(*((1, 3, 0, 2, 4) if of else (2, 0, 1, 3))))
            for name in payload.statistics:
                statistic = self._of_groups(name, spans, heads, of)
                statistics.append(statistic.permute(*((1, 3, 0, 2) if of else (2, 0, 1))))
        if statistics:
            # One concatenation of everything: one within another is stored by a kernel of its own.
            if self.store.words_per_statistic > 1:
                rows = [row.view(WORD) for row in rows]
            parts = [row.flatten(-2) for row in rows]
            parts += self._zeros(parts, up_to=layout.starts[-1])
            parts += map(self._as_words, statistics)
        else:
            together = (
                rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, 3 if groups else 2)
            )
            parts = [together.flatten(-2)]
        parts += self._zeros(parts, up_to=layout.width)
        return concatenate(parts, -1)

    def _of_groups(
        self, name: str, spans: Sequence[Span], heads: Span, of: Groups | None
    ) -> Tensor:
        """Return a tensor over spans (B, h, t, ...); with groups of heads (B, n, h, t, ...)."""
        parts = self.store.parts(name, spans, of.whole if of else heads)
        tensor = concatenate(parts, SEQUENCE_DIM)
        if of is None:
            return tensor
        tensor = tensor.unflatten(HEADS_DIM, (of.count, of.step))
        if of.size < of.step:
            tensor = tensor.narrow(2, of.start - of.whole.start, of.size)
        if of.repeat > 1:
            shape = (*tensor.shape[:2], of.repeat, *tensor.shape[2:])
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
