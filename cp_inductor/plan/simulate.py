"""Execute all ranks of a plan abstractly: check it, and estimate its time.

A plan is wrong if a (query, key, head) that is needed is not computed exactly once; if a tile runs
before its data arrives; if a rank sends data that it does not have; or if results are not sent home
exactly once.

A plan that passes cannot deadlock: exchanges are collectives, in the order of the stages on all
ranks, and the data to send is there before an exchange starts.
"""

from __future__ import annotations

import numpy as np

from cp_inductor.mask.rule import Cell
from cp_inductor.plan.assign_cells import causal_cells, cells_of
from cp_inductor.plan.grid import lengths_of, spread
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
    _check_coverage(plan)
    _check_exchanges(plan)
    for of_keys in (False, True):
        places = _Places(plan, of_keys=of_keys)
        _check_data(plan, places)
        if plan.direction is Direction.BACKWARD or not of_keys:
            _check_homes(plan, places)
    machine = machine or Machine()
    return loads_of(plan, machine).timeline(machine)


def require(condition: bool, *what: object) -> None:
    """Raise `InvalidPlan`, which says what is wrong, unless a condition holds."""
    if not condition:
        raise InvalidPlan(" ".join(map(str, what)))


def _check_coverage(plan: PlanData) -> None:
    """Check that each needed pair of chunks is computed once for every head, and no other."""
    grid, whole = plan.grid, plan.shape.all_heads
    cells = cells_of(grid, plan.mask, plan.rule)
    queries, keys = (lengths_of(grid, of_keys=of_keys) for of_keys in (False, True))
    has_tokens = (queries[:, None] > 0) & (keys[None] > 0)
    needed = (cells != Cell.EMPTY) & has_tokens
    runs, seen = plan.tiles_of_heads, set()
    is_whole = not runs or (runs[0][0].start, runs[-1][0].stop) == (whole.start, whole.stop)
    require(is_whole, "heads are missing")
    for heads, tiles in runs:
        # Groups of ranks that split the heads compute the same tiles, each for heads of its own.
        same = tuple(sorted((tile.queries, tile.keys, tile.mask.value) for tile in tiles))
        if same in seen:
            continue
        seen.add(same)
        computed = np.zeros(cells.shape, dtype=np.int16)
        for tile in tiles:
            _add_pairs(computed, tile, cells, plan.mask)
        wrong = np.argwhere(computed * has_tokens != needed)
        require(
            not len(wrong),
            f"{len(wrong)} pairs of chunks are not computed once, heads {heads}: {wrong[:3]}",
        )


def _add_pairs(computed: np.ndarray, tile: Tile, cells: np.ndarray, mask: Mask) -> None:
    """Count the cells of a tile, and check its mask against them."""
    area = np.ix_(
        *(
            [chunk for span in spans for chunk in range(span.start, span.stop)]
            for spans in (tile.queries, tile.keys)
        )
    )
    part = cells[area]
    if tile.mask is Mask.CAUSAL:
        require(tile.queries == tile.keys, tile, "is causal and not square")
        require(tile.queries == tuple(sorted(tile.queries)), tile, "is not in order of position")
        require(np.array_equal(part, causal_cells(len(part))), tile, "is not causal under the mask")
    elif tile.mask is Mask.FULL:
        require(bool((part == Cell.FULL).all()), tile, "sees pairs that do not exist")
    else:
        require(mask is Mask.PARTIAL, tile, "is under a mask that the plan has not")
    computed[area] += part != Cell.EMPTY


def _check_exchanges(plan: PlanData) -> None:
    """Check that transfers join two ranks, once, in a message order that both ends know.

    Results go to the owners of their chunks, if they go no other way.
    """
    size = plan.grid.chunks_per_rank
    for index, stage in enumerate(plan.stages):
        for kind, moved in (("fetch", stage.fetch), ("home", stage.home)):
            where, columns = f"{kind} of stage {index}:", moved.columns
            owner, last_owner = columns[:, START] // size, (columns[:, STOP] - 1) // size
            for wrong, what in (
                (columns[:, SOURCE] == columns[:, DESTINATION], "goes nowhere"),
                (owner != last_owner, "has several owners"),
                (
                    (owner != columns[:, DESTINATION]) & (kind == "home" and not plan.returns),
                    "is a result that does not go home",
                ),
            ):
                require(not wrong.any(), where, *Transfers(columns[wrong][:1]), what)
            is_new = (np.diff(columns[:, :LAST_HEAD], axis=0) != 0).any(1)
            require(moved == moved.sorted() and bool(is_new.all()), where, "is out of order")


