"""Record when exchanges and tiles run, while somebody asks for it.

    with recording(recorder):                       `cp_inductor.profile`
        with recorded(name_of): run a graph         its ops are timed, and named in torch.profiler

Nothing happens at run time as long as nobody records. A dispatch mode sees the ops that a graph
calls: starts and waits of exchanges, and tiles but for the templates that Inductor generates for a
GPU, which are no ops. Times are those of the device's stream, or of the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_inductor.graph.collectives import STARTS, WAIT
from cp_inductor.run.attention import Attention
from cp_inductor.tiles.tile_ops import TILE_OPS
from cp_inductor.torch_private.modes import OpWatcher


@dataclass(frozen=True, slots=True)
class Moment:
    """What one op is to the plan it belongs to.

    Attributes:
        site: the attention, for people.
        attention: the same; None if it is not known which.
        direction: "forward" or "backward".
        number, total: which exchange or tile of that direction it is, from 1, and of how many; the
            total is 0 where it is not known before the last.
    """

    site: str
    attention: Attention | None
    direction: str
    number: int
    total: int


@dataclass(slots=True)
class Span:
    """An exchange or a tile of this rank.

    Attributes:
        moment: which.
        is_exchange: or a tile.
        begin, end: marks of a clock: seconds, or events of a device; of an exchange from its start
            to the end of the wait.
        wait: the mark at which the rank began to wait for the exchange.
    """

    moment: Moment
    is_exchange: bool
    begin: Any
    end: Any = None
    wait: Any = None


# Which exchange or tile an op is; None if it is of no attention.
NameOf = Callable[[Any], Moment | None]


class Recorder:
    """Keeps the spans of all graphs that run."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.zero: Any = None

    def mark(self, device: torch.device) -> Any:
        """Return the time now, on the CPU, or behind what a device has been given."""
        if device.type == "cpu":
            now: Any = time.perf_counter()
        else:
            now = torch.Event(device, enable_timing=True)
            now.record()
        if self.zero is None:
            self.zero = now
        return now

    def seconds(self, mark: Any) -> float:
        """Return when a mark was made, in seconds from the first."""
        if isinstance(mark, float):
            return mark - float(self.zero)
        mark.synchronize()
        return float(self.zero.elapsed_time(mark)) / 1e3


class _Running:
    recorder: Recorder | None = None


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within this context, whatever runs is recorded, on all threads of the process."""
    before, _Running.recorder = _Running.recorder, recorder
    try:
        yield
    finally:
        _Running.recorder = before


def is_recording() -> bool:
    """Whether something is recorded, which a second recorder would not let it see."""
    return _Running.recorder is not None


def recorded(name_of: NameOf) -> AbstractContextManager[Any]:
    """Return the context that a graph, or an eager attention, runs in."""
    recorder = _Running.recorder
    return nullcontext() if recorder is None else _Watch(recorder, name_of)


class _Watch(OpWatcher):
    """Times the ops of one graph."""

    def __init__(self, recorder: Recorder, name_of: NameOf) -> None:
        super().__init__()
        self.recorder, self.name_of = recorder, name_of
        self.flying: list[tuple[Tensor, Span]] = []

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; time it if it is an exchange or a tile."""
        if op is WAIT:
            return self._wait(args, kwargs)
        is_start = op in STARTS
        moment = self.name_of(op) if is_start or op in TILE_OPS else None
        if moment is None:
            return op(*args, **kwargs)
        what = "exchange" if is_start else "tile"
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        span = Span(moment, is_start, self.recorder.mark(device))
        title = f"{moment.site}, {moment.direction}, {what} {moment.number}"
        with torch.profiler.record_function(title):
            result = op(*args, **kwargs)
        self.recorder.spans.append(span)
        if is_start:
            self.flying.append((result, span))
        else:
            span.end = self.recorder.mark(device)
        return result

    def _wait(self, args: Any, kwargs: Any) -> Any:
        place = next((i for i, (one, _) in enumerate(self.flying) if one is args[0]), None)
        if place is None:
            return WAIT(*args, **kwargs)
        _, span = self.flying.pop(place)
        span.wait = self.recorder.mark(args[0].device)
        moment = span.moment
        title = f"{moment.site}, {moment.direction}, wait for exchange {moment.number}"
        with torch.profiler.record_function(title):
            result = WAIT(*args, **kwargs)
        span.end = self.recorder.mark(args[0].device)
        return result


def count_ops(site: str, attention: Attention, direction: str) -> NameOf:
    """Return what names the ops of one eager attention, which run in the order of its plan."""
    started = {True: 0, False: 0}

    def name_of(func: Any) -> Moment:
        is_start = func in STARTS
        started[is_start] += 1
        return Moment(site, attention, direction, started[is_start], 0)

    return name_of
