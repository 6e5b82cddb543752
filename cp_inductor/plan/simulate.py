"""Execute all ranks of a plan abstractly: check it, and estimate its time.

A plan is wrong if a (query, key, head) that is needed is not computed exactly once; if a tile runs
before its data arrives; if a rank sends data that it does not have; or if results are not sent home
exactly once.

A plan that passes cannot deadlock: exchanges are collectives, in the order of the stages on all
ranks, and the data to send is there before an exchange starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import pairs_of
from cp_inductor.plan.grid import Grid, lengths_of, spread, tokens_before
from cp_inductor.plan.ir import (
    DESTINATION,
    FIRST_HEAD,
    IS_OF_KEYS,
    LAST_HEAD,
    PAYLOAD,
    SOURCE,
    START,
    STOP,
    Direction,
    Mask,
    PlanData,
    Tile,
    Transfer,
    Transfers,
)
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.timeline import Timeline, loads_of
from cp_inductor.plan.transfers import TileColumns


class InvalidPlan(AssertionError):
    """A plan that must not be executed, because of a bug of ours."""


def simulate(plan: PlanData, machine: Machine | None = None) -> Timeline:
    """Check a plan, and return its timeline.

    Raises:
        InvalidPlan: the plan is wrong; see the module.
    """
    tiles = TileColumns.of(stage.tiles for stage in plan.stages)
    _check_tiles(plan)
    _check_coverage(plan)
    _check_exchanges(plan)
    for of_keys in (False, True):
        places = _Places(plan, tiles, of_keys=of_keys)
        _check_data(plan, places)
        if plan.direction is Direction.BACKWARD or not of_keys:
            _check_homes(plan, places)
    machine = machine or Machine()
    return loads_of(plan, machine).timeline(machine)


def require(condition: bool, *what: object) -> None:
    """Raise `InvalidPlan`, which says what is wrong, unless a condition holds."""
    if not condition:
        raise InvalidPlan(" ".join(map(str, what)))


def _check_tiles(plan: PlanData) -> None:
    for tile in (tile for stage in plan.stages for tile in stage.tiles):
        if tile.mask is Mask.CAUSAL:
            in_order = all(a.stop <= b.start for a, b in pairwise(tile.queries))
            require(tile.queries == tile.keys, tile, "is causal and not square")
            require(in_order, tile, "is not in order of position")
        elif tile.mask is Mask.PARTIAL:
            require(plan.mask is Mask.PARTIAL, tile, "is under a mask that the plan has not")


def _check_coverage(plan: PlanData) -> None:
    """Check that each needed pair of chunks is computed once for every head, and no other."""
    grid, num_chunks = plan.grid, plan.grid.num_chunks
    cells = pairs_of(grid, plan.mask, plan.rule).cells
    lengths = [lengths_of(grid, of_keys=of_keys) for of_keys in (False, True)]
    has_tokens = (lengths[0][:, None] > 0) & (lengths[1][None] > 0)
    needed = (cells != Cell.EMPTY) & has_tokens
    tiles = [tile for stage in plan.stages for tile in stage.tiles]
    edges = sorted({edge for tile in tiles for edge in (tile.heads.start, tile.heads.stop)})
    whole = plan.shape.all_heads
    require(not tiles or (edges[0], edges[-1]) == (whole.start, whole.stop), "heads are missing")
    seen = set()
    for start in edges[:-1]:
        own = [tile for tile in tiles if tile.heads.start <= start < tile.heads.stop]
        # Groups of ranks that split the heads compute the same tiles, each for heads of its own.
        same = tuple(sorted((tile.queries, tile.keys, tile.mask.value) for tile in own))
        if same in seen:
            continue
        seen.add(same)
        computed = np.zeros((num_chunks, num_chunks), dtype=np.int16)
        for tile in own:
            _add_pairs(computed, tile, cells)
        computed *= has_tokens
        if not np.array_equal(computed, needed):
            wrong = np.argwhere(computed != needed)
            what = f"{len(wrong)} pairs of chunks are not computed once, head {start}: {wrong[:3]}"
            raise InvalidPlan(what)


def _add_pairs(computed: np.ndarray, tile: Tile, cells: np.ndarray) -> None:
    """Count the cells of a tile, and check its mask against them."""
    queries, keys = (
        np.array([chunk for span in spans for chunk in range(span.start, span.stop)])
        for spans in (tile.queries, tile.keys)
    )
    area = np.ix_(queries, keys)
    part = cells[area]
    if tile.mask is Mask.CAUSAL:
        order = np.arange(len(queries))
        expected = np.where(order[:, None] > order[None], Cell.FULL, Cell.EMPTY)
        np.fill_diagonal(expected, Cell.CAUSAL)
        require(bool((part == expected).all()), tile, "is not causal under the mask")
    elif tile.mask is Mask.FULL:
        require(bool((part == Cell.FULL).all()), tile, "sees pairs that do not exist")
    computed[area] += part != Cell.EMPTY


class _Places:
    """A place for each rank, span of heads and part of the sequence that a plan treats as a whole.

    Of queries, or of keys. What has no token has no place.
    """

    def __init__(self, plan: PlanData, tiles: TileColumns, *, of_keys: bool) -> None:
        self.of_keys, grid, shape = of_keys, plan.grid, plan.shape
        group = shape.num_heads // shape.num_kv_heads if of_keys else 1
        self.heads = tiles.first_head // group, (tiles.last_head - 1) // group + 1
        num_heads = shape.num_kv_heads if of_keys else shape.num_heads
        moved = np.concatenate([Transfers.of(plan.kept_fetches).columns, *sum(plan.columns, ())])
        moved = moved[IS_OF_KEYS[moved[:, PAYLOAD]] == of_keys]
        self.tiles, self.spans = tiles, tiles.keys if of_keys else tiles.queries
        head_edges = *self.heads, moved[:, FIRST_HEAD], moved[:, LAST_HEAD], [0, num_heads]
        self.head_edges = np.unique(np.concatenate(head_edges))
        ranks = np.arange(grid.world_size)
        first = ranks * grid.chunks_per_rank
        edges = self.spans.start, self.spans.stop, moved[:, START], moved[:, STOP]
        self.edges = np.unique(np.concatenate([*edges, first, [grid.num_chunks]]))
        self.tokens = np.diff(np.array(tokens_before(grid, of_keys=of_keys))[self.edges])
        heads = np.zeros_like(ranks), np.full_like(ranks, num_heads)
        num_places = grid.world_size * (len(self.head_edges) - 1) * len(self.tokens)
        self.own = np.zeros(num_places, bool)
        self.own[self._at(ranks, first, first + grid.chunks_per_rank, *heads)[0]] = True

    def of_transfers(self, columns: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places at one end of transfers, and the transfer of each.

        Transfers of the other kind, queries or keys, are left out.
        """
        which = np.flatnonzero(IS_OF_KEYS[columns[:, PAYLOAD]] == self.of_keys)
        columns = columns[which].T[[end, START, STOP, FIRST_HEAD, LAST_HEAD]]
        places, of = self._at(*columns)
        return places, which[of]

    def of_tiles(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places that the tiles of a stage read, and the tile of each."""
        tile = self.spans.tile
        now = np.flatnonzero(self.tiles.stage[tile] == stage)
        tile, spans = tile[now], (self.spans.start[now], self.spans.stop[now])
        places, of = self._at(self.tiles.rank[tile], *spans, *(of[tile] for of in self.heads))
        return places, tile[of]

    def _at(
        self,
        rank: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        first_head: np.ndarray,
        last_head: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        part, num_parts = _between(self.edges, start, stop)
        head, num_heads = _between(self.head_edges, first_head, last_head)
        of, place = spread(num_parts * num_heads)
        heads, parts = np.divmod(place, num_parts[of])
        parts += part[of]
        places = (rank[of] * (len(self.head_edges) - 1) + head[of] + heads) * len(self.tokens)
        has_tokens = self.tokens[parts] > 0
        return (places + parts)[has_tokens], of[has_tokens]


def _between(edges: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the first of what edges part that is in [start, stop), and how many are."""
    first = np.searchsorted(edges, start)
    return first, np.searchsorted(edges, stop) - first


def _are_new(places: np.ndarray, known: np.ndarray) -> bool:
    """Whether no place is known, or comes twice."""
    return not known[places].any() and len(np.unique(places)) == len(places)


def _check_exchanges(plan: PlanData) -> None:
    """Check that transfers join two ranks, and that results go home if they go no other way."""
    for index, (stage, (fetch, home)) in enumerate(zip(plan.stages, plan.columns, strict=True)):
        _check_ends(stage.fetch, fetch, plan.grid, f"fetch of stage {index}")
        _check_ends(stage.home, home, plan.grid, f"home of stage {index}")
        is_home = home[:, START] // plan.grid.chunks_per_rank == home[:, DESTINATION]
        require(plan.returns or bool(is_home.all()), f"stage {index}: a result does not go home")


def _check_data(plan: PlanData, places: _Places) -> None:
    """Run the exchanges: check that what is sent, and what a tile reads, is there."""
    held = places.own.copy()

    def add(columns: np.ndarray, where: str) -> None:
        arrived, _ = places.of_transfers(columns, DESTINATION)
        require(_are_new(arrived, held), where, "a fetch brings what is there already")
        held[arrived] = True

    if plan.direction is Direction.BACKWARD and places.of_keys:
        add(Transfers.of(plan.kept_fetches).columns, "what was kept:")
    tiles = [tile for stage in plan.stages for tile in stage.tiles]
    for index, (stage, (fetch, _)) in enumerate(zip(plan.stages, plan.columns, strict=True)):
        # The fetch of a stage starts before the tiles of the one before: what it sends must have
        # been there then, so that nothing that arrives with this exchange is sent by it.
        sent, of = places.of_transfers(fetch, SOURCE)
        if not held[sent].all():
            transfer = stage.fetch[int(of[held[sent].argmin()])]
            raise InvalidPlan(f"stage {index}: {transfer} sends what is not there")
        add(fetch, f"stage {index}:")
        read, of = places.of_tiles(index)
        if not held[read].all():
            tile = tiles[int(of[held[read].argmin()])]
            what = "keys" if places.of_keys else "queries"
            raise InvalidPlan(f"stage {index}: {tile} misses {what}")


def _check_ends(transfers: Sequence[Transfer], columns: np.ndarray, grid: Grid, where: str) -> None:
    """Check that transfers join two ranks, once, in a message order that both ends know."""
    size = grid.chunks_per_rank
    for wrong, what in (
        (columns[:, SOURCE] == columns[:, DESTINATION], "goes nowhere"),
        (columns[:, START] // size != (columns[:, STOP] - 1) // size, "has several owners"),
    ):
        if wrong.any():
            raise InvalidPlan(f"{where} {transfers[int(wrong.argmax())]} {what}")
    require(_are_in_order(columns), where, "is out of order")


def _are_in_order(columns: np.ndarray) -> bool:
    """Whether every transfer comes after the one before it in the order of messages."""
    steps = np.diff(columns[:, :LAST_HEAD], axis=0)
    if not len(steps):
        return True
    first = (steps != 0).argmax(1)
    return bool((steps[np.arange(len(steps)), first] > 0).all())


def _check_homes(plan: PlanData, places: _Places) -> None:
    """Check that results of foreign chunks are sent home once, not before the last tile of each.

    Every rank that has such results must send them. So must a rank that results of foreign chunks
    were sent to, after they have arrived: it sends them once, whereupon nothing more may arrive. So
    they cannot go round in circles, and what is sent reaches the owner.
    """
    what = "results of keys" if places.of_keys else "results of queries"
    homes = [home for _, home in plan.columns]
    # From behind the last stage on: what is added to or arrives later, and what was sent later. A
    # tile adds to what leaves with its stage or later; what arrives with a stage leaves after it.
    added, sent = places.own.copy(), np.zeros_like(places.own)
    for index in reversed(range(len(homes))):
        leaving, _ = places.of_transfers(homes[index], SOURCE)
        added[places.of_transfers(homes[index], DESTINATION)[0]] = True
        is_right = _are_new(leaving, added | sent)
        require(is_right, f"stage {index}: {what} are early or twice")
        sent[leaving] = True
        added[places.of_tiles(index)[0]] = True
    home = sent | places.own
    require(not (home & ~added).any(), f"{what} that nobody has computed are sent")
    require(not (added & ~home).any(), what, "stay away from home")
