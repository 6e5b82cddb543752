"""The plan of one batch: who computes which chunks with which, decided when the program runs.

    document numbers of the batch     0 0 0 0 1 1 2 2 2 2 2 2
    cells (query chunk, key chunk)    (0, 0) (1, 0) (1, 1) (2, 2) ...     those that may hold pairs
      =>
    rank and stage of each cell: ranks compute nearly the same number of blocks, and little moves

Heads are cut into groups where the rule is the same for all of them: a cell is of one group. Ranks
that compute the same pairs for other heads each fetch a part of the heads, where ranks that compute
other pairs for all heads would fetch the whole of the same keys.

Every rank derives the same plan from the same rule and tables. Nothing here is random, and nothing
depends on the order of a set. A plan is arrays, because compiled code reads it as data. A chunk
that a rank needs and does not store arrives once, in the first stage whose cells need it. What the
rank computes of a foreign chunk goes home to its owner after each stage that computes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch_assign import assign_ranks
from cp_inductor.plan.batch_cells import BLOCK, Cells, Chunks, chunks_of, find_cells
from cp_inductor.plan.batch_nodes import Nodes, assign_over_nodes
from cp_inductor.plan.ir import (
    DESTINATION,
    PAYLOAD,
    SOURCE,
    START,
    Mask,
    Payload,
    Prices,
    Shape,
    Transfers,
)
from cp_inductor.plan.picture import Area, Panel, draw_panels
from cp_inductor.plan.transfers import begins, by_stage

__all__ = ["BLOCK", "BatchPlan", "Chunks", "chunks_of", "groups_of_heads", "plan_batch"]

# A plan has at most so many chunks of queries of all ranks, because planning takes time with them
# (about 18 ms at 8 ranks, `benchmarks/documents.py`), but a rank has at least so many to be
# balanced with, and twice as many over nodes, where heads are cut into more groups; more than 64 do
# not balance it better.
MAX_CHUNKS = 2048
MIN_CHUNKS_PER_RANK = 16
MAX_CHUNKS_PER_RANK = 64
# Heads are cut into at most so many groups: more save little, and make the numbers longer.
MAX_GROUPS = 4
# Over nodes, more groups save much: a rank of another node that takes a long document for one group
# sends home the gradients of fewer keys, and no other rank has to take the same.
MAX_GROUPS_OVER_NODES = 8
# The least share of own work that is counted with: a rank without any fetches something for stage 1
# all the same.
MIN_OWN_SHARE = 0.1
# How often the interval is halved in which the growth of stages is looked for: from 10 to 1.5e-4.
NUM_BISECTIONS = 16
# Divides in place of a total of nothing.
TINY = 1e-9


@dataclass(frozen=True, eq=False)
class BatchPlan(Cells):
    """Who computes which cell, and when.

    Attributes:
        world_size: number of ranks.
        stages: the last stage; stage 0 is of cells whose chunks their rank stores.
        rank: who computes each cell.
        stage: when; what it needs of others is fetched for this stage or an earlier one.
    """

    world_size: int
    stages: int
    rank: np.ndarray
    stage: np.ndarray

    @cached_property
    def fetches(self) -> list[Transfers]:
        """What each stage fetches: chunks of others that ranks compute with from it on.

        A span is one chunk, of the queries or of the keys, and its heads are its group.
        """
        first = [uses[begins(uses, [DESTINATION, START])] for uses in self._uses]
        return by_stage(first, self.stages + 1)

    @cached_property
    def homes(self) -> list[Transfers]:
        """What each stage sends home: gradients, and in the forward partials in place of dq."""
        homes = [uses.copy() for uses in self._uses]
        for home, payload in zip(homes, (Payload.QUERY_GRAD, Payload.KEY_VALUE_GRAD), strict=True):
            home[:, [SOURCE, DESTINATION]] = home[:, [DESTINATION, SOURCE]]
            home[:, PAYLOAD] = payload.order
        return by_stage(homes, self.stages + 1)

    @cached_property
    def _uses(self) -> list[np.ndarray]:
        """The queries, and the keys, that ranks compute with and do not store, once in each stage.

        (n, 8) each, as in `cp_inductor.plan.transfers`; sorted by rank, chunk and stage.
        """
        uses = []
        for (chunks, chunk), payload in zip(
            self.sides, (Payload.QUERY, Payload.KEY_VALUE), strict=True
        ):
            is_away = chunks.rank[chunk] != self.rank
            numbers = (self.rank * len(chunks) + chunk) * (self.stages + 1) + self.stage
            numbers, stage = np.divmod(np.unique(numbers[is_away]), self.stages + 1)
            rank, which = np.divmod(numbers, max(1, len(chunks)))
            group, kind = chunks.group[which], np.full_like(which, payload.order)
            columns = chunks.rank[which], rank, which, which + 1, kind, group, group + 1, stage
            uses.append(np.stack(columns, axis=1))
        return uses

    @cached_property
    def loads(self) -> np.ndarray:
        """The weight that each rank computes."""
        return np.bincount(self.rank, self.weight, self.world_size)

    def draw(self, path: str | Path, *, entry: int = 0) -> None:
        """Write a picture of who computes which cells of one entry of the batch.

        Rows are queries, columns are keys, each color is a rank, and cells of which less than half
        holds pairs are pale.

        Args:
            path: ends in .png or .svg.
            entry: of the batch.

        Raises:
            InvalidArgument: the path ends otherwise, or matplotlib is not installed
                (``pip install 'cp-inductor[draw]'``).
        """
        spans, ends = [], []
        for chunks in (self.queries, self.keys):
            stop = chunks.first + chunks.length
            spans.append(np.stack([chunks.first, stop], axis=1).tolist())
            end = np.zeros(self.world_size, np.int64)
            np.maximum.at(end, chunks.rank, stop)
            ends.append(np.maximum.accumulate(end).tolist())
        is_pale = 2 * self.weight < (self.queries.size // BLOCK) * (self.keys.size // BLOCK)
        panels = []
        for group in range(self.num_groups):
            is_drawn = (self.queries.entry == entry) & (self.queries.group == group)
            areas = [
                Area(
                    int(self.rank[cell]),
                    spans[0][self.query[cell]],
                    spans[1][self.key[cell]],
                    Mask.PARTIAL if is_pale[cell] else Mask.FULL,
                )
                for cell in np.flatnonzero(is_drawn[self.query])
            ]
            name = "all heads" if self.num_groups == 1 else f"group {group} of heads"
            panels.append(Panel(name, areas))
        title = f"planned for entry {entry} of this batch"
        draw_panels(path, panels, ends, self.loads.tolist(), "blocks", title)

    @property
    def num_groups(self) -> int:
        """The groups that heads are cut into."""
        return self.queries.num_groups

    @property
    def num_blocks(self) -> float:
        """Blocks of 128 x 128 pairs that all ranks compute; a group's count as its share of 1."""
        return float(self.weight.sum()) / self.num_groups

    @property
    def balance(self) -> float:
        """The busiest rank's weight over the mean; 1.0 if nothing is to be computed."""
        total = float(self.loads.sum())
        return float(self.loads.max()) * self.world_size / total if total else 1.0

    def bytes_received(
        self, rank: int, *, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
    ) -> int:
        """Return the bytes that a rank receives, forward and backward, if nothing is kept."""
        prices = Prices.of(Shape(1, num_heads, num_kv_heads, head_dim, itemsize))
        received = 0
        for (chunks, _), uses, price in zip(self.sides, self._uses, prices, strict=True):
            length, is_first = chunks.length[uses[:, START]], begins(uses, [DESTINATION, START])
            received += int(price.fetch) * int(
                length[is_first & (uses[:, DESTINATION] == rank)].sum()
            )
            received += int(price.home) * int(length[uses[:, SOURCE] == rank].sum())
        return received // self.num_groups


