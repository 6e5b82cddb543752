"""Plans of attentions by their sizes, and what their ranks receive."""

from __future__ import annotations

from typing import Any

from cp_inductor.plan import Plan, plan_attention


def make_plan(
    world_size: int, tokens: int, heads: int, kv_heads: int | None = None, **how: Any
) -> Plan:
    """Plan an attention of so many tokens on each rank, with a head dim of 64, or as `how` says."""
    sizes = {"seq_len": world_size * tokens, "num_heads": heads, "num_kv_heads": kv_heads}
    return plan_attention(world_size=world_size, **{**sizes, "head_dim": 64, **how})


def received_bytes(plan: Plan) -> list[int]:
    """Return what each rank receives, forward and backward."""
    backward = plan.backward()
    ranks = range(plan.grid.world_size)
    return [plan.bytes_received(rank) + backward.bytes_received(rank) for rank in ranks]
