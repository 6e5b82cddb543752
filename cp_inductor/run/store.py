"""What a rank has at hand: its own tensors, and all that arrived. Tiles read views of it.

    add("key", chunks 0:2)      this rank's shard
    put("key", chunks 2:6)      arrived, in one message
    take("key", chunks 1:4)     put together of both, once for all tiles that read it
    take("key", chunks 2:4)     a view of the message

As chunks are numbered as they are stored, what arrives from neighbouring ranks lies in order in a
message, and a tile over many ranks' keys reads it where it is. So that its own do, too, a rank
sends itself its part of such a message.

Shapes: B batch, h heads, t tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor

from cp_inductor.plan import Payload, Span
from cp_inductor.plan.grid import join_spans
from cp_inductor.run.records import Contents, Groups, Record, num_rows, num_statistics
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.dims import HEADS_DIM, SEQUENCE_DIM, Tokens
from cp_inductor.torch_private.sizes import is_known


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What is known about some chunks and heads: tokens of tensors, or records of them."""

    spans: tuple[Span, ...]  # chunks whose tokens the tensors hold, one span behind the other
    heads: Groups  # all of the tensors'
    of_keys: bool  # the chunks are chunks of keys
    # By name, (B, h, t, D), or (B, h, t) for a statistic; of several groups of heads (B, count,
    # size, t, ...). By their contents, records (t, B, W).
    tensors: dict[str | Contents, Tensor]
    has_arrived: bool = False  # they are views of a message

    @staticmethod
    def of(
        payload: Payload,
        spans: tuple[Span, ...],
        heads: Span | Groups,
        tensors: Iterable[Tensor],
        *,
        has_arrived: bool = False,
    ) -> Piece:
        """Return what a payload consists of, over spans and heads."""
        groups = Groups.single(heads) if isinstance(heads, Span) else heads
        named = dict[str | Contents, Tensor](zip(payload.parts, tensors, strict=True))
        return Piece(spans, groups, payload.is_of_keys, named, has_arrived)

    def map(self, change: Callable[[Tensor], Tensor], **fields: Any) -> Piece:
        """Return it with all of its tensors changed, and with other fields."""
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, **fields)

    @property
    def span(self) -> Span:
        """Its only span."""
        (span,) = self.spans
        return span

    def has(self, heads: Span) -> bool:
        """Whether heads are among its own."""
        return self.heads.whole.intersect(heads) == heads

    def span_at(self, chunk: int) -> Span | None:
        """Return the span that holds a chunk."""
        return next((span for span in self.spans if span.start <= chunk < span.stop), None)


# What kernels load at once. A record that ends with statistics is a multiple of it, so that the
# heads of the next begin at one.
ALIGNMENT_BYTES = 16

# Of what holds all heads of its contents.
ALL = Groups.single(Span(0, 0))


