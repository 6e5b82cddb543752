"""Plan a batch before it is used, off the critical path.

    for batch in cp_inductor.prepared(loader):      the next one is planned while this is computed
        loss = step(batch)

When an attention is compiled whose plan the batch decides, what its mask reads is known as a
function of the model's inputs: document numbers, say, of `position_ids`. `prepare` computes that
function on the batch, plans, and keeps the plan where the graph will look for it, in pinned memory
if it goes to a GPU. What a graph does not find there, it plans by itself.

The workers of a `DataLoader` are processes of their own. `PreparingCollator` tells them what was
compiled, and plans in them.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from sympy import Symbol
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.batches.plan_store import PlanStore, store_in_use, store_of_process
from cp_inductor.batches.plans import leave_numbers, numbers_of, pin
from cp_inductor.graph.program import Program, from_json, to_json
from cp_inductor.kept import on_reset
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import Multiple, number_of, solve

# Rule, batch entries, lengths, heads and stages, as `plan_batch` takes them.
How = tuple[str, int, tuple[int, int], tuple[int, int], int]

Batch = TypeVar("Batch", bound=Mapping[str, Any])

# Attentions, of all models of this process, that are remembered; the oldest are forgotten.
NUM_KNOWN = 64


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """An attention whose plan the batch decides.

    Attributes:
        names: of the inputs of the model that its mask reads.
        like: the shape and dtype of each, as it was compiled for. A size that may change is a
            multiple of a symbol.
        tables: makes the tables of its rule from these.
        rule, batch, lengths, heads, stages, nodes, group_name: as `plan_batch` takes them.
        is_copied: the plan goes from the host to another device.
    """

    names: tuple[str, ...]
    like: tuple[tuple[tuple[int | Multiple, ...], torch.dtype], ...]
    tables: Program
    rule: str
    batch: int | Multiple
    lengths: tuple[int | Multiple, int | Multiple]
    heads: tuple[int, int]
    stages: int
    nodes: str
    group_name: str
    is_copied: bool = False

    def fits(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the inputs, and the lengths, that the attention was compiled for."""
        return self._symbols(batch) is not None

    def derive(self, batch: Mapping[str, Any]) -> tuple[Sequence[Tensor], How] | None:
        """Return the tables of a batch, and what its plan depends on besides them and the rank.

        None if it does not fit.
        """
        numbers = self._symbols(batch)
        if numbers is None:
            return None
        size, queries, keys = (number_of(one, numbers) for one in (self.batch, *self.lengths))
        how = (self.rule, size, (queries, keys), self.heads, self.stages)
        return self.tables(*(batch[name] for name in self.names)), how

    def _symbols(self, batch: Mapping[str, Any]) -> dict[Symbol, int] | None:
        """Return what the symbols of sizes are in a batch; None if it does not fit."""
        sizes: list[int | Multiple] = []
        numbers: list[int] = []
        for name, (shape, dtype) in zip(self.names, self.like, strict=True):
            value = batch.get(name)
            if type(value) is not Tensor or (value.ndim, value.dtype) != (len(shape), dtype):
                return None
            sizes += shape
            numbers += value.shape
        return solve(sizes, numbers)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others. All layers of a model have one key."""
        of_plan = (self.rule, self.batch, self.lengths, self.heads, self.stages, self.nodes)
        return (self.names, self.like, *of_plan, self.group_name)

    def to_json(self) -> Any:
        """Return what another process needs to plan for it."""
        of_plan = (self.rule, self.batch, self.lengths, self.heads, self.stages, self.nodes)
        return to_json((self.names, self.like, self.tables, *of_plan))


_known: OrderedDict[tuple[Any, ...], Known] = OrderedDict()


def remember(known: Known) -> None:
    """Remember an attention that was compiled."""
    _known[known.key] = known
    _known.move_to_end(known.key)
    while len(_known) > NUM_KNOWN:
        _known.popitem(last=False)
    if (store := store_in_use()) is not None:
        _tell_workers(store)


def _tell_workers(store: PlanStore) -> None:
    """Tell workers which attentions there are, and the rank of this process among how many."""
    placed = [(known.to_json(), _place_in(known.group_name)) for known in _known.values()]
    store.publish([one for one in placed if one[1] is not None])


def _place_in(group_name: str) -> tuple[int, int] | None:
    """Return the number of ranks of a group, and the rank in it; None if it was destroyed."""
    try:
        group = group_of(group_name)
    except (RuntimeError, LookupError):
        return None
    return dist.get_world_size(group), dist.get_rank(group)


@on_reset
def forget() -> None:
    """Forget all attentions."""
    _known.clear()


def prepare(batch: Batch) -> Batch:
    """Plan a batch for the attentions that were compiled in this process.

    It may be called in any thread of the process that computes. Every rank calls it with the whole
    batch, or leaves it: the plan is the same either way. Before the first step there is nothing to
    plan for. Left to the graph are batches of shapes or dtypes that were not compiled, and masks
    that read more than the batch, such as random numbers or what other ranks send.

    Args:
        batch: the inputs of the model by name, whole tensors, as they are before they are sharded.

    Returns:
        The batch.
    """
    for known in list(_known.values()):
        place = _place_in(known.group_name)
        derived = known.derive(batch) if place is not None else None
        if place is None or derived is None:
            continue
        tables, how = derived
        found = numbers_of(tables, *how, *place, known.nodes)
        if known.is_copied:
            pin(found)
        counters["cp_inductor"]["plans_prepared"] += 1
    return batch


def prepared(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Plan each batch of a data loader while the one before it is computed.

        for batch in cp_inductor.prepared(loader):
            loss = step(shard(batch))

    A thread of this process takes the next batch out of `batches` and prepares it; a `DataLoader`
    with workers collates it in these, as ever. An error there is raised here when its turn comes.

    Args:
        batches: yields inputs of the model by name, whole, as `prepare` takes them.

    Yields:
        The batches.
    """
    source = iter(batches)

    def advance() -> tuple[Batch] | None:
        for batch in source:
            return (prepare(batch),)
        return None

    with ThreadPoolExecutor(1, thread_name_prefix="cp_inductor_prepared") as thread:
        ahead = thread.submit(advance)
        while (found := ahead.result()) is not None:
            ahead = thread.submit(advance)
            yield found[0]


