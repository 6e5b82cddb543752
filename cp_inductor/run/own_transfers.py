"""What a rank sends in an exchange, with what it sends itself. Pure decisions.

    own keys 0:2, fetched keys 2:6, one tile over 0:6
      =>
    the rank sends itself 0:2, so that the tile reads one message and copies nothing

The plan says what ranks send each other. What a rank sends itself moves nothing, but lets what
belongs together arrive together: a tile's keys, or the results of all ranks that share the heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from cp_inductor.plan import Payload, Plan, Span, Transfer, backward_plan, forward_plan
from cp_inductor.plan.grid import join_spans
from cp_inductor.plan.ir import Transfers
from cp_inductor.run.attention import Attention


def fetch_of(plan: Plan, rank: int, index: int) -> tuple[Transfer, ...]:
    """Return a rank's transfers of a fetch, with what it sends itself.

    A tile over its own and fetched chunks reads them where they arrived, if they arrive together.
    """
    stage, grid = plan.program(rank)[index], plan.grid
    fetched = [transfer for transfer in stage.fetch if transfer.destination == rank]
    own: dict[Transfer, None] = {}
    for tile in (*stage.tiles, *stage.backward_tiles):
        for of_keys in (False, True):
            spans, heads = tile.side(plan.shape, of_keys=of_keys)
            alike = [t for t in fetched if t.payload.is_of_keys == of_keys and t.heads == heads]
            beside = [t for t in alike if any(map(t.span.intersect, spans))]
            inside = [span.intersect(grid.own(rank)) for span in spans] if beside else []
            for span in filter(None, inside):
                if grid.num_tokens(span, of_keys=of_keys):
                    own[Transfer(beside[0].payload, span, heads, rank, rank)] = None
    return tuple(Transfers.joined((stage.fetch, own)).sorted()) if own else tuple(stage.fetch)


def home_of(plan: Plan, rank: int, index: int) -> tuple[Transfer, ...]:
    """Return a rank's transfers of results, with what it sends itself.

    Where ranks share the heads, those of all ranks arrive together.
    """
    program, grid = plan.program(rank), plan.grid
    if plan.returns:
        return tuple(program[index].home)
    home, own = program[index].home, grid.own(rank)
    itself: list[Transfer] = []
    for payload in dict.fromkeys(t.payload for t in home if t.source == rank):
        all_heads = plan.shape.all_heads
        everything = plan.shape.kv_heads(all_heads) if payload.is_of_keys else all_heads
        for heads in sorted(_heads_leaving(home, rank, payload) - {everything}):
            spans: list[Span] = []
            last = 0
            for number, stage in enumerate(program):
                for tile in stage.tiles:
                    of_tile, its_heads = tile.side(plan.shape, of_keys=payload.is_of_keys)
                    inside = [part for span in of_tile if (part := span.intersect(own))]
                    if inside and its_heads == heads:
                        spans += inside
                        last = number
            # Once, with the first results that leave when it is all there.
            is_now = not any(
                heads in _heads_leaving(stage.home, rank, payload) for stage in program[last:index]
            )
            if last <= index and is_now:
                itself += [
                    Transfer(payload, span, heads, rank, rank)
                    for span in join_spans(spans)
                    if grid.num_tokens(span, of_keys=payload.is_of_keys)
                ]
    return tuple(Transfers.joined((home, itself)).sorted()) if itself else tuple(home)


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
    before: list[tuple[Payload, Span]] = []
    for transfer in sorted(of_payload, key=lambda t: (t.heads, t.span)):
        heads, span = transfer.heads, transfer.span
        with_it = beside[transfer.destination, span]
        adjoins = runs and runs[-1][1] == heads and runs[-1][0].stop == span.start
        if adjoins and before == with_it:
            span = Span(runs.pop()[0].start, span.stop)
        runs.append((span, heads))
        before = with_it
    return runs


def reads_shard(attention: Attention) -> bool:
    """Whether the backward of this rank reads its own shards of query, key and value.

    It does not where the forward kept all that the backward's tiles read, in messages that hold the
    rank's own part as well. Then the shards need not be saved.
    """
    rank, plan = attention.rank, forward_plan(attention.recipe)
    if plan.num_kept < len(plan.stages):
        return True  # what is fetched again is sent again
    itself = [
        (transfer.payload.is_of_keys, transfer.heads, transfer.span)
        for index in range(len(plan.stages))
        for transfer in fetch_of(plan, rank, index)
        if transfer.source == transfer.destination
    ]
    return any(
        plan.grid.num_tokens(part, of_keys=of_keys)
        and not any(
            one[:2] == (of_keys, heads) and part.intersect(one[2]) == part for one in itself
        )
        for stage in backward_plan(attention.recipe).program(rank)
        for tile in stage.tiles
        for of_keys in (False, True)
        for spans, heads in [tile.side(plan.shape, of_keys=of_keys)]
        for span in spans
        if (part := span.intersect(plan.grid.own(rank)))
    )
