"""Report what happens to every attention of a model, and why, before anything runs.

    print(explain(model, x, mesh=mesh))
      =>
    2 attentions: 1 rewritten, 1 refused, 0 not sharded
    sdpa_0 (model.py:41)  rewritten
      mesh       axis 'cp', rank 1 of 4
      plan       blocks, 2 stages, contiguous
      ...
    sdpa_1 (model.py:41)  refused
      expected   attention without dropout
      ...

Only Dynamo runs, on tensors without data; nothing is computed and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.recipe import make_recipe, whole_lengths
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import CPError
from cp_inductor.graph.nodes import nodes_of
from cp_inductor.inspect.compile_for import Target, planned_for
from cp_inductor.inspect.cross_compile import CrossCompiled, trace_and_stop
from cp_inductor.inspect.world import Example
from cp_inductor.mask.language import CAUSAL, FULL
from cp_inductor.mask.rule import Rule, describe
from cp_inductor.modules.along_sequence import GATHERS
from cp_inductor.passes.attentions import Site
from cp_inductor.passes.pipeline import judge
from cp_inductor.passes.settings import read_settings
from cp_inductor.plan import Machine, Plan, backward_plan, forward_plan
from cp_inductor.plan.machine import DEVICES, Rate
from cp_inductor.plan.simulate import loads_of
from cp_inductor.tiles.kernel_table import KERNELS, implementation_of, known_wrong_of
from cp_inductor.torch_private.dynamo import graph_break_reason
from cp_inductor.torch_private.sizes import size_hint


@dataclass(frozen=True, slots=True)
class PassReport:
    """Numbers of the forward or backward of one attention, for this rank if not stated otherwise.

    Attributes:
        collectives: number of all_to_all_single calls, the same on every rank.
        tiles: number of flash calls.
        tiles_of_all_ranks: number of flash calls on all ranks together.
        skipped: fraction of all (query, key) pairs that no rank computes: nearly 0.5 if causal.
        bytes_sent, bytes_received: by this rank.
        most_bytes_received: by the rank that receives most.
        flops: of this rank's tiles.
        balance: flops of the busiest rank divided by the mean of all ranks; 1.0 is perfect.
        predicted_s: predicted seconds, on the machine of the options, at the measured rate of the
            kernel on the target, if somebody has measured it.
        exposed_s: the seconds of `predicted_s` in which no tile hides an exchange.
    """

    collectives: int
    tiles: int
    tiles_of_all_ranks: int
    skipped: float
    bytes_sent: int
    bytes_received: int
    most_bytes_received: int
    flops: int
    balance: float
    predicted_s: float
    exposed_s: float

    def __str__(self) -> str:
        """Return the numbers as text."""
        received, most = self.bytes_received / 1e6, self.most_bytes_received / 1e6
        return (
            f"{_count(self.collectives, 'collective')}, {_count(self.tiles, 'tile')}"
            f" of {self.tiles_of_all_ranks}, {self.skipped:.1%} of pairs skipped,"
            f" {self.flops / 1e9:.3g} GFLOP, balance {self.balance:.3f},"
            f"\n{'':13}{received:.3g} MB received, {most:.3g} at most,"
            f" {self.exposed_s * 1e3:.3g} of {self.predicted_s * 1e3:.3g} ms exposed"
        )


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """What happens to one attention.

    Attributes:
        site: its name and source line, such as ``sdpa_3 (model.py:41)``.
        verdict: "rewritten", "refused", or "not sharded" (left unchanged).
        refusal: of a refused attention: the error's class, expected, got, remedy. Otherwise empty.
        facts: of a rewritten attention: mesh axis, rank, mask, shapes, dtype, kernel and why it was
            chosen, kernel of tiles under the mask, strategy, ... Otherwise empty.
        forward, backward: of a rewritten attention whose plan is known. Otherwise None, as where
            the batch decides; backward is also None if gradients are disabled.
    """

    site: str
    verdict: str
    refusal: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    forward: PassReport | None = None
    backward: PassReport | None = None

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        rows: dict[str, Any] = dict(self.refusal)
        facts = self.facts
        if facts:
            rows["mesh"] = f"{facts['axis']}, rank {facts['rank']} of {facts['world_size']}"
            rows["attention"] = (
                f"{facts['mask']}, batch {facts['batch']},"
                f" {facts['query_length']} queries, {facts['key_length']} keys,"
                f"\n{'':13}{facts['num_heads']} heads, {facts['num_kv_heads']} of keys,"
                f" head dim {facts['head_dim']}, {facts['dtype']}"
            )
            rows["kernel"] = _of_kernel(facts)
            rows["plan"] = f"{facts['strategy']}, {_count(facts['stages'], 'stage')}"
        rows |= {"forward": self.forward, "backward": self.backward}
        lines = [f"  {name:<11}{value}" for name, value in rows.items() if value is not None]
        return "\n".join([f"{self.site}  {self.verdict}", *lines])


def _of_kernel(facts: Mapping[str, Any]) -> str:
    by_library = f" as {facts['implementation']}" if facts["implementation"] else ""
    text = f"{facts['kernel']}{by_library}: {facts['why_kernel']}"
    if facts["kernel_under_mask"]:
        text += f";\n{'':13}tiles under the mask by {facts['kernel_under_mask']}"
    rate = facts["flops_per_s"]
    if rate is not None:
        text += f";\n{'':13}{rate / 1e12:.0f} TFLOP/s at best: {facts['rate_source']}"
    return text + "".join(f";\n{'':13}known to be wrong: {row}" for row in facts["known_wrong"])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What one module exchanges to compute its own tokens of a recurrence.

    Attributes:
        path: of the module in the model.
        kind: its class.
        ranks: how many share the sequence.
        gathers: how many gathers or other exchanges its forward has. Its backward has as many, of
            the same bytes.
        received_bytes: by this rank in the forward, whatever the length of the sequence.
    """

    path: str
    kind: str
    ranks: int
    gathers: int
    received_bytes: int

    def __str__(self) -> str:
        """Return the report as text."""
        return (
            f"{self.path} ({self.kind})  computes its own tokens\n"
            f"  exchange   {_count(self.gathers, 'exchange')} over {self.ranks} ranks, receives"
            f" {self.received_bytes / 1e6:.3f} MB, and as much in the backward"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What happens to every attention of a model.

    Attributes:
        attentions: in the order of the model. Empty if the model does not become one graph.
        graph_break: why Dynamo does not capture the model as one graph; "" if it does.
        scans: the modules of which each rank computes its own tokens by passing on states.
        about: the model, the world, and the target, by name.
    """

    attentions: tuple[AttentionReport, ...]
    graph_break: str = ""
    scans: tuple[ScanReport, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return asdict(self)

    @property
    def is_fine(self) -> bool:
        """Whether the model is captured as one graph and no attention is refused."""
        return not self.graph_break and all(a.verdict != "refused" for a in self.attentions)

    def html(self, path: str | Path, compiled: CrossCompiled | None = None) -> None:
        """Write the report as one page that needs no network.

        It has every attention with its line, and why it is refused; and of each plan a picture of
        who computes what, the predicted timeline of all ranks, who sends how much to whom, the
        memory over time, what `strategy="auto"` weighs, and the program of this rank. Where the
        batch decides the plan, this is the plan of all pairs that some batch may have.

        Args:
            path: of the file.
            compiled: what `cross_compile` returned for the same model; its graphs and its code are
                shown, with starts and waits of exchanges marked.

        Raises:
            InvalidArgument: matplotlib is not installed (``pip install 'cp-inductor[draw]'``).
        """
        from cp_inductor.inspect.page import page_of

        machines = {report.facts["machine"] for report in self.attentions if report.facts}
        now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}"
        about = {**self.about, "machine": ", ".join(sorted(machines)), "written": now}
        Path(path).write_text(page_of(self.headline, about, self.attentions, compiled))

    @property
    def headline(self) -> str:
        """How many attentions there are, by verdict; or why nobody knows."""
        verdicts = [attention.verdict for attention in self.attentions]
        counts = ", ".join(
            f"{verdicts.count(name)} {name}" for name in ("rewritten", "refused", "not sharded")
        )
        if self.graph_break and not verdicts:
            return f"attentions unknown, as the model is not captured whole: {self.graph_break}"
        return f"{_count(len(verdicts), 'attention')}: {counts}"

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join([self.headline, *map(str, (*self.attentions, *self.scans))])


def explain(
    model: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh | None = None,
    options: Mapping[str, Any] | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Report:
    """Report what ``torch.compile(model, backend="cp_inductor")`` would do with every attention.

    Each rank can call this alone: nothing is communicated, and the model is not run.

    Args:
        model: a module or function.
        args: its arguments.
        mesh: as in ``options={"mesh": mesh}``: plain tensors are shards of the sequence over it.
        options: as torch.compile's for this backend.
        target: as in `cross_compile`, for the choice of kernels; by default the tensors' device.
        kwargs: keyword arguments of the model.

    Returns:
        The report; ``print`` shows it as text.

    Raises:
        CPError: the options are wrong. Refused attentions are in the report, not raised.
    """
    options = dict(options or {}) | ({} if mesh is None else {"mesh": mesh})
    settings = read_settings(options)
    chip = ""
    if target is not None:
        device = Target.parse(target)
        settings, chip = planned_for(device, settings), device.chip
    reports: list[AttentionReport] = []
    scans: list[ScanReport] = []

    def report(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        scans.extend(_find_scans(gm))  # before the graph is searched, which changes it
        reports.extend(_report(*verdict, chip) for verdict in judge(gm, settings))

    model = getattr(model, "_orig_mod", model)
    about = {"model": getattr(model, "__qualname__", type(model).__name__), "target": target or ""}
    try:
        trace_and_stop(Example(model, args, kwargs, dynamic=False), report)
    except Exception as error:
        # Dynamo adds the source line to an error's text, over several lines.
        named = str(error).partition("\n")[0] if isinstance(error, CPError) else None
        reason = named or graph_break_reason(error)
        if reason is None:
            raise
        return Report((), reason, about=about)
    axes = {f"{a.facts['world_size']} on {a.facts['axis']}" for a in reports if a.facts}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    about["world"] = "; ".join([_count(ranks, "rank"), *sorted(axes)])
    return Report(tuple(reports), scans=tuple(scans), about=about)


def _report(name: str, verdict: Site | CPError | None, chip: str) -> AttentionReport:
    if verdict is None:
        return AttentionReport(name, "not sharded")
    if isinstance(verdict, CPError):
        said = {part: getattr(verdict, part) for part in ("expected", "got", "remedy")}
        return AttentionReport(name, "refused", {"error": type(verdict).__name__, **said})
    site, attention, facts = verdict, verdict.attention, _facts(verdict)
    switch = KERNELS[attention.kernel].plain.switch.name
    kernel_of_most_tiles = facts["kernel_under_mask"] or facts["implementation"] or switch
    rate = DEVICES[chip].rate_of(kernel_of_most_tiles) if chip in DEVICES else None
    if rate is not None:
        facts |= {"flops_per_s": rate.forward, "rate_source": rate.source}
    machine = site.plan_options.machine_of(site.axis, site.query.meta["example_value"])
    facts["machine"] = machine.format()
    plans = [] if attention.is_per_batch else [forward_plan(attention.recipe)]
    if plans and torch.is_grad_enabled():
        plans.append(backward_plan(attention.recipe))
    passes = (_report_pass(plan, site, machine, rate) for plan in plans)
    return AttentionReport(name, "rewritten", {}, facts, *passes)


def _facts(site: Site) -> dict[str, Any]:
    """Return the facts of an attention; if the batch decides its plan, lengths are those of now."""
    attention, options = site.attention, site.plan_options
    query, key = (node.meta["example_value"] for node in (site.query, site.key))
    if attention.is_per_batch:
        here: Any = options, site.axis, query, key
        lengths = whole_lengths(*here, site=site.name, is_dynamic=True)
        strategy, stages, kept = "planned once per batch", attention.source.stages, 0
        rule = attention.source.rule
        recipe = make_recipe(*here, rule=rule, dtype=site.dtype, site=site.name)
    else:
        recipe = attention.recipe
        lengths = (recipe.query_length, recipe.key_length)
        strategy, stages, kept = recipe.strategy, recipe.stages, recipe.keep
    is_plain = site.mask.rule in (Rule(CAUSAL), Rule(FULL))
    return {
        "axis": site.axis.name,
        "rank": site.axis.rank,
        "world_size": site.axis.world_size,
        "mask": describe(site.mask.rule),
        "query_length": size_hint(lengths[0]),
        "key_length": size_hint(lengths[1]),
        "batch": site.batch,
        "num_heads": size_hint(held_by_rank(query).shape[1]),
        "num_kv_heads": size_hint(held_by_rank(key).shape[1]),
        "head_dim": size_hint(query.shape[-1]),
        "dtype": str(site.dtype).removeprefix("torch."),
        "kernel": attention.kernel,
        "recipe": recipe.format(),
        "why_kernel": site.why_kernel,
        "known_wrong": known_wrong_of(attention.kernel, query.device, options.capability),
        "implementation": implementation_of(attention.kernel),
        "kernel_under_mask": "" if is_plain else KERNELS[attention.kernel].under_rule.name,
        "flops_per_s": None,
        "rate_source": "",
        "strategy": strategy,
        "stages": stages,
        "stages_kept": kept,
    }


def _report_pass(plan: Plan, site: Site, machine: Machine, rate: Rate | None) -> PassReport:
    rank, batch, ranks = site.axis.rank, site.batch, range(plan.grid.world_size)
    machine = machine.with_speeds(0, getattr(rate, plan.direction.value, 0.0))
    tiles = [sum(len(stage.tiles) for stage in plan.program(each)) for each in ranks]
    timeline = loads_of(plan, machine).timeline(machine)
    return PassReport(
        collectives=sum(bool(stage.fetch) + bool(stage.home) for stage in plan.stages),
        tiles=tiles[rank],
        tiles_of_all_ranks=sum(tiles),
        skipped=plan.skipped,
        bytes_sent=batch * plan.bytes_sent(rank),
        bytes_received=batch * plan.bytes_received(rank),
        most_bytes_received=batch * max(map(plan.bytes_received, ranks)),
        flops=batch * plan.flops(rank),
        balance=plan.balance,
        predicted_s=timeline.total_s,
        exposed_s=timeline.exposed_s,
    )


def _find_scans(gm: fx.GraphModule) -> list[ScanReport]:
    """Return the recurrences that ranks share, in the order of the graph.

    Beyond `MOST_GATHERED` ranks, exchanges of (rows, ...) from all ranks take the place of gathers.
    """
    reports: dict[tuple[str, str], ScanReport] = {}
    for node in nodes_of(gm):
        if GATHERS not in node.meta.get("custom", {}):
            continue
        arrives: Any = node.meta.get("example_value")
        if isinstance(arrives, DTensor):
            num_ranks, is_from_all = arrives.shape[0], True
        elif node.target is torch.ops._c10d_functional.all_to_all_single:
            parts: Any = node.args[1]
            # Or from the rank before alone.
            num_ranks, is_from_all = len(parts), len(set(parts)) == 1
        else:
            continue
        share = 1 - 1 / num_ranks if is_from_all else 1.0
        num_bytes = round(share * arrives.numel() * arrives.element_size())
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, cls = stack[-1] if stack else ("the model", "a function")
        site = path, getattr(cls, "__name__", str(cls))
        last = reports.get(site, ScanReport(*site, num_ranks, 0, 0))
        gathers, received = last.gathers + 1, last.received_bytes + num_bytes
        reports[site] = ScanReport(*site, num_ranks, gathers, received)
    return list(reports.values())
