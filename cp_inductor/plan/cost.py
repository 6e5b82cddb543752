"""What a plan costs, in sympy: flops, bytes and seconds.

    received = B * S * (...) bytes         seconds = max(compute, exchange) + what is exposed

Two kinds of expressions. `cost_of` counts a plan, exactly, and returns expressions in the sizes of
the attention, of the rank for which each is largest; `Plan.simulate` holds the plan against them.
`estimate` knows a strategy without its plan, in closed form in the number of ranks; the choice of
strategy and stages evaluates these.

Units: bytes, seconds, floating-point operations. All tokens in chunks of equal length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import sympy
from sympy import Expr, Integer, Max, Rational, Symbol, sqrt

from cp_inductor.mask.language import without_tables
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan.checks import check_speed
from cp_inductor.plan.ir import Direction, Mask, Payload, PlanData, Shape, Tile, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, slots=True)
class Link:
    """What connects a rank to the others: seconds per exchange, bytes per second."""

    latency_s: float = 20e-6
    bytes_per_s: float = 50e9

    def __post_init__(self) -> None:
        check_speed("latency_s", self.latency_s, site="a link", is_zero_allowed=True)
        check_speed("bytes_per_s", self.bytes_per_s, site="a link")


@dataclass(frozen=True, slots=True)
class Device:
    """How fast a rank computes tiles, in floating-point operations per second."""

    flops_per_s: float = 500e12

    def __post_init__(self) -> None:
        check_speed("flops_per_s", self.flops_per_s, site="a device")


def _symbol(name: str) -> Symbol:
    return Symbol(name, positive=True)


B, S, H, G, D, E, P, N = map(_symbol, ("B", "S", "H", "H_kv", "D", "itemsize", "P", "stages"))
ALPHA, BETA, RATE = map(_symbol, ("alpha", "beta", "rate"))
SYMBOLS = (B, S, H, G, D, E, P, N, ALPHA, BETA, RATE)

# float32 statistics of a row, whatever the dtype of the rest (float64 for float64).
STATISTIC = Max(4, E)


@dataclass(frozen=True, slots=True)
class Cost:
    """Expressions in B, S, H, H_kv, D, itemsize, P, stages, alpha, beta and rate.

    Attributes:
        flops: of the busiest rank's tiles.
        received_bytes: of the rank that receives most.
        peak_bytes: of tensors that a rank holds beside its own shards, at most.
        seconds: compute and exchange overlapped as the stages allow.
    """

    flops: Expr
    received_bytes: Expr
    peak_bytes: Expr
    seconds: Expr


def bytes_per_head_token(payload: Payload) -> Expr:
    """Return the bytes of a payload per token, head and batch entry; see `ir.bytes_per_row`."""
    row = D * E
    return {
        Payload.QUERY: row,
        Payload.KEY_VALUE: 2 * row,
        Payload.PARTIAL: row + STATISTIC,
        Payload.QUERY_GRAD_OUT: 2 * row + 2 * STATISTIC,
        Payload.GRAD_OUT: row + 2 * STATISTIC,
        Payload.QUERY_GRAD: row,
        Payload.KEY_VALUE_GRAD: 2 * row,
    }[payload]


def cost_of(plan: PlanData) -> Cost:
    """Return the cost of a plan: exact where every chunk holds as many tokens."""
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
    """Return the flops of the busiest rank, found in integers: expressions are dear to make."""
    return _flops(plan, max(range(plan.grid.world_size), key=plan.flops))


def most_received_bytes(plan: PlanData) -> Expr:
    """Return the bytes that reach the rank that receives most."""
    rank = max(range(plan.grid.world_size), key=plan.bytes_received)
    arriving = (
        transfer
        for stage in plan.program(rank)
        for transfer in (*stage.fetch, *stage.home)
        if transfer.destination == rank
    )
    return _bytes(plan, arriving)


def _bytes(plan: PlanData, transfers: Iterable[Transfer]) -> Expr:
    """Sum up transfers: (chunks x heads) of each payload, times what one weighs."""
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
    """Keys per query: 1 but for cross-attention."""
    return Rational(plan.grid.key_length, plan.grid.query_length)


def _flops(plan: PlanData, rank: int) -> Expr:
    total: Expr = Integer(0)
    num_matmuls = 2 if plan.direction is Direction.FORWARD else 5
    for stage in plan.program(rank):
        for tile in stage.tiles:
            total += 2 * num_matmuls * B * D * H * _pairs(plan, tile)
    return sympy.expand(total)


def _pairs(plan: PlanData, tile: Tile) -> Expr:
    """Return pairs of a tile, as a share of the heads."""
    share = Rational(len(tile.heads), plan.shape.num_heads)
    chunk = S / plan.grid.num_chunks
    queries = sum(map(len, tile.queries)) * chunk
    if tile.mask is Mask.CAUSAL:
        return share * queries * (queries + 1) / 2
    return share * queries * sum(map(len, tile.keys)) * chunk * _key_ratio(plan)


def _held(plan: PlanData, rank: int, index: int) -> list[Transfer]:
    """Return what a rank holds of others in a stage.

    What was fetched so far, the next stage's fetch, and results on their way home.
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


