"""Read a plan that the batch decides, part by part.

    rows = tile_tables(numbers, sizes, ...)             which rows a tile reads, for one

A graph that reads them is the same for every plan and on every rank. How many rows there are, it
learns when it runs: to the compiler, these sizes are symbols that only the data binds. They are
chosen so that nothing depends on them but loops: rows of tiles come in blocks of 128 and are never
none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.graph.exchange_rows import read_part
from cp_inductor.plan.batch_cells import BLOCK
from cp_inductor.plan.batch_tables import COLUMNS, ROW_COLUMNS, Layout, Side
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import new_size


def layout_of(stages: int, group_name: str) -> Layout:
    """Return which parts the plans of a group's batches have."""
    return Layout(stages, dist.get_world_size(group_of(group_name)))


# The lanes of rows of a tile that have no token. Those of queries and of keys differ, so that they
# make no pairs with each other.
NO_LANE = {Side.QUERY: -1, Side.KEY: -2}


@torch.library.custom_op("cp_inductor::rows_of_results", mutates_args=())
def rows_of_results(numbers: Tensor, sizes: Tensor, place: int, width: int) -> Tensor:
    """Return which rows of results make up a rank's own rows.

    Args:
        numbers, sizes: of `plan_batch`.
        place: `Layout.place` of a SUM part.
        width: the rank's own rows.

    Returns:
        (n, width); n is 2 at least.
    """
    if not width:
        return numbers.new_empty((2, 0))
    return read_part(numbers, sizes, place).view(-1, width).clone()


@rows_of_results.register_fake
def _(numbers: Tensor, sizes: Tensor, place: int, width: int) -> Tensor:
    return numbers.new_empty((new_size(2), width))


@torch.library.custom_op("cp_inductor::tile_tables", mutates_args=())
def tile_tables(
    numbers: Tensor, sizes: Tensor, queries: int, keys: int, cells: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that a tile reads, and which of its blocks it computes.

    One op, because these are a few numbers, for which generated code would be long.

    Args:
        numbers, sizes: of `plan_batch`.
        queries, keys, cells: `Layout.place` of its TILE parts and of its CELLS part.

    Returns:
        Rows of queries (128 n, 3) and of keys (128 m, 3): row of the pool, lane, and position.
        Rows that have no token read row 0 of the pool, and are of the lane `NO_LANE`. Behind them,
        (n, m) bool.
    """
    of_queries, of_keys = (
        read_part(numbers, sizes, place).view(-1, len(COLUMNS)) for place in (queries, keys)
    )
    slots, of_columns = (blocks[:, COLUMNS.index("slot")] for blocks in (of_queries, of_keys))
    is_computed = read_part(numbers, sizes, cells)[slots.unsqueeze(1) + of_columns] != 0
    rows = _tile_rows(of_queries, NO_LANE[Side.QUERY])
    return rows, _tile_rows(of_keys, NO_LANE[Side.KEY]), is_computed


@tile_tables.register_fake
def _(
    numbers: Tensor, sizes: Tensor, queries: int, keys: int, cells: int
) -> tuple[Tensor, Tensor, Tensor]:
    n, m = new_size(1), new_size(1)
    of_queries, of_keys = (numbers.new_empty((BLOCK * size, len(ROW_COLUMNS))) for size in (n, m))
    return of_queries, of_keys, numbers.new_empty((n, m), dtype=torch.bool)


def _tile_rows(blocks: Tensor, missing: int) -> Tensor:
    """(n, columns), a TILE part -> (128 n, 3); `missing` is the lane of rows without a token."""
    first, step, length, lane, position = (
        blocks[:, COLUMNS.index(name), None]
        for name in ("pool", "step", "length", "lane", "position")
    )
    inside = torch.arange(BLOCK, device=blocks.device)
    is_row = inside < length
    columns = (
        torch.where(is_row, first + inside * step, 0),
        torch.where(is_row, lane, missing),
        torch.where(is_row, position + inside, 0),
    )
    return torch.stack(columns, -1).flatten(0, 1)


TILE_TABLES: Any = torch.ops.cp_inductor.tile_tables.default
ROWS_OF_RESULTS: Any = torch.ops.cp_inductor.rows_of_results.default
