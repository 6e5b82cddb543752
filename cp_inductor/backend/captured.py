"""A captured graph: what calling it takes besides its compiled function.

captured = Captured.of(gm, settings)        attentions captured, idle inputs dropped
compiled = ...(gm, captured.inputs(example_inputs))
return captured.runner(compiled)            what Dynamo calls
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.backend.gradients import complete_gradients, completed, with_plain_gradients
from cp_inductor.backend.steps import with_steps_named
from cp_inductor.backend.versions import Places, hold_versions
from cp_inductor.dtensor.limits import refuse_permuted
from cp_inductor.dtensor.rules.writes import note_copies, refuse_stale_copies
from cp_inductor.graph.collectives import Collective, list_collectives
from cp_inductor.passes.capture_attention import list_attentions
from cp_inductor.passes.check_sequence import shards_of
from cp_inductor.passes.graph_types import Checking
from cp_inductor.passes.note_draws import has_notes
from cp_inductor.passes.pipeline import Lowering, capture, lower
from cp_inductor.passes.settings import Settings
from cp_inductor.region.modes import note_compiled
from cp_inductor.torch_private.checkpoint import has_saved_tensor_hooks
from cp_inductor.torch_private.dynamo import is_capturing_whole
from cp_inductor.torch_private.tracing import replace_backward
from cp_inductor.trust.agreement import AgreedGraph
from cp_inductor.trust.claims import Planned, batches_of, describe_program
from cp_inductor.trust.unreduced import watch_gradients


@dataclass(frozen=True)
class Captured:
    """What calling a captured graph takes."""

    settings: Settings
    kept: tuple[int, ...]  # places of the inputs that were kept
    # Makes the context, from the inputs, in which the ranks compare what they run.
    agree: Callable[[Sequence[Any]], Any]
    attentions: tuple[Planned, ...] = ()  # those that were captured, in the order in which they run
    types: Checking | None = None  # what checks calls of the graph, if they must be
    # What its lowered graphs start, by "forward", "backward" and "inference", and the "backward as
    # traced"; of graphs that come from a cache nothing is known.
    collectives: dict[str, Sequence[Collective]] = field(default_factory=dict)
    # Places of outputs, and of inputs, that are one memory on one process.
    sharing: Sequence[tuple[list[int], list[int]]] = ()
    written: Sequence[int] = ()  # places of the DTensors among the inputs that the graph writes to
    place_of: dict[Any, int] = field(default_factory=dict)  # of attentions, as `Lowering` has it

    @staticmethod
    def of(gm: fx.GraphModule, settings: Settings) -> Captured:
        """Capture the attentions of a Dynamo graph, in place.

        Raises:
            CPError: an attention is sharded along the sequence and cannot be rewritten.
        """
        whole = describe_program(gm) if is_capturing_whole() else None
        batches = batches_of(gm)
        captured = capture(gm, settings)
        planned = tuple(list_attentions(gm))
        agree: Callable[[Sequence[Any]], Any] = nullcontext
        collectives: dict[str, Sequence[Collective]] = {}
        if settings.check_agreement and (planned or has_notes(gm)):
            agree = AgreedGraph(
                planned,
                gm.graph.find_nodes(op="placeholder"),
                flags={
                    "machine": settings.plan_options.priced_by,
                    "enabled": str(settings.enabled),
                    "schedule": settings.plan_options.schedule,
                    "memory budget": str(settings.plan_options.memory_budget_bytes),
                },
                collectives=collectives,
                whole=whole,
                shards=shards_of(gm),
                batches=batches,
            )
        inputs = gm.graph.find_nodes(op="placeholder")
        sharing = [(outputs, [inputs.index(n) for n in of]) for outputs, of in captured.sharing]
        values = [node.meta.get("example_value") for node in inputs]
        written = [
            place
            for place, value in enumerate(values)
            if isinstance(value, DTensor) and value._version > 0
        ]
        kept, types = captured.kept, captured.types
        return Captured(settings, kept, agree, planned, types, collectives, sharing, written)

    def inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs that were kept."""
        return [inputs[place] for place in self.kept]

    def note_backward(self, gm: fx.GraphModule) -> None:
        """Note for the other ranks what a backward will start, which is lowered in its first call.

        There they would wait for each other before they could compare it.
        """
        if self.settings.enabled:
            self.collectives["backward as traced"] = list_collectives(gm)

    def lower(self, gm: fx.GraphModule, kind: str, **options: Any) -> Lowering | None:
        """Lower a graph of AOTAutograd, and note for the other ranks what it starts; or leave it.

        The options are those of a `Lowering` that differ between compilers.
        """
        if not self.settings.enabled:
            return None
        options |= {"check_tables": self.settings.check_agreement, "place_of": self.place_of}
        lowering = Lowering(gm, kind, self.settings.plan_options, **options)
        lower(lowering)
        self.collectives[kind] = list_collectives(gm)
        return lowering

    def runner(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls a compiled graph: with the inputs kept, once all ranks are ready.

        Dynamo passes the inputs of the final graph, which it shares with us; its splitter for DDP
        passes all of the original inputs.
        """
        forward = with_steps_named(compiled, self.attentions, "forward")
        is_replaced = False
        places: Places = None
        group_names = {attention.attention.group_name for attention in self.attentions}

        def replace(backward: Callable[..., Any]) -> Callable[..., Any]:
            return completed(with_steps_named(backward, self.attentions, "backward"))

        def call(args: Sequence[Any]) -> Any:
            nonlocal is_replaced, places
            args = with_plain_gradients(args)
            results = forward(*args)
            outputs = results if isinstance(results, (tuple, list)) else [results]
            has_dtensors = any(isinstance(value, DTensor) for value in (*outputs, *args))
            node = None
            if has_dtensors or self.attentions:
                node = complete_gradients(outputs, args, has_dtensors)
            if node is not None and not is_replaced:
                replace_backward(node, replace)
                is_replaced = True
            is_recorded = torch.is_grad_enabled() and not has_saved_tensor_hooks()
            if node is not None and has_dtensors and is_recorded:
                # What a region around sees of a program is not to see this.
                with torch._C.DisableTorchFunction():
                    places = hold_versions(node, args, outputs, places)
            return results

        def run(*args: Any) -> Any:
            if self.attentions:  # of which Dynamo has no guard
                refuse_permuted("a compiled graph with attention over a sharded sequence")
            note_compiled()
            for name in group_names:
                watch_gradients(name, args)
            for place in self.written:
                refuse_stale_copies(args[place], f"input {place} of a compiled graph")
            with self.agree(args):
                results = call(args)
            for outputs, inputs in self.sharing:
                note_copies([results[i] for i in outputs] + [args[i] for i in inputs])
            return results

        checked = run if self.types is None else self.types(run, self.kept)

        @wraps(compiled)
        def call_with_kept(*args: Any) -> Any:
            return checked(*(self.inputs(args) if len(args) > len(self.kept) else args))

        return call_with_kept
