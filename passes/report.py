"""Say what the passes found and did: the log, the counters, and the artifacts of TORCH_TRACE."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._logging import trace_structured

from cp_inductor.graph.collectives import STARTS
from cp_inductor.graph.nodes import modules_of
from cp_inductor.kept import cache
from cp_inductor.mask.language import is_of_pairs
from cp_inductor.mask.rule import describe
from cp_inductor.passes.attentions import Site
from cp_inductor.passes.lower_attention import Piece
from cp_inductor.passes.nodes import tiles_of
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.plan.facade import format_program
from cp_inductor.schedule.overlap import Measured
from cp_inductor.torch_private.sizes import size_hint

log = logging.getLogger("cp_inductor")
# What TORCH_TRACE writes: it has no handlers where nobody asked for a trace.
trace_log = logging.getLogger("torch.__trace")


def count(name: str, number: int = 1) -> None:
    """Add to one of the counters `torch._dynamo.utils.counters["cp_inductor"]`."""
    counters["cp_inductor"][name] += number


def report_site(site: Site) -> None:
    """Log an attention that is going to be rewritten, and how it is planned."""
    axis, kernel = site.axis, site.attention.kernel
    on_rank = f"{axis.name}, rank {axis.rank} of {axis.world_size}"
    where = f"{site.name}: {describe(site.mask.rule)} on {on_rank}"
    if site.attention.is_per_batch:
        stages = site.attention.source.stages
        log.info("%s, planned once per batch in %d stages, %s", where, stages, kernel)
        count("sites_planned_at_run_time")
        return
    recipe = site.attention.recipe
    forward, backward = forward_plan(recipe), backward_plan(recipe)
    # What this rank sends per run, forward and, if any, backward. Dynamic lengths count with their
    # values in the call being compiled.
    plans = [forward, backward] if torch.is_grad_enabled() else [forward]
    num_bytes = site.batch * sum(plan.bytes_sent(axis.rank) for plan in plans)
    count("bytes_sent", num_bytes)
    chosen = f"{recipe.strategy} in {recipe.stages} stages, {kernel}"
    cost = f"{100 * forward.skipped:.1f}% of pairs skipped, sends {num_bytes} bytes per run"
    log.info("%s, %s, %s", where, chosen, cost)
    for plan in (forward, backward):
        log.debug("%s %s\n%s", site.name, plan.direction.value, format_program(plan, axis.rank))
    # What has a value for every pair is built on every rank.
    for node, indices in zip(site.mask.tables, site.mask.indices, strict=True):
        if is_of_pairs(indices):
            mask = node.meta["example_value"]
            name = f"{'the captured' if site.is_flex else 'the mask'} {node.name}"
            mib = size_hint(mask.numel()) * mask.element_size() / (1 << 20)
            size = f"a tensor of every query and key, {tuple(mask.shape)}, {mib:.1f} MiB"
            remedy = "a mask that is computed from indices would take no memory"
            log.warning("%s: %s is used as %s; %s", site.name, name, size, remedy)
    if site.mask.is_bias_made:
        log.warning(
            "%s: what its score_mod adds is computed as a tensor of this rank's queries and all"
            " keys, because it requires a gradient or cannot be read",
            site.name,
        )


def report_schedule(kind: str, before: Measured, after: Measured, budget_bytes: int) -> None:
    """Log what the schedule of a graph costs, and what it would cost if nothing overlapped."""
    most = {"peak_bytes": after.peak_bytes, "peak_bytes_unscheduled": before.peak_bytes}
    for name, value in {**most, "memory_budget_bytes": budget_bytes}.items():
        key = f"{kind}_{name}"
        counters["cp_inductor"][key] = max(counters["cp_inductor"][key], value)
    total_ms, exposed_ms, most_ms = (
        f"{seconds * 1e3:.3f} ms" for seconds in (after.seconds, after.exposed_s, before.exposed_s)
    )
    log.info(
        f"{kind}: estimated {total_ms}, {exposed_ms} of it exposed ({most_ms} if nothing"
        f" overlapped); {after.peak_bytes} bytes alive at most, {before.peak_bytes} if nothing"
        f" overlapped, {after.exchange_bytes} of exchanges"
    )


def count_ops(gm: fx.GraphModule) -> None:
    """Count the starts and tiles of a lowered graph."""
    modules = (module for module in modules_of(gm) if not isinstance(module, Piece))
    nodes = [node for module in modules for node in module.graph.nodes]
    count("starts", sum(node.target in STARTS for node in nodes))
    count("tiles", sum(len(tiles_of(node)) for node in nodes))


@cache
def say_nothing_found() -> None:
    """Log it once: graphs without attention are common, models without attention are not."""
    log.info("no attention over a sharded sequence in this graph; it is left as it is")


@contextmanager
def graph_logged(gm: fx.GraphModule, kind: str) -> Iterator[None]:
    """Log a graph before and after a change, to the logger and as artifacts of TORCH_TRACE.

    Nothing is logged if the change fails, or was none, or nobody reads it: to print a graph takes
    as long as to lower it.
    """
    if not (log.isEnabledFor(logging.DEBUG) or trace_log.handlers):
        yield
        return
    print_graph = partial(gm.print_readable, print_output=False, include_stride=True)
    before = print_graph()
    yield
    after = print_graph()
    for moment, text in (("before", before), ("after", after)) if before != after else ():
        name = f"cp_inductor_{kind}_graph_{moment}"
        log.debug("%s\n%s", name, text)
        metadata: Any = partial(dict, name=name, encoding="string")
        trace_structured("artifact", metadata, payload_fn=partial(str, text))
