"""Plans that the batch decides: kept where graphs find them, and read part by part.

    found = numbers_of(tables, rule, ...)               a rank's part, made or found
    rows = tile_tables(numbers, sizes, ...)             which rows a tile reads, for one

A graph that reads them is the same for every plan and on every rank. How many rows there are, it
learns when it runs: to the compiler, these sizes are symbols that only the data binds. They are
chosen so that nothing depends on them but loops: rows of tiles come in blocks of 128 and are never
none.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.graph.exchange_rows import read_part
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_chunks import BLOCK
from cp_inductor.plan.batch_tables import (
    COLUMNS,
    ROW_COLUMNS,
    Layout,
    RankTables,
    Side,
    rank_tables,
)
from cp_inductor.plan.grid import Grid
from cp_inductor.run.plan_store import PlanStore, store_in_use
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import new_size

# Plans that are kept. Layers that read other tables, and batches that come again, are found here.
NUM_PLANS = 16


# --- Plans ------------------------------------------------------------------------------------


_made: deque[BatchPlan] = deque(maxlen=NUM_PLANS)


def batch_plans() -> tuple[BatchPlan, ...]:
    """Return the plans that this process made last for batches, the newest behind the others.

    Each is of one batch and one rule, which the layers of a model share.
    """
    return tuple(_made)


class _Tables:
    """Tables of a rule as numpy arrays, told apart by all of their bits."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = tuple(arrays)
        digest = hashlib.sha256()
        for array in self.arrays:
            digest.update(repr((array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        self.digest = digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tables) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def shard_rows(length: int, world_size: int) -> list[int]:
    """Return the tokens of a sequence that each rank stores, as torch.chunk cuts it."""
    grid = Grid(world_size, 1, "contiguous", length, length)
    return [grid.local_length(rank, of_keys=False) for rank in range(world_size)]


@lru_cache(maxsize=NUM_PLANS)
def _plan(
    tables: _Tables,
    rule: str,
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    stages: int,
    world_size: int,
) -> BatchPlan:
    started = time.perf_counter()
    parsed = Rule.parse(rule)
    plan = plan_batch(
        parsed,
        dict(zip(sorted(parsed.tables), tables.arrays, strict=True)),
        batch=batch,
        query_lengths=shard_rows(lengths[0], world_size),
        key_lengths=shard_rows(lengths[1], world_size),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        stages=stages,
    )
    _made.append(plan)
    counters["cp_inductor"]["batches_planned"] += 1
    counters["cp_inductor"]["planning_us"] += round(1e6 * (time.perf_counter() - started))
    return plan


@lru_cache(maxsize=NUM_PLANS)
def _numbers(
    tables: _Tables,
    rule: str,
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    stages: int,
    world_size: int,
    rank: int,
) -> RankTables:
    how = (tables, rule, batch, lengths, heads, stages, world_size)
    store = store_in_use()
    if store is not None and (found := store.take(key_of_numbers(*how, rank))) is not None:
        counters["cp_inductor"]["plans_of_workers"] += 1
        return found
    plan = _plan(*how)
    started = time.perf_counter()
    num_queries, num_keys = (batch * shard_rows(one, world_size)[rank] for one in lengths)
    numbers = rank_tables(plan, rank, num_queries=num_queries, num_keys=num_keys)
    counters["cp_inductor"]["planning_us"] += round(1e6 * (time.perf_counter() - started))
    return numbers


def key_of_numbers(tables: _Tables, *how: Any) -> str:
    """Return the name of a rank's part of a plan in a `PlanStore`."""
    return hashlib.sha256(tables.digest + repr(how).encode()).hexdigest()


def leave_numbers(store: PlanStore, tables: Sequence[Tensor], *how: Any) -> None:
    """Plan a batch for another process; takes what `numbers_of` takes."""
    arrays = _Tables([_as_numpy(table) for table in tables])
    store.put(key_of_numbers(arrays, *how), _numbers(arrays, *how))


def numbers_of(
    tables: Sequence[Tensor],
    rule: str,
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    stages: int,
    world_size: int,
    rank: int,
) -> RankTables:
    """Return a rank's part of the plan of a batch, and keep it; see `plan_batch`."""
    arrays = _Tables([_as_numpy(table) for table in tables])
    return _numbers(arrays, rule, batch, lengths, heads, stages, world_size, rank)


# Numbers in pinned memory, of plans that are kept.
_pinned: WeakKeyDictionary[RankTables, Tensor] = WeakKeyDictionary()


def pin(found: RankTables) -> None:
    """Put the numbers of a plan into pinned memory, from where they are copied to a GPU."""
    if found not in _pinned:
        _pinned[found] = torch.from_numpy(found.numbers).pin_memory()


def copy_numbers(found: RankTables, device: torch.device) -> Tensor:
    """Return the numbers of a plan on a device, without waiting if they are pinned."""
    pinned = _pinned.get(found)
    if pinned is None:
        return torch.from_numpy(found.numbers).to(device, copy=True)
    return pinned.to(device, copy=True, non_blocking=True)


def forget_plans() -> None:
    """Forget all plans of batches."""
    _made.clear()
    _plan.cache_clear()
    _numbers.cache_clear()


def layout_of(stages: int, group_name: str) -> Layout:
    """Return which parts the plans of a group's batches have."""
    return Layout(stages, dist.get_world_size(group_of(group_name)))


def _as_numpy(table: Tensor) -> np.ndarray:
    table = table.detach().cpu()
    if table.dtype in (torch.bfloat16, torch.float16):
        table = table.float()
    array: np.ndarray = table.numpy()
    return array


# --- Parts of a plan --------------------------------------------------------------------------


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
