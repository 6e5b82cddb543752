"""Exchanges: from transfers to one all_to_all_single, and from what arrives to pieces.

    q[0:2] and kv[0:2] to rank 1, kv[1:2] to rank 2
      =>
    record(q, k, v of chunks 0:2)  record(k, v of chunk 1)      one flat buffer, uneven splits

What two ranks send each other of one span of tokens is one record (t, B, W): of each token the
heads of all that is sent, side by side, and then its statistics, float32 bit by bit in words of the
records' dtype. As chunks are numbered as they are stored, what arrives from neighbouring ranks lies
in order in the buffer, and a tile over many ranks' keys reads it where it is. So that its own do,
too, a rank sends itself its part of such a message. What many ranks are sent, or send, of one span,
each other heads, is one strided tensor over all of them: see `Groups`.

Shapes: B batch, h heads, t tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import torch
from torch import SymInt, Tensor

from cp_inductor.plan import Grid, Payload, Span, Transfer
from cp_inductor.plan.grid import join_spans
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.dims import HEADS_DIM, SEQUENCE_DIM
from cp_inductor.tiles.tokens import Tokens
from cp_inductor.torch_private.sizes import is_known

# Tensors (B, h, t, D), and statistics (B, h, t), that a payload consists of.
TENSORS: dict[Payload, tuple[str, ...]] = {
    Payload.QUERY: ("query",),
    Payload.KEY_VALUE: ("key", "value"),
    Payload.PARTIAL: ("out",),
    Payload.QUERY_GRAD_OUT: ("query", "grad_out"),
    Payload.GRAD_OUT: ("grad_out",),
    Payload.QUERY_GRAD: ("grad_query",),
    Payload.KEY_VALUE_GRAD: ("grad_key", "grad_value"),
}
STATISTICS: dict[Payload, tuple[str, ...]] = {
    Payload.PARTIAL: ("lse",),
    Payload.QUERY_GRAD_OUT: ("lse", "delta"),
    Payload.GRAD_OUT: ("lse", "delta"),
}


# Bits of statistics, as many at once as an element of a half type has.
WORD = torch.int16


# What kernels load at once; a record's heads must begin at multiples of it.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """What is known about some chunks and heads: tokens of a tensor (B, h, t, ...).

    Attributes:
        spans: chunks of which the tensor holds the tokens, one span behind the other.
        heads: all of the tensor's.
        of_keys: the chunks are chunks of keys.
        tensor: (B, h, t, D), or (B, h, t) for a statistic.
        has_arrived: it is a view of a message.
    """

    spans: tuple[Span, ...]
    heads: Span
    of_keys: bool
    tensor: Tensor
    has_arrived: bool = False

    def span_at(self, chunk: int) -> Span | None:
        """Return the span that holds a chunk."""
        return next((span for span in self.spans if span.start <= chunk < span.stop), None)


@dataclass(frozen=True, slots=True)
class Groups:
    """Heads of several ranks: `count` groups of `size` heads, each `step` behind the one before.

    Attributes:
        start: the first head of the first group.
        size: how many heads a group has.
        step: from a group to the next.
        count: how many groups there are.
        repeat: so many ranks, one after the other, have the same group.
    """

    start: int
    size: int
    step: int
    count: int
    repeat: int = 1

    @staticmethod
    def of(heads: Sequence[Span]) -> Groups | None:
        """Return what the heads of ranks, in order, are; None if they follow no such rule."""
        start, size = heads[0].start, len(heads[0])
        repeat = sum(1 for _ in takewhile(lambda one: one == heads[0], heads))
        count, step = len(heads) // repeat, size
        if count > 1:
            step = max(1, heads[repeat].start - start)
        expected = [
            Span(start + i * step, start + i * step + size)
            for i in range(count)
            for _ in range(repeat)
        ]
        groups = Groups(start, size, step, count, repeat)
        is_inside = step >= size and start + size <= groups.whole.start + step
        return groups if expected == list(heads) and is_inside else None

    @property
    def whole(self) -> Span:
        """The heads among which the groups are, a whole number of steps."""
        first = self.start - (self.start % self.step if self.count > 1 else 0)
        return Span(first, first + self.step * self.count)


@dataclass(frozen=True, slots=True)
class Stack:
    """What several ranks sent of the same chunks.

    Attributes:
        payload: what it is.
        span: chunks.
        heads: of all of them.
        tensors: as the payload consists of, each (n, B, count, size, t, ...), in which n is how
            many ranks sent the same groups of heads; one group has no dim of its own.
    """

    payload: Payload
    span: Span
    heads: Groups
    tensors: tuple[Tensor, ...]


# What a record is made of: payloads and their heads.
Contents = tuple[tuple[Payload, Span], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank sends another of one span."""

    source: int
    destination: int
    span: Span
    contents: Contents


