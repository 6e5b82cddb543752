"""Assign ranks to the cells of a batch where ranks share nodes, so that little moves between nodes.

    a cell begins at the node that stores its queries
    nodes with too much work       node 0: 1.6 shares    node 1: 0.4 shares
    ranks of others take boxes     rank 8 takes queries {4 5} x keys {0 1 2} of node 0
      =>
    each node is a world of its own: what it took is fixed, and its ranks divide the rest

What a rank took of another node it computes alone, so queries and keys cross once for most of it.
Ranks take from another node up to a limit on what any rank receives, which rises only if some node
still has too much: the rank that receives most between nodes decides how long the exchange takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cp_inductor.plan.batch_assign import NOBODY, Prices, assign_ranks
from cp_inductor.plan.batch_cells import Cells
from cp_inductor.plan.batch_chunks import BLOCK, Chunks
from cp_inductor.plan.ir import Direction, Payload, Shape, bytes_per_row, flops_per_pair
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
MAX_SHARE_TAKEN = 0.8
# What a rank may receive from other nodes, in its keys and values: at first, and the factor by
# which it is raised.
FIRST_LIMIT, RAISED = 2.0, 1.25
# How much more a token costs a rank that has received as much as the limit, and the power of that.
LIMIT_PENALTY, LIMIT_POWER = 6.0, 3
# Work that is not worth moving, in shares.
NEGLIGIBLE_SHARE = 0.01
# Prices are whole numbers up to here, because sums of them must be exact.
MAX_PRICE_OF_NODES = 64


@dataclass(frozen=True, slots=True)
class Nodes:
    """How ranks share nodes, as far as plans of batches depend on it.

    Attributes:
        size: ranks of a node, numbered through the first node, then the second.
        price: what a byte between nodes costs, in bytes inside.
        wait: how long a token's keys and values take between nodes, in thousandths of the time of
            a block of pairs; 0 balances whatever that costs.
    """

    size: int
    price: int
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


def assign_over_nodes(
    cells: Cells, queries: Chunks, keys: Chunks, world_size: int, prices: Prices, nodes: Nodes
) -> np.ndarray:
    """Return the rank of each cell."""
    rank = np.full(len(cells.query), NOBODY)
    share = float(cells.weight.sum()) / world_size
    if not share:
        return rank
    of_cell = queries.rank[cells.query] // nodes.size
    least = np.inf
    for most in (MAX_IMBALANCE_OF_NODES, *MORE_IMBALANCE):
        tried = np.full_like(rank, NOBODY)
        imports = _Imports(cells, tried, of_cell, (queries, keys), world_size, prices, nodes)
        work = imports.run(share, most)
        waiting = float(imports.received.max()) * imports.unit * nodes.wait / 1000
        if work + waiting < least:
            rank, least = tried, work + waiting
        if waiting <= work:
            break
    of_cell = np.where(rank == NOBODY, of_cell, rank // nodes.size)
    for node in range(-(-world_size // nodes.size)):
        first = node * nodes.size
        size = min(nodes.size, world_size - first)
        mine = np.flatnonzero(of_cell == node)
        if not len(mine):
            continue
        query, local_queries = _view(queries, cells.query[mine], first, size, nodes.price)
        key, local_keys = _view(keys, cells.key[mine], first, size, nodes.price)
        taken = np.where(rank[mine] == NOBODY, NOBODY, rank[mine] - first)
        local = Cells(query, key, cells.weight[mine])
        sides = local_queries, local_keys
        of_node = float(local.weight.sum()) / size
        max_load = MAX_IMBALANCE * max(share, of_node / MAX_IMBALANCE_OF_NODES)
        rank[mine] = first + assign_ranks(
            local, *sides, size + 1, prices, taken=taken, num_growing=size, max_load=max_load
        )
    return rank


def _view(
    chunks: Chunks, needed: np.ndarray, first: int, size: int, price: int
) -> tuple[np.ndarray, Chunks]:
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
    return place[needed], replace(chunks, **parts)


class _Imports:
    """Ranks that take cells of nodes that have too many."""

    def __init__(
        self,
        cells: Cells,
        rank: np.ndarray,
        of_cell: np.ndarray,
        chunks: tuple[Chunks, Chunks],
        world_size: int,
        prices: Prices,
        nodes: Nodes,
    ) -> None:
        keys = chunks[1]
        self.cells, self.rank, self.of_cell, self.chunks = cells, rank, of_cell, chunks
        self.prices, self.world_size = prices, world_size
        self.unit = max(1.0, float(keys.length.sum()) / world_size)
        self.node = np.arange(world_size) // nodes.size
        self.price = nodes.price
        # What ranks receive from other nodes, in `unit`s of a token's keys and values. Keys of a
        # document that crosses a border go home at least once.
        self.received = np.zeros(world_size)
        crosses = np.unique(cells.key[self.node[keys.rank[cells.key]] != of_cell])
        home = prices.key_home * keys.length[crosses] / self.unit
        self.received += np.bincount(keys.rank[crosses], home, world_size)

    def run(self, share: float, kept: float) -> float:
        """Let ranks take cells until no node has too many, or no rank has room.

        Args:
            share: the mean work of a rank.
            kept: the work of a node over the mean, up to which it keeps what it stores.

        Returns:
            The work of a rank of the node that has most.
        """
        num_ranks = np.bincount(self.node)
        load = np.bincount(self.of_cell, self.cells.weight, len(num_ranks))
        spare = kept * share * num_ranks - load
        room, excess = np.maximum(spare, 0), np.maximum(-spare, 0)
        least = NEGLIGIBLE_SHARE * share
        of_rank = np.full(self.world_size, MAX_SHARE_TAKEN * share)
        sources = {int(n): _Source(self, int(n)) for n in np.flatnonzero(excess > least)}
        limit, source = FIRST_LIMIT, np.full(self.world_size, NOBODY)
        is_stuck = np.zeros(self.world_size, dtype=bool)
        while excess.max() > least:
            can_take = np.minimum(of_rank, room[self.node])
            if (
                can_take.max() <= least
                or (is_stuck & (can_take > least)).sum() == (can_take > least).sum()
            ):
                break
            can_take[(self.received >= limit) | is_stuck] = 0
            rank = int(can_take.argmax())
            if can_take[rank] <= least:
                limit *= RAISED
                continue
            # It takes line after line, so that its box grows, until it has enough.
            while self.received[rank] < limit and min(of_rank[rank], room[self.node[rank]]) > least:
                if source[rank] == NOBODY or excess[source[rank]] <= least:
                    source[rank] = int(excess.argmax())
                most = min(of_rank[rank], room[self.node[rank]], excess[source[rank]])
                if most <= least:
                    break
                got = sources[int(source[rank])].grow(rank, most, limit)
                is_stuck[rank] = not got
                if not got:
                    break
                excess[source[rank]] -= got
                room[self.node[rank]] -= got
                of_rank[rank] -= got
        for one in sources.values():
            self.rank[one.todo] = one.taken[one.at]
        of_node = np.where(self.rank == NOBODY, self.of_cell, self.node[self.rank])
        left = np.bincount(of_node, self.cells.weight, len(num_ranks))
        return float((left / num_ranks).max())


class _Source:
    """A node that has too much: rows of queries, columns of keys, and lines, which are both."""

    def __init__(self, imports: _Imports, node: int) -> None:
        cells, (queries, keys), prices = imports.cells, imports.chunks, imports.prices
        self.imports = imports
        self.todo = np.flatnonzero(imports.of_cell == node)
        rows, row = np.unique(cells.query[self.todo], return_inverse=True)
        columns, column = np.unique(cells.key[self.todo], return_inverse=True)
        self.at, self.num_rows = (row, column), len(rows)
        self.left = np.zeros((len(rows), len(columns)))
        self.left[self.at] = cells.weight[self.todo]
        self.taken = np.full(self.left.shape, NOBODY)
        self.owner = np.concatenate([queries.rank[rows], keys.rank[columns]])
        of_query, of_key = queries.length[rows], keys.length[columns]
        self.cost_in = np.concatenate([prices.query_in * of_query, prices.key_in * of_key])
        self.cost_home = np.concatenate([prices.query_home * of_query, prices.key_home * of_key])
        self.cost_in, self.cost_home = self.cost_in / imports.unit, self.cost_home / imports.unit
        self.has: dict[int, np.ndarray] = {}

    def grow(self, rank: int, room: float, limit: float) -> float:
        """Let a rank take the line that brings most for its cost; return how much it took."""
        imports, num_rows = self.imports, self.num_rows
        has = self.has.setdefault(rank, self.owner == rank)
        is_near = imports.node[self.owner] == imports.node[rank]
        dear = 1 + LIMIT_PENALTY * (imports.received / limit) ** LIMIT_POWER
        cost = self.cost_in * dear[rank] + self.cost_home * dear[self.owner]
        cost /= np.where(is_near, imports.price, 1)
        # Sums of whole numbers, which are exact in any order.
        brings = np.concatenate([self.left @ has[num_rows:], has[:num_rows] @ self.left])
        brings[has] = 0
        value = np.minimum(brings, room) / cost
        line = int(value.argmax())
        if value[line] <= 0:
            return self._seed(rank, room, cost)
        if line < num_rows:
            column = np.flatnonzero(has[num_rows:] & (self.left[line] > 0))
            row = np.full(len(column), line)
        else:
            row = np.flatnonzero(has[:num_rows] & (self.left[:, line - num_rows] > 0))
            column = np.full(len(row), line - num_rows)
        return self._take(rank, row, column, room)

    def _seed(self, rank: int, room: float, cost: np.ndarray) -> float:
        """Begin a box: with the queries that are worth most with all of their keys."""
        of_row, of_column = cost[: self.num_rows], cost[self.num_rows :]
        # Added in the order of columns, so that all ranks round alike.
        of_keys = np.cumsum(np.where(self.left > 0, of_column, 0), axis=1)[:, -1]
        row = int((np.minimum(self.left.sum(1), room) / (of_row + of_keys)).argmax())
        column = int((self.left[row] / of_column).argmax())
        if not self.left[row, column]:
            return 0.0
        return self._take(rank, np.array([row]), np.array([column]), room)

    def _take(self, rank: int, row: np.ndarray, column: np.ndarray, room: float) -> float:
        """Take cells in this order, as many as there is room for."""
        weight = self.left[row, column]
        fits = np.cumsum(weight) <= room
        row, column = row[fits], column[fits]
        if not len(row):
            return 0.0
        imports, has = self.imports, self.has[rank]
        for line in {int(row[0]), self.num_rows + int(column[0]), *row, *(self.num_rows + column)}:
            if has[line]:
                continue
            has[line] = True
            owner = self.owner[line]
            if imports.node[owner] != imports.node[rank]:
                imports.received[rank] += self.cost_in[line]
                imports.received[owner] += self.cost_home[line]
        self.left[row, column] = 0
        self.taken[row, column] = rank
        return float(weight[fits].sum())
