"""The definition of a strategy: one row of the table in `cp_inductor.plan.strategies`.

Planner, cost, tests and the command line read the table, and know no strategy by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sympy import Expr

from cp_inductor.plan.grid import Grid
from cp_inductor.plan.ir import Mask, Shape, Transfer
from cp_inductor.plan.tiles import Tiles
from cp_inductor.plan.transfers import fetch_directly

LAYOUTS = ("contiguous", "zigzag")

# (grid, shape, tiles) -> what is fetched before the tiles of each stage.
Fetch = Callable[[Grid, Shape, Tiles], list[tuple[Transfer, ...]]]


@dataclass(frozen=True)
class Strategy:
    """One way to assign tiles to ranks.

    Attributes:
        name: as users write it.
        assign: (grid, shape, mask, number of stages) -> tiles; the mask is full or causal.
        assign_masked: (grid, shape, cells, number of stages) -> tiles, under a rule. cells (query
            chunks, key chunks) hold counts of `Cell`. None if the strategy supports no rules.
        received: (mask, layout) -> bytes of the rank that receives most, forward and backward, in
            the symbols of `cp_inductor.plan.cost`.
        imbalance: (mask, layout) -> flops of the busiest rank over the mean.
        fetch: tiles -> fetches.
        num_stages: (ranks, mask) -> the number of stages, if there is no choice; else None.
        head_groups: ranks -> into how many parts it splits the heads; 1 if it does not.
        layouts: the layouts that it supports.
        layouts_of_auto: the layouts in which "auto" considers it.
        is_groupable: groups of ranks may split the heads around it, as in "heads4+blocks".
        is_fine: many chunks per rank balance a causal mask; otherwise pieces do, or nothing does.
        min_chunks: per rank, with contiguous shards.
        has_own_tiles: stage 0 has the tile of a rank's own chunks, which can hide the first fetch.
        moves_queries: a rank may compute queries of another, and would need their rows of a mask
            tensor.
    """

    name: str
    assign: Callable[[Grid, Shape, Mask, int], Tiles]
    assign_masked: Callable[[Grid, Shape, np.ndarray, int], Tiles] | None
    received: Callable[[Mask, str], tuple[Expr, Expr]]
    imbalance: Callable[[Mask, str], Expr]
    fetch: Fetch = fetch_directly
    num_stages: Callable[[int, Mask], int | None] = lambda world_size, mask: None
    head_groups: Callable[[int], int] = lambda world_size: 1
    layouts: tuple[str, ...] = LAYOUTS
    layouts_of_auto: tuple[str, ...] = ()
    is_groupable: bool = False
    is_fine: bool = False
    min_chunks: int = 2
    has_own_tiles: bool = True
    moves_queries: bool = False
