"""Assign ranks to the cells of a batch where ranks share nodes, so that little moves between nodes.

    a cell begins at the node that stores its queries
    nodes with too much work       node 0: 1.6 shares    node 1: 0.4 shares
    ranks of others take rows      rank 8 takes queries {4 5}, with all keys that these see
      =>
    each node is a world of its own: what it took is fixed, and its ranks divide the rest

What leaves a node costs most where its results come home, and the result of a row of queries is as
many bytes, however many keys it was computed with. So whole rows leave: first those that bring most
work for their bytes and those of the keys that their rank has not yet, which are the last rows of
the longest documents. No rank receives more from other nodes than a limit, for which the least is
sought under which no node has too much: the rank that receives most decides how long the exchange
takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_inductor.plan.batch_assign import assign_ranks
from cp_inductor.plan.batch_cells import BLOCK, Cells, Chunks
from cp_inductor.plan.batch_improve import NOBODY
from cp_inductor.plan.ir import Direction, Payload, Prices, Shape, bytes_per_row, flops_per_pair
from cp_inductor.plan.machine import Machine

# The numbers below follow from no theory; `benchmarks/nodes_documents.py` judges them.

# The work of a node over the mean, up to which it keeps what it stores; and what else is tried if
# receiving takes longer than computing.
MAX_IMBALANCE_OF_NODES = 1.04
MORE_IMBALANCE = (1.25, 1.6, 2.2, float("inf"))
# The work of a rank over the mean, up to which work is moved to it inside its node.
MAX_IMBALANCE = 1.055
# How much of a rank's share may be work of other nodes: the more, the larger and the cheaper its
# boxes, and the more of its own work its neighbors compute.
MAX_SHARE_TAKEN = 1.04
# What a rank may receive from other nodes, in its keys and values: at first, the factor by which it
# is raised until no node has too much, the most, and how often what lies between is halved then.
FIRST_LIMIT, RAISED, MAX_LIMIT, NUM_BISECTIONS = 1.4, 1.4, 12.0, 3
# How much more a token costs a rank that has received as much as the limit, and the power of that.
LIMIT_PENALTY, LIMIT_POWER = 2.0, 3
# Costs are counted in these parts of a rank's keys and values, because sums of them must be exact.
PRECISION = 1 << 16
# Work that is not worth moving, in shares.
NEGLIGIBLE_SHARE = 0.01
# Prices are whole numbers up to here, because sums of them must be exact.
MAX_PRICE_OF_NODES = 64


@dataclass(frozen=True, slots=True)
class Nodes:
    """How ranks share nodes, as far as plans of batches depend on it."""

    size: int  # ranks of a node, numbered through the first node, then the second
    price: int  # what a byte between nodes costs, in bytes inside
    # How long a token's keys and values take between nodes, in thousandths of the time of a block
    # of pairs; 0 balances whatever that costs.
    wait: int = 0

    @staticmethod
    def of(machine: Machine, world_size: int, shape: Shape) -> Nodes | None:
        """Return the nodes of a machine, for an attention; None if its ranks are all alike."""
        if machine.num_nodes(world_size) == 1:
            return None
        inside, between = machine.levels
        price = min(MAX_PRICE_OF_NODES, round(inside.bytes_per_s / between.bytes_per_s))
        if price <= 1 or inside.ranks <= 1:
            return None
        device = machine.device
        share = min(1.0, device.at_once / inside.ranks) if device.at_once else 1.0
        flops = sum(flops_per_pair(direction, shape) for direction in Direction)
        block_s = BLOCK**2 * shape.num_heads * flops / (share * device.flops_per_s)
        token = shape.num_kv_heads * bytes_per_row(Payload.KEY_VALUE, shape)
        return Nodes(inside.ranks, price, round(1000 * token / between.bytes_per_s / block_s))

    def format(self) -> str:
        """Return it as text that `parse` reads."""
        return f"{self.size}:{self.price}:{self.wait}"

    @staticmethod
    def parse(text: str) -> Nodes:
        """Return what `format` wrote."""
        return Nodes(*map(int, text.split(":")))


def assign_over_nodes(cells: Cells, world_size: int, prices: Prices, nodes: Nodes) -> np.ndarray:
    """Return the rank of each cell."""
    imports = _Imports(cells, world_size, prices, nodes)
    least = np.inf
    for most in (MAX_IMBALANCE_OF_NODES, *MORE_IMBALANCE):
        taken = imports.search(most * imports.share)
        work = float((taken.load / imports.num_ranks).max())
        waiting = float(taken.received.max()) * imports.unit * nodes.wait / 1000
        if work + waiting < least:
            best, least = taken, work + waiting
        if waiting <= work:
            break
    rank = imports.with_crossing(best)
    of_cell = np.where(rank == NOBODY, imports.of_cell, rank // nodes.size)
    for node in range(-(-world_size // nodes.size)):
        first = node * nodes.size
        size = min(nodes.size, world_size - first)
        mine = np.flatnonzero(of_cell == node)
        (queries, query), (keys, key) = (
            _view(chunks, chunk[mine], first, size, nodes.price) for chunks, chunk in cells.sides
        )
        local = Cells(queries, keys, query, key, cells.weight[mine])
        taken_here = np.where(rank[mine] == NOBODY, NOBODY, rank[mine] - first)
        of_node = float(local.weight.sum()) / size
        max_load = MAX_IMBALANCE * max(imports.share, of_node / MAX_IMBALANCE_OF_NODES)
        rank[mine] = first + assign_ranks(
            local, size + 1, prices, taken=taken_here, num_growing=size, max_load=max_load
        )
    return rank


def _view(
    chunks: Chunks, needed: np.ndarray, first: int, size: int, price: int
) -> tuple[Chunks, np.ndarray]:
    """Return chunks as a node sees them, and where those that it needs are among them.

    All that other nodes store is stored by one more rank, and is longer by its price.
    """
    is_inside = (chunks.rank >= first) & (chunks.rank < first + size)
    is_seen = is_inside.copy()
    is_seen[needed] = True
    seen = np.concatenate([np.flatnonzero(is_inside), np.flatnonzero(is_seen & ~is_inside)])
    place = np.zeros(len(chunks), np.int64)
    place[seen] = np.arange(len(seen))
    arrays = ("entry", "group", "first", "length", "row")
    parts = {name: getattr(chunks, name)[seen] for name in arrays}
    parts["length"] = np.where(is_inside[seen], 1, price) * parts["length"]
    parts["rank"] = np.where(is_inside[seen], chunks.rank[seen] - first, size)
    return replace(chunks, **parts), place[needed]


class _Imports:
    """What ranks may take of nodes that have too much."""

    def __init__(self, cells: Cells, world_size: int, prices: Prices, nodes: Nodes) -> None:
        queries, keys = cells.queries, cells.keys
        self.cells, self.prices, self.price = cells, prices, nodes.price
        self.world_size, self.unit = world_size, max(1.0, float(keys.length.sum()) / world_size)
        self.node = np.arange(world_size) // nodes.size
        self.of_cell = self.node[queries.rank[cells.query]]
        self.num_ranks = np.bincount(self.node)
        self.load = np.bincount(self.of_cell, cells.weight, len(self.num_ranks))
        self.share = float(cells.weight.sum()) / world_size
        self.least = NEGLIGIBLE_SHARE * self.share
        # What a rank receives that fetches a chunk, and what the chunk's owner receives then.
        (self.row_in, self.row_home), (self.cost_in, self.cost_home) = (
            [way * (chunks.length / self.unit) for way in price]
            for (chunks, _), price in zip(cells.sides, prices, strict=True)
        )
        # Keys of documents that cross a border: each has one reader in a node; they take turns.
        is_away = self.node[keys.rank[cells.key]] != self.of_cell
        reader, crosses = np.divmod(
            np.unique(self.of_cell[is_away] * len(keys) + cells.key[is_away]), len(keys)
        )
        enters = np.bincount(reader, self.cost_in[crosses], len(self.num_ranks))
        self.enters = (enters / self.num_ranks)[self.node]
        self.crossing = self.enters + np.bincount(
            keys.rank[crosses], self.cost_home[crosses], world_size
        )
        excess = self.load - MAX_IMBALANCE_OF_NODES * self.share * self.num_ranks
        self.sources = {n: _Source(self, n) for n in np.flatnonzero(excess > self.least).tolist()}

    def with_crossing(self, taken: _Taken) -> np.ndarray:
        """Return the rank of each cell that was taken, or has keys of another node.

        Keys of one owner and one group of heads enter a node at one rank, the one that receives
        least of those that have room.
        """
        cells, keys, rank = self.cells, self.cells.keys, taken.taken[self.cells.query]
        received = taken.received - self.enters
        room = self.share - np.bincount(rank[rank >= 0], cells.weight[rank >= 0], self.world_size)
        crosses = np.flatnonzero(
            (rank == NOBODY) & (self.node[keys.rank[cells.key]] != self.of_cell)
        )
        key = cells.key[crosses]
        lane = (self.of_cell[crosses] * self.world_size + keys.rank[key]) * keys.num_groups
        lanes, of_lane = np.unique(lane + keys.group[key], return_inverse=True)
        weight = np.bincount(of_lane, cells.weight[crosses], len(lanes))
        is_first = np.unique(of_lane * len(keys) + key)
        tokens = np.bincount(is_first // len(keys), keys.length[is_first % len(keys)], len(lanes))
        reader = np.full(len(lanes), NOBODY)
        for at in np.argsort(-tokens, kind="stable"):
            node = lanes[at] // (self.world_size * keys.num_groups)
            ranks = np.flatnonzero((self.node == node) & (room >= weight[at]))
            if len(ranks):
                reader[at] = ranks[received[ranks].argmin()]
                received[reader[at]] += self.prices.keys.fetch * tokens[at] / self.unit
                room[reader[at]] -= weight[at]
        rank[crosses] = reader[of_lane]
        return rank

    def search(self, kept: float) -> _Taken:
        """Return who takes what, so that the rank that receives most receives little.

        A node keeps what it stores up to so much work of each of its ranks.
        """
        low, limit = FIRST_LIMIT / 2, FIRST_LIMIT
        best = _Taken(self, kept, limit)
        while not best.run() and limit < np.inf:
            low, limit = limit, RAISED * limit if limit < MAX_LIMIT else np.inf
            best = _Taken(self, kept, limit)
        for _ in range(NUM_BISECTIONS if limit < np.inf and best.has else 0):
            middle = (low + limit) / 2
            tried = _Taken(self, kept, middle)
            if tried.run():
                best, limit = tried, middle
            else:
                low = middle
        return best


class _Source:
    """A node that has too much: its cells as rows of queries and columns of keys."""

    def __init__(self, imports: _Imports, node: int) -> None:
        todo = np.flatnonzero(imports.of_cell == node)
        # The first cell of each row, and where the next row begins; the column of each cell.
        self.rows, first = np.unique(imports.cells.query[todo], return_index=True)
        self.first, self.end = first, np.append(first[1:], len(todo))
        self.columns, self.column = np.unique(imports.cells.key[todo], return_inverse=True)
        self.row_owner = imports.cells.queries.rank[self.rows]
        self.owner = imports.cells.keys.rank[self.columns]
        self.row_in, self.row_home = imports.row_in[self.rows], imports.row_home[self.rows]
        self.cost_in = imports.cost_in[self.columns]
        self.cost_home = imports.cost_home[self.columns]


class _Taken:
    """Ranks that take cells of nodes that have too many, of which none receives more than a limit.

    Attributes:
        load: the work of each node.
        received: what ranks receive from other nodes, in tokens' keys and values, over those that
            a rank stores.
    """

    def __init__(self, imports: _Imports, kept: float, limit: float) -> None:
        self.imports, self.limit = imports, limit
        spare = kept * imports.num_ranks - imports.load
        self.load = imports.load.copy()
        self.room, self.excess = np.maximum(spare, 0), np.maximum(-spare, 0)
        self.of_rank = np.full(imports.world_size, MAX_SHARE_TAKEN * imports.share)
        self.received = imports.crossing.copy()
        # What is left of each query, and who has taken it.
        queries, cells = imports.cells.queries, imports.cells
        self.left = np.bincount(cells.query, cells.weight, len(queries))
        self.taken = np.full(len(queries), NOBODY)
        # Which of a source's keys a rank has.
        ranks = np.arange(imports.world_size)[:, None]
        self.has = {node: source.owner == ranks for node, source in imports.sources.items()}

    def run(self) -> bool:
        """Let ranks take cells; return whether no node has too many then."""
        least, room, excess = self.imports.least, self.room, self.excess
        is_stuck = np.zeros((self.imports.world_size, len(room)), dtype=bool)
        while excess.max() > least:
            can_take = np.minimum(self.of_rank, room[self.imports.node])
            can_take[is_stuck[:, excess > least].all(1)] = 0
            # Of those that can take most, the one that receives least.
            rank = int(np.lexsort((self.received, -can_take))[0])
            if can_take[rank] <= least:
                return False
            # It takes row after row, so that its box grows, until it has enough.
            node, source = self.imports.node[rank], int(excess.argmax())
            while (most := float(min(self.of_rank[rank], room[node]))) > least:
                on_offer = np.where(is_stuck[rank], 0, excess)
                if on_offer[source] <= least:
                    source = int(on_offer.argmax())
                if on_offer[source] <= least:
                    break
                got = self._grow(source, rank, most)
                is_stuck[rank, source] = not got
                excess[source] -= got
                self.load[source] -= got
                self.load[node] += got
                room[node] -= got
                self.of_rank[rank] -= got
        return True

    def _grow(self, node: int, rank: int, room: float) -> float:
        """Let a rank take the row that brings most for its cost; return how much that is.

        It takes the whole row, because the results of a part of it are as many bytes.
        """
        imports, limit, received = self.imports, self.limit, self.received
        source, has = imports.sources[node], self.has[node][rank]
        dear = 1 + LIMIT_PENALTY * (received / limit) ** LIMIT_POWER
        # Keys that a rank of the same node stores do not come from other nodes, and are cheaper.
        is_near = imports.node[source.owner] == imports.node[rank]
        cost = source.cost_in * dear[rank] + source.cost_home * dear[source.owner]
        cost = np.rint(PRECISION * cost / np.where(is_near, imports.price, 1)) + 1
        brings = np.where(is_near, 0, np.rint(PRECISION * source.cost_in))
        is_stuck = ~is_near & (received[source.owner] + source.cost_home > limit)
        # Of the keys that the rank has not: what they cost, what they bring from other nodes, and
        # how many may not go home. Sums of whole numbers, which are exact in any order.
        costs, comes, stuck = (
            np.add.reduceat((~has * of).take(source.column), source.first)
            for of in (cost, brings, 1.0 * is_stuck)
        )
        row_cost = source.row_in * dear[rank] + source.row_home * dear[source.row_owner]
        left = self.left[source.rows]
        fits = (left > 0) & (left <= room) & (stuck == 0)
        fits &= received[source.row_owner] + source.row_home <= limit
        comes += np.rint(PRECISION * source.row_in)
        fits &= comes <= PRECISION * (limit - received[rank])
        value = np.where(fits, left / (np.rint(PRECISION * row_cost) + 1 + costs), 0)
        row = int(value.argmax())
        if value[row] <= 0:
            return 0.0
        columns = source.column[source.first[row] : source.end[row]]
        new = columns[~has[columns]]
        has[new] = True
        new = new[~is_near[new]]
        received[rank] += source.row_in[row]
        received[source.row_owner[row]] += source.row_home[row]
        received[rank] += source.cost_in[new].sum()
        np.add.at(received, source.owner[new], source.cost_home[new])
        self.left[source.rows[row]], self.taken[source.rows[row]] = 0, rank
        return float(left[row])