def groups_of_heads(
    rule: Rule, num_heads: int, num_kv_heads: int, world_size: int, nodes: Nodes | None = None
) -> int:
    """Return how many groups the heads of an attention are cut into; 1 if its rule knows heads."""
    if world_size == 1 or num_heads % num_kv_heads or rule.knows_heads:
        return 1
    most = MAX_GROUPS if nodes is None else MAX_GROUPS_OVER_NODES
    return max(n for n in range(1, most + 1) if num_kv_heads % n == 0)


def plan_batch(
    rule: Rule,
    tables: Mapping[int, np.ndarray],
    *,
    batch: int,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    stages: int,
    size: int = 0,
    nodes: Nodes | None = None,
) -> BatchPlan:
    """Plan a batch.

    Args:
        rule: which pairs exist.
        tables: the whole of each table that the rule reads, with as many dims as it reads it at;
            integers, bools or floats.
        batch: number of batch entries.
        query_lengths, key_lengths: the tokens of each rank, of one entry.
        num_heads, num_kv_heads: of the attention.
        stages: exchanges to spread over what is fetched, at least 1.
        size: tokens of a chunk, a multiple of 128; 0 chooses.
        nodes: which ranks share a node; None if all are alike.
    """
    world_size = len(query_lengths)
    assert len(key_lengths) == world_size and stages >= 1
    num_groups = groups_of_heads(rule, num_heads, num_kv_heads, world_size, nodes)
    tokens = batch * num_groups * max(*query_lengths, *key_lengths)
    size = size or _size_of(tokens, world_size, 1 if nodes is None else 2)
    chunks = (chunks_of(batch, of, size, num_groups) for of in (query_lengths, key_lengths))
    cells = find_cells(rule, tables, *chunks, batch=batch, num_heads=num_heads)
    prices = Prices.in_elements(num_heads, num_kv_heads)
    if nodes is None or nodes.size >= world_size:
        rank = assign_ranks(cells, world_size, prices)
    else:
        rank = assign_over_nodes(cells, world_size, prices, nodes)
    stage = assign_stages(cells, rank, world_size, stages, prices)
    return BatchPlan(**vars(cells), world_size=world_size, stages=stages, rank=rank, stage=stage)


