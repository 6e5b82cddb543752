"""The definition of a strategy: one row of the table in `cp_inductor.plan.strategies`.

Planner, tests and the command line read the table, and know no strategy by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cp_inductor.plan.assign_cells import Table, Tiles
from cp_inductor.plan.grid import Grid
from cp_inductor.plan.ir import Shape, Transfers
from cp_inductor.plan.transfers import fetch_directly

Assign = Callable[[Table, int], Tiles]
# (grid, shape, tiles) -> what is fetched before the tiles of each stage.
Fetch = Callable[[Grid, Shape, Tiles], list[Transfers]]


@dataclass(frozen=True)
class Strategy:
    """One way to assign tiles to ranks.

    Attributes:
        name: as users write it.
        assign: (table, number of stages) -> tiles.
        assign_backward: the same -> tiles of the backward, as many stages as of the forward, if
            they are others.
        fetch: tiles -> fetches.
        under_rules: the strategy that takes its place under a mask that is neither full nor causal.
        returns: results go back the way their inputs came, from rank to rank, not straight home.
        num_stages: (ranks) -> the number of stages, if there is no choice; else None.
        splits: (shape, ranks) -> whether it can split the heads of this shape over them.
        free_keep: (shape, stages) -> of how many stages, from the first, the forward keeps what it
            fetched for the backward, because that takes the place of the shard's own q, k and v. It
            is as large, but where several ranks share a KV head.
        is_of_auto: "auto" considers it.
        is_groupable: groups of ranks may split the heads around it, as in "heads4+blocks".
        fine: many chunks for so many ranks balance a causal mask; 0 if pieces do, or nothing does.
        min_chunks: per rank.
        moves_queries: a rank may compute queries of another, and would need their rows of a mask
            tensor.
    """

    name: str
    assign: Assign
    assign_backward: Assign | None = None
    fetch: Fetch = fetch_directly
    under_rules: Strategy | None = None
    returns: bool = False
    num_stages: Callable[[int], int | None] = lambda world_size: None
    splits: Callable[[Shape, int], bool] = lambda shape, world_size: True
    free_keep: Callable[[Shape, int], int] = lambda shape, num_stages: 0
    is_of_auto: bool = True
    is_groupable: bool = False
    fine: int = 0
    min_chunks: int = 2
    moves_queries: bool = False
