"""Write the plan of a batch as tiles, transfers and stages, so that `simulate` can execute it.

    cells (4, 2), (5, 2) of rank 0 in stage 1
      =>
    stage 1: fetch q[4:6] 1 -> 0; rank 0: tile q[4:6] x kv[2:3] full; home out[4:6] 0 -> 1

Assumes shards of equal length, cut into equal chunks, and one batch entry; and a rule without
run-time tables, because the simulator derives from the rule which cells exist.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.assign_masked import cells_of, tiles_of_cells
from cp_inductor.plan.batch import BatchPlan
from cp_inductor.plan.facade import Plan
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, Shape
from cp_inductor.plan.tiles import Tiles
from cp_inductor.plan.transfers import fetch_directly, plan_forward


def tiles_of_batch(plan: BatchPlan, rule: Rule, shape: Shape) -> Plan:
    """Return the forward plan; its `backward` is derived from it as of any other.

    Args:
        plan: of a batch of one entry, in chunks of equal length.
        rule: which pairs exist, without tables.
        shape: of the attention.
    """
    world_size, lengths = plan.world_size, (plan.queries.length, plan.keys.length)
    counts = [
        np.bincount(chunks.rank, minlength=world_size) // plan.num_groups
        for chunks in (plan.queries, plan.keys)
    ]
    assert not rule.reads and not plan.queries.entry.any(), "one entry, and no tables"
    assert len({*counts[0].tolist(), *counts[1].tolist()}) == 1, "equally many chunks per rank"
    assert all(len(set(of.tolist())) == 1 for of in lengths), "chunks of equal length"
    grid = Grid(
        world_size,
        int(counts[0][0]),
        "contiguous",
        *(int(of.sum()) // plan.num_groups for of in lengths),
    )
    # The chunks of the grid, and the groups of heads.
    query = (plan.queries.first // lengths[0][0])[plan.query]
    key = (plan.keys.first // lengths[1][0])[plan.key]
    group = plan.queries.group[plan.query]
    num_heads = shape.num_heads // plan.num_groups
    cells = cells_of(grid, rule)
    tiles: Tiles = [[] for _ in range(plan.stages + 1)]
    for rank, number in product(range(world_size), range(plan.num_groups)):
        heads = Span(number * num_heads, (number + 1) * num_heads)
        for stage, made in enumerate(tiles):
            is_here = (plan.rank == rank) & (plan.stage == stage) & (group == number)
            here = np.flatnonzero(is_here)
            rows, row = np.unique(query[here], return_inverse=True)
            part = np.full((len(rows), grid.num_chunks), Cell.EMPTY)
            part[row, key[here]] = cells[query[here], key[here]]
            made += tiles_of_cells(grid, rank, heads, rows, part, cells[rows])
    return Plan.of(
        plan_forward(
            grid,
            shape,
            Mask.PARTIAL,
            "batch",
            tiles,
            fetch_directly(grid, shape, tiles),
            rule=rule.format(),
        )
    )
