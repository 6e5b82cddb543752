"""Derive plans from tiles: who computes what determines what must move.

    rank 0: tile q[2:4] x kv[0:1]        owner of q[2:4] is rank 1
      =>
    use q[2:4] of rank 1 by rank 0       in each stage whose tiles read it
      =>
    fetch q[2:4] 1 -> 0    at the first of these stages, once
    home out[2:4] 0 -> 1   after the last of them, once

Uses are rows of integers, of all ranks and stages at once: the transfers that would bring them from
their owners, and the stage behind these. The uses of a batch are so as well.

The backward plan is a function of the forward plan. It has the same tiles at the same ranks, or
others that read what the forward fetched, so that fetched data may be kept. Every fetched query is
fetched with the gradient of its output, every fetched key and value is fetched again, and the
gradients of both are sent home: `Plan.backward`.

Over several nodes, what a rank needs of another node enters its node at one rank, one stage before
it is passed on, so that no stage passes on what it brings. Results go back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cp_inductor.plan.grid import Grid, spread, tokens_before
from cp_inductor.plan.ir import (
    DESTINATION,
    FIRST_HEAD,
    LAST_HEAD,
    PAYLOAD,
    SOURCE,
    STAGE,
    START,
    STOP,
    Payload,
    Shape,
    Tile,
    TileColumns,
    Transfers,
    message_order,
)

INPUTS = Payload.QUERY, Payload.KEY_VALUE


def moves_of(
    grid: Grid,
    shape: Shape,
    tiles: Sequence[Sequence[Tile]],
    payloads: Sequence[Payload],
    *,
    num_nodes: int = 1,
    is_ring: bool = False,
) -> list[Transfers]:
    """Return, for each stage, the inputs that its tiles need and ranks have not yet, or results.

    Results are sent home after the last tile that adds to them. Over several nodes, tiles of the
    first stage read only what enters at their rank, and a rank passes results on, with its own,
    when all have arrived: perhaps in one more stage. In a ring, keys come from the rank before,
    and a rank without queries hands them on.
    """
    columns, moves = TileColumns.of(tiles), []
    for payload in payloads:
        is_input = payload in INPUTS
        uses = _uses_of(
            *(grid, shape, columns, payload),
            by_chunk=num_nodes > 1 and not is_input,
            is_passed_on=is_ring,
        )
        if num_nodes > 1 and len(uses):
            uses = _with_entries(grid, uses, num_nodes, later=-1 if is_input else 1)
            if not is_input:
                _spread_last_hops(grid, uses, num_nodes, of_keys=payload.is_of_keys)
        uses = _joined(uses)
        before = (uses[:, DESTINATION] - 1) % grid.world_size
        uses[:, SOURCE] = before if is_ring else _neighbors(grid, uses, num_nodes)
        if not is_input:
            uses[:, [SOURCE, DESTINATION]] = uses[:, [DESTINATION, SOURCE]]
        moves.append(uses)
    return by_stage(moves, max(len(tiles), *(1 + uses[:, STAGE].max(initial=0) for uses in moves)))


def _neighbors(grid: Grid, uses: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return whom each rank gets its part from: the owner, or the rank where it enters its node."""
    rank, owner, size = uses[:, DESTINATION], uses[:, SOURCE], grid.world_size // num_nodes
    # If there is one node, what an owner has "enters" it at the owner.
    entry = rank // size * size + owner // num_nodes
    return np.where(entry == rank, owner, entry)


def _with_entries(grid: Grid, uses: np.ndarray, num_nodes: int, *, later: int) -> np.ndarray:
    """Return uses, and those of the ranks that pass something on, so many stages later; sorted."""
    neighbor = _neighbors(grid, uses, num_nodes)
    is_passed = neighbor != uses[:, SOURCE]
    passed = uses[is_passed]
    passed[:, DESTINATION] = neighbor[is_passed]
    passed[:, STAGE] += later
    uses = np.concatenate([uses, passed])
    uses = uses[np.lexsort(uses[:, [STAGE, START, LAST_HEAD, FIRST_HEAD, DESTINATION]].T)]
    is_chosen = begins(uses, [DESTINATION, FIRST_HEAD, LAST_HEAD, START])
    return uses[np.roll(is_chosen, -1) if later > 0 else is_chosen]


