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
from cp_inductor.graph.nodes import graphs_of
from cp_inductor.kept import cache
from cp_inductor.mask.describe import describe
from cp_inductor.mask.language import is_of_pairs
from cp_inductor.passes.nodes import tiles_of
from cp_inductor.passes.schedule_exchange import Scheduled
from cp_inductor.passes.share_pieces import Piece
from cp_inductor.passes.sites import Site
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.plan.facade import format_program
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
    where = (site.name, describe(site.mask.rule), axis.name, axis.rank, axis.world_size)
    if site.attention.is_per_batch:
        log.info(
            "%s: %s on %s, rank %d of %d, planned once per batch in %d stages, %s",
            *where,
            site.attention.source.stages,
            kernel,
        )
        count("sites_planned_at_run_time")
        return
    recipe = site.attention.recipe
    # What this rank sends per run, forward and, if any, backward. Dynamic lengths count with their
    # values in the call being compiled.
    plans = [forward_plan(recipe)] + [backward_plan(recipe)] * torch.is_grad_enabled()
    num_bytes = site.batch * sum(plan.bytes_sent(axis.rank) for plan in plans)
    count("bytes_sent", num_bytes)
    log.info(
        "%s: %s on %s, rank %d of %d, %s in %d stages, %s, %.1f%% of pairs skipped,"
        " sends %d bytes per run",
        *where,
        recipe.strategy,
        recipe.stages,
        kernel,
        100 * forward_plan(recipe).skipped,
        num_bytes,
    )
    _warn_of_pairs(site)
    for plan in (forward_plan(recipe), backward_plan(recipe)):
        log.debug(
            "%s %s\n%s", site.name, plan.direction.value, format_program(plan, site.axis.rank)
        )


def _warn_of_pairs(site: Site) -> None:
    """Warn what a mask costs that has a value for every pair: the model builds it on every rank."""
    for node, indices in zip(site.mask.tables, site.mask.indices, strict=True):
        if is_of_pairs(indices):
            mask = node.meta["example_value"]
            log.warning(
                "%s: %s %s is used as a tensor of every query and key, %s, %.1f MiB; a"
                " mask that is computed from indices would take no memory",
                site.name,
                "the captured" if site.is_flex else "the mask",
                node.name,
                tuple(mask.shape),
                size_hint(mask.numel()) * mask.element_size() / (1 << 20),
            )
    if site.mask.is_bias_made:
        log.warning(
            "%s: what its score_mod adds is computed as a tensor of this rank's queries and all"
            " keys, because it requires a gradient or cannot be read",
            site.name,
        )


def report_schedule(kind: str, scheduled: Scheduled) -> None:
    """Log what the schedule of a graph costs, and what it would cost if nothing overlapped."""
    before, after = scheduled.before, scheduled.after
    for name, value in (
        ("peak_bytes", after.peak_bytes),
        ("peak_bytes_unscheduled", before.peak_bytes),
        ("memory_budget_bytes", scheduled.budget_bytes),
    ):
        key = f"{kind}_{name}"
        counters["cp_inductor"][key] = max(counters["cp_inductor"][key], value)
    log.info(
        "%s: estimated %.3f ms, %.3f ms of it exposed (%.3f ms if nothing overlapped); %d bytes"
        " alive at most, %d if nothing overlapped, %d of exchanges",
        kind,
        after.seconds * 1e3,
        after.exposed_s * 1e3,
        before.exposed_s * 1e3,
        after.peak_bytes,
        before.peak_bytes,
        after.exchange_bytes,
    )


def count_ops(gm: fx.GraphModule) -> None:
    """Count the starts and tiles of a lowered graph."""
    nodes = [
        node
        for graph in graphs_of(gm)
        if not isinstance(graph.owning_module, Piece)
        for node in graph.nodes
    ]
    count("starts", sum(node.target in STARTS for node in nodes))
    count("tiles", sum(len(tiles_of(node)) for node in nodes))


@cache
def say_nothing_found() -> None:
    """Log it once: graphs without attention are common, models without attention are not."""
    log.info("no attention over a sharded sequence in this graph; it is left as it is")


@contextmanager
def graph_logged(gm: fx.GraphModule, kind: str) -> Iterator[None]:
    """Log a graph before and after a change, to the logger and as artifacts of TORCH_TRACE.

    Nothing is logged if the change fails, or was none. Nor is anything printed that nobody reads:
    to print a graph takes as long as to lower it.
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
