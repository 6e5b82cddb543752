"""Plan the next batch of a data loader in a thread, while this one is computed.

When an attention is compiled whose plan the batch decides, what its mask reads is known as a
function of the model's inputs: document numbers, say, of `position_ids`. The thread computes it and
plans; the graph finds the plan where it keeps its own, or makes what it does not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch._dynamo.utils import counters

from cp_inductor.batches.plans import numbers_of, pin
from cp_inductor.graph.derive_tables import Derived
from cp_inductor.kept import on_reset
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.sizes import Multiple, number_of

Batch = TypeVar("Batch", bound=Mapping[str, Any])
NUM_KNOWN = 64  # attentions of all models that are remembered; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Known:
    """An attention whose plan the batch decides. Those of all layers of a model are equal.

    Attributes:
        derived: makes the tables of its rule from inputs of the model.
        sizes: of the batch, and the lengths of queries and keys.
        rule, heads, stages, nodes, group_name: as the op `plan_batch` takes them.
        is_copied: the plan goes to a GPU, from pinned memory.
    """

    derived: Derived
    rule: str
    sizes: tuple[int | Multiple, ...]
    heads: tuple[int, int]
    stages: int
    nodes: str
    group_name: str
    is_copied: bool

    def plan(self, batch: Mapping[str, Any]) -> None:
        """Plan a batch, if it has the inputs and sizes for which the attention was compiled."""
        numbers = self.derived.solve(batch)
        if numbers is None:
            return
        try:
            group = group_of(self.group_name)
        except (RuntimeError, LookupError):  # it was destroyed
            return
        size, queries, keys = (number_of(one, numbers) for one in self.sizes)
        how = (self.rule, size, (queries, keys), self.heads, self.stages)
        place = dist.get_world_size(group), dist.get_rank(group)
        found = numbers_of(self.derived(batch), *how, *place, self.nodes)
        if self.is_copied:
            pin(found)
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
