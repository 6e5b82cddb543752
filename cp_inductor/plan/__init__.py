"""The pure decision: which rank computes which tile, what moves, and when. Imports no torch.

Recipe . resolve . forward_plan . Plan.backward        what every rank derives alike
Plan.program(rank)                                     what one rank executes
"""

from cp_inductor.plan.facade import Plan
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, Payload, Stage, Tile, Transfer
from cp_inductor.plan.machine import Device, Level, Machine
from cp_inductor.plan.planner import Recipe, backward_plan, forward_plan, plan_attention, resolve
from cp_inductor.plan.simulate import InvalidPlan
from cp_inductor.plan.strategies import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Device",
    "Grid",
    "InvalidPlan",
    "Level",
    "Machine",
    "Mask",
    "Payload",
    "Plan",
    "Recipe",
    "Span",
    "Stage",
    "Tile",
    "Transfer",
    "backward_plan",
    "forward_plan",
    "plan_attention",
    "resolve",
]
