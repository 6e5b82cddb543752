"""The cost of a plan, in sympy: flops, bytes and seconds.

    received = B * S * (...) bytes         seconds = max(compute, exchange) + what is exposed

`cost_of` counts a plan exactly. It returns expressions in the sizes of the attention, for the rank
that has the largest value of each; `Plan.simulate` checks the plan against them.

Units: bytes, seconds, floating-point operations. All chunks are taken to hold equally many tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy
from sympy import Expr, Integer, Max, Rational, Symbol

from cp_inductor.plan.ir import (
    NUM_MATMULS,
    STATISTIC_BYTES,
    Mask,
    Payload,
    PlanData,
    Tile,
    Transfer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def _symbol(name: str) -> Symbol:
    return Symbol(name, positive=True)


B, S, H, G, D, E, P, N = map(_symbol, ("B", "S", "H", "H_kv", "D", "itemsize", "P", "stages"))
ALPHA, BETA, RATE = map(_symbol, ("alpha", "beta", "rate"))

STATISTIC = Max(STATISTIC_BYTES, E)


@dataclass(frozen=True, slots=True)
class Cost:
    """Expressions in B, S, H, H_kv, D, itemsize, P, stages, alpha, beta and rate.

    Attributes:
        flops: of the tiles of the busiest rank.
        received_bytes: of the rank that receives most.
        peak_bytes: the most that a rank holds at once besides its own shards.
        seconds: compute and exchange, overlapped as the stages allow.
    """

    flops: Expr
    received_bytes: Expr
    peak_bytes: Expr
    seconds: Expr


def bytes_per_head_token(payload: Payload) -> Expr:
    """Return the bytes of a payload per token, head and batch entry; see `ir.bytes_per_row`."""
    return len(payload.tensors) * D * E + len(payload.statistics) * STATISTIC


def cost_of(plan: PlanData) -> Cost:
    """Return the cost of a plan; exact if all chunks hold equally many tokens."""
    ranks = range(plan.grid.world_size)
    flops, received = most_flops(plan), most_received_bytes(plan)
    moments = ((rank, index) for rank in ranks for index in range(len(plan.stages)))
    fullest = max(moments, key=lambda at: sum(map(plan.num_bytes, _held(plan, *at))))
    peak = _bytes(plan, _held(plan, *fullest))
    num_exchanges = sum(bool(stage.fetch) + bool(stage.home) for stage in plan.stages)
    compute = flops / RATE
    exchange = received / BETA + num_exchanges * ALPHA
    first = exchange / max(1, num_exchanges)
    seconds = Max(compute, exchange) + first if num_exchanges else compute
    return Cost(flops, received, peak, seconds)


def most_flops(plan: PlanData) -> Expr:
    """Return the flops of the busiest rank, in integers, because expressions are slow to build."""
    return _flops(plan, max(range(plan.grid.world_size), key=plan.flops))


def most_received_bytes(plan: PlanData) -> Expr:
    """Return the bytes of the rank that receives most."""
    rank = max(range(plan.grid.world_size), key=plan.bytes_received)
    arriving = (
        transfer
        for stage in plan.program(rank)
        for transfer in (*stage.fetch, *stage.home)
        if transfer.destination == rank
    )
    return _bytes(plan, arriving)


def _bytes(plan: PlanData, transfers: Iterable[Transfer]) -> Expr:
    """Sum up transfers: (chunks x heads) of each payload, times its bytes."""
    counts: Counter[Payload] = Counter()
    for transfer in transfers:
        counts[transfer.payload] += len(transfer.span) * len(transfer.heads)
    total: Expr = Integer(0)
    for payload, count in counts.items():
        of_keys = payload.is_of_keys
        num_heads, symbol = (plan.shape.num_kv_heads, G) if of_keys else (plan.shape.num_heads, H)
        share = Rational(count, num_heads * plan.grid.num_chunks)
        length = S * _key_ratio(plan) if of_keys else S
        total += share * B * length * symbol * bytes_per_head_token(payload)
    return total


def _key_ratio(plan: PlanData) -> Rational:
    """Keys per query: 1, except for cross-attention."""
    return Rational(plan.grid.key_length, plan.grid.query_length)


def _flops(plan: PlanData, rank: int) -> Expr:
    total: Expr = Integer(0)
    num_matmuls = NUM_MATMULS[plan.direction]
    for stage in plan.program(rank):
        for tile in stage.tiles:
            total += 2 * num_matmuls * B * D * H * _pairs(plan, tile)
    return sympy.expand(total)


def _pairs(plan: PlanData, tile: Tile) -> Expr:
    """Return the pairs of a tile, times its fraction of the heads."""
    share = Rational(len(tile.heads), plan.shape.num_heads)
    chunk = S / plan.grid.num_chunks
    queries = sum(map(len, tile.queries)) * chunk
    if tile.mask is Mask.CAUSAL:
        return share * queries * (queries + 1) / 2
    return share * queries * sum(map(len, tile.keys)) * chunk * _key_ratio(plan)


def _held(plan: PlanData, rank: int, index: int) -> list[Transfer]:
    """Return what a rank holds of others in a stage.

    That is everything fetched so far, the next stage's fetch, and results that are being sent home.
    """
    program = plan.program(rank)
    arrived = [t for stage in program[: index + 2] for t in stage.fetch if t.destination == rank]
    return arrived + [t for stage in program[max(0, index - 1) : index + 1] for t in stage.home]


def sizes_of(plan: PlanData) -> dict[Symbol, int]:
    """Return the values of the symbols that a plan fixes."""
    shape, grid = plan.shape, plan.grid
    return {
        B: shape.batch,
        S: grid.query_length,
        H: shape.num_heads,
        G: shape.num_kv_heads,
        D: shape.head_dim,
        E: shape.itemsize,
        P: grid.world_size,
        N: len(plan.stages),
    }
