"""Merge what tiles computed, here and on other ranks, into a rank's results.

              chunks  0   1   2   3
    heads 0:4         A   A   A   A        A: a tile of this rank, over chunks 0:4
    heads 4:8         B   B   C   C        B, C: tiles of heads 4:8, one of them arrived
      =>
    patches           {A}: heads 0:4, chunks 0:4     {B}: heads 4:8, 0:2     {C}: heads 4:8, 2:4
      =>
    each patch is merged (partials are combined, gradients summed), and patches are put together,
    first along the sequence, then along heads

A *contribution* is what one tile, or several ranks' messages, have of a result: over a span of
chunks and some heads. They overlap in any way, so a result is cut into patches, which each covers
whole or not at all. Where that makes fewer kernels, heads are written as groups that are merged
together.

Shapes: B batch, h heads, t tokens, D head dim; with groups of heads (B, count, size, t, ...).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from operator import methodcaller

import torch
from torch import Tensor

from cp_inductor.plan import Payload, Plan, Span, Tile
from cp_inductor.run.records import Groups
from cp_inductor.run.store import Piece, Store, concatenate
from cp_inductor.tiles.combine import accumulation_dtype, combine, combine_stack, sum_grads
from cp_inductor.tiles.dims import HEADS_DIM, SEQUENCE_DIM
from cp_inductor.tiles.kernels import Partial
from cp_inductor.torch_private.sizes import is_known

# What belongs together of one result, such as out and lse.
Tensors = tuple[Tensor, ...]


# What tiles contribute to; contributions to other ranks' chunks go home.
RESULTS = (Payload.PARTIAL, Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD)


def merge_stack(result: Payload, stacks: Iterable[Tensor]) -> Tensors:
    """Merge several that are one tensor; they are not rounded."""
    if result is Payload.PARTIAL:
        return combine_stack(*stacks)
    return tuple(grads.sum(0, dtype=accumulation_dtype(grads)) for grads in stacks)


def _nothing(result: Payload, zeros: Tensor) -> Tensors:
    """Return a result, given zeros (B, h, t, D), of tokens that no tile is about."""
    tensors = (zeros, *(torch.zeros_like(zeros) for _ in result.tensors[1:]))
    shape, dtype = zeros.shape[:-1], accumulation_dtype(zeros)
    blind = (zeros.new_full(shape, -float("inf"), dtype=dtype) for _ in result.statistics)
    return (*tensors, *blind)


class Results:
    """All contributions that a rank has; the store knows lengths, and what results are like."""

    def __init__(self, plan: Plan, rank: int, store: Store) -> None:
        self.plan, self.own, self.store = plan, plan.grid.own(rank), store
        self.contributions = defaultdict[Payload, list[Piece]](list)

    def add(self, result: Payload, tile: Tile, tensors: Sequence[Tensor]) -> None:
        """Note what a tile computed, over its spans, concatenated."""
        spans, heads = tile.side(self.plan.shape, of_keys=result.is_of_keys)
        lengths = [self.store.tokens.of(span, of_keys=result.is_of_keys) for span in spans]
        parts = [t.split(lengths, SEQUENCE_DIM) if len(spans) > 1 else [t] for t in tensors]
        self.contributions[result] += [
            Piece.of(result, (span,), heads, of_span)
            for span, *of_span in zip(spans, *parts, strict=True)
        ]

    def add_arrived(
        self, result: Payload, span: Span, heads: Groups, stacks: Sequence[Tensor]
    ) -> None:
        """Note what other ranks sent home; see `cp_inductor.run.messages.Messages.arrive`."""
        is_single = stacks[0].shape[0] == 1
        tensors = [t.squeeze(0) for t in stacks] if is_single else merge_stack(result, stacks)
        heads = replace(heads, repeat=1)
        piece = Piece.of(result, (span,), heads, tensors, has_arrived=True)
        self.contributions[result].append(piece)

    def withdraw(self, result: Payload, gone: Set[Span]) -> None:
        """Let go of what this rank computed of its own chunks and sends itself, of such heads."""
        around = Span(0, self.own.start), Span(self.own.stop, self.plan.grid.num_chunks)
        left = []
        for piece in self.contributions[result]:
            if piece.has_arrived or piece.heads.whole not in gone:
                left.append(piece)
                continue
            for part in filter(None, map(piece.span.intersect, around)):
                left.append(self._cut(piece, part, piece.heads.whole))
        self.contributions[result] = left

    def of_shard(self, result: Payload) -> Tensors:
        """Return this rank's own part of a result."""
        shape = self.plan.shape
        heads = shape.kv_heads(shape.all_heads) if result.is_of_keys else shape.all_heads
        if self.store.tokens.of(self.own, of_keys=result.is_of_keys) == 0:
            like = self.store.like
            return _nothing(result, like.new_empty((like.shape[0], len(heads), 0, like.shape[-1])))
        return self.over(result, self.own, heads)

    def over(self, result: Payload, span: Span, heads: Span, *, of_tiles: bool = False) -> Tensors:
        """Merge contributions to a span and heads, wherever their borders are.

        If it is of tiles, only what this rank computed with exactly these heads: what arrived, or
        was computed with others, is not to leave with it; unless results return the way their
        inputs came, and this rank is on it.
        """
        near = [piece for piece in self.contributions[result] if piece.span.intersect(span)]
        near = [piece for piece in near if piece.heads.meet(heads)]
        if of_tiles:
            near = [piece for piece in near if piece.heads.whole == heads]
            near = [piece for piece in near if self.plan.returns or not piece.has_arrived]
        count, grouped, all_heads = _write_in_groups(near, heads)
        grouped = _join_heads(grouped, all_heads)
        by_heads = []
        for some_heads in _cut_at_borders([piece.heads.first for piece in grouped], all_heads):
            row = [piece for piece in grouped if piece.heads.first.intersect(some_heads)]
            parts = _cut_at_borders([piece.span for piece in row], span)
            patches = [self._merge_patch(result, part, some_heads, row, count) for part in parts]
            with_tokens = [patch for patch in patches if patch]
            by_heads.append(_put_together(with_tokens, SEQUENCE_DIM))
        merged = _put_together(by_heads, HEADS_DIM)
        if len(grouped) == 1 and grouped[0].has_arrived:
            # Results of ops own their memory.
            merged = tuple(map(_copy, merged))
        return tuple(t.flatten(1, 2) for t in merged) if count > 1 else merged

    def _merge_patch(
        self, result: Payload, span: Span, heads: Span, contributions: Sequence[Piece], count: int
    ) -> Tensors:
        """Merge what contributes to a span, of contributions to heads; () if it has no tokens."""
        like = self.store.like
        near = [piece for piece in contributions if piece.span.intersect(span)]
        if near:
            cuts = [tuple(self._cut(piece, span, heads).tensors.values()) for piece in near]
            if result is Payload.PARTIAL:
                return combine([Partial(*cut) for cut in cuts], dtype=like.dtype)
            return tuple(sum_grads(grads, dtype=like.dtype) for grads in zip(*cuts, strict=True))
        length = self.store.tokens.of(span, of_keys=result.is_of_keys)
        if is_known(length == 0):
            return ()
        groups = (count, len(heads)) if count > 1 else (len(heads),)
        return _nothing(result, like.new_zeros((like.shape[0], *groups, length, like.shape[-1])))

    def _cut(self, piece: Piece, span: Span, heads: Span) -> Piece:
        """Return a contribution to a part of its span, and of the heads of each of its groups."""
        of, is_grouped = piece.heads, int(piece.heads.count > 1)
        if span != piece.span:
            before = self.store.tokens.of(Span(piece.span.start, span.start), of_keys=piece.of_keys)
            length = self.store.tokens.of(span, of_keys=piece.of_keys)
            dim = SEQUENCE_DIM + is_grouped
            piece = piece.map(lambda t: t.narrow(dim, before, length), spans=(span,))
        if heads != of.first:
            start, dim_of_heads = heads.start - of.start, HEADS_DIM + is_grouped
            groups = replace(of, start=heads.start, size=len(heads))
            piece = piece.map(lambda t: t.narrow(dim_of_heads, start, len(heads)), heads=groups)
        return piece


