"""Execute a rank's part of a plan, or trace it: the loop over stages, and the tiles of each.

    fetch 0 . [start fetch i+1 . tiles i . wait home i-1 . start home i . wait fetch i+1] ...

Each fetch is in flight over the tiles of the stage before, each home over those of the stage after.

    tile q[0:2] x kv[2:6]
      =>
    query, key, value = rows.read(tile, ...)
    out, lse = kernel.forward(TileCall(query, key, value))
    rows.add(Payload.PARTIAL, tile, (out, lse))

A rank has a pool of rows: its own, and those that arrived. A tile reads parts of it and adds to
parts of the results. What a part is, is all that plans differ in: constant slices, which are views,
if the plan is known when a graph is compiled (`cp_inductor.run.views`), or a table of rows, which
are gathered, if the batch decides (`cp_inductor.run.tables`).

Shapes: B batch, H query heads, G key-value heads, S local queries, T local keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cp_inductor.plan import Payload
from cp_inductor.run.attention import Attention
from cp_inductor.run.merge import concatenate_all
from cp_inductor.run.store import concatenate
from cp_inductor.run.tables import Tables
from cp_inductor.run.views import Views
from cp_inductor.tiles.combine import accumulation_dtype, sum_grads
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.kernels import Partial

# What a rank has of a plan: its pool of rows, its tiles, and what was computed. Its tiles, and
# exchanges that it has started, are values of its own.
Rows = Views | Tables


def run_forward(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, *extras: Tensor
) -> list[Tensor]:
    """Attend to the keys of all ranks.

    Args:
        attention: what to compute.
        query: (B, H, S, D), this rank's shard, any strides.
        key, value: (B, G, T, D), this rank's shards.
        extras: tables of the rule; then the seed of dropout, or sizes and numbers of `plan_batch`.

    Returns:
        out (B, H, S, D) in the input dtype; lse (B, H, S) over the keys of all ranks; and the
        buffers of the exchanges that are kept for the backward.
    """
    rows = _kind_of(attention)(attention, (query, key, value), extras, is_backward=False)
    _run(rows, _attend)
    return [*rows.result(Payload.PARTIAL), *rows.kept]


def run_backward(
    attention: Attention,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Tensor,
) -> list[Tensor]:
    """Differentiate `run_forward`.

    Args:
        attention: as there.
        grad_out, query, out: (B, H, S, D), this rank's shards.
        key, value: (B, G, T, D), this rank's shards. Of these and query nothing but the shape and
            dtype is read unless `reads_shard`.
        lse: (B, H, S), over the keys of all ranks.
        rest: the extras of the forward, and the buffers that it kept.

    Returns:
        Gradients of query, key and value in their shapes and dtypes, summed in float32; and of the
        bias, if there is one.
    """
    extras, kept = rest[: attention.num_extras], rest[attention.num_extras :]
    rows = _kind_of(attention)(attention, (query, key, value), extras, is_backward=True)
    rows.begin_backward(grad_out, out, lse, kept)
    _run(rows, _differentiate)
    grads = [*rows.result(Payload.QUERY_GRAD), *rows.result(Payload.KEY_VALUE_GRAD)]
    return [*grads, rows.bias_grad()] if isinstance(rows, Views) and attention.has_bias else grads


def _kind_of(attention: Attention) -> type[Views] | type[Tables]:
    return Tables if attention.is_per_batch else Views


def _run(rows: Rows, compute: Callable[[Rows, Any], None]) -> None:
    """Run all stages of a rank."""
    homeward: Any = None
    fetching: Any = rows.start_fetch(0)
    rows.end_fetch(0, fetching)
    for stage in range(rows.num_stages):
        fetching = rows.start_fetch(stage + 1)
        for tile in rows.tiles(stage):
            compute(rows, tile)
        # What the stage before sent home was in flight over this stage's tiles.
        rows.end_home(homeward)
        homeward = rows.start_home(stage)
        rows.end_fetch(stage + 1, fetching)
    rows.end_home(homeward)


def _attend(rows: Rows, tile: Any) -> None:
    """Compute the partial result of a tile."""
    query, key, value = rows.read(tile, ("query", "key", "value"))
    partials = [kernel.forward(call) for _, kernel, call in rows.calls(tile, query, key, value)]
    rows.add(Payload.PARTIAL, tile, concatenate_all(partials, SEQUENCE_DIM))


def _differentiate(rows: Rows, tile: Any) -> None:
    """Compute the gradients of a tile."""
    names = ("grad_out", "query", "out", "lse", "key", "value")
    grad_out, query, out, lse, key, value = rows.read(tile, names)
    grads = []
    for part, kernel, call in rows.calls(tile, query, key, value):
        of_part = [grad_out, out, lse]
        if part != slice(None):
            of_part = [tensor[:, :, part] for tensor in of_part]
        grads.append(kernel.backward(call, of_part[0], Partial(*of_part[1:])))
    dq, dk, dv = (list(of_parts) for of_parts in zip(*grads, strict=True))
    rows.add(Payload.QUERY_GRAD, tile, [concatenate(dq, SEQUENCE_DIM)])
    # A sum of parts is rounded when it is added to what other tiles computed, and not before.
    dtype = accumulation_dtype(dk[0]) if len(dk) > 1 else None
    sums = [sum_grads(of_parts, dtype=dtype) for of_parts in (dk, dv)]
    rows.add(Payload.KEY_VALUE_GRAD, tile, sums)