class PreparingCollator:
    """A collate function for a `DataLoader`, in whose workers batches are planned.

        collate = cp_inductor.PreparingCollator(collate)
        loader = DataLoader(samples, collate_fn=collate, num_workers=2)

    Make it in the process that trains. Batches that were collated before the first step, of which
    nothing was known then, are planned by the graph; so are those that `prepare` leaves to it.
    Without workers, it calls `prepare`.

    Args:
        collate_fn: makes the batch: the inputs of the model by name, whole.
    """

    def __init__(self, collate_fn: Callable[[Any], Batch]) -> None:
        self.collate_fn, self.store = collate_fn, store_of_process()
        _tell_workers(self.store)

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples."""
        batch = self.collate_fn(samples)
        if self.store.user == os.getpid():
            return prepare(batch)
        for data, place in self.store.known() or ():
            fields: list[Any] = [*from_json(data), ""]
            known = Known(*fields)
            derived = known.derive(batch)
            if derived is not None:
                leave_numbers(self.store, derived[0], *derived[1], *place, known.nodes)
        return batch


class PlansAhead:
    """Plan each batch while the one before it is used, where others load the batches.

    load(a); load(b); use() -> a is used, b is planned; load(c); use() -> b is used, c is planned

    Each batch is planned in a thread of its own, which ends with the plan. Batches for which
    nothing can be planned start none.
    """

    def __init__(self) -> None:
        self._loaded: deque[Mapping[str, Any]] = deque()
        self._thread: threading.Thread | None = None

    def load(self, batch: Any) -> None:
        """Take note of a batch that will be used, behind those that were loaded before."""
        self._loaded.append(batch if isinstance(batch, Mapping) else {})

    def use(self) -> None:
        """Wait for the plan of the batch that is used now, and start to plan the next one."""
        self.wait()
        if self._loaded:
            self._loaded.popleft()
        if not self._loaded:
            return
        following = self._loaded[0]
        if any(known.fits(following) for known in list(_known.values())):
            self._thread = threading.Thread(
                target=_try_to_prepare, args=(following,), name="cp_inductor_plans_ahead"
            )
            self._thread.start()

    def wait(self) -> None:
        """Wait for the thread that plans, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _try_to_prepare(batch: Mapping[str, Any]) -> None:
    try:
        prepare(batch)
    except Exception as error:
        # The graph then makes the plan, and raises the same error where the user can see it.
        warnings.warn(f"a batch could not be planned ahead: {error}", stacklevel=1)
