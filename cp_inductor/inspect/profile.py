"""Compare what the planner predicted with what ran: exchanges and tiles, stage by stage.

    with cp_inductor.profile() as p:
        for batch in batches: step(batch)
    print(p)
      =>
    attention (model.py:41), forward, 6 calls      predicted    measured    error
      fetch 1                                       0.210 ms    0.260 ms    +24 %   waited 0.020 ms
      tiles 0                                       ...

A stage is as long as its tiles take together; an exchange lasts from its start to the end of its
wait, in which other work may run, so it is measured as too long where it is hidden well: what it
costs is the time that was waited.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from cp_inductor import config
from cp_inductor.dtensor.machines import machine_of, machine_text
from cp_inductor.errors import InvalidArgument
from cp_inductor.kept import cache
from cp_inductor.plan import Plan, backward_plan, forward_plan
from cp_inductor.plan.facade import write_trace
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.timeline import Event, loads_of
from cp_inductor.run.attention import Attention
from cp_inductor.trust.recording import Moment, Recorder, Span, is_recording, recording


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """Tiles or an exchange of one stage of an attention, on this rank.

    Attributes:
        site: the attention.
        direction: "forward" or "backward".
        name: such as "fetch 1", "tiles 0" or "home 1"; where the batch decides the plan, or the
            plan is not known, "exchange 2" and "tiles".
        is_exchange: or tiles.
        calls: how often it ran, in all steps and all layers with this site.
        measured_s: median seconds.
        waited_s: median seconds in which the rank waited for an exchange; of tiles 0.
        predicted_s: seconds by the plan; None where the plan is not known.
    """

    site: str
    direction: str
    name: str
    is_exchange: bool
    calls: int
    measured_s: float
    waited_s: float
    predicted_s: float | None


@dataclass(frozen=True, slots=True)
class _Run:
    """A span, in seconds from the first, with the name of its stage."""

    moment: Moment
    name: str
    is_exchange: bool
    call: int
    begin_s: float
    end_s: float
    waited_s: float


@dataclass
class Profile:
    """What `profile` recorded; complete behind its context.

    Attributes:
        batch: entries of the batch, by which predictions of bytes and flops are multiplied.
    """

    batch: int
    _machines: dict[str, Machine] = field(default_factory=dict)
    _runs: list[_Run] = field(default_factory=list)

    @property
    def steps(self) -> tuple[ProfiledStep, ...]:
        """Every exchange, and the tiles of every stage, in the order in which they first ran."""
        found: dict[tuple[str, str, str], list[_Run]] = defaultdict(list)
        for run in self._runs:
            found[run.moment.site, run.moment.direction, run.name].append(run)
        return tuple(self._step(runs) for runs in found.values())

    def _step(self, runs: Sequence[_Run]) -> ProfiledStep:
        seconds, waited = defaultdict[int, float](float), defaultdict[int, float](float)
        for run in runs:
            seconds[run.call] += run.end_s - run.begin_s
            waited[run.call] += run.waited_s
        return ProfiledStep(
            site=runs[0].moment.site,
            direction=runs[0].moment.direction,
            name=runs[0].name,
            is_exchange=runs[0].is_exchange,
            calls=len(seconds),
            measured_s=median(seconds.values()),
            waited_s=median(waited.values()),
            predicted_s=self._predicted(runs[0]),
        )

    def _predicted(self, run: _Run) -> float | None:
        attention = run.moment.attention
        if attention is None or attention.is_per_batch:
            return None
        machine = self._machines[attention.group_name]
        events = _events(attention, run.moment.direction, machine, self.batch)
        return next((float(e.seconds[attention.rank]) for e in events if e.name == run.name), 0.0)

    def __str__(self) -> str:
        """Return a table of the steps: predicted, measured, and by how much they differ."""
        lines: list[str] = []
        title = None
        for step in self.steps:
            if title != (step.site, step.direction):
                title = (step.site, step.direction)
                head = f"{step.site}, {step.direction}, {step.calls} calls"
                lines.append(f"{head:<52}{'predicted':>12}{'measured':>12}{'error':>9}")
            predicted, error = "unknown", ""
            if step.predicted_s is not None:
                predicted = f"{step.predicted_s * 1e3:.3f} ms"
                if step.predicted_s:
                    error = f"{step.measured_s / step.predicted_s - 1:+.0%}".replace("%", " %")
            row = f"  {step.name:<50}{predicted:>12}{step.measured_s * 1e3:>9.3f} ms{error:>9}"
            waits = f"   waited {step.waited_s * 1e3:.3f} ms" if step.is_exchange else ""
            lines.append(row + waits)
        return "\n".join(lines) or "no attention of cp_inductor ran"

    def write_trace(self, path: str | Path) -> None:
        """Write what ran as a trace for https://ui.perfetto.dev or chrome://tracing.

        Every rank is a process with two lanes, tiles and exchanges, like those that
        `Plan.write_trace` predicts. All ranks of the default process group call it; the first
        writes the file. Ranks are laid side by side from their first recorded op on.

        Args:
            path: of the file, which is JSON.
        """
        spans = [
            (
                f"{run.moment.site}, {run.moment.direction}, {run.name}",
                run.is_exchange,
                run.begin_s,
                run.end_s - run.begin_s,
            )
            for run in self._runs
        ]
        of_ranks: list[Any] = [spans]
        if dist.is_initialized():
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, spans)
            if dist.get_rank() != 0:
                return
        write_trace(path, of_ranks)


@contextmanager
def profile(*, machine: Machine | str | None = None, batch: int = 1) -> Iterator[Profile]:
    """Record the exchanges and tiles of all attentions that run within this context.

    Eager code, `cp_aot_eager` and `cp_inductor` are recorded alike, on this rank, forward and
    backward. In a `torch.profiler.profile` around it, the same steps have ranges of their names.
    Steps before it compile; leave them outside. On a GPU, tiles that Inductor generates from
    templates (those under most masks) are not seen; exchanges are.

    Args:
        machine: what to predict for: a `Machine`, its text, "calibrated" or "auto"; None: what
            `config.machine` says.
        batch: entries of the batch on this rank.

    Yields:
        A `Profile`, which is filled when the context ends.

    Raises:
        InvalidArgument: batch is not positive, another profile is running, or nothing was
            calibrated.
        InvalidText: machine is not one.
    """
    if batch < 1:
        raise InvalidArgument(
            site="cp_inductor.profile",
            expected="batch, at least 1",
            got=repr(batch),
            remedy="pass the number of sequences in this rank's batch",
        )
    if is_recording():
        raise InvalidArgument(
            site="cp_inductor.profile",
            expected="one profile at a time",
            got="a second one within it, of whose steps the first would see none",
            remedy="leave the inner one out, or call it outside",
        )
    machine = config.machine if machine is None else machine
    text = machine_text(machine, site="cp_inductor.profile")
    found, recorder = Profile(batch), Recorder()
    with recording(recorder):
        yield found
    found._runs += _runs_of(recorder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attentions = (run.moment.attention for run in found._runs)
    for name in {one.group_name for one in attentions if one is not None}:
        found._machines[name] = machine_of(text, name, device)


def _runs_of(recorder: Recorder) -> list[_Run]:
    """Return what a recorder has seen to its end, each in its call of its attention."""
    runs: list[_Run] = []
    calls = Counter[Any]()
    seen: dict[Any, set[tuple[bool, int]]] = defaultdict(set)
    for span in recorder.spans:
        if span.end is None:
            continue  # its wait was outside
        moment = span.moment
        key, step = (moment.site, moment.direction), (span.is_exchange, moment.number)
        if step in seen[key]:
            seen[key].clear()
            calls[key] += 1
        seen[key].add(step)
        begin, end = recorder.seconds(span.begin), recorder.seconds(span.end)
        waited = end - recorder.seconds(span.wait) if span.is_exchange else 0.0
        runs.append(_Run(moment, _name_of(span), span.is_exchange, calls[key], begin, end, waited))
    return runs


def _name_of(span: Span) -> str:
    attention, place = span.moment.attention, span.moment.number - 1
    if attention is not None and not attention.is_per_batch:
        plan = _plan_of(attention, span.moment.direction)
        names = _exchanges_of(plan) if span.is_exchange else _tiles_of(plan, attention.rank)
        # A tile may be computed in parts of its rows.
        is_known = span.is_exchange or span.moment.total in (0, len(names))
        if is_known and place < len(names):
            return names[place]
    return f"exchange {place + 1}" if span.is_exchange else "tiles"


def _plan_of(attention: Attention, direction: str) -> Plan:
    return (forward_plan if direction == "forward" else backward_plan)(attention.recipe)


def _exchanges_of(plan: Plan) -> Sequence[str]:
    """Return the names of the exchanges, in the order in which every rank starts them."""
    started = [("fetch 0", plan.stages[0].fetch)]
    for index, stage in enumerate(plan.stages):
        following = plan.stages[index + 1].fetch if index + 1 < len(plan.stages) else ()
        started += [(f"fetch {index + 1}", following), (f"home {index}", stage.home)]
    return [name for name, transfers in started if transfers]


def _tiles_of(plan: Plan, rank: int) -> Sequence[str]:
    """Return the stage of each tile of a rank."""
    program = plan.program(rank)
    return [f"tiles {index}" for index, stage in enumerate(program) for _ in stage.tiles]


@cache
def _events(attention: Attention, direction: str, machine: Machine, batch: int) -> Sequence[Event]:
    loads = loads_of(_plan_of(attention, direction), machine)
    names = ("fetch", "home", "flops", "wasted")
    loads = replace(loads, **{name: batch * getattr(loads, name) for name in names})
    return loads.events(machine)