# --- Heads and borders ------------------------------------------------------------------------


def _write_in_groups(contributions: Sequence[Piece], heads: Span) -> tuple[int, list[Piece], Span]:
    """Write heads as a number of groups, if contributions are to so many groups, or to all heads.

    Return how many, the contributions to the heads of each of them, and the heads of one.
    """
    first = next((piece.heads for piece in contributions if piece.heads.count > 1), None)
    if first is None:
        return 1, list(contributions), heads
    grouped = [_in_groups(piece, heads, first.count, first.step) for piece in contributions]
    written = [piece for piece in grouped if piece is not None]
    if len(written) == len(grouped):
        return first.count, written, Span(0, first.step)
    apart = [part for piece in contributions for part in _apart(piece) if part.heads.meet(heads)]
    return 1, apart, heads


def _in_groups(piece: Piece, heads: Span, count: int, step: int) -> Piece | None:
    """Write a contribution as one to the heads of each group; None if it is to others."""
    of = piece.heads
    if (of.count, of.step, of.whole) == (count, step, heads):
        return replace(piece, heads=replace(of, start=of.start - heads.start))
    if of.count == 1 and of.whole == heads and len(heads) == count * step:
        groups = Groups(0, step, step, count)
        return piece.map(lambda tensor: tensor.unflatten(HEADS_DIM, (count, step)), heads=groups)
    return None


