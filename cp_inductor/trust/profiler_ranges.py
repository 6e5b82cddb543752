"""Name the exchanges and tiles of attentions in a profile of torch.

    with torch.profiler.profile():
        with named_ranges(name_of): run a graph
      =>  attention (model.py:41), forward, exchange 1
          attention (model.py:41), forward, tile 1
          attention (model.py:41), forward, wait for exchange 1

Nothing happens at run time as long as nobody profiles. A dispatch mode sees the ops that a graph
calls: starts and waits of exchanges, and tiles but for the templates that Inductor generates for a
GPU, which are no ops.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.graph.collectives import STARTS, WAIT
from cp_inductor.tiles.kernel_table import TILE_OPS
from cp_inductor.torch_private.modes import OpWatcher, is_profiling

# The attention and direction that an op belongs to, and which exchange or tile of it the op is,
# from 1; None if it is of no attention.
NameOf = Callable[[Any], tuple[str, int] | None]


def named_ranges(name_of: NameOf) -> AbstractContextManager[Any]:
    """Return the context that a graph, or an eager attention, runs in."""
    return _Watch(name_of) if is_profiling() else nullcontext()


class _Watch(OpWatcher):
    """Names the ops of one graph."""

    def __init__(self, name_of: NameOf) -> None:
        super().__init__()
        self.name_of = name_of
        # What arrives, until it is waited for, and how the wait is called.
        self.waits: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; within a range if it is an exchange, a wait for one, or a tile."""
        if op is WAIT:
            title = self.waits.pop(args[0], "")
            with torch.profiler.record_function(title) if title else nullcontext():
                return op(*args, **kwargs)
        is_start = op in STARTS
        name = self.name_of(op) if is_start or op in TILE_OPS else None
        if name is None:
            return op(*args, **kwargs)
        attention, number = name
        title = f"{attention}, {'exchange' if is_start else 'tile'} {number}"
        with torch.profiler.record_function(title):
            result = op(*args, **kwargs)
        if is_start:
            self.waits[result] = f"{attention}, wait for exchange {number}"
        return result


def count_ops(site: str, direction: str) -> NameOf:
    """Return what names the ops of one eager attention, which run in the order of its plan."""
    started = {True: 0, False: 0}

    def name_of(op: Any) -> tuple[str, int]:
        is_start = op in STARTS
        started[is_start] += 1
        return f"{site}, {direction}", started[is_start]

    return name_of
