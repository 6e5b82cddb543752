"""Cut a result into patches, which each contribution to it covers whole or not at all.

              chunks  0   1   2   3
    heads 0:4         A   A   A   A        row 0:4    patch chunks 0:4 {A}
    heads 4:8         B   B   C   C        row 4:8    patches 0:2 {B}, 2:4 {C}

A *contribution* is what one tile, or one stack of messages, has of a result: over a span of chunks
and some heads. Where that makes fewer kernels, heads are written as groups that are merged
together, and rows are found whose patches differ in one contribution alone: they are merged as one.

Shapes: B batch, h heads, t tokens, D head dim; with groups of heads (B, count, size, t, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from cp_inductor.plan import Span
from cp_inductor.run.records import Groups
from cp_inductor.tiles.dims import HEADS_DIM

# What belongs together of one result, such as out and lse.
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one tile, or one stack of messages, has of a result.

    Attributes:
        span: chunks.
        groups: of heads.
        tensors: (B, size, t, D), and for a statistic (B, size, t). Of several groups, (B, count,
            size, t, ...).
        has_arrived: others computed it; the tensors are views of a message.
    """

    span: Span
    groups: Groups
    tensors: Tensors
    has_arrived: bool = False

    def covers(self, heads: Span) -> bool:
        """Whether one of the heads is among those of the groups."""
        of = self.groups
        starts = range(of.start, of.start + of.count * of.step, of.step)
        return any(Span(start, start + of.size).intersect(heads) for start in starts)


# A span, and all that contributes to it; of some heads.
Patch = tuple[Span, list[Contribution]]

# Heads, and the patches of a span under them.
Row = tuple[Span, list[Patch]]

# A span, and what contributes to it: of each contribution a list, one for each row.
Column = tuple[Span, list[list[Contribution]]]


def write_in_groups(
    contributions: Sequence[Contribution], heads: Span
) -> tuple[int, list[Contribution], Span]:
    """Write heads as a number of groups, if contributions are to so many groups, or to all heads.

    Returns:
        How many groups, the contributions to the heads of each of them, and the heads of one.
    """
    first = next((one.groups for one in contributions if one.groups.count > 1), None)
    if first is None:
        return 1, list(contributions), heads
    grouped = list[Contribution]()
    for one in contributions:
        written = _in_groups(one, heads, first.count, first.step)
        if written is None:
            break
        grouped.append(written)
    else:
        return first.count, grouped, Span(0, first.step)
    apart = [part for one in contributions for part in _apart(one)]
    return 1, [one for one in apart if one.covers(heads)], heads


def _in_groups(one: Contribution, heads: Span, count: int, step: int) -> Contribution | None:
    """Write a contribution as one to the heads of each group; None if it is to others."""
    of = one.groups
    if (of.count, of.step, of.whole) == (count, step, heads):
        return replace(one, groups=replace(of, start=of.start - heads.start))
    if of.count == 1 and of.whole == heads and len(heads) == count * step:
        tensors = tuple(t.unflatten(HEADS_DIM, (count, step)) for t in one.tensors)
        return replace(one, groups=Groups(0, step, step, count), tensors=tensors)
    return None


def _apart(one: Contribution) -> Iterator[Contribution]:
    """Yield a contribution group by group."""
    of = one.groups
    for i in range(of.count):
        groups = Groups(of.start + i * of.step, of.size, of.size, 1)
        tensors = tuple(t.select(1, i) for t in one.tensors) if of.count > 1 else one.tensors
        yield replace(one, groups=groups, tensors=tensors)


def cut_into_patches(
    contributions: Sequence[Contribution], span: Span, heads: Span
) -> Iterator[Row]:
    """Cut a span and heads into patches that no contribution covers in part."""
    for some_heads in _cut_at_borders([one.groups.first for one in contributions], heads):
        row = [one for one in contributions if one.groups.first.intersect(some_heads)]
        parts = _cut_at_borders([one.span for one in row], span)
        yield (
            some_heads,
            [(part, [one for one in row if one.span.intersect(part)]) for part in parts],
        )


def _cut_at_borders(spans: Sequence[Span], within: Span) -> list[Span]:
    """Cut `within` at all borders of the spans."""
    edges = {within.start, within.stop}
    for span in spans:
        edges |= {edge for edge in (span.start, span.stop) if within.start < edge < within.stop}
    return [Span(a, b) for a, b in pairwise(sorted(edges))]


def columns_of_alike(rows: Sequence[Row]) -> list[Column] | None:
    """Return the columns of rows that are alike but for contributions to different heads.

    Rows are alike if they are cut at the same chunks, if as many contribute to each patch, and if
    one contribution at least, and all but one, is to all rows.
    """
    found: list[Column] = []
    for patches in zip(*(patches for _, patches in rows), strict=False):
        span, first = patches[0]
        common = [one for one in first if all(any(one is o for o in of) for _, of in patches)]
        rest = [[one for one in of if not any(one is c for c in common)] for _, of in patches]
        is_alike = all(other == span for other, _ in patches) and all(len(of) == 1 for of in rest)
        if not common or not is_alike:
            return None
        found.append((span, [*([one] * len(rows) for one in common), [of[0] for of in rest]]))
    return found if all(len(patches) == len(found) for _, patches in rows) else None
