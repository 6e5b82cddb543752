"""Passes with the signature that lists of graph passes want: `(gm, example_inputs) -> gm`.

    out, lse = cp_inductor::attention(q, k, v, ...)     traced by make_fx, forward and backward
      => lower_attention
    arriving = start(k, v);  out_0 = tile(q, k, v);  kv = wait(arriving);  out_1 = tile(q, kv)
      => schedule_exchange
    arriving = start(k, v);  other compute;  out_0 = tile(...);  kv = wait(arriving);  ...

For those who trace a whole training step and compile it with passes of their own, as torchtitan's
graph trainer does. Trace in a region (`cp_inductor.context_parallel`) or over DTensors: then the
graph has our ops in place of the attentions.

Assumes: nodes carry `val`, as make_fx and AOTAutograd leave it. Run `lower_attention` first, and
both before passes that compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.errors import InvalidArgument
from cp_inductor.flags import check_options
from cp_inductor.passes.pipeline import Lowering, Stage, run_passes

# The options of a schedule.
SCHEDULED_BY = {"schedule", "memory_budget_bytes", "machine"}
SCHEDULED_BY |= {"link_bytes_per_s", "device_flops_per_s"}


def lower_attention(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> fx.GraphModule:
    """Expand the captured attentions of a graph into exchanges and tiles, in place.

    A graph without them, or whose attentions were lowered before, stays as it is.

    Args:
        gm: a forward, a backward, or both in one graph.
        example_inputs: not read.

    Returns:
        gm.
    """
    run_passes(Stage.LOWER, Lowering(gm, "forward", PlanOptions.read({})[0]))
    return gm


def schedule_exchange(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None, **options: Any
) -> fx.GraphModule:
    """Reorder a lowered graph so that compute hides its exchanges, in place.

    The order of collectives stays, so ranks agree on it as before.

    Args:
        gm: a graph of `lower_attention`.
        example_inputs: not read.
        options: "schedule", "memory_budget_bytes", "link_bytes_per_s", "device_flops_per_s", as in
            `torch.compile(options=...)`; give them with `functools.partial`.

    Returns:
        gm.

    Raises:
        UnsupportedStrategy: there is no such schedule.
        InvalidArgument: an option is unknown, or the budget is not a number of bytes.
    """
    check_options(options)
    unknown = options.keys() - SCHEDULED_BY
    if unknown:
        raise InvalidArgument(
            site="schedule_exchange",
            expected="options of the schedule",
            got=", ".join(sorted(unknown)),
            remedy="see docs/options.md for their names",
        )
    # A graph of both directions holds what its forward saves until its backward reads it.
    run_passes(Stage.SCHEDULE, Lowering(gm, "forward", PlanOptions.read(options)[0]))
    return gm
