"""Exchanges: from transfers to one all_to_all_single, and from what arrives to pieces.

    q[0:2] and kv[0:2] to rank 1, kv[1:2] to rank 2
      =>
    record(q, k, v of chunks 0:2)  record(k, v of chunk 1)      one flat buffer, uneven splits

What two ranks send each other of one span of tokens is one record (t, B, W): of each token the
heads of all that is sent, side by side, and then its statistics, float32 bit by bit in words of the
records' dtype. As chunks are numbered as they are stored, what arrives from neighbouring ranks lies
in order in the buffer, and a tile over many ranks' keys reads it where it is. What many ranks send
of one span, which is how results come home, is one strided tensor over all of them.

Shapes: B batch, h heads, t tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import SymInt, Tensor

from cp_inductor.plan import Grid, Payload, Span, Transfer
from cp_inductor.plan.grid import join_spans
from cp_inductor.run.combine import accumulation_dtype
from cp_inductor.run.dims import HEADS_DIM, SEQUENCE_DIM

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


# What kernels load at once; a record's heads must begin at multiples of it.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tokens:
    """Lengths of spans, in tokens, that may be symbolic.

    Attributes:
        grid: of the plan.
        num_queries, num_keys: this rank's, from its tensors. Where the sequence divides evenly, all
            ranks hold as many, whatever the length that the plan was made for.
    """

    grid: Grid
    num_queries: int | SymInt
    num_keys: int | SymInt

    def of(self, span: Span, *, of_keys: bool) -> int | SymInt:
        """Return how many tokens a span of chunks holds."""
        whole = self.grid.key_length if of_keys else self.grid.query_length
        if whole % self.grid.world_size:
            return self.grid.num_tokens(span, of_keys=of_keys)
        local = self.num_keys if of_keys else self.num_queries
        return self._before(span.stop, local) - self._before(span.start, local)

    def positions(self, span: Span, *, of_keys: bool) -> list[tuple[int | SymInt, int | SymInt]]:
        """Return where the tokens of a span stand along the sequence, in ranges [start, stop)."""
        ranges = []
        for run in self.grid.runs(span):
            before = self.grid.spans_at(0, self.grid.position(run.start))
            start = sum(self.of(one, of_keys=of_keys) for one in before)
            ranges.append((start, start + self.of(run, of_keys=of_keys)))
        return ranges

    def _before(self, chunk: int, local: int | SymInt) -> int | SymInt:
        rank, offset = divmod(chunk, self.grid.chunks_per_rank)
        return rank * local + offset * local // self.grid.chunks_per_rank


@dataclass(frozen=True, slots=True)
class Piece:
    """What is known about some chunks and heads: tokens of a tensor (B, h, t, ...).

    Attributes:
        span: chunks.
        heads: all of the tensor's.
        of_keys: the chunks are chunks of keys.
        tensor: (B, h, t, D), or (B, h, t) for a statistic.
        offset: of the chunks' first token in the tensor, where it holds more than theirs.
        is_shared: the tensor is a view of a buffer that holds more than it.
    """

    span: Span
    heads: Span
    of_keys: bool
    tensor: Tensor
    offset: int | SymInt | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """What several ranks sent of the same chunks and heads.

    Attributes:
        payload: what it is.
        span: chunks.
        heads: all of them.
        tensors: as the payload consists of, each (n, B, ranks, heads of one rank, t, ...): n times
            all heads.
    """

    payload: Payload
    span: Span
    heads: Span
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
        span: chunks.
        tensor: (t, B, W); W elements are a token's.
        offset: where in the tensor the chunks begin, if it holds more.
    """

    contents: Contents
    span: Span
    tensor: Tensor
    offset: int | SymInt | None = None


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
    """An exchange that was started: what will arrive, and in which order."""

    started: Tensor
    records: tuple[Record, ...]


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

    def add(self, name: str, span: Span, heads: Span, tensor: Tensor, *, of_keys: bool) -> None:
        """Put a tensor at hand."""
        self.pieces.setdefault(name, []).append(Piece(span, heads, of_keys, tensor))

    def pop(self, name: str, *, but: Span) -> list[Piece]:
        """Take all pieces of a name away, except those of some chunks."""
        pieces = self.pieces.get(name, [])
        self.pieces[name] = [piece for piece in pieces if piece.span == but]
        return [piece for piece in pieces if piece.span != but]

    def matching(self, name: str, piece: Piece) -> list[Tensor]:
        """Return the tensors of a name over the same chunks and heads as a piece."""
        return [
            self.narrow(other, piece.span, piece.heads)
            for other in self.pieces[name]
            if (other.span, other.heads) == (piece.span, piece.heads)
        ]

    def forget(self, needed: Sequence[Span], own: Span) -> None:
        """Let go of what arrived and is not needed any more."""

        def is_needed(span: Span) -> bool:
            return span == own or any(span.intersect(other) for other in needed)

        for name, pieces in self.pieces.items():
            self.pieces[name] = [piece for piece in pieces if is_needed(piece.span)]
        self.packed = [
            packed
            for packed in self.packed
            if packed.span.intersect(own) == packed.span or is_needed(packed.span)
        ]

    def take(self, name: str, spans: Iterable[Span], heads: Span) -> Tensor:
        """Return a tensor over spans, in their order, and heads; all of them must be at hand."""
        parts = [part for span in spans for part in self._parts(name, span, heads)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, SEQUENCE_DIM)

    def _parts(self, name: str, span: Span, heads: Span) -> list[Tensor]:
        parts, start = [], span.start
        pieces = [p for p in self.pieces[name] if p.heads.start <= heads.start < p.heads.stop]
        while start < span.stop:
            piece = next((p for p in pieces if p.span.start <= start < p.span.stop), None)
            if piece is None:
                of_keys = name in TENSORS[Payload.KEY_VALUE]
                length = self.tokens.of(Span(start, start + 1), of_keys=of_keys)
                assert length == 0, f"chunk {start} of {name} is not at hand"
                start += 1
                continue
            part = Span(start, min(span.stop, piece.span.stop))
            parts.append(self.narrow(piece, part, heads))
            start = part.stop
        return parts

    def narrow(self, piece: Piece, span: Span, heads: Span) -> Tensor:
        """Return some tokens and heads of a piece."""
        tensor = piece.tensor
        if heads != piece.heads:
            tensor = tensor.narrow(HEADS_DIM, heads.start - piece.heads.start, len(heads))
        if span != piece.span or piece.offset is not None:
            before = self.tokens.of(Span(piece.span.start, span.start), of_keys=piece.of_keys)
            length = self.tokens.of(span, of_keys=piece.of_keys)
            tensor = tensor.narrow(SEQUENCE_DIM, (piece.offset or 0) + before, length)
        return tensor

    # --- Sending and receiving -------------------------------------------------------------

    def start(self, transfers: Sequence[Transfer]) -> Arriving:
        """Start an exchange, in which a rank takes part also with nothing to give."""
        sent = _records((t for t in transfers if t.source == self.rank), self.tokens.grid)
        received = records_received(transfers, self.rank, self.tokens.grid)
        self._pack_own(sent)
        flat = self._flatten(sent)
        if not flat:
            buffer = self.like.new_empty((0,))
        else:
            buffer = flat[0] if len(flat) == 1 else torch.cat(flat)
        started: Tensor = torch.ops._c10d_functional.all_to_all_single(
            buffer,
            self._splits(received, lambda record: record.source),
            self._splits(sent, lambda record: record.destination),
            self.group_name,
        )
        return Arriving(started, received)

    def _flatten(self, sent: Sequence[Record]) -> list[Tensor]:
        """Return what is sent, in order, in as few pieces as it takes."""
        # What goes to neighbours, of chunks that adjoin, lies in order in what was packed.
        runs = [
            Record(run[0].source, run[0].destination, _joined(run), run[0].contents)
            for run in _runs(sent, is_joined=self._is_packed_together)
        ]
        flat = []
        for repetition in _repeats([(run.contents, run.span) for run in runs]):
            # Several ranks get the same.
            once = [self._packed(run).reshape(-1) for run in runs[repetition.unit]]
            if repetition.count == 1:
                flat += once
            else:
                unit = once[0] if repetition.period == 1 else torch.cat(once)
                flat.append(unit.repeat(repetition.count))
        return flat

    def _is_packed_together(self, record: Record, after: Record) -> bool:
        joined = Record(0, 0, Span(record.span.start, after.span.stop), record.contents)
        return self._find(joined) is not None

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

    def _pack_own(self, sent: Sequence[Record]) -> None:
        """Pack what is not packed yet: once for all that is sent of one contents."""
        missing: dict[Contents, list[Span]] = {}
        for record in sent:
            if self._find(record) is None:
                missing.setdefault(record.contents, []).append(record.span)
        for contents, spans in missing.items():
            for span in join_spans(spans):
                self.packed.append(Packed(contents, span, self._pack(contents, span)))

    def _find(self, record: Record) -> Packed | None:
        for packed in self.packed:
            is_inside = packed.span.intersect(record.span) == record.span
            if packed.contents == record.contents and is_inside:
                return packed
        return None

    def _packed(self, record: Record) -> Tensor:
        """Return a record (t, B, W): what was packed, or a part of it."""
        found = self._find(record)
        assert found is not None
        if found.span == record.span and found.offset is None:
            return found.tensor
        of_keys = record.contents[0][0].is_of_keys
        before = self.tokens.of(Span(found.span.start, record.span.start), of_keys=of_keys)
        return found.tensor.narrow(0, (found.offset or 0) + before, self._length(record))

    def _pack(self, contents: Contents, span: Span) -> Tensor:
        tensors, statistics = [], []
        for payload, heads in contents:
            tensors += [self.take(name, [span], heads) for name in TENSORS[payload]]
            names = STATISTICS.get(payload, ())
            statistics += [self.take(name, [span], heads) for name in names]
        tokens_first = [tensor.permute(2, 0, 1, 3) for tensor in tensors]
        rows = tokens_first[0] if len(tensors) == 1 else torch.cat(tokens_first, 2)
        parts = [rows.contiguous().flatten(2)]
        if statistics:
            parts += self._zeros(parts, up_to=self._statistics_at(contents))
            parts.append(self._as_words(statistics))
        parts += self._zeros(parts, up_to=self._width(contents))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _zeros(self, parts: Sequence[Tensor], *, up_to: int) -> list[Tensor]:
        """Return what fills the parts of a token up to a number of elements."""
        missing = up_to - sum(part.shape[-1] for part in parts)
        # Not F.pad, which makes a constant of a symbolic length.
        return [parts[0].new_zeros((*parts[0].shape[:-1], missing))] if missing else []

    def _as_words(self, statistics: list[Tensor]) -> Tensor:
        """(B, h, t) float32 tensors => (t, B, words)."""
        dtype = accumulation_dtype(self.like)
        together = torch.cat([statistic.to(dtype) for statistic in statistics], HEADS_DIM)
        tokens_first = _copy(together.permute(2, 0, 1))
        words = _bitcast(tokens_first.flatten(), self.like.dtype)
        return words.view(*tokens_first.shape[:2], -1)

    def wait(self, arriving: Arriving) -> Tensor:
        """Wait for an exchange, also where it brings nothing, and put at hand what it brought."""
        buffer: Tensor = torch.ops._c10d_functional.wait_tensor(arriving.started)
        self.unpack(buffer, arriving.records)
        return buffer

    def arrive(self, arriving: Arriving) -> list[Stack]:
        """Wait for an exchange and return what it brought, without keeping it."""
        buffer: Tensor = torch.ops._c10d_functional.wait_tensor(arriving.started)
        records = arriving.records
        repeats = _repeats(
            [(record.contents, record.span) for record in records],
            fits=lambda start, period: _is_side_by_side(records[start : start + period]),
        )
        groups = [(records[repetition.unit], repetition.count) for repetition in repeats]
        sizes = [sum(self._numel(record) for record in unit) * count for unit, count in groups]
        stacks = []
        parts_of = self._split_buffer(buffer, sizes, [unit[0].contents for unit, _ in groups])
        for (unit, count), (flat, flat_words) in zip(groups, parts_of, strict=True):
            first, last = unit[0], unit[-1]
            shape = (count, len(unit), self._length(first), self.like.shape[0], -1)
            _, parts = self._unpack(first.contents, flat, flat_words, shape)
            for index, (payload, start) in enumerate(first.contents):
                heads = Span(start.start, last.contents[index][1].stop)
                tensors = tuple(tensor.movedim(1, 2) for tensor in parts[index])
                stacks.append(Stack(payload, first.span, heads, tensors))
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
        runs = _runs(group)
        lengths = [sum(self._length(record) for record in run) for run in runs]
        contents = group[0].contents
        shape = (sum(lengths), self.like.shape[0], -1)
        packed, parts = self._unpack(contents, flat, flat_words, shape)
        offset: int | SymInt = 0
        for run, length in zip(runs, lengths, strict=True):
            span = _joined(run)
            at = offset if len(runs) > 1 else None
            self.packed.append(Packed(contents, span, packed, at))
            for (payload, heads), tensors in zip(contents, parts, strict=True):
                names = (*TENSORS[payload], *STATISTICS.get(payload, ()))
                for name, tensor in zip(names, tensors, strict=True):
                    piece = Piece(span, heads, payload.is_of_keys, tensor, at)
                    self.pieces.setdefault(name, []).append(piece)
            offset += length

    def _unpack(
        self, contents: Contents, flat: Tensor, flat_words: Tensor, shape: tuple[int | SymInt, ...]
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the records (..., t, B, W), and of each part of the contents what it consists of.

        Args:
            contents: of the records.
            flat: the records.
            flat_words: the same, as statistics.
            shape: of the records, (..., t, B, -1).

        Returns:
            Of each part its tensors (..., B, h, t, D), then its statistics (..., B, h, t).
        """
        num_heads, head_dim = _num_heads(contents), self.like.shape[-1]
        packed = flat.view(*shape[:-1], self._width(contents))
        rows = packed
        if self._width(contents) > num_heads * head_dim:
            rows = packed.narrow(-1, 0, num_heads * head_dim)
        rows = rows.unflatten(-1, (num_heads, head_dim)).movedim(-4, -2)
        words = flat_words.view(shape) if self._num_words(contents) else None
        row, statistic = 0, self._statistics_at(contents) // self._words_per_statistic()
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


def _runs(
    records: Sequence[Record],
    *,
    is_joined: Callable[[Record, Record], bool] = lambda record, after: True,
) -> list[list[Record]]:
    """Group records that adjoin, in the buffer and in their chunks."""
    runs: list[list[Record]] = []
    for record in records:
        last = runs[-1][-1] if runs else None
        if (
            last
            and last.contents == record.contents
            and last.span.stop == record.span.start
            and is_joined(runs[-1][0], record)
        ):
            runs[-1].append(record)
        else:
            runs.append([record])
    return runs


def _joined(run: Sequence[Record]) -> Span:
    return Span(run[0].span.start, run[-1].span.stop)


# Longer periods are not looked for: a plan repeats over the ranks that share the heads.
MAX_PERIOD = 64


def _repeats(
    keys: Sequence[object], *, fits: Callable[[int, int], bool] | None = None
) -> list[Repetition]:
    """Split a sequence into repetitions, each as long as can be.

    a b a b a b c   =>   Repetition(0, period=2, count=3), Repetition(6)

    Args:
        keys: what is compared.
        fits: (start, period) -> whether these may be taken together, even once; if not given, they
            may if they are repeated.
    """
    found: list[Repetition] = []
    while (start := found[-1].stop if found else 0) < len(keys):
        best = Repetition(start)
        for period in range(1, min(MAX_PERIOD, len(keys) - start) + 1):
            if fits is not None and not fits(start, period):
                continue
            repeated = Repetition(start, period, _count(keys, start, period))
            if repeated.stop > best.stop and (repeated.count > 1 or fits is not None):
                best = repeated
        found.append(best)
    return found


def _count(keys: Sequence[object], start: int, period: int) -> int:
    """Return how often so many elements come, one time after the other."""
    unit, stop = keys[start : start + period], start + period
    while keys[stop : stop + period] == unit:
        stop += period
    return (stop - start) // period


def _is_side_by_side(unit: Sequence[Record]) -> bool:
    """Whether records are of one span and their heads, put together, are a span of heads."""
    return all(
        record.span == after.span
        and [payload for payload, _ in record.contents]
        == [payload for payload, _ in after.contents]
        and all(
            heads.stop == following.start and len(heads) == len(following)
            for (_, heads), (_, following) in zip(record.contents, after.contents, strict=True)
        )
        for record, after in pairwise(unit)
    )


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of its shape: contiguous() leaves those of dims of size 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
