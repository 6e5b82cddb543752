"""Plans that the batch decides, kept where graphs find them, and made ahead for a data loader.

When an attention is compiled whose plan the batch decides, what its mask reads is known as a
function of the model's inputs: document numbers, say, of `position_ids`. `prepared` computes it in
a thread and plans the next batch; the graph finds the plan, or makes what it does not find.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.graph.derive_tables import Derived
from cp_inductor.kept import lru_cache, on_reset
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.batch import BatchPlan, plan_batch
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.plan.batch_tables import RankTables, rank_tables
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import Multiple, number_of

# How many plans are kept. Layers may read different tables, and a batch may come again.
NUM_PLANS = 16

_made: deque[BatchPlan] = deque(maxlen=NUM_PLANS)
on_reset(_made.clear)


def batch_plans() -> tuple[BatchPlan, ...]:
    """Return the plans that this process made last for batches, the newest at the end.

    Each plan is for one batch and one rule, which the layers of a model share.
    """
    return tuple(_made)


@dataclass(frozen=True, slots=True)
class HashedTables:
    """Tables of a rule as numpy arrays, told apart by all of their bits."""

    arrays: tuple[np.ndarray, ...] = field(compare=False)
    digest: bytes

    @staticmethod
    def of(tables: Sequence[Tensor]) -> HashedTables:
        """Read tables on the host."""
        arrays, digest = tuple(map(_as_numpy, tables)), hashlib.sha256()
        for array in arrays:
            digest.update(repr((array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return HashedTables(arrays, digest.digest())


@lru_cache(maxsize=NUM_PLANS)
def numbers_of(
    tables: HashedTables,
    rule: str,
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    stages: int,
    world_size: int,
    rank: int,
    nodes: str,
) -> RankTables:
    """Return a rank's part of the plan of a batch, and keep it; see `plan_batch`."""
    started = time.perf_counter()
    parsed = Rule.parse(rule)
    queries, keys = (shard_lengths(length, world_size) for length in lengths)
    plan = plan_batch(
        parsed,
        dict(zip(sorted(parsed.tables), tables.arrays, strict=True)),
        batch=batch,
        query_lengths=queries,
        key_lengths=keys,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        stages=stages,
        nodes=Nodes.parse(nodes) if nodes else None,
    )
    tokens = batch * queries[rank], batch * keys[rank]
    numbers = rank_tables(plan, rank, num_queries=tokens[0], num_keys=tokens[1])
    _made.append(plan)
    counters["cp_inductor"]["batches_planned"] += 1
    counters["cp_inductor"]["planning_us"] += round(1e6 * (time.perf_counter() - started))
    return numbers


# Numbers in pinned memory, of plans that are kept.
_pinned: WeakKeyDictionary[RankTables, Tensor] = WeakKeyDictionary()


def pin(tables: RankTables) -> None:
    """Put the numbers of a plan into pinned memory, from where they are copied to a GPU."""
    if tables not in _pinned:
        _pinned[tables] = torch.from_numpy(tables.numbers).pin_memory()


def copy_numbers(tables: RankTables, device: torch.device) -> Tensor:
    """Return the numbers of a plan on a device, without waiting if they are pinned."""
    numbers = _pinned.get(tables, torch.from_numpy(tables.numbers))
    return numbers.to(device, copy=True, non_blocking=tables in _pinned)


def _as_numpy(table: Tensor) -> np.ndarray:
    table = table.detach().cpu()
    if table.dtype in (torch.bfloat16, torch.float16):
        table = table.float()
    array: np.ndarray = table.numpy()
    return array


# --- Plans that are made ahead -----------------------------------------------------------------

Batch = TypeVar("Batch", bound=Mapping[str, Any])
NUM_KNOWN = 64  # attentions of all models that are remembered; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Known:
    """An attention whose plan the batch decides. Those of all layers of a model are equal."""

    derived: Derived  # makes the tables of its rule from inputs of the model
    # rule, heads, stages, nodes, group_name: as the op `plan_batch` takes them.
    rule: str
    sizes: tuple[int | Multiple, ...]  # of the batch, and the lengths of queries and keys
    heads: tuple[int, int]
    stages: int
    nodes: str
    group_name: str
    is_copied: bool  # the plan goes to a GPU, from pinned memory

    def plan(self, batch: Mapping[str, Any]) -> None:
        """Plan a batch, if it has the inputs and sizes for which the attention was compiled."""
        numbers = self.derived.solve(batch)
        if numbers is None:
            return
        try:
            group = group_of(self.group_name)
        except (RuntimeError, LookupError):  # it was destroyed
            return
        size, *lengths = (number_of(of_batch, numbers) for of_batch in self.sizes)
        tables = HashedTables.of(self.derived(batch))
        attention = self.rule, size, tuple(lengths), self.heads, self.stages
        place = dist.get_world_size(group), dist.get_rank(group)
        planned = numbers_of(tables, *attention, *place, self.nodes)
        if self.is_copied:
            pin(planned)
        counters["cp_inductor"]["plans_prepared"] += 1


_known: dict[Known, None] = {}
on_reset(_known.clear)


def remember(known: Known) -> None:
    """Remember an attention that was compiled, as the newest."""
    _known.pop(known, None)
    _known[known] = None
    if len(_known) > NUM_KNOWN:
        del _known[next(iter(_known))]


def prepared(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Plan each batch of a data loader while the one before it is computed.

        for batch in cp_inductor.prepared(loader):
            loss = step(shard(batch))

    A thread takes the next batch, a mapping of the model's inputs by name, whole, and plans it for
    what was compiled; a `DataLoader` with workers collates it in these. An error there is raised
    here in its turn. Batches of other shapes or dtypes, and masks that read more, are the graph's.
    """
    source = iter(batches)

    def advance() -> Batch | None:
        if (batch := next(source, None)) is not None:
            for known in list(_known):
                known.plan(batch)
        return batch

    with ThreadPoolExecutor(1, thread_name_prefix="cp_inductor_prepared") as thread:
        ahead = thread.submit(advance)
        while (batch := ahead.result()) is not None:
            ahead = thread.submit(advance)
            yield batch