class Store:
    """What a rank has at hand, by name, chunks and heads.

    Tensors are `like` any (B, h, t, D) of the attention, in batch, head dim and dtype.
    """

    def __init__(self, tokens: Tokens, like: Tensor) -> None:
        self.tokens, self.like = tokens, like
        self.pieces: list[Piece] = []
        self.taken: dict[tuple[str, tuple[Span, ...], Span], Tensor] = {}

    def named(self, name: str | Contents) -> list[Piece]:
        """Return the pieces that hold some of a tensor, or of records."""
        return [piece for piece in self.pieces if name in piece.tensors]

    def forget(self, needed: Sequence[Span]) -> None:
        """Let go of what arrived and is not needed any more."""

        def is_needed(spans: Iterable[Span]) -> bool:
            return any(span.intersect(other) for span in spans for other in needed)

        self.pieces = [p for p in self.pieces if not p.has_arrived or is_needed(p.spans)]
        self.taken = {key: taken for key, taken in self.taken.items() if is_needed(key[1])}

    def take(
        self, name: str, spans: Iterable[Span], heads: Span, *, is_in_order: bool = False
    ) -> Tensor:
        """Return a tensor over spans, in their order, and heads; all of them must be at hand.

        What is put together of parts is put together once. If it is to be in order, its strides are
        those of its shape.
        """
        key = name, tuple(spans), heads
        if key not in self.taken:
            parts = self.parts(*key)
            if len(parts) == 1 and not is_in_order:
                return parts[0]
            whole = concatenate(parts, SEQUENCE_DIM)
            self.taken[key] = whole.contiguous() if is_in_order else whole
        return self.taken[key]

    def put_together(self, all_spans: Sequence[tuple[Span, ...]], heads: Span) -> None:
        """Put keys and values together once, of which tiles read different parts (`all_spans`)."""
        singles = [spans for spans in all_spans if len(spans) == 1]
        apart = {spans for spans in singles if len(self.parts("key", spans, heads)) > 1}
        if len(apart) < 2:
            return
        for span in join_spans(span for spans in apart for span in spans):
            tensors = self._both_together(span, heads) or [
                concatenate(self.parts(name, [span], heads), SEQUENCE_DIM)
                for name in Payload.KEY_VALUE.tensors
            ]
            piece = Piece.of(Payload.KEY_VALUE, (span,), heads, tensors, has_arrived=True)
            self.pieces.append(piece)

    def _both_together(self, span: Span, heads: Span) -> list[Tensor] | None:
        """Return keys and values of a span by one concatenation, if messages hold all of both.

        In a record they stand side by side.
        """
        content = Payload.KEY_VALUE, heads
        records = {
            piece: (packed, num_rows(contents[: contents.index(content)]))
            for piece in self.pieces
            if piece.has_arrived
            for contents, packed in piece.tensors.items()
            if isinstance(contents, tuple) and content in contents
        }
        pieces = list(records)
        if not _hold(pieces, [span]):
            return None
        parts = []
        for piece, offset, length in self._located("key", [span], pieces):
            (packed, rows_before), width = records[piece], int(self.like.shape[-1])
            both = narrow(packed, 0, offset, length)
            both = both.narrow(-1, rows_before * width, 2 * len(heads) * width)
            parts.append(both.unflatten(-1, (2 * len(heads), width)).movedim(-4, -2))
        key_value = concatenate(parts, SEQUENCE_DIM)
        return [key_value.narrow(HEADS_DIM, at, len(heads)) for at in (0, len(heads))]

    def parts(self, name: str, spans: Sequence[Span], heads: Span) -> list[Tensor]:
        """Return views of a tensor over spans and heads, one behind the other, as few as can be."""
        pieces = [piece for piece in self.named(name) if piece.has(heads)]
        # What is this rank's alone is there as it was given. The rest lies together in a message.
        own = [piece for piece in pieces if not piece.has_arrived]
        is_foreign = any(not any(piece.span_at(span.start) for piece in own) for span in spans)
        pieces.sort(key=lambda piece: piece.has_arrived != is_foreign)
        parts = []
        for piece, offset, length in self._located(name, spans, pieces):
            tensor, first = piece.tensors[name], piece.heads.start
            tensor = narrow(tensor, HEADS_DIM, heads.start - first, len(heads))
            parts.append(narrow(tensor, SEQUENCE_DIM, offset, length))
        return parts

    def _located(
        self, name: str | Contents, spans: Sequence[Span], pieces: Sequence[Piece]
    ) -> list[tuple[Piece, int | SymInt, int | SymInt]]:
        """Return where spans are: pieces, how many tokens come before, and how many it are."""
        parts: list[tuple[Piece, int | SymInt, int | SymInt]] = []
        for span in spans:
            start = span.start
            while start < span.stop:
                holding = [(piece, inside) for piece in pieces if (inside := piece.span_at(start))]
                if not holding:
                    of_keys = name in Payload.KEY_VALUE.tensors
                    length = self.tokens.of(Span(start, start + 1), of_keys=of_keys)
                    assert length == 0, f"chunk {start} of {name} is not at hand"
                    start += 1
                    continue
                # The first of those that hold the most that follows.
                piece, longest = max(holding, key=lambda held: held[1].stop)
                part = Span(start, min(span.stop, longest.stop))
                length = self.tokens.of(part, of_keys=piece.of_keys)
                before = *piece.spans[: piece.spans.index(longest)], Span(longest.start, start)
                offset = sum(self.tokens.of(other, of_keys=piece.of_keys) for other in before)
                last = parts[-1] if parts else None
                if last and last[0] is piece and is_known(last[1] + last[2] == offset):
                    parts[-1] = (piece, last[1], last[2] + length)
                else:
                    parts.append((piece, offset, length))
                start = part.stop
        return parts

    # --- What a record is here --------------------------------------------------------------

    def first_word(self, contents: Contents) -> int:
        """Return where in a record the statistics of a token begin."""
        return _round_up(num_rows(contents) * self.like.shape[-1], self.words_per_statistic)

    def width(self, contents: Contents) -> int:
        """Return how many elements a record has of a token; the last may be zeros."""
        count = num_statistics(contents)
        stop = self.first_word(contents) + count * self.words_per_statistic
        return _round_up(stop, ALIGNMENT_BYTES // self.like.dtype.itemsize) if count else stop

    def length(self, record: Record) -> int | SymInt:
        """Return how many tokens a record has."""
        return self.tokens.of(record.span, of_keys=record.contents[0][0].is_of_keys)

    def numel(self, record: Record) -> int | SymInt:
        """Return how many elements a record has."""
        return self.length(record) * self.like.shape[0] * self.width(record.contents)

    @property
    def words_per_statistic(self) -> int:
        """How many elements of a message hold one statistic."""
        return accumulation_dtype(self.like).itemsize // self.like.dtype.itemsize

    def holds(self, contents: Contents, spans: Sequence[Span]) -> bool:
        """Whether records of these contents and spans are at hand."""
        return _hold(self.named(contents), spans)

    def records(self, contents: Contents, spans: Sequence[Span]) -> Tensor:
        """Return records (t, B, W) that are at hand."""
        located = self._located(contents, spans, self.named(contents))
        return concatenate([narrow(piece.tensors[contents], 0, *at) for piece, *at in located])


def in_runs(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join spans that adjoin, in their order."""
    runs: list[Span] = []
    for span in spans:
        if runs and runs[-1].stop == span.start:
            span = Span(runs.pop().start, span.stop)
        runs.append(span)
    return tuple(runs)


def _hold(pieces: Sequence[Piece], spans: Sequence[Span]) -> bool:
    """Whether pieces hold all chunks of spans."""
    chunks = (chunk for span in spans for chunk in range(span.start, span.stop))
    return all(any(piece.span_at(chunk) for piece in pieces) for chunk in chunks)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def narrow(tensor: Tensor, dim: int, start: int | SymInt, length: int | SymInt) -> Tensor:
    """Narrow a tensor, unless it is all of it."""
    is_whole = is_known(length == tensor.shape[dim])
    return tensor if is_whole else tensor.narrow(dim, start, length)


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors, unless it is one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View bits as numbers of another dtype."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
