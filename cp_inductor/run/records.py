"""What a rank sends: transfers, also to itself, and the records that they make. No tensors here.

    q[0:2] and kv[0:2] to rank 1, kv[1:2] to rank 2
      =>
    record(q, k, v of chunks 0:2)  record(k, v of chunk 1)

What two ranks send each other of one span of tokens is one record (t, B, W):

    | query 128 | grad_out 128 | lse 4 | delta 4 |      264 elements of bfloat16, 528 bytes

It has of each token the heads of all that is sent, side by side, and then its statistics: float32
bit by bit, in several elements each, from where they can be read as what they are. Where ranks
share the heads, many ranks are sent, or send, the same span, each other heads: `Groups` writes
these as one rule.

Tensors of a payload are (B, h, t, D), and statistics (B, h, t).

Shapes: B batch, h heads, t tokens, D head dim, W elements of one token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product, takewhile

from cp_inductor.plan import Grid, Payload, Plan, Span, Tile, Transfer, backward_plan, forward_plan
from cp_inductor.plan.grid import join_spans
from cp_inductor.plan.ir import Transfers
from cp_inductor.run.attention import Attention

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


@dataclass(frozen=True, slots=True)
class Groups:
    """Heads of several ranks: `count` groups of `size` heads, each `step` behind the one before.

    The first begins at `start`. `repeat` ranks, one after the other, have the same group.
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
        repeat = sum(1 for _ in takewhile(heads[0].__eq__, heads))
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
    records: Sequence[Record], fits: Callable[[slice, int], bool]
) -> Iterator[tuple[slice, int]]:
    """Split records into units, each with how often its contents come, as long as can be.

    a b a b a b c   =>   (slice(0, 2), 3), (slice(6, 7), 1)

    `fits` says whether a longer unit, or one that comes so often, may be taken together.
    """
    keys, start = [(record.contents, record.span) for record in records], 0
    while start < len(keys):
        unit, best, stop = slice(start, start + 1), 1, start + 1
        for period in range(1, min(MAX_PERIOD, len(keys) - start) + 1):
            at, end = slice(start, start + period), start + period
            while keys[end : end + period] == keys[at]:
                end += period
            count = (end - start) // period
            if end > stop and fits(at, count):
                unit, best, stop = at, count, end
        yield unit, best
        start = stop


# --- What a rank sends itself ---------------------------------------------------------------------
#
#     own keys 0:2, fetched keys 2:6, one tile over 0:6
#       =>
#     the rank sends itself 0:2, so that the tile reads one message and copies nothing
#
# This moves nothing, but what belongs together arrives together: a tile's keys, or the results of
# all ranks that share the heads.


def fetch_of(plan: Plan, rank: int, index: int) -> tuple[Transfer, ...]:
    """Return a rank's transfers of a fetch, with what it sends itself.

    A tile over its own and fetched chunks reads them where they arrived, if they arrive together.
    """
    stage, grid = plan.program(rank)[index], plan.grid
    fetched = [transfer for transfer in stage.fetch if transfer.destination == rank]
    own: dict[Transfer, None] = {}
    for tile in (*stage.tiles, *stage.backward_tiles):
        for of_keys, heads, part in _own_parts(plan, rank, [tile]):
            spans, _ = tile.side(plan.shape, of_keys=of_keys)
            alike = [t for t in fetched if (t.payload.is_of_keys, t.heads) == (of_keys, heads)]
            beside = [t.payload for t in alike if any(map(t.span.intersect, spans))]
            if beside and grid.num_tokens(part, of_keys=of_keys):
                own[Transfer(beside[0], part, heads, rank, rank)] = None
    return tuple(Transfers.joined((stage.fetch, own)).sorted()) if own else tuple(stage.fetch)


