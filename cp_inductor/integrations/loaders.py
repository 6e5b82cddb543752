"""Plan the next batch of a data loader of accelerate, or of Trainer, while this one is computed.

    for batch in loader:  next(loader)  step(batch)  next(loader)  step(batch)  ...
      =>                                  plan the next              plan the next

accelerate's loaders load one batch ahead of the one they yield, to know which is the last. This
module notes each batch where it is loaded. What is loaded, skipped and yielded stays as it was.

Trainer takes all batches of a step at once where gradients are accumulated. It gets a list that
plans the next batch while it is iterated over.
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


def iterate_loader(original: Method, loader: Any) -> Iterator[Any]:
    """Replace `DataLoaderShard.__iter__`."""
    if AcceleratorState._shared_state and is_ours(AcceleratorState()):
        return Batches(loader, original)
    inner: Iterator[Any] = original(loader)
    return inner


def take_samples(
    original: Method, trainer: Any, epoch_iterator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace `Trainer.get_batch_samples`."""
    if not isinstance(epoch_iterator, Batches):
        return original(trainer, epoch_iterator, *args, **kwargs)
    taken, *others = original(trainer, _all_of(epoch_iterator), *args, **kwargs)
    return (Samples(taken, epoch_iterator.ahead), *others)


def _all_of(batches: Batches) -> Iterator[Any]:
    """Take batches before they are used."""
    while True:
        try:
            batch = batches.take()
        except StopIteration:
            return
        yield batch
