"""Capture the attentions of a Dynamo graph: find them, judge them, and refuse where necessary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor.backend.settings import Settings, log
from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.ties import check_ties
from cp_inductor.errors import (
    CPError,
    SequenceWarning,
    UnsupportedAttention,
)
from cp_inductor.passes.find_attention import has_attentions, has_masks, regions_of
from cp_inductor.passes.note_draws import note_draws
from cp_inductor.passes.pipeline import capture
from cp_inductor.passes.separate_outputs import separate_outputs
from cp_inductor.passes.whole_scalars import whole_scalars
from cp_inductor.run.agreement import tell_refusal
from cp_inductor.torch_private.dynamo import (
    are_gradients_reduced,
    as_backend_error,
    graph_inputs,
    guard_whole_lengths,
    has_tensor_hooks,
    is_capturing_whole,
    is_splitting_for_ddp,
)


def drop_idle_objects(gm: fx.GraphModule) -> list[int]:
    """Drop inputs of a Dynamo graph that are neither tensors nor numbers and that nothing reads.

    After capturing, the mesh of a region is such an input. torch 2.13's partitioner with a memory
    budget takes it for an object of unknown size.

    Returns:
        The places of the remaining inputs.
    """
    kept = []
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if node.users or isinstance(value, (Tensor, int, float, SymInt, SymFloat, SymBool)):
            kept.append(place)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return kept


def capture_graph(gm: fx.GraphModule, settings: Settings) -> bool:
    """Capture the attentions of a Dynamo graph, in place, and refuse those that cannot be captured.

    Returns:
        Whether the graph has any attention, including those that are left alone.
    """
    check_ties(gm.graph)
    if settings.check_agreement:
        # Before attentions are captured: what is drawn may be a mask beside DTensors.
        note_draws(gm)
    has_attention = has_attentions(gm)
    if settings.axis is not None:
        _check_whole(gm, settings.axis)
        _check_gradients(gm, settings.axis)
        is_said = settings.axis.world_size > 1 and settings.axis.rank == 0  # for all ranks
        if not has_attention and is_said:
            _warn_of_nothing()
    # DTensor's handler computes the same where nothing is to be rewritten, but knows no masks;
    # plain tensors have no handler, and would attend within their shard.
    if settings.enabled or settings.axis is not None or has_masks(gm) or regions_of(gm):
        try:
            capture(gm, settings.axis, settings.plan_options, settings.check_sequence)
        except CPError as error:
            if settings.axis is not None and settings.check_agreement:
                tell_refusal(settings.axis.group_name, error)
            raise
    whole_scalars(gm)
    separate_outputs(gm)
    # Last: what reads a mask makes numbers of whole lengths that were symbols.
    guard_whole_lengths(gm.graph)
    return has_attention


def _check_whole(gm: fx.GraphModule, axis: SequenceAxis) -> None:
    """Refuse a graph that ends at a graph break, if only options say that plain tensors are shards.

    Python code that Dynamo runs between two graphs would attend within the local shard, because
    nothing about a plain tensor says that it is a shard.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        raise UnsupportedAttention(
            site='options={"mesh": ...}',
            expected="a model that Dynamo captures as one graph",
            got=f"a graph break: {reason.reason}",
            remedy="compile with fullgraph=True and remove the break, or pass DTensors to the"
            " model",
        )
    if not is_capturing_whole() and axis.rank == 0:
        _warn_of_fallback()


def _check_gradients(gm: fx.GraphModule, axis: SequenceAxis) -> None:
    """Warn where every rank gets the gradient of its own tokens, and nothing known sums them."""
    if axis.world_size == 1 or not torch.is_grad_enabled() or are_gradients_reduced():
        return
    if axis.rank != 0:
        return  # the first rank says it for all
    for _, name, value in graph_inputs(gm.graph):
        is_plain = isinstance(value, nn.Parameter) and not isinstance(value, DTensor)
        if is_plain and value.requires_grad and not has_tensor_hooks(value):
            _warn_of_gradients(name, axis.name)
            return


@cache
def _warn_of_gradients(name: str, axis: str) -> None:
    log.warning(
        'options={"mesh": ...}: the gradient of %s, and of other plain weights, will be that of'
        " this rank's tokens. Sum gradients over %s before the optimizer steps, or the ranks'"
        " weights will differ: dist.all_reduce(parameter.grad, group=mesh.get_group()) for each"
        " parameter, or DistributedDataParallel, or FSDP, or cp_inductor.distribute and DTensors.",
        name,
        axis,
    )


def _warn_of_nothing() -> None:
    """Warn of options={"mesh": mesh} in a graph without attention."""
    if is_splitting_for_ddp():
        # Its optimizer cuts models into graphs, of which some have no attention.
        return
    warnings.warn(
        'options={"mesh": ...}: found no scaled_dot_product_attention in the graph;'
        " hand-written attention sees only this rank's shard",
        SequenceWarning,
        stacklevel=2,
    )


@cache
def _warn_of_fallback() -> None:
    log.warning(
        'options={"mesh": ...} without fullgraph=True: wherever torch.compile falls back to eager'
        " (a recompile limit, a dispatch mode), attention sees only its own shard. Compile with"
        " fullgraph=True, or pass DTensors to the model."
    )


@contextmanager
def errors_unwrapped() -> Iterator[None]:
    """Let users catch our errors by their own classes, because Dynamo wraps other errors."""
    try:
        yield
    except CPError as error:
        raise as_backend_error(error) from None
