"""The list of passes: which there are, on which graph each runs, in which order, and why there.

    Dynamo graph      FIND, REWRITE
    AOTAutograd
    aten graphs       LOWER, SCHEDULE; INTERPRET
    Inductor          its own passes, then POST_GRAD

Everybody runs this one list. `torch.compile` runs all of it, `cp_aot_eager` interprets in place of
Inductor, `explain` ends behind FIND, `cross_compile` and the rehearsal are compiles for another
device (whose joint graph `inspect.compile_for` moves there), and `backend.graph_passes` are LOWER
and SCHEDULE of a step that somebody else traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.errors import CPError
from cp_inductor.graph.collectives import STARTS, is_start
from cp_inductor.graph.nodes import graphs_of, nodes_of
from cp_inductor.modules.along_sequence import GATHERS
from cp_inductor.modules.weights import check_ties
from cp_inductor.ops.attention import attention_of
from cp_inductor.passes import report
from cp_inductor.passes.align_attention import align_attention, inline_multi_head, inline_varlen
from cp_inductor.passes.attentions import ATTENTIONS, Site, Verdict, has_masks
from cp_inductor.passes.capture_attention import capture_attention, drop_block_masks
from cp_inductor.passes.check_mesh import check_mesh, check_placements, check_ways
from cp_inductor.passes.check_sequence import check_sequence
from cp_inductor.passes.complete_outputs import (
    Sharing,
    complete_outputs,
    drop_idle_objects,
    translate_policy,
)
from cp_inductor.passes.find_attention import find_attention, groups_of_sequence
from cp_inductor.passes.graph_types import Checking
from cp_inductor.passes.lower_attention import lower_attention
from cp_inductor.passes.merge_starts import bucket_sums, merge_starts
from cp_inductor.passes.note_draws import note_draws
from cp_inductor.passes.pin_order import number_nodes, pin_order, relax_views
from cp_inductor.passes.replay_writes import replay_writes
from cp_inductor.passes.schedule_exchange import schedule_exchange
from cp_inductor.passes.settings import Settings
from cp_inductor.passes.verify_graph import label_exchanges, number_attentions, verify_graph
from cp_inductor.region.marks import regions_of, remove_marks
from cp_inductor.region.modes import typers_of_program
from cp_inductor.region.regions import groups_of_program
from cp_inductor.torch_private.dynamo import (
    guard_whole_lengths,
    relate_local_lengths,
    settle_local_lengths,
)
from cp_inductor.torch_private.inductor import is_bisected_away
from cp_inductor.torch_private.sizes import forget_fakes
from cp_inductor.trust.agreement import tell_refusal


class Stage(Enum):
    """On which graph a pass runs."""

    FIND = "find"  # Dynamo's. Attentions are found, and all that is refused is refused here.
    REWRITE = "rewrite"  # The same, in which nothing was refused.
    # A forward, backward or inference graph of AOTAutograd, before Inductor's cache is asked.
    LOWER = "lower"
    SCHEDULE = "schedule"  # The same, with exchanges and tiles.
    INTERPRET = "interpret"  # The same, if no Inductor follows.
    POST_GRAD = "post-grad"  # The same, after Inductor's own passes.


@dataclass(frozen=True, slots=True)
class Pass:
    """One line of the list, run with the `Capture`, the `Lowering`, or the graph of its stage."""

    stage: Stage
    name: str
    run: Callable[[Any], object]
    # Asked right before.
    is_wanted: Callable[[Any], bool] = lambda _: True
    # Numbers are the same without it, so that torch's bisector may leave it out.
    is_spare: bool = False
    # The attribute in which what it returns is kept, if it is.
    keeps: str = ""


@dataclass
class Capture:
    """A Dynamo graph on its way through FIND and REWRITE."""

    gm: fx.GraphModule
    settings: Settings
    # The verdicts alone are asked for: warnings that are given once are for the compile.
    is_explained: bool = False
    verdicts: list[tuple[str, Verdict]] = field(default_factory=list)
    kept: tuple[int, ...] = ()  # places of the inputs that are left at the end
    types: Checking | None = None  # what checks calls of the graph, if they must be
    sharing: Sharing = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        """The attentions to rewrite."""
        return [verdict for _, verdict in self.verdicts if isinstance(verdict, Site)]

    @cached_property
    def has_attention(self) -> bool:
        """Whether the graph had any attention, including those that are left alone."""
        return any(node.target in ATTENTIONS for node in nodes_of(self.gm))

    @cached_property
    def is_searched(self) -> bool:
        """Whether attentions are looked for.

        DTensor's handler computes the same where nothing is to be rewritten, but knows no masks.
        Plain tensors have no handler, and would attend within their shard.
        """
        is_asked_for = self.settings.enabled or self.settings.axis or typers_of_program()
        return bool(is_asked_for or has_masks(self.gm) or regions_of(self.gm))

    @property
    def is_checked(self) -> bool:
        """Whether operations other than attention are looked at."""
        return self.is_searched and self.settings.check_sequence

    def find(self) -> None:
        """Find all attentions; raise the first error among the verdicts."""
        self.verdicts += find_attention(self.gm, self.settings.axis, self.settings.plan_options)
        for _, verdict in self.verdicts:
            if isinstance(verdict, CPError):
                raise verdict


@dataclass
class Lowering:
    """A graph of AOTAutograd on its way through LOWER, SCHEDULE and INTERPRET."""

    gm: fx.GraphModule
    kind: str  # "forward", "backward" or "inference"
    options: PlanOptions
    # By op of aten, as the rest of the graph is decomposed.
    decompositions: Mapping[Any, Any] = field(default_factory=dict)
    check_tables: bool = False  # ranks compare the tables of masks and the seeds of dropout
    # The numbers of `number_attentions`, from the forward of a compile to its backward.
    place_of: dict[Any, int] = field(default_factory=dict)
    # Until then fake tensors whose sizes only data says are not remembered, by Inductor either.
    until: ExitStack = field(default_factory=ExitStack)
    num_lowered: int = 0
    order: list[str] | None = None  # of the collectives, once it is known

    def lower_attention(self) -> None:
        """Lower all attentions. A backward reads tables that its forward has compared."""
        is_noted = self.check_tables and self.kind != "backward"
        attentions = filter(None, map(attention_of, nodes_of(self.gm)))
        if any(attention.is_per_batch for attention in attentions):
            forget_fakes(self.until)
        self.num_lowered = lower_attention(self.gm, self.decompositions, note_tables=is_noted)

    def schedule_exchanges(self) -> None:
        """Schedule every graph that starts an exchange of attentions or of recurrences."""
        for graph in graphs_of(self.gm):
            if any(node.target in STARTS or _passes_states(node) for node in graph.nodes):
                costs = schedule_exchange(graph, self.kind, self.options)
                report.report_schedule(self.kind, *costs)
        self.gm.recompile()

    def verify(self) -> None:
        """Verify the graph, and that its collectives are in the order that they had before."""
        order = verify_graph(self.gm)
        assert self.order in (None, order), "the schedule changed the order of collectives"
        self.order = order


def _passes_states(node: fx.Node) -> bool:
    return is_start(node) and GATHERS in node.meta.get("custom", {})


def _of_all_graphs(change: Callable[[fx.Graph], object]) -> Callable[[Lowering], object]:
    return lambda work: [change(graph) for graph in graphs_of(work.gm)]


FIND, REWRITE, LOWER, SCHEDULE, INTERPRET, POST_GRAD = Stage
SEARCHED, FOUND = attrgetter("is_searched"), attrgetter("sites")

# fmt: off
PASSES = (
    # Ahead of all: what it refuses is the model, whatever the graph does.
    Pass(FIND, "check_ties", lambda work: check_ties(work.gm.graph)),
    Pass(FIND, "check_ways", lambda work: check_ways(work.gm)),
    # Before all that read values: behind it every value is what it is on one process.
    Pass(FIND, "replay_writes", lambda work: replay_writes(work.gm)),
    # Before attentions are captured: what is drawn may be a mask beside DTensors.
    Pass(FIND, "note_draws", lambda work: note_draws(work.gm),
         lambda work: work.settings.check_agreement),
    # Before anything is refused for a single attention: this is about the whole graph.
    Pass(FIND, "check_mesh", lambda work: check_mesh(
        work.gm, work.settings.axis, is_mesh_named=work.settings.is_mesh_named,
        has_attention=work.has_attention), lambda work: not work.is_explained),
    # The next three change how attention is written, not what it is; so before it is found.
    Pass(FIND, "inline_multi_head", lambda work: inline_multi_head(work.gm, work.settings.axis),
         SEARCHED),
    Pass(FIND, "inline_varlen", lambda work: inline_varlen(work.gm), SEARCHED),
    Pass(FIND, "align_attention", lambda work: align_attention(work.gm, work.settings.axis),
         SEARCHED),
    # Before masks are read: of 2 * s1 more can be said than of two symbols.
    Pass(FIND, "relate_local_lengths", lambda work: relate_local_lengths(work.gm.graph),
         lambda work: work.is_searched and work.has_attention),
    Pass(FIND, "find_attention", Capture.find, SEARCHED),
    # Before the checks, which have nothing to say of how a BlockMask was made.
    Pass(FIND, "drop_block_masks", lambda work: drop_block_masks(work.gm, work.sites), SEARCHED,
         is_spare=True),
    # Behind find_attention: queries and keys tell which dims hold tokens, if nothing else does.
    Pass(FIND, "check_sequence", lambda work: check_sequence(
        work.gm, work.sites, work.settings.seq_dims, work.settings.axis),
         lambda work: work.is_checked, keeps="types"),
    Pass(FIND, "check_placements", lambda work: check_placements(work.gm),
         lambda work: work.is_checked and not work.is_explained),

    # Behind the last pass that asks for regions.
    Pass(REWRITE, "remove_marks", lambda work: remove_marks(work.gm), SEARCHED),
    # Behind find_attention: to read a mask may make numbers of whole lengths.
    Pass(REWRITE, "settle_local_lengths", lambda work: settle_local_lengths(work.gm.graph), FOUND),
    Pass(REWRITE, "capture_attention", lambda work: capture_attention(work.gm, work.sites), FOUND),
    # Policies name what attention was before; nothing reads them until AOTAutograd.
    Pass(REWRITE, "translate_policy", lambda work: translate_policy(work.gm), FOUND),
    # What leaves the graph is known only now.
    Pass(REWRITE, "complete_outputs", lambda work: complete_outputs(work.gm), keeps="sharing"),
    # Behind all that make numbers of whole lengths which were symbols.
    Pass(REWRITE, "guard_whole_lengths", lambda work: guard_whole_lengths(work.gm.graph)),
    # Behind capture_attention, after which nothing reads the mesh of a region.
    Pass(REWRITE, "drop_idle_objects", lambda work: drop_idle_objects(work.gm), keeps="kept"),

    # Before lowering: the numbers are part of an expansion's meta.
    Pass(LOWER, "number_attentions",
         lambda work: number_attentions(work.gm, work.kind, work.place_of)),
    # Before the exchanges of attentions are there, which no two share.
    Pass(LOWER, "merge_starts", _of_all_graphs(merge_starts)),
    Pass(LOWER, "bucket_sums", lambda work: bucket_sums(work.gm.graph),
         lambda work: work.kind == "backward", is_spare=True),
    Pass(LOWER, "lower_attention", Lowering.lower_attention),
    Pass(LOWER, "verify_graph", Lowering.verify),

    # Before the order changes, also where somebody else has LOWER run.
    Pass(SCHEDULE, "verify_graph", Lowering.verify, lambda work: work.order is None),
    Pass(SCHEDULE, "schedule_exchange", Lowering.schedule_exchanges, is_spare=True),
    Pass(SCHEDULE, "verify_graph", Lowering.verify),
    # Behind schedule_exchange: the order is that of the graph as all ranks leave it here.
    Pass(SCHEDULE, "number_nodes", _of_all_graphs(number_nodes)),
    Pass(SCHEDULE, "label_exchanges", _of_all_graphs(label_exchanges), is_spare=True),

    # What is interpreted has the strides of eager kernels; Inductor's has those of the graph.
    Pass(INTERPRET, "relax_views", lambda work: relax_views(work.gm)),

    # Behind Inductor's own passes, which would not know the ops that hold the order.
    Pass(POST_GRAD, "pin_order", pin_order, is_spare=True),
)
# fmt: on


def run_passes(stage: Stage, work: Any) -> None:
    """Run the passes of a stage, from top to bottom.

    They take a `Capture` in FIND and REWRITE, a graph in POST_GRAD, otherwise a `Lowering`.
    """
    for entry in PASSES:
        if entry.stage is not stage or not entry.is_wanted(work):
            continue
        if not entry.is_spare or not is_bisected_away(entry.name):
            result = entry.run(work)
            if entry.keeps:
                setattr(work, entry.keeps, result)


def capture(gm: fx.GraphModule, settings: Settings) -> Capture:
    """Find and capture the attentions of a Dynamo graph, in place, or refuse and change none."""
    work = Capture(gm, settings)
    try:
        run_passes(Stage.FIND, work)
    except CPError as error:
        report.count("sites_refused")
        for name in {*groups_of_sequence(gm, settings.axis), *groups_of_program()}:
            tell_refusal(name, error)
        raise
    if not work.sites:
        run_passes(Stage.REWRITE, work)
        return work
    report.count("sites_found", len(work.sites))
    for site in work.sites:
        report.report_site(site)
    with report.graph_logged(gm, "dynamo"):
        run_passes(Stage.REWRITE, work)
    report.count("sites_rewritten", len(work.sites))
    return work


def judge(gm: fx.GraphModule, settings: Settings) -> list[tuple[str, Verdict]]:
    """Return what `capture` would do with every attention of a graph, not to be used afterwards."""
    work = Capture(gm, replace(settings, enabled=True), is_explained=True)
    try:
        run_passes(Stage.FIND, work)
    except CPError as error:
        if all(verdict is not error for _, verdict in work.verdicts):
            work.verdicts.append((error.site, error))
    return work.verdicts


def lower(work: Lowering) -> None:
    """Lower the captured attentions of a graph from AOTAutograd, and schedule their exchanges."""
    with report.graph_logged(work.gm, work.kind):
        run_passes(Stage.LOWER, work)
        if not work.num_lowered and not any(map(_passes_states, nodes_of(work.gm))):
            report.say_nothing_found()
            return
        run_passes(Stage.SCHEDULE, work)
    report.count_ops(work.gm)


class PostGrad(CustomGraphPass):
    """Inductor's custom pass behind its own: runs the stage POST_GRAD.

    `key` identifies this compile in Inductor's cache keys. Without a `uuid` nothing is cached; with
    one that leaves out the rank, ranks load each other's graphs.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes over a graph that was lowered, scheduled and then rewritten."""
        run_passes(Stage.POST_GRAD, graph)

    def uuid(self) -> object | None:
        """Return the key."""
        return self.key
