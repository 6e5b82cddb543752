"""The plan that users hold: `PlanData` with methods to simulate and print it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cp_inductor.plan.ir import PlanData
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.picture import draw_plan
from cp_inductor.plan.simulate import simulate
from cp_inductor.plan.text import format_plan
from cp_inductor.plan.timeline import Timeline, loads_of
from cp_inductor.plan.transfers import plan_backward


@dataclass(frozen=True)
class Plan(PlanData):
    """Which rank computes which tile of an attention, what moves, and when; for all ranks."""

    def format(self) -> str:
        """Return the plan as text, one line per action."""
        return format_plan(self)

    def __str__(self) -> str:
        return self.format()

    def simulate(self, machine: Machine | None = None) -> Timeline:
        """Execute all ranks abstractly; raise `InvalidPlan` if the plan is wrong."""
        return simulate(self, machine)

    def draw(self, path: str | Path) -> None:
        """Write a picture of who computes which (query, key) pairs, for all heads.

        Rows are queries, columns are keys, each color is a rank, and pale areas are under a mask
        that leaves out some of their pairs. Heads that are computed by the same ranks share a
        panel.

        Args:
            path: ends in .png or .svg.

        Raises:
            InvalidArgument: the path ends otherwise, or matplotlib is not installed
                (``pip install 'cp-inductor[draw]'``).
        """
        draw_plan(self, path)

    def write_trace(self, path: str | Path, machine: Machine | None = None) -> None:
        """Write the predicted timeline as a trace for https://ui.perfetto.dev or chrome://tracing.

        Each rank is a process with two lanes: tiles, and exchanges.

        Args:
            path: of the file, which is JSON.
            machine: to predict for.
        """
        machine = machine or Machine()
        events = loads_of(self, machine).events(machine)
        trace: list[dict[str, object]] = []
        for rank in range(self.grid.world_size):
            names = [("process_name", 0, f"rank {rank}")]
            names += [("thread_name", lane, of) for lane, of in enumerate(("tiles", "exchange"))]
            for kind, lane, name in names:
                entry = {"name": kind, "ph": "M", "pid": rank, "tid": lane}
                trace.append({**entry, "args": {"name": name}})
            for event in events:
                span = {"ts": event.start_s * 1e6, "dur": float(event.seconds[rank]) * 1e6}
                at = {"pid": rank, "tid": int(event.is_exchange)}
                trace.append({"name": event.name, "ph": "X", **at, **span})
        Path(path).write_text(json.dumps({"traceEvents": trace}))

    def backward(self) -> Plan:
        """Return the plan of the backward pass, derived from this one."""
        return plan_backward(self)