class _Places:
    """Places in which ranks hold queries, or keys: (rank, part of the heads, chunk), as integers.

    No tile or transfer has a part of the heads but in whole. Chunks without tokens have no places.
    """

    def __init__(self, plan: PlanData, *, of_keys: bool) -> None:
        self.of_keys, world_size = of_keys, plan.grid.world_size
        self.has_tokens = lengths_of(plan.grid, of_keys=of_keys) > 0
        num_heads = plan.shape.num_kv_heads if of_keys else plan.shape.num_heads
        moved = [plan.kept_fetches, *(m for s in plan.stages for m in (s.fetch, s.home))]
        tiles = TileColumns.of(stage.tiles for stage in plan.stages)
        (of_tile, start, stop), heads = tiles.reads(plan.shape, of_keys=of_keys)
        read = np.stack([tiles.rank[of_tile], start, stop, *(of[of_tile] for of in heads)], axis=1)
        boxes = [read, *(self._boxes(transfers, SOURCE) for transfers in moved)]
        self.edges = np.unique([0, num_heads, *np.concatenate(boxes)[:, 3:].ravel()])
        self.shape = world_size, len(self.edges) - 1, plan.grid.num_chunks
        # What the tiles of each stage read; what ranks store.
        stages = range(len(plan.stages))
        self.read = [self._in(read[tiles.stage[of_tile] == stage]) for stage in stages]
        own = [(rank, plan.grid.own(rank)) for rank in range(world_size)]
        self.own = self._in(np.array([(r, s.start, s.stop, 0, num_heads) for r, s in own]))

    def of_transfers(self, transfers: Transfers, end: int) -> np.ndarray:
        """Return the places that transfers of this kind leave, or reach."""
        return self._in(self._boxes(transfers, end))

    def require(self, needed: np.ndarray, held: np.ndarray, *what: object) -> None:
        """Require that what is needed is held. What is not is named."""
        lacking = np.setdiff1d(needed, held)[:3]
        require(not len(lacking), *what, np.transpose(np.unravel_index(lacking, self.shape)))

    def _boxes(self, transfers: Transfers, end: int) -> np.ndarray:
        """Return (n, 5), of each transfer a rank, the first and last chunk, and those of heads."""
        columns = transfers.columns[IS_OF_KEYS[transfers.columns[:, PAYLOAD]] == self.of_keys]
        return columns[:, [end, START, STOP, FIRST_HEAD, LAST_HEAD]]

    def _in(self, boxes: np.ndarray) -> np.ndarray:
        """Return the places in each box."""
        rank, start, stop, *heads = boxes.T
        first, last = np.searchsorted(self.edges, heads)
        box, part = spread(last - first)
        part, (row, chunk) = part + first[box], spread((stop - start)[box])
        box, part = box[row], part[row]
        chunk += start[box]
        places = np.ravel_multi_index((rank[box], part, chunk), self.shape)
        return places[self.has_tokens[chunk]]


def _are_different(*places: np.ndarray) -> bool:
    together = np.concatenate(places)
    return len(np.unique(together)) == len(together)


def _check_data(plan: PlanData, places: _Places) -> None:
    """Run the exchanges: check that what is sent, and what a tile reads, is there."""
    held = places.own
    if plan.direction is Direction.BACKWARD and places.of_keys:
        held = np.concatenate([held, places.of_transfers(plan.kept_fetches, DESTINATION)])
        require(_are_different(held), "what was kept is there already")
    for index, stage in enumerate(plan.stages):
        # The fetch of a stage starts before the tiles of the one before: what it sends must have
        # been there then, so that nothing that arrives with this exchange is sent by it.
        sent = places.of_transfers(stage.fetch, SOURCE)
        places.require(sent, held, f"stage {index}: a rank sends what is not there:")
        held = np.concatenate([held, places.of_transfers(stage.fetch, DESTINATION)])
        require(_are_different(held), f"stage {index}: a fetch brings what is there already")
        what = "keys" if places.of_keys else "queries"
        places.require(places.read[index], held, f"stage {index}: a tile misses {what}:")


def _check_homes(plan: PlanData, places: _Places) -> None:
    """Check that results of foreign chunks are sent home once, not before the last tile of each.

    Every rank that has such results must send them. So must a rank that results of foreign chunks
    were sent to, after they have arrived: it sends them once, whereupon nothing more may arrive. So
    they cannot go round in circles, and what is sent reaches the owner.
    """
    what = "results of keys" if places.of_keys else "results of queries"
    # From behind the last stage on: what is added to or arrives later, and what was sent later. A
    # tile adds to what leaves with its stage or later; what arrives with a stage leaves after it.
    added, home = places.own, places.own
    for index, stage in reversed([*enumerate(plan.stages)]):
        leaving = places.of_transfers(stage.home, SOURCE)
        added = np.union1d(added, places.of_transfers(stage.home, DESTINATION))
        is_right = _are_different(leaving, np.union1d(added, home))
        require(is_right, f"stage {index}: {what} are early or twice")
        home = np.union1d(home, leaving)
        added = np.union1d(added, places.read[index])
    places.require(home, added, f"{what} that nobody has computed are sent:")
    places.require(added, home, f"{what} stay away from home:")
