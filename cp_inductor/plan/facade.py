"""The plan that users hold: `PlanData` with methods to simulate and print it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from cp_inductor.plan.cost import Device, Link
from cp_inductor.plan.ir import PlanData
from cp_inductor.plan.picture import draw_plan
from cp_inductor.plan.simulate import simulate
from cp_inductor.plan.text import format_plan, parse_plan
from cp_inductor.plan.timeline import Timeline
from cp_inductor.plan.transfers import plan_backward


@dataclass(frozen=True)
class Plan(PlanData):
    """Which rank computes which tile of an attention, what moves, and when; for all ranks."""

    @staticmethod
    def of(data: PlanData) -> Plan:
        """Return the same plan as an instance of this class."""
        return Plan(**{field.name: getattr(data, field.name) for field in fields(data)})

    @staticmethod
    def parse(text: str) -> Plan:
        """Return the plan that `format` wrote."""
        return Plan.of(parse_plan(text))

    def format(self) -> str:
        """Return the plan as text, one line per action, which `Plan.parse` reads."""
        return format_plan(self)

    def simulate(self, link: Link | None = None, device: Device | None = None) -> Timeline:
        """Execute all ranks abstractly; raise `InvalidPlan` if the plan is wrong."""
        return simulate(self, link, device)

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

    def backward(self) -> Plan:
        """Return the plan of the backward pass, derived from this one."""
        return Plan.of(plan_backward(self))