def _size_of(tokens: int, world_size: int, factor: int) -> int:
    """Return the tokens of a chunk, for the tokens of a rank; a factor of 2 makes twice as many."""
    least = max(MAX_CHUNKS // world_size, MIN_CHUNKS_PER_RANK)
    num = min(factor * least, MAX_CHUNKS_PER_RANK)
    size = BLOCK
    while size * num < tokens:
        size *= 2
    return size


def assign_stages(
    cells: Cells, rank: np.ndarray, world_size: int, stages: int, prices: Prices
) -> np.ndarray:
    """Return the stage of each cell, given its rank; what is fetched comes in so many stages.

    What is fetched for the next stage hides behind this one. Stage 0 is of cells of a rank's own
    chunks. A chunk is fetched for the first stage that needs it. A rank turns to the owners before
    it first, the nearest ahead of the others, so that ranks do not all ask the same owner at once.
    """
    # Owners in the order in which a rank turns to them: those before it, from the nearest on.
    away = [(rank - chunks.rank[chunk]) % world_size for chunks, chunk in cells.sides]
    nearest = np.maximum(*away)
    stage = np.zeros(len(rank), dtype=np.int64)
    far = np.flatnonzero(nearest)
    # Cells that wait for the same owner stay in the order that they are in.
    far = far[np.argsort((rank * world_size + nearest)[far], kind="stable")]
    at, weight = rank[far], cells.weight[far]
    # What each cell brings that was not there: the first of its rank that needs a chunk brings it.
    cost = np.zeros(len(far))
    for (chunks, chunk), from_owner, price in zip(cells.sides, away, prices, strict=True):
        _, first = np.unique(at * len(chunks) + chunk[far], return_index=True)
        first = first[from_owner[far[first]] > 0]
        cost[first] += chunks.length[chunk[far[first]]] * price.fetch
    # Along the cells, bytes and work grow about alike; a stage is a part of both.
    part = (_share(at, cost, world_size) + _share(at, weight, world_size)) / 2
    total = np.bincount(rank, cells.weight, world_size)
    own = 1 - np.bincount(at, weight, world_size) / np.maximum(total, 1.0)
    ends = _ends_of_stages(own, stages)
    stage[far] = 1 + (part[:, None] > ends[at, :-1]).sum(1)
    return stage


def _ends_of_stages(own: np.ndarray, stages: int) -> np.ndarray:
    """Return where the stages 1, 2, ... of each rank end, as shares of what is not its own.

    The fetch of a stage hides behind the work of the one before: its share f(s) is proportional to
    that work, which is the rank's own work for stage 1, and (1 - own) f(s - 1) for the others. The
    share of its own work in all of a rank's is `own`, (ranks,).
    """
    own = np.clip(own, MIN_OWN_SHARE, 1.0)[:, None]
    low, high = np.zeros_like(own), np.full_like(own, 1 / MIN_OWN_SHARE)
    for _ in range(NUM_BISECTIONS):
        ratio = (low + high) / 2
        ends = _ends(own, ratio, stages)
        is_more = ends[:, -1:] > 1
        low, high = np.where(is_more, low, ratio), np.where(is_more, ratio, high)
    return _ends(own, high, stages)


def _ends(own: np.ndarray, ratio: np.ndarray, stages: int) -> np.ndarray:
    growth = np.repeat(ratio * (1 - own), stages, axis=1)
    growth[:, :1] = ratio * own
    return np.cumsum(np.cumprod(growth, axis=1), axis=1)


def _share(rank: np.ndarray, amount: np.ndarray, world_size: int) -> np.ndarray:
    """Return which share of its rank's amounts lies before the middle of each cell."""
    total = np.bincount(rank, amount, world_size)
    before = np.cumsum(total) - total
    middle = np.cumsum(amount) - amount / 2 - before[rank]
    return np.clip(middle / np.maximum(total, TINY)[rank], 0.0, 1.0)