def _apart(piece: Piece) -> Iterator[Piece]:
    """Yield a contribution group by group."""
    if piece.heads.count == 1:
        yield piece
        return
    for i, heads in enumerate(piece.heads.spans):
        yield piece.map(methodcaller("select", 1, i), heads=Groups.single(heads))


def _join_heads(contributions: Sequence[Piece], heads: Span) -> list[Piece]:
    """Put together what is to parts of the heads, if something else is to all of them.

    They are merged with it at once, and not part by part, of which the results were copied.
    """
    whole = [piece for piece in contributions if piece.heads.first == heads]
    joined, parts_of = list[Piece](), dict[Span, list[Piece]]()
    for piece in sorted(contributions, key=lambda piece: piece.heads.start):
        if piece.heads.first != heads:
            parts_of.setdefault(piece.span, []).append(piece)
    for parts in parts_of.values():
        edges = [heads.start, *(part.heads.first.stop for part in parts)]
        if [*(part.heads.start for part in parts), heads.stop] != edges:
            return list(contributions)
        groups = replace(parts[0].heads, size=len(heads))
        tensors = _put_together([[*part.tensors.values()] for part in parts], HEADS_DIM)
        named = dict(zip(parts[0].tensors, tensors, strict=True))
        joined.append(replace(parts[0], heads=groups, tensors=named))
    return [*whole, *joined] if whole else list(contributions)


def _cut_at_borders(spans: Sequence[Span], within: Span) -> list[Span]:
    """Cut `within` at all borders of the spans."""
    edges = {edge for span in spans for edge in (span.start, span.stop)}
    inside = (edge for edge in sorted(edges) if within.start < edge < within.stop)
    return [Span(a, b) for a, b in pairwise((within.start, *inside, within.stop))]


# --- Tensors ----------------------------------------------------------------------------------


def concatenate_all(parts: Sequence[Sequence[Tensor]], dim: int) -> Tensors:
    """Concatenate what belongs together, such as outs and lses, each with its like."""
    return tuple(concatenate(of_one, dim) for of_one in zip(*parts, strict=True))


def _put_together(parts: Sequence[Sequence[Tensor]], dim: int) -> Tensors:
    """Concatenate results over spans or heads; rows of groups of heads, which come first, by token.

    They have a dim more than others: (B, count, size, t, D).
    """
    if len(parts) < 2 or parts[0][0].ndim == 4:
        return concatenate_all(parts, dim)
    joined = []
    for of_one in zip(*parts, strict=True):
        if of_one[0].ndim == 4:
            joined.append(torch.cat(of_one, dim + 1))
            continue
        tokens_first = [tensor.movedim(SEQUENCE_DIM + 1, 1) for tensor in of_one]
        whole = torch.cat(tokens_first, 1 if dim == SEQUENCE_DIM else dim + 2)
        joined.append(whole.movedim(1, SEQUENCE_DIM + 1))
    return tuple(joined)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy, rows of groups of heads token by token."""
    if tensor.ndim < 5:
        return tensor.clone(memory_format=torch.contiguous_format)
    tokens_first = tensor.movedim(SEQUENCE_DIM + 1, 1)
    copy = tokens_first.clone(memory_format=torch.contiguous_format)
    return copy.movedim(1, SEQUENCE_DIM + 1)
