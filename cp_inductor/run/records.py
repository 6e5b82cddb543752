"""What messages are made of: records, and the heads of many ranks as one rule. No tensors here.

    q[0:2] and kv[0:2] to rank 1, kv[1:2] to rank 2
      =>
    record(q, k, v of chunks 0:2)  record(k, v of chunk 1)

What two ranks send each other of one span of tokens is one record (t, B, W). It has of each token
the heads of all that is sent, side by side, and then its statistics; see
`cp_inductor.graph.record_layout`. Where ranks share the heads, many ranks are sent, or send, the
same span, each other heads: `Groups` writes these as one rule.

Tensors of a payload are (B, h, t, D), and statistics (B, h, t).

Shapes: B batch, h heads, t tokens, D head dim, W elements of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import torch

from cp_inductor.graph.record_layout import Field, RecordLayout, lay_out
from cp_inductor.kept import lru_cache
from cp_inductor.plan import Grid, Payload, Span, Transfer

# What kernels load at once. A record that ends with statistics is a multiple of it, so that the
# heads of the next begin at one.
ALIGNMENT_BYTES = 16

# Longer periods are not looked for: a plan repeats over the ranks that share the heads.
MAX_PERIOD = 64


# What a record is made of: payloads and their heads.
Contents = tuple[tuple[Payload, Span], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank sends another of one span."""

    source: int
    destination: int
    span: Span
    contents: Contents


def records_of(
    transfers: Iterable[Transfer], rank: int, grid: Grid, *, are_sent: bool
) -> tuple[Record, ...]:
    """Return what a rank sends in an exchange, or receives, in the order of the buffer.

    The transfers of one span between two ranks, which stand together in a plan, are one record.
    Queries and keys are joined if they are as many tokens: in cross-attention they may differ.
    """
    is_cross = grid.query_length != grid.key_length

    def what_is_joined(transfer: Transfer) -> tuple[int, int, Span, bool]:
        of_keys = is_cross and transfer.payload.is_of_keys
        return transfer.source, transfer.destination, transfer.span, of_keys

    own = (t for t in transfers if rank == (t.source if are_sent else t.destination))
    return tuple(
        Record(source, destination, span, tuple((part.payload, part.heads) for part in group))
        for (source, destination, span, _), group in groupby(own, what_is_joined)
    )


def num_rows(contents: Contents) -> int:
    """Return how many rows of D numbers one token has."""
    return sum(len(payload.tensors) * len(heads) for payload, heads in contents)


def num_statistics(contents: Contents) -> int:
    """Return how many statistics one token has."""
    return sum(len(payload.statistics) * len(heads) for payload, heads in contents)


@lru_cache(maxsize=4096)
def lay_out_record(
    contents: Contents, head_dim: int, dtype: torch.dtype, of_statistics: torch.dtype
) -> RecordLayout:
    """Return where the rows of D numbers of a token stand, and behind them its statistics."""
    rows = Field((num_rows(contents), head_dim), dtype)
    if not num_statistics(contents):
        return lay_out([rows], dtype)
    statistics = Field((num_statistics(contents),), of_statistics)
    alignment = ALIGNMENT_BYTES // dtype.itemsize
    return lay_out([rows, statistics], dtype, alignment)


@dataclass(frozen=True, slots=True)
class Groups:
    """Heads of several ranks: `count` groups of `size` heads, each `step` behind the one before.

    Attributes:
        start: the first head of the first group.
        size, step, count: see above.
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
        count = len(heads) // repeat
        step = max(1, heads[repeat].start - start) if count > 1 else size
        groups = Groups(start, size, step, count, repeat)
        expected = [span for span in groups.spans for _ in range(repeat)]
        is_inside = step >= size and start + size <= groups.whole.start + step
        return groups if expected == list(heads) and is_inside else None

    @staticmethod
    def single(heads: Span) -> Groups:
        """Return heads as one group."""
        return Groups(heads.start, len(heads), len(heads), 1)

    def meet(self, heads: Span) -> bool:
        """Whether one of the heads is in a group."""
        return any(span.intersect(heads) for span in self.spans)

    @property
    def spans(self) -> list[Span]:
        """The heads of each group."""
        starts = (self.start + i * self.step for i in range(self.count))
        return [Span(start, start + self.size) for start in starts]

    @property
    def first(self) -> Span:
        """The heads of the first group."""
        return Span(self.start, self.start + self.size)

    @property
    def whole(self) -> Span:
        """The heads among which the groups are, a whole number of steps."""
        first = self.start - (self.start % self.step if self.count > 1 else 0)
        return Span(first, first + self.step * self.count)


def groups_of(unit: Sequence[Record]) -> list[Groups] | None:
    """Return, for each part of the contents of records of one span, the heads of all of them.

    None if they are of several spans, or follow no rule.
    """
    first = unit[0]
    payloads = [payload for payload, _ in first.contents]
    # The last first: of units that are tried, it tells most apart.
    for record in reversed(unit):
        if record.span != first.span or [p for p, _ in record.contents] != payloads:
            return None
    of_parts = [Groups.of([record.contents[i][1] for record in unit]) for i in range(len(payloads))]
    groups = [groups for groups in of_parts if groups is not None]
    return groups if len(groups) == len(payloads) else None


def find_repetitions(
    keys: Sequence[object], *, fits: Callable[[int, int], bool], must_fit: bool = False
) -> Iterator[tuple[slice, int]]:
    """Split a sequence into units, each with how often it comes, as long as can be.

    a b a b a b c   =>   (slice(0, 2), 3), (slice(6, 7), 1)

    Args:
        keys: what is compared.
        fits: (start, period) -> whether these may be taken together, even once.
        must_fit: others are not taken together even if they are repeated.
    """
    start = 0
    while start < len(keys):
        unit, best, stop = slice(start, start + 1), 1, start + 1
        for period in range(1, min(MAX_PERIOD, len(keys) - start) + 1):
            count = _count(keys, start, period)
            is_longer = start + period * count > stop
            if is_longer and (fits(start, period) or (count > 1 and not must_fit)):
                unit, best, stop = slice(start, start + period), count, start + period * count
        yield unit, best
        start = stop


def _count(keys: Sequence[object], start: int, period: int) -> int:
    """Return how often so many elements come, one time after the other."""
    unit, stop = keys[start : start + period], start + period
    while keys[stop : stop + period] == unit:
        stop += period
    return (stop - start) // period
