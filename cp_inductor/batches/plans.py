"""Plans that the batch decides, kept where graphs find them.

found = numbers_of(tables, rule, ...)               a rank's part, made or found
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.kept import lru_cache, on_reset
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.plan.batch_tables import (
    RankTables,
    rank_tables,
)
from cp_inductor.plan.grid import shard_lengths

# How many plans are kept. Layers may read different tables, and a batch may come again.
NUM_PLANS = 16


_made: deque[BatchPlan] = deque(maxlen=NUM_PLANS)
on_reset(_made.clear)


def batch_plans() -> tuple[BatchPlan, ...]:
    """Return the plans that this process made last for batches, the newest at the end.

    Each plan is for one batch and one rule, which the layers of a model share.
    """
    return tuple(_made)


class _HashedTables:
    """Tables of a rule as numpy arrays, told apart by all of their bits."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = tuple(arrays)
        digest = hashlib.sha256()
        for array in self.arrays:
            digest.update(repr((array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        self.digest = digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashedTables) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the plan of a batch depends on; see `plan_batch`."""

    tables: _HashedTables
    rule: str
    batch: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    stages: int
    world_size: int
    nodes: str


@lru_cache(maxsize=NUM_PLANS)
def _plan(asked: _Asked) -> BatchPlan:
    started = time.perf_counter()
    parsed = Rule.parse(asked.rule)
    queries, keys = (shard_lengths(length, asked.world_size) for length in asked.lengths)
    plan = plan_batch(
        parsed,
        dict(zip(sorted(parsed.tables), asked.tables.arrays, strict=True)),
        batch=asked.batch,
        query_lengths=queries,
        key_lengths=keys,
        num_heads=asked.heads[0],
        num_kv_heads=asked.heads[1],
        stages=asked.stages,
        nodes=Nodes.parse(asked.nodes) if asked.nodes else None,
    )
    _made.append(plan)
    counters["cp_inductor"]["batches_planned"] += 1
    counters["cp_inductor"]["planning_us"] += round(1e6 * (time.perf_counter() - started))
    return plan


@lru_cache(maxsize=NUM_PLANS)
def _numbers(asked: _Asked, rank: int) -> RankTables:
    plan = _plan(asked)
    started = time.perf_counter()
    num_queries, num_keys = (
        asked.batch * shard_lengths(length, asked.world_size)[rank] for length in asked.lengths
    )
    numbers = rank_tables(plan, rank, num_queries=num_queries, num_keys=num_keys)
    counters["cp_inductor"]["planning_us"] += round(1e6 * (time.perf_counter() - started))
    return numbers


def numbers_of(
    tables: Sequence[Tensor],
    rule: str,
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    stages: int,
    world_size: int,
    rank: int,
    nodes: str = "",
) -> RankTables:
    """Return a rank's part of the plan of a batch, and keep it; see `plan_batch`."""
    hashed = _HashedTables([_as_numpy(table) for table in tables])
    return _numbers(_Asked(hashed, rule, batch, lengths, heads, stages, world_size, nodes), rank)


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


def _as_numpy(table: Tensor) -> np.ndarray:
    table = table.detach().cpu()
    if table.dtype in (torch.bfloat16, torch.float16):
        table = table.float()
    array: np.ndarray = table.numpy()
    return array
