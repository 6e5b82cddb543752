"""The order of the passes, in one place.

Dynamo graph        replay_writes, before all others: they read values that nothing writes to
                    inline_multi_head . inline_varlen
                    find_attention (recognize_mask)
                    drop_block_masks
                    check_sequence . check_placements
                    capture_attention . translate_policy
                    whole_scalars . separate_outputs, of what leaves the graph
AOTAutograd
aten graphs         lower_attention . schedule_exchange . verify_graph . number_nodes
Inductor            its own passes, then PinOrder
cp_aot_eager        relax_views, because what is interpreted has the strides of eager kernels
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._dynamo.utils import counters
from torch._logging import trace_structured

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.errors import CPError
from cp_inductor.graph.collectives import STARTS
from cp_inductor.graph.nodes import graphs_of
from cp_inductor.kept import cache
from cp_inductor.mask.describe import describe
from cp_inductor.mask.language import is_of_pairs
from cp_inductor.passes.align_attention import align_attention
from cp_inductor.passes.capture_attention import bytes_sent, capture_attention
from cp_inductor.passes.check_placements import check_placements
from cp_inductor.passes.check_sequence import check_sequence
from cp_inductor.passes.drop_block_masks import drop_block_masks
from cp_inductor.passes.find_attention import (
    Site,
    find_attention,
    has_attentions,
    judge_attention,
    regions_of,
    remove_marks,
)
from cp_inductor.passes.inline_multi_head import inline_multi_head
from cp_inductor.passes.inline_varlen import inline_varlen
from cp_inductor.passes.lower_attention import lower_attention
from cp_inductor.passes.pin_order import number_nodes
from cp_inductor.passes.schedule_exchange import Scheduled, Scheduling, schedule_exchange
from cp_inductor.passes.translate_policy import translate_policy
from cp_inductor.passes.verify_graph import verify_graph
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.plan.text import format_program
from cp_inductor.run.batch import BACKWARD as BATCH_BACKWARD
from cp_inductor.run.batch import FORWARD as BATCH_FORWARD
from cp_inductor.run.batch import BatchAttention
from cp_inductor.tiles.tile_ops import TILE_OPS
from cp_inductor.torch_private.dynamo import relate_local_lengths, settle_local_lengths
from cp_inductor.torch_private.sizes import forget_fakes, number_sizes_from, size_hint

log = logging.getLogger("cp_inductor")

# Among the meta of a graph: whether its layout depends on what torch's context parallelism was
# doing when it was captured.
LAYOUT_FOUND = "cp_inductor_layout_found"


def capture(
    gm: fx.GraphModule,
    axis: SequenceAxis | None,
    plan_options: PlanOptions,
    is_checked: bool = True,
    seq_dims: Mapping[str, int | None] | None = None,
) -> int:
    """Find and capture the attentions of a Dynamo graph, and return how many there are.

    Args:
        gm: changed in place; unchanged if an attention is refused.
        axis: the axis of the mesh that the user named, if any.
        plan_options: the choices for plans.
        is_checked: refuse operations other than attention that mix tokens of plain shards.
        seq_dims: see `check_sequence`.

    Raises:
        CPError: an attention is sharded along the sequence and cannot be rewritten, or something
            else mixes the tokens of plain shards.
    """
    try:
        # First, for what it uncovers. It changes how attention is written, not what it is.
        inline_multi_head(regions_of(gm) if axis is None else graphs_of(gm))
        inline_varlen(graphs_of(gm))
        align_attention(gm, has_axis=axis is not None)
        if has_attentions(gm):
            relate_local_lengths(gm.graph)
        sites = find_attention(gm, axis, plan_options)
        # Before the check, which has nothing to say of how a BlockMask was made.
        drop_block_masks(gm, sites)
        if is_checked:
            check_sequence(gm, sites, seq_dims)
            check_placements(gm)
    except CPError:
        counters["cp_inductor"]["sites_refused"] += 1
        raise
    remove_marks(gm)
    if not sites:
        return 0
    counters["cp_inductor"]["sites_found"] += len(sites)
    for site in sites:
        _report_site(site)
    gm.meta[LAYOUT_FOUND] = any(site.is_layout_found for site in sites)
    # Masks have been read, which may make numbers of whole lengths.
    settle_local_lengths(gm.graph)
    with _GraphLog(gm, "dynamo"):
        capture_attention(gm, sites)
        translate_policy(gm)
    counters["cp_inductor"]["sites_rewritten"] += len(sites)
    return len(sites)


def judge(
    gm: fx.GraphModule,
    axis: SequenceAxis | None,
    plan_options: PlanOptions,
    is_checked: bool = True,
    seq_dims: Mapping[str, int | None] | None = None,
) -> list[tuple[str, Site | CPError | None]]:
    """Return what `capture` would do with every attention of a Dynamo graph, in order.

    It takes the arguments of `capture`. The graph must not be used afterwards.
    """
    try:
        inline_multi_head(regions_of(gm) if axis is None else graphs_of(gm))
        inline_varlen(graphs_of(gm))
        align_attention(gm, has_axis=axis is not None)
    except CPError as error:
        return [(error.site, error)]
    verdicts = list(judge_attention(gm, axis, plan_options))
    sites = [verdict for _, verdict in verdicts if isinstance(verdict, Site)]
    try:
        drop_block_masks(gm, sites)
        # An attention that was refused is no site, and would be refused once more.
        if is_checked and not any(isinstance(verdict, CPError) for _, verdict in verdicts):
            check_sequence(gm, sites, seq_dims)
    except CPError as error:
        return [*verdicts, (error.site, error)]
    return verdicts


def lower(
    gm: fx.GraphModule,
    kind: str,
    scheduling: Scheduling,
    decompositions: Mapping[Any, Any],
    check_tables: bool = False,
) -> None:
    """Lower the captured attentions of a graph from AOTAutograd, and schedule their exchanges.

    Args:
        gm: changed in place.
        kind: "forward", "backward" or "inference".
        scheduling: the choices of the user.
        decompositions: aten op to function, so that the expansion uses the ops of the rest of the
            graph.
        check_tables: let ranks compare the tables of masks and the seeds of dropout.
    """
    with _GraphLog(gm, kind) as graph_log:
        _number_sizes(gm, kind)
        # A backward reads what its forward read.
        check_tables = check_tables and kind != "backward"
        if not lower_attention(gm, decompositions=decompositions, note_tables=check_tables):
            graph_log.cancel()
            _say_nothing_found()
            return
        order = verify_graph(gm)
        for graph in graphs_of(gm):
            if any(node.target in STARTS for node in graph.nodes):
                _report_schedule(kind, schedule_exchange(graph, kind, scheduling))
        gm.recompile()
        assert verify_graph(gm) == order, "the schedule changed the order of collectives"
        # Numbered last: the order is that of the graph as all ranks leave it here.
        for graph in graphs_of(gm):
            number_nodes(graph)
    targets = [node.target for graph in graphs_of(gm) for node in graph.nodes]
    counters["cp_inductor"]["starts"] += sum(target in STARTS for target in targets)
    counters["cp_inductor"]["tiles"] += sum(target in TILE_OPS for target in targets)


def _number_sizes(gm: fx.GraphModule, kind: str) -> None:
    """Have the graphs of a model name the sizes that only data says alike, cached or not."""
    for graph in graphs_of(gm):
        for node in graph.nodes:
            if node.target in (BATCH_FORWARD, BATCH_BACKWARD):
                number_sizes_from(node.args[0].meta["val"], 2 if kind == "backward" else 1)
                forget_fakes()
                return


def _report_schedule(kind: str, scheduled: Scheduled) -> None:
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


@cache
def _say_nothing_found() -> None:
    """Log it once: graphs without attention are common, models without attention are not."""
    log.info("no attention over a sharded sequence in this graph; it is left as it is")


def _report_site(site: Site) -> None:
    if isinstance(site.attention, BatchAttention):
        log.info(
            "%s: %s on %s, rank %d of %d, planned once per batch in %d stages, %s",
            site.name,
            describe(site.mask.rule),
            site.axis.name,
            site.axis.rank,
            site.axis.world_size,
            site.attention.stages,
            site.attention.kernel,
        )
        counters["cp_inductor"]["sites_planned_at_run_time"] += 1
        return
    counters["cp_inductor"]["bytes_sent"] += bytes_sent(site)
    recipe = site.attention.recipe
    log.info(
        "%s: %s on %s, rank %d of %d, %s in %d stages, %s, %.1f%% of pairs skipped,"
        " sends %d bytes per run",
        site.name,
        describe(site.mask.rule),
        site.axis.name,
        site.axis.rank,
        site.axis.world_size,
        recipe.strategy,
        recipe.stages,
        site.attention.kernel,
        100 * forward_plan(recipe).skipped,
        bytes_sent(site),
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
                "the captured" if site.is_flex else "attn_mask",
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


class _GraphLog:
    """Log a graph before and after a change, to the logger and as artifacts of TORCH_TRACE."""

    def __init__(self, gm: fx.GraphModule, kind: str) -> None:
        self.gm, self.kind, self.is_cancelled = gm, kind, False

    def __enter__(self) -> _GraphLog:
        self.before = self._text()
        return self

    def cancel(self) -> None:
        """Log nothing, because nothing was changed."""
        self.is_cancelled = True

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None or self.is_cancelled:
            return
        for moment, text in (("before", self.before), ("after", self._text())):
            name = f"cp_inductor_{self.kind}_graph_{moment}"
            log.debug("%s\n%s", name, text)
            _trace_artifact(name, text)

    def _text(self) -> str:
        text: str = self.gm.print_readable(print_output=False, include_stride=True)
        return text


def _trace_artifact(name: str, text: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
    )
