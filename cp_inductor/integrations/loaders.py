"""Plan the next batch of a data loader of accelerate, or of Trainer, while this one is computed.

    for batch in loader:  next(loader)  step(batch)  next(loader)  step(batch)  ...
      =>                                  plan the next              plan the next

accelerate's loaders take a batch ahead of the one they yield, to know which is the last. What they
load is noted where they take it; they decide what is loaded, skipped and yielded, as before.

Trainer takes all batches of a step at once where gradients are accumulated. The list that it gets
plans as it goes through it, so that one batch is ahead there, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.state import AcceleratorState

from cp_inductor.batches.prepare import PlansAhead
from cp_inductor.integrations.methods import Method, is_ours


class Batches(Iterator[Any]):
    """Iterates over a loader of accelerate, and plans the next batch as each is used.

    Args:
        loader: a DataLoaderShard.
        iterate: its own `__iter__`.
    """

    def __init__(self, loader: Any, iterate: Method) -> None:
        self.ahead = PlansAhead()
        self.loader = loader
        self.inner = iterate(loader)
        self.is_new = True

    def __next__(self) -> Any:
        batch = self.take()
        self.ahead.use()
        return batch

    def take(self) -> Any:
        """Return the next batch, which is used later."""
        if not self.is_new:
            return next(self.inner)
        self.is_new = False
        # The inner iterator asks for this one as it begins.
        base = self.loader.base_dataloader
        base.__iter__ = lambda: self._noting(iter(base))
        try:
            return next(self.inner)
        finally:
            del base.__iter__

    def _noting(self, loaded: Iterator[Any]) -> Iterator[Any]:
        for index, batch in enumerate(loaded):
            if index >= self.loader.skip_batches:
                self.ahead.load(batch)
            yield batch


class Samples(list[Any]):
    """The batches of a step of Trainer; going through them plans ahead, the first time."""

    def __init__(self, batches: list[Any], ahead: PlansAhead) -> None:
        super().__init__(batches)
        self.ahead = ahead
        self.num_used = 0

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(super().__iter__()):
            if index == self.num_used:
                self.num_used += 1
                self.ahead.use()
            yield batch


def iterate_loader(original: Method) -> Method:
    """Replace `DataLoaderShard.__iter__`."""

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        if AcceleratorState._shared_state and is_ours(AcceleratorState()):
            return Batches(self, original)
        inner: Iterator[Any] = original(self)
        return inner

    return __iter__


def take_samples(original: Method) -> Method:
    """Replace `Trainer.get_batch_samples`."""

    def get_batch_samples(self: Any, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(epoch_iterator, Batches):
            return original(self, epoch_iterator, *args, **kwargs)
        taken, *others = original(self, _all_of(epoch_iterator), *args, **kwargs)
        return (Samples(taken, epoch_iterator.ahead), *others)

    return get_batch_samples


def _all_of(batches: Batches) -> Iterator[Any]:
    """Take batches that are used later."""
    while True:
        try:
            batch = batches.take()
        except StopIteration:
            return
        yield batch