@dataclass(frozen=True, slots=True)
class Packed:
    """Records of some chunks as they are sent, or have arrived.

    Attributes:
        contents: of each record.
        spans: chunks, one span behind the other.
        tensor: (t, B, W); W elements are a token's.
        has_arrived: it is a view of a message.
    """

    contents: Contents
    spans: tuple[Span, ...]
    tensor: Tensor
    has_arrived: bool = False

    def span_at(self, chunk: int) -> Span | None:
        """Return the span that holds a chunk."""
        return next((span for span in self.spans if span.start <= chunk < span.stop), None)


@dataclass(frozen=True, slots=True)
class Repetition:
    """Elements of a sequence from `start`: so many (`period`), and these so often (`count`)."""

    start: int
    period: int = 1
    count: int = 1

    @property
    def stop(self) -> int:
        """Where the next begins."""
        return self.start + self.period * self.count

    @property
    def unit(self) -> slice:
        """Once what is repeated."""
        return slice(self.start, self.start + self.period)


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


class Store:
    """What a rank has at hand: its own tensors, and all that arrived.

    Args:
        tokens: lengths of spans.
        rank: this one.
        group_name: c10d name of the process group.
        like: any (B, h, t, D) tensor of the attention: for batch, head dim and dtype.
    """

    def __init__(self, tokens: Tokens, rank: int, group_name: str, like: Tensor) -> None:
        self.tokens, self.rank, self.group_name, self.like = tokens, rank, group_name, like
        self.pieces: dict[str, list[Piece]] = {}
        self.packed: list[Packed] = []
        self.taken: dict[tuple[str, tuple[Span, ...], Span], Tensor] = {}
        self.sent_again: dict[Contents, tuple[Span, ...]] = {}
        self.num_started = 0

    def add(self, name: str, span: Span, heads: Span, tensor: Tensor, *, of_keys: bool) -> None:
        """Put a tensor at hand."""
        self.pieces.setdefault(name, []).append(Piece((span,), heads, of_keys, tensor))

    def pop_arrived(self, name: str) -> list[Piece]:
        """Take all pieces of a name away that arrived."""
        pieces = self.pieces.get(name, [])
        self.pieces[name] = [piece for piece in pieces if not piece.has_arrived]
        return [piece for piece in pieces if piece.has_arrived]

    def drop(self, names: Iterable[str]) -> None:
        """Let go of all pieces of some names."""
        for name in names:
            self.pieces.pop(name, None)
        self.taken = {key: taken for key, taken in self.taken.items() if key[0] not in names}

    def beside(self, name: str, piece: Piece) -> Piece:
        """Return the piece of another name that arrived with this one."""
        (found,) = (
            other
            for other in self.pieces[name]
            if other.has_arrived and (other.spans, other.heads) == (piece.spans, piece.heads)
        )
        return found

    def pop_beside(self, name: str, piece: Piece) -> Piece:
        """Take that piece away."""
        found = self.beside(name, piece)
        self.pieces[name] = [other for other in self.pieces[name] if other is not found]
        return found

    def put(self, name: str, piece: Piece) -> None:
        """Put a piece at hand."""
        self.pieces.setdefault(name, []).append(piece)

    def forget(self, needed: Sequence[Span], own: Span) -> None:
        """Let go of what arrived and is not needed any more."""

        def is_needed(spans: Iterable[Span]) -> bool:
            return any(span.intersect(other) for span in spans for other in needed)

        for name, pieces in self.pieces.items():
            self.pieces[name] = [
                piece for piece in pieces if not piece.has_arrived or is_needed(piece.spans)
            ]
        self.packed = [
            packed
            for packed in self.packed
            if all(span.intersect(own) == span for span in packed.spans) or is_needed(packed.spans)
        ]
        self.taken = {key: taken for key, taken in self.taken.items() if is_needed(key[1])}

    def take(
        self, name: str, spans: Iterable[Span], heads: Span, *, is_in_order: bool = False
    ) -> Tensor:
        """Return a tensor over spans, in their order, and heads; all of them must be at hand.

        What is put together of parts is put together once.

        Args:
            name: of the tensor.
            spans: chunks.
            heads: of the tensor.
            is_in_order: the strides are to be those of the shape.
        """
        key = name, tuple(spans), heads
        if key not in self.taken:
            parts = self._parts(*key)
            if len(parts) == 1 and not is_in_order:
                return parts[0]
            whole = _cat(parts, SEQUENCE_DIM)
            self.taken[key] = whole.contiguous() if is_in_order else whole
        return self.taken[key]

    def put_together(self, all_spans: Sequence[tuple[Span, ...]], heads: Span) -> None:
        """Put keys and values together once, of which several tiles read different parts.

        Args:
            all_spans: of keys, for each tile.
            heads: of the keys.
        """
        apart = {
            spans
            for spans in all_spans
            if len(spans) == 1 and len(self._parts("key", spans, heads)) > 1
        }
        if len(apart) < 2:
            return
        for span in join_spans(span for spans in apart for span in spans):
            tensors = self._both_together(span, heads) or [
                _cat(self._parts(name, [span], heads), SEQUENCE_DIM)
                for name in TENSORS[Payload.KEY_VALUE]
            ]
            for name, tensor in zip(TENSORS[Payload.KEY_VALUE], tensors, strict=True):
                self.put(name, Piece((span,), heads, True, tensor, has_arrived=True))

    def _both_together(self, span: Span, heads: Span) -> list[Tensor] | None:
        """Return keys and values of a span by one concatenation, if messages hold all of both.

        In a record they stand side by side.
        """
        content = Payload.KEY_VALUE, heads
        pieces = [
            Piece(packed.spans, heads, True, packed.tensor, has_arrived=True)
            for packed in self.packed
            if content in packed.contents and packed.has_arrived
        ]
        if any(_longest(pieces, chunk)[0] is None for chunk in range(span.start, span.stop)):
            return None
        parts = []
        for piece, offset, length in self._located("key", [span], pieces):
            packed = next(packed for packed in self.packed if packed.tensor is piece.tensor)
            rows = _num_heads(packed.contents[: packed.contents.index(content)])
            width = int(self.like.shape[-1])
            both = _narrow(packed.tensor, 0, offset, length)
            both = both.narrow(-1, rows * width, 2 * len(heads) * width)
            parts.append(both.unflatten(-1, (2 * len(heads), width)).movedim(-4, -2))
        key_value = _cat(parts, SEQUENCE_DIM)
        return [key_value.narrow(HEADS_DIM, at, len(heads)) for at in (0, len(heads))]

    def _parts(self, name: str, spans: Sequence[Span], heads: Span) -> list[Tensor]:
        pieces = [
            piece
            for piece in self.pieces[name]
            if piece.heads.start <= heads.start and heads.stop <= piece.heads.stop
        ]
        # What is this rank's alone is there as it was given. The rest lies together in a message.
        is_foreign = any(
            not any(one.span_at(span.start) for one in pieces if not one.has_arrived)
            for span in spans
        )
        pieces.sort(key=lambda piece: piece.has_arrived != is_foreign)
        return [_cut(piece, heads, *at) for piece, *at in self._located(name, spans, pieces)]

    def _located(
        self, name: str, spans: Sequence[Span], pieces: Sequence[Piece]
    ) -> list[tuple[Piece, int | SymInt, int | SymInt]]:
        """Return where spans are: pieces, how many tokens come before, and how many it are."""
        parts: list[tuple[Piece, int | SymInt, int | SymInt]] = []
        for span in spans:
            start = span.start
            while start < span.stop:
                piece, inside = _longest(pieces, start)
                if piece is None or inside is None:
                    of_keys = name in TENSORS[Payload.KEY_VALUE]
                    length = self.tokens.of(Span(start, start + 1), of_keys=of_keys)
                    assert length == 0, f"chunk {start} of {name} is not at hand"
                    start += 1
                    continue
                part = Span(start, min(span.stop, inside.stop))
                offset = self._offset(piece.spans, start, of_keys=piece.of_keys)
                length = self.tokens.of(part, of_keys=piece.of_keys)
                last = parts[-1] if parts else None
                if last and last[0] is piece and is_known(last[1] + last[2] == offset):
                    parts[-1] = (piece, last[1], last[2] + length)
                else:
                    parts.append((piece, offset, length))
                start = part.stop
        return parts

    def _offset(self, spans: Sequence[Span], chunk: int, *, of_keys: bool) -> int | SymInt:
        """Return how many tokens of spans are before a chunk."""
        before: int | SymInt = 0
        for span in spans:
            if span.start <= chunk < span.stop:
                return before + self.tokens.of(Span(span.start, chunk), of_keys=of_keys)
            before += self.tokens.of(span, of_keys=of_keys)
        raise AssertionError(f"chunk {chunk} is not in {spans}")

    # --- Sending and receiving -------------------------------------------------------------

    def note_sent(self, exchanges: Iterable[Sequence[Transfer]]) -> None:
        """Note what several of these exchanges send of this rank's own: it is packed once."""
        spans_of: dict[Contents, list[tuple[int, Span]]] = {}
        for index, transfers in enumerate(exchanges):
            for record in _records(self._sent(transfers), self.tokens.grid):
                spans_of.setdefault(record.contents, []).append((index, record.span))
        own = self.tokens.grid.own(self.rank)
        self.sent_again = {
            contents: join_spans(span for _, span in sent)
            for contents, sent in spans_of.items()
            if len({index for index, _ in sent}) > 1
            and all(span.intersect(own) == span for _, span in sent)
        }

    def start(self, transfers: Sequence[Transfer]) -> Arriving:
        """Start an exchange, in which a rank takes part also with nothing to give."""
        sent = _records(self._sent(transfers), self.tokens.grid)
        received = records_received(transfers, self.rank, self.tokens.grid)
        flat = self._flatten(sent)
        buffer = _cat(flat) if flat else self.like.new_empty((0,))
        buffer = _bitcast(buffer, self.like.dtype)
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
        has_words = self._words_per_statistic() > 1 and any(
            self._num_words(record.contents) for record in sent
        )
        dtype = WORD if has_words else self.like.dtype
        flat, singles = [], list[Record]()

        def flush() -> None:
            for contents, group in groupby(singles, lambda record: record.contents):
                spans = [record.span for record in group]
                flat.append(_bitcast(self._packed(contents, spans), dtype).reshape(-1))
            singles.clear()

        for repetition in _repeats(
            [(record.contents, record.span) for record in sent],
            fits=lambda start, period: self._is_packed_together(sent[start : start + period]),
        ):
            unit = sent[repetition.unit]
            if repetition.count > 1:
                # Several ranks get the same.
                flush()
                once = _cat([_bitcast(part, dtype) for part in self._flatten(unit)])
                flat.append(once.repeat(repetition.count))
            elif len(unit) > 1:
                flush()
                groups = _groups_of(unit)
                packed = self._pack(unit[0].contents, [unit[0].span], groups)
                flat.append(_bitcast(packed, dtype).reshape(-1))
            else:
                singles += unit
        flush()
        return flat

    def _is_packed_together(self, unit: Sequence[Record]) -> bool:
        """Whether records are this rank's own tokens, for ranks whose heads follow a rule."""
        groups = _groups_of(unit)
        return groups is not None and all(
            any(
                not piece.has_arrived
                and piece.span_at(unit[0].span.start)
                and piece.heads.start <= of.whole.start
                and of.whole.stop <= piece.heads.stop
                for piece in self.pieces.get(TENSORS[payload][0], [])
            )
            for (payload, _), of in zip(unit[0].contents, groups, strict=True)
        )

    def _splits(
        self, records: Sequence[Record], end: Callable[[Record], int]
    ) -> list[int | SymInt]:
        """Return how many elements go to, or come from, each rank."""
        splits: list[int | SymInt] = [0] * self.tokens.grid.world_size
        for record in records:
            splits[end(record)] += self._numel(record)
        return splits

    def _numel(self, record: Record) -> int | SymInt:
        return self._length(record) * self.like.shape[0] * self._width(record.contents)

    def _width(self, contents: Contents) -> int:
        """Return W, the elements of one token."""
        width = self._statistics_at(contents)
        num_words = self._num_words(contents)
        if not num_words:
            return width
        alignment = ALIGNMENT_BYTES // self.like.dtype.itemsize
        return -(-(width + num_words) // alignment) * alignment

    def _statistics_at(self, contents: Contents) -> int:
        """Return how many elements of a token come before its statistics."""
        ratio = self._words_per_statistic()
        return -(-_num_heads(contents) * int(self.like.shape[-1]) // ratio) * ratio

    def _length(self, record: Record) -> int | SymInt:
        return self.tokens.of(record.span, of_keys=record.contents[0][0].is_of_keys)

    def _num_words(self, contents: Contents) -> int:
        """Return the elements of one token's statistics."""
        words = sum(len(STATISTICS.get(payload, ())) * len(heads) for payload, heads in contents)
        return words * self._words_per_statistic()

    def _words_per_statistic(self) -> int:
        return accumulation_dtype(self.like).itemsize // self.like.dtype.itemsize

    def _packed(self, contents: Contents, spans: Sequence[Span]) -> Tensor:
        """Return records (t, B, W): what was packed, or a part of it, or packed now."""
        again = self.sent_again.get(contents)
        if again and self._find(contents, spans[0]) is None:
            self.packed.append(Packed(contents, again, self._pack(contents, again)))
        found = [self._find(contents, span) for span in spans]
        of_keys = contents[0][0].is_of_keys
        parts: list[tuple[Packed, int | SymInt, int | SymInt]] = []
        for packed, span in zip(found, spans, strict=True):
            if packed is None:
                return self._pack(contents, spans)
            offset = self._offset(packed.spans, span.start, of_keys=of_keys)
            length = self.tokens.of(span, of_keys=of_keys)
            last = parts[-1] if parts else None
            if last and last[0] is packed and is_known(last[1] + last[2] == offset):
                parts[-1] = (packed, last[1], last[2] + length)
            else:
                parts.append((packed, offset, length))
        return _cat([_narrow(packed.tensor, 0, start, n) for packed, start, n in parts])

    def _find(self, contents: Contents, span: Span) -> Packed | None:
        for packed in self.packed:
            inside = packed.span_at(span.start)
            if packed.contents == contents and inside and span.stop <= inside.stop:
                return packed
        return None

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
        rows, statistics = [], []
        for index, (payload, heads) in enumerate(contents):
            of = groups[index] if groups else None
            for name in TENSORS[payload]:
                tensor = self._of_groups(name, spans, heads, of)
                rows.append(tensor.permute(*((1, 3, 0, 2, 4) if of else (2, 0, 1, 3))))
            for name in STATISTICS.get(payload, ()):
                statistic = self._of_groups(name, spans, heads, of)
                statistics.append(statistic.permute(*((1, 3, 0, 2) if of else (2, 0, 1))))
        if statistics:
            # One concatenation of everything: one within another is stored by a kernel of its own.
            if self._words_per_statistic() > 1:
                rows = [row.view(WORD) for row in rows]
            parts = [row.flatten(-2) for row in rows]
            parts += self._zeros(parts, up_to=self._statistics_at(contents))
            parts += map(self._as_words, statistics)
        else:
            together = (
                rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, 3 if groups else 2)
            )
            parts = [together.flatten(-2)]
        parts += self._zeros(parts, up_to=self._width(contents))
        return _cat(parts, -1)

    def _of_groups(
        self, name: str, spans: Sequence[Span], heads: Span, of: Groups | None
    ) -> Tensor:
        """Return a tensor over spans (B, h, t, ...); with groups of heads (B, n, h, t, ...)."""
        parts = self._parts(name, spans, of.whole if of else heads)
        tensor = _cat(parts, SEQUENCE_DIM)
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
        statistic = statistic.to(accumulation_dtype(self.like))
        if self._words_per_statistic() == 1:
            return statistic
        # Not by a view of other width, for which Inductor stores the numbers first.
        bits = statistic.view(torch.int32).unsqueeze(-1)
        shifts = torch.arange(0, 32, 16, dtype=torch.int32, device=bits.device)
        return (bits >> shifts << 16 >> 16).to(WORD).flatten(-2)

    def wait(self, arriving: Arriving) -> Tensor:
        """Wait for an exchange, also where it brings nothing, and put at hand what it brought."""
        buffer = _wait(arriving)
        self.unpack(buffer, arriving.records)
        return buffer

    def arrive(self, arriving: Arriving) -> list[Stack]:
        """Wait for an exchange and return what it brought, without keeping it."""
        buffer = _wait(arriving)
        records = arriving.records
        repeats = _repeats(
            [(record.contents, record.span) for record in records],
            fits=lambda start, period: _groups_of(records[start : start + period]) is not None,
            must_fit=True,
        )
        units = [(records[repetition.unit], repetition.count) for repetition in repeats]
        sizes = [sum(self._numel(record) for record in unit) * count for unit, count in units]
        stacks = []
        parts_of = self._split_buffer(buffer, sizes, [unit[0].contents for unit, _ in units])
        for (unit, count), (flat, flat_words) in zip(units, parts_of, strict=True):
            first, groups = unit[0], _groups_of(unit)
            assert groups is not None
            shape = (count, len(unit), self._length(first), self.like.shape[0])
            _, parts = self._unpack(first.contents, flat, flat_words, shape)
            for (payload, _), part, of in zip(first.contents, parts, groups, strict=True):
                tensors = tuple(_by_groups(tensor, of) for tensor in part)
                stacks.append(Stack(payload, first.span, of, tensors))
        return stacks

    def unpack(self, buffer: Tensor, records: Sequence[Record]) -> None:
        """Put the records of a buffer at hand."""
        groups = [list(group) for _, group in groupby(records, lambda record: record.contents)]
        sizes = [sum(self._numel(record) for record in group) for group in groups]
        all_contents = [group[0].contents for group in groups]
        for group, parts in zip(
            groups, self._split_buffer(buffer, sizes, all_contents), strict=True
        ):
            self._unpack_group(group, *parts)

    def _split_buffer(
        self, buffer: Tensor, sizes: Sequence[int | SymInt], all_contents: Sequence[Contents]
    ) -> list[tuple[Tensor, Tensor]]:
        """Split a buffer, as it is and as the words of statistics, if there are any."""
        words, ratio = buffer, 1
        if any(map(self._num_words, all_contents)):
            # Bits are cast for all at once, in one dim.
            words = _bitcast(buffer, accumulation_dtype(self.like))
            ratio = self._words_per_statistic()
        if len(sizes) <= 1:
            return [(buffer, words)] * len(sizes)
        flat = buffer.split(list(sizes))
        if words is buffer:
            return list(zip(flat, flat, strict=True))
        return list(zip(flat, words.split([size // ratio for size in sizes]), strict=True))

    def _unpack_group(self, group: Sequence[Record], flat: Tensor, flat_words: Tensor) -> None:
        """Put records of one contents at hand: one tensor for all, (B, h, t, D), for each name."""
        contents = group[0].contents
        spans = _in_runs(record.span for record in group)
        length = sum(self._length(record) for record in group)
        shape = (length, self.like.shape[0])
        packed, parts = self._unpack(contents, flat, flat_words, shape)
        self.packed.append(Packed(contents, spans, packed, has_arrived=True))
        for (payload, heads), tensors in zip(contents, parts, strict=True):
            names = (*TENSORS[payload], *STATISTICS.get(payload, ()))
            for name, tensor in zip(names, tensors, strict=True):
                self.put(name, Piece(spans, heads, payload.is_of_keys, tensor, has_arrived=True))

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
        num_heads, head_dim = _num_heads(contents), self.like.shape[-1]
        width, ratio = self._width(contents), self._words_per_statistic()
        packed = flat.view(*shape, width)
        rows = packed
        if width > num_heads * head_dim:
            rows = packed.narrow(-1, 0, num_heads * head_dim)
        rows = rows.unflatten(-1, (num_heads, head_dim)).movedim(-4, -2)
        words = flat_words.view(*shape, width // ratio) if self._num_words(contents) else None
        row, statistic = 0, self._statistics_at(contents) // ratio
        parts = []
        for payload, heads in contents:
            part = []
            for _ in TENSORS[payload]:
                part.append(rows.narrow(-3, row, len(heads)))
                row += len(heads)
            for _ in STATISTICS.get(payload, ()):
                assert words is not None
                part.append(words.narrow(-1, statistic, len(heads)).movedim(-3, -1))
                statistic += len(heads)
            parts.append(part)
        return packed, parts


def _num_heads(contents: Contents) -> int:
    return sum(len(TENSORS[payload]) * len(heads) for payload, heads in contents)


def records_received(transfers: Iterable[Transfer], rank: int, grid: Grid) -> tuple[Record, ...]:
    """Return what an exchange brings to a rank, in the order of the buffer."""
    return _records((t for t in transfers if t.destination == rank), grid)


def _records(transfers: Iterable[Transfer], grid: Grid) -> tuple[Record, ...]:
    """Join the transfers of one span between two ranks; they stand together in a plan.

    Queries and keys of as many tokens, that is: in cross-attention they may differ.
    """
    is_cross = grid.query_length != grid.key_length

    def what_is_joined(transfer: Transfer) -> tuple[object, ...]:
        of_keys = is_cross and transfer.payload.is_of_keys
        return transfer.source, transfer.destination, transfer.span, of_keys

    records = []
    for _, group in groupby(transfers, what_is_joined):
        parts = tuple(group)
        contents = tuple((part.payload, part.heads) for part in parts)
        records.append(Record(parts[0].source, parts[0].destination, parts[0].span, contents))
    return tuple(records)


def _in_runs(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join spans that adjoin, in their order."""
    runs: list[Span] = []
    for span in spans:
        if runs and runs[-1].stop == span.start:
            span = Span(runs.pop().start, span.stop)
        runs.append(span)
    return tuple(runs)


def _longest(pieces: Sequence[Piece], chunk: int) -> tuple[Piece | None, Span | None]:
    """Return the piece that holds a chunk and the most that follow, and its span of them."""
    best: tuple[Piece | None, Span | None] = None, None
    for piece in pieces:
        inside = piece.span_at(chunk)
        if inside and (best[1] is None or inside.stop > best[1].stop):
            best = piece, inside
    return best


def _cut(piece: Piece, heads: Span, offset: int | SymInt, length: int | SymInt) -> Tensor:
    tensor = piece.tensor
    if heads != piece.heads:
        tensor = tensor.narrow(HEADS_DIM, heads.start - piece.heads.start, len(heads))
    return _narrow(tensor, SEQUENCE_DIM, offset, length)


def _narrow(tensor: Tensor, dim: int, start: int | SymInt, length: int | SymInt) -> Tensor:
    is_whole = is_known(length == tensor.shape[dim])
    return tensor if is_whole else tensor.narrow(dim, start, length)


def _wait(arriving: Arriving) -> Tensor:
    try:
        buffer: Tensor = torch.ops._c10d_functional.wait_tensor(arriving.started)
    except RuntimeError as error:
        raise StepFailed(arriving.number) from error
    return buffer


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _by_groups(tensor: Tensor, of: Groups) -> Tensor:
    """(c, ranks, B, h, ...) => (n, B, count, h, ...): n of the same groups, from c times.

    One group has no dim of its own.
    """
    if of.count == 1:
        return tensor.flatten(0, 1)
    if of.repeat > 1:
        tensor = tensor.unflatten(1, (of.count, of.repeat)).movedim(2, 1).flatten(0, 1)
    return tensor.movedim(1, 2)


# Longer periods are not looked for: a plan repeats over the ranks that share the heads.
MAX_PERIOD = 64


def _repeats(
    keys: Sequence[object], *, fits: Callable[[int, int], bool], must_fit: bool = False
) -> list[Repetition]:
    """Split a sequence into repetitions, each as long as can be.

    a b a b a b c   =>   Repetition(0, period=2, count=3), Repetition(6)

    Args:
        keys: what is compared.
        fits: (start, period) -> whether these may be taken together, even once.
        must_fit: others are not taken together even if they are repeated.
    """
    found: list[Repetition] = []
    while (start := found[-1].stop if found else 0) < len(keys):
        best = Repetition(start)
        for period in range(1, min(MAX_PERIOD, len(keys) - start) + 1):
            repeated = Repetition(start, period, _count(keys, start, period))
            if repeated.stop <= best.stop:
                continue
            if fits(start, period) or (repeated.count > 1 and not must_fit):
                best = repeated
        found.append(best)
    return found


def _count(keys: Sequence[object], start: int, period: int) -> int:
    """Return how often so many elements come, one time after the other."""
    unit, stop = keys[start : start + period], start + period
    while keys[stop : stop + period] == unit:
        stop += period
    return (stop - start) // period


def _groups_of(unit: Sequence[Record]) -> list[Groups] | None:
    """Return, for each part of the contents of records of one span, the heads of all of them.

    None if they are of several spans, or follow no rule.
    """
    first, last = unit[0], unit[-1]
    if last.span != first.span or len(last.contents) != len(first.contents):
        return None
    payloads = [payload for payload, _ in first.contents]
    for record in unit:
        if record.span != first.span or [p for p, _ in record.contents] != payloads:
            return None
    groups = []
    for index in range(len(payloads)):
        of = Groups.of([record.contents[index][1] for record in unit])
        if of is None:
            return None
        groups.append(of)
    return groups


def _bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