def _spread_last_hops(grid: Grid, uses: np.ndarray, num_nodes: int, *, of_keys: bool) -> None:
    """Let results leave later on their last hop, if they are early, when most ranks move.

    In an exchange all wait for the rank that moves most. What a few ranks alone move costs all of
    them as much as if they all did.
    """
    at = np.flatnonzero(_neighbors(grid, uses, num_nodes) == uses[:, SOURCE])
    owner, rank, start, stop, _, first_head, last_head, stage = uses[at].T
    before = tokens_before(grid, of_keys=of_keys)
    size = (last_head - first_head) * (before[stop] - before[start])
    # One chunk of each owner, then the next, so that owners receive as evenly.
    turn = start % grid.chunks_per_rank
    for end in (rank, owner):
        num_stages = int(stage.max()) + 1
        loads = np.bincount(end * num_stages + stage, size, grid.world_size * num_stages)
        loads = loads.reshape(-1, num_stages)
        usual = np.median(loads[loads.any(1)], axis=0)
        if not usual.any():
            break
        order = np.lexsort((turn, stage, end))
        moved = np.cumsum(size[order])
        of_rank = np.searchsorted(end[order], end[order])
        middle = moved - size[order] / 2 - (moved - size[order])[of_rank]
        share = middle / loads.sum(1)[end[order]]
        later = np.searchsorted(np.cumsum(usual) / usual.sum(), share)
        stage[order] = np.maximum(stage[order], later)
    uses[at, STAGE] = stage


def _uses_of(
    grid: Grid,
    shape: Shape,
    tiles: TileColumns,
    payload: Payload,
    *,
    by_chunk: bool,
    is_passed_on: bool,
) -> np.ndarray:
    """Return (n, 8), what ranks read and do not store, as transfers; sorted by rank and span.

    The stage is the first that reads it, or of results the last. Spans are parts of the sequence
    that tiles read as a whole, or with `by_chunk` single chunks.
    """
    of_keys, num_stages = payload.is_of_keys, int(tiles.stage.max(initial=0)) + 1
    group = shape.num_heads // shape.num_kv_heads if of_keys else 1
    heads = tiles.first_head // group, (tiles.last_head - 1) // group + 1
    tile, start, stop = tiles.keys if of_keys else tiles.queries
    is_edge = np.full(grid.num_chunks + 1, by_chunk)
    is_edge[:: grid.chunks_per_rank] = is_edge[start] = is_edge[stop] = True
    edges, part_of = np.flatnonzero(is_edge), np.cumsum(is_edge) - 1
    # A rank with heads, a part and a stage are one number: few of many uses are the first.
    lines = (tiles.rank << 34) + (heads[0] << 17) + heads[1]
    _, first_tile, line = np.unique(lines, return_index=True, return_inverse=True)
    is_used = is_passed_on | (tiles.tokens(grid)[not of_keys][tile] > 0)
    of_span, place = spread((part_of[stop] - part_of[start]) * is_used)
    numbers = (line[tile] * len(edges) + part_of[start]) * num_stages + tiles.stage[tile]
    numbers, stage = np.divmod(np.sort(numbers[of_span] + place * num_stages), num_stages)
    is_new = np.diff(numbers, **{"prepend" if payload in INPUTS else "append": -1})
    line, part = np.divmod(numbers[is_new != 0], len(edges))
    tile, owner = first_tile[line], edges[part] // grid.chunks_per_rank
    kind, rank, edges = np.full_like(part, payload.order), tiles.rank[tile], edges[[part, part + 1]]
    stage = stage[is_new != 0]
    uses = np.stack([owner, rank, *edges, kind, *(of[tile] for of in heads), stage], axis=1)
    before = tokens_before(grid, of_keys=of_keys)[edges]
    return uses[(owner != rank) & (before[0] < before[1])]


def begins(uses: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    """Return (n,), which uses differ in some columns from the one before."""
    return np.asarray(np.diff(uses[:, columns], axis=0, prepend=-1).any(1))


def _joined(uses: np.ndarray) -> np.ndarray:
    """Join sorted uses that differ in nothing but their spans, which touch."""
    is_first = begins(uses, [SOURCE, DESTINATION, PAYLOAD, FIRST_HEAD, LAST_HEAD, STAGE])
    is_first[1:] |= uses[1:, START] != uses[:-1, STOP]
    joined = uses[is_first]
    joined[:, STOP] = uses[np.roll(is_first, -1), STOP]
    return joined


def by_stage(uses: Sequence[np.ndarray], num_stages: int) -> list[Transfers]:
    """Return the transfers of each stage, in the order of messages."""
    rows = np.concatenate(uses)
    rows = rows[message_order(rows, rows[:, STAGE])]
    edges = np.searchsorted(rows[:, STAGE], np.arange(1, num_stages))
    return [Transfers(part[:, :STAGE]) for part in np.split(rows, edges)]