def home_of(plan: Plan, rank: int, index: int) -> tuple[Transfer, ...]:
    """Return a rank's transfers of results, with what it sends itself.

    Where ranks share the heads, those of all ranks arrive together.
    """
    program, itself = plan.program(rank), list[Transfer]()
    home = program[index].home
    if plan.returns:
        return tuple(home)
    for payload in dict.fromkeys(t.payload for t in home if t.source == rank):
        all_heads = plan.shape.all_heads
        everything = plan.shape.kv_heads(all_heads) if payload.is_of_keys else all_heads
        for heads in sorted(_heads_leaving(home, rank, payload) - {everything}):
            computed = [
                (number, part)
                for number, stage in enumerate(program)
                for *side, part in _own_parts(plan, rank, stage.tiles)
                if side == [payload.is_of_keys, heads]
            ]
            last = max((number for number, _ in computed), default=0)
            # Once, with the first results that leave when it is all there.
            before = (_heads_leaving(stage.home, rank, payload) for stage in program[last:index])
            if last <= index and not any(heads in of_stage for of_stage in before):
                itself += [
                    Transfer(payload, span, heads, rank, rank)
                    for span in join_spans(part for _, part in computed)
                    if plan.grid.num_tokens(span, of_keys=payload.is_of_keys)
                ]
    return tuple(Transfers.joined((home, itself)).sorted()) if itself else tuple(home)


def _own_parts(plan: Plan, rank: int, tiles: Iterable[Tile]) -> Iterator[tuple[bool, Span, Span]]:
    """Yield of what tiles read: whether it is keys, its heads, and which of a rank's own chunks."""
    for tile, of_keys in product(tiles, (False, True)):
        spans, heads = tile.side(plan.shape, of_keys=of_keys)
        for part in filter(None, map(plan.grid.own(rank).intersect, spans)):
            yield of_keys, heads, part


def _heads_leaving(home: Iterable[Transfer], rank: int, payload: Payload) -> set[Span]:
    return {t.heads for t in home if t.payload is payload and t.source == rank}


def runs_leaving(leaving: Sequence[Transfer], payload: Payload) -> list[tuple[Span, Span]]:
    """Return the (span, heads) of the transfers of a payload, those that adjoin as one.

    They adjoin if the same is sent beside them: what is packed by two concatenations is stored.
    """
    beside: defaultdict[tuple[int, Span], list[tuple[Payload, Span]]] = defaultdict(list)
    for transfer in leaving:
        beside[transfer.destination, transfer.span].append((transfer.payload, transfer.heads))
    of_payload = [transfer for transfer in leaving if transfer.payload is payload]
    runs: list[tuple[Span, Span]] = []
    end: object = None
    for transfer in sorted(of_payload, key=lambda t: (t.heads, t.span)):
        heads, span = transfer.heads, transfer.span
        with_it = beside[transfer.destination, span]
        if end == (heads, span.start, with_it):
            span = Span(runs.pop()[0].start, span.stop)
        runs.append((span, heads))
        end = heads, span.stop, with_it
    return runs


def reads_shard(attention: Attention) -> bool:
    """Whether the backward of this rank reads its own shards of query, key and value.

    It does not where the forward kept all that the backward's tiles read, in messages that hold the
    rank's own part as well. Then the shards need not be saved.
    """
    rank, plan = attention.rank, forward_plan(attention.recipe)
    if plan.num_kept < len(plan.stages):
        return True  # what is fetched again is sent again
    fetched = chain.from_iterable(fetch_of(plan, rank, at) for at in range(len(plan.stages)))
    itself = [transfer for transfer in fetched if transfer.source == transfer.destination]
    return any(
        plan.grid.num_tokens(part, of_keys=of_keys)
        and not any(
            (t.payload.is_of_keys, t.heads) == (of_keys, heads) and part.intersect(t.span) == part
            for t in itself
        )
        for stage in backward_plan(attention.recipe).program(rank)
        for of_keys, heads, part in _own_parts(plan, rank, stage.tiles)
    )