# --- Closed forms ----------------------------------------------------------------------------

# One rank's queries, keys and values, and statistics of its rows, in bytes.
_Q = B * S / P * H * D * E
_KV = 2 * B * S / P * G * D * E
_STAT = B * S / P * H * STATISTIC


@lru_cache(maxsize=64)
def estimate(strategy: str, mask: Mask, layout: str, *, is_training: bool) -> Cost:
    """Return the cost of a strategy for any number of ranks.

    The bytes of ring, allgather, zigzag rows and heads are those of their plans. Of blocks, whose
    plans are found by search, they are those of square blocks of average size, and a fifth for
    the rank that is worst off.
    """
    forward, backward = _closed_form(strategy, mask, layout)
    received = forward + backward if is_training else forward
    half = Rational(1, 2) if mask is Mask.CAUSAL else Integer(1)
    num_matmuls = 7 if is_training else 2
    flops = half * 2 * num_matmuls * B * H * D * S**2 / P
    # Only the last rank of an unbalanced row works on all of it.
    if mask is Mask.CAUSAL and (strategy in ("ring", "allgather") and layout == "contiguous"):
        flops = flops * (2 - 1 / P)
    own = 0 if strategy.startswith("heads") else half * 2 * num_matmuls * B * H * D * (S / P) ** 2
    compute, first_tiles = flops / RATE, own / RATE
    exchange = received / BETA
    exposed = Max(0, exchange / N - first_tiles)
    seconds = Max(compute, exchange) + exposed + N * ALPHA * (2 if is_training else 1)
    return Cost(flops, received, received / N * 2, seconds)


@lru_cache(maxsize=64)
def seconds_of(
    strategy: str, mask: Mask, layout: str, *, is_training: bool
) -> Callable[..., float]:
    """Return the estimated seconds as a function of the values of `SYMBOLS`, in their order."""
    cost = estimate(strategy, mask, layout, is_training=is_training)
    function: Callable[..., float] = sympy.lambdify(SYMBOLS, cost.seconds, modules="math")
    return function


def _closed_form(strategy: str, mask: Mask, layout: str) -> tuple[Expr, Expr]:
    """Return the bytes received forward and backward by the rank that receives most."""
    is_causal, others = mask is Mask.CAUSAL, P - 1
    if strategy.startswith("heads") and "+" in strategy:
        groups, rest = strategy.removeprefix("heads").split("+")
        return _closed_form_of_groups(int(groups), *_closed_form(rest, mask, layout))
    match strategy:
        case "ring" | "allgather":
            return others * _KV, others * _KV * (1 if is_causal and layout != "zigzag" else 2)
        case "rows" if not is_causal:
            return others * _KV, others * _KV * 2
        case "rows" if layout == "zigzag":
            return others * _KV, others * _KV * Rational(3, 2)
        case "rows":
            query = (4 * _Q + 3 * _STAT) / 2
            return others * _KV + query / 3, others * _KV * Rational(3, 2) + query
        case "heads":
            # KV heads that several ranks share go to each of them.
            heads = Max(1 / G, 1 / P) * _KV * others
            queries = _Q * others / P
            statistics = _STAT * others / P
            forward = 2 * queries + statistics + heads
            return forward, 3 * queries + 2 * statistics + 2 * heads
    assert strategy == "blocks", strategy
    side = sqrt(P / 2) if is_causal else sqrt(P)
    spread = Rational(6, 5) if is_causal else Integer(1)
    forward = (side - Rational(1, 2)) * (2 * _Q + _STAT + _KV)
    backward = (side - Rational(1, 2)) * (3 * _Q + 2 * _STAT + 2 * _KV)
    return spread * forward, spread * backward


