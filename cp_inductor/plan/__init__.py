"""The pure decision: who computes which tile and what moves when. Imports no torch."""

from cp_inductor.plan.ring import Exchange, RingStep, TileMask, plan_ring

__all__ = ["Exchange", "RingStep", "TileMask", "plan_ring"]