def _closed_form_of_groups(groups: int, forward: Expr, backward: Expr) -> tuple[Expr, Expr]:
    """Split the heads among groups of ranks: fewer, longer shards, and heads to gather."""
    gather_forward, gather_backward = _closed_form("heads", Mask.FULL, "contiguous")
    # A group is one rank of the rest, with as many times the tokens and a part of the heads.
    kv_share = Max(1, groups / G)
    inner = {P: P / groups}
    within = {P: Integer(groups), S: S * groups / P}
    return tuple(
        rest.subs(inner) / groups * kv_share + gather.subs(within, simultaneous=True)
        for rest, gather in ((forward, gather_forward), (backward, gather_backward))
    )


def lower_bound(
    shape: Shape,
    world_size: int,
    length: int,
    rule: str,
    *,
    most_pairs: float = 0.0,
    is_kept: bool = False,
) -> float:
    """Return bytes that some rank must receive, forward and backward, whatever the plan.

    Of contiguous shards of T tokens, heads not split, and no rank with more than ``most_pairs``. A
    rank that works with X foreign queries and Y foreign keys reaches (T + X)(T + Y) pairs, of which
    some of its own square do not exist: T^2 / 2 under a causal mask. The mean rank receives
    c_q X + c_k Y bytes, counting with each foreign token what its owner gets back, and the least
    such sum for an area A = (T + X)(T + Y) is f(A) = 2 sqrt(c_q c_k A) - (c_q + c_k) T. That is
    concave from where it is zero, so the mean is least where ranks do either as much as needs
    nothing of others, or as much as they may: it lies on the chord between the two.

    Under a rule that reads run-time tables, pairs count that may exist: a plan that knows no table
    computes them.

    Args:
        shape: of the attention.
        world_size: number of ranks.
        length: of the sequence, of queries as of keys.
        rule: which pairs exist; see `cp_inductor.mask.rule`.
        most_pairs: of the busiest rank, of a head; those of the mean, if less.
        is_kept: what was fetched in the forward is kept for the backward.
    """
    row = shape.head_dim * shape.itemsize
    # q, q with the gradient of out, two results; k and v twice, and their gradients.
    queries = ((4 if is_kept else 5) * row + 3 * max(4, shape.itemsize)) * shape.num_heads
    keys = (4 if is_kept else 6) * row * shape.num_kv_heads
    queries, keys = queries * shape.batch, keys * shape.batch
    tokens = -(-length // world_size)
    pairs, missing = _count_pairs(rule, world_size, length)
    mean = pairs / world_size
    most = max(most_pairs, mean)
    alone = ((queries + keys) * tokens) ** 2 / (4 * queries * keys) - missing
    if mean <= alone:
        return 0.0
    bound = 2 * (queries * keys * (most + missing)) ** 0.5 - (queries + keys) * tokens
    return float(bound * (mean - alone) / (most - alone))


# Boxes along a side in which pairs are counted.
_NUM_BOXES = 512


@lru_cache(maxsize=64)
def _count_pairs(rule: str, world_size: int, length: int) -> tuple[int, int]:
    """Count pairs of a head: at least so many exist, and so many of each rank's square do not."""
    allowed = without_tables(Rule.parse(rule).allowed)
    shard = -(-length // world_size)
    # No box is of two ranks.
    size = max(1, shard // max(1, _NUM_BOXES // world_size))
    starts = [
        at
        for first in range(0, length, shard)
        for at in range(first, min(first + shard, length), size)
    ]
    stops = [*starts[1:], length]
    edges = np.array(starts, dtype=float), np.array(stops) - 1.0
    cells = Rule(allowed).cells(edges, edges)
    sizes = np.array(stops) - np.array(starts)
    area = np.outer(sizes, sizes)
    triangle = np.where(cells == Cell.CAUSAL, (area + sizes[:, None]) // 2, 0)
    pairs = int(np.where(cells == Cell.FULL, area, triangle).sum())
    absent = np.where(cells == Cell.EMPTY, area, 0) + np.where(triangle, area - triangle, 0)
    owners = np.array(starts) // shard
    missing = [int(absent[np.ix_(owners == r, owners == r)].sum()) for r in range(world_size)]
    return pairs, min(missing)
