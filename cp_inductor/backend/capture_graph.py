"""Capture the attentions of a Dynamo graph: find them, judge them, and refuse where necessary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.distributed.tensor import DTensor

from cp_inductor.backend.settings import Settings, log
from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.errors import (
    CPError,
    SequenceWarning,
    UnsupportedAttention,
)
from cp_inductor.kept import cache
from cp_inductor.modules.ties import check_ties
from cp_inductor.passes.find_attention import has_attentions, has_masks, regions_of
from cp_inductor.passes.note_draws import note_draws
from cp_inductor.passes.pipeline import capture
from cp_inductor.passes.replay_writes import replay_writes
from cp_inductor.passes.separate_outputs import separate_outputs
from cp_inductor.passes.whole_scalars import whole_scalars
from cp_inductor.torch_private.dynamo import (
    are_gradients_reduced,
    as_backend_error,
    guard_whole_lengths,
    is_capturing_whole,
    is_splitting_for_ddp,
)
from cp_inductor.trust.agreement import tell_refusal


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
    # First: all others read a graph in which every value is what it is on one process.
    replay_writes(gm)
    if settings.check_agreement:
        # Before attentions are captured: what is drawn may be a mask beside DTensors.
        note_draws(gm)
    has_attention = has_attentions(gm)
    if settings.axis is not None:
        _check_whole(gm, settings.axis)
        is_said = settings.axis.world_size > 1 and settings.axis.rank == 0  # for all ranks
        if not has_attention and is_said:
            _warn_of_nothing()
    elif has_attention and not settings.is_mesh_named and _is_of_whole_tensors(gm):
        _warn_of_no_shards()
    # DTensor's handler computes the same where nothing is to be rewritten, but knows no masks;
    # plain tensors have no handler, and would attend within their shard.
    if settings.enabled or settings.axis is not None or has_masks(gm) or regions_of(gm):
        try:
            how = (settings.plan_options, settings.check_sequence, settings.seq_dims)
            capture(gm, settings.axis, *how)
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


def _is_of_whole_tensors(gm: fx.GraphModule) -> bool:
    """Whether several ranks run, and nothing of a graph is sharded; said on the first of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_rank() != 0:
        return False
    if are_gradients_reduced():  # over ranks that each have batches of their own
        return False
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return not regions_of(gm) and not any(isinstance(value, DTensor) for value in values)


@cache
def _warn_of_no_shards() -> None:
    """Warn of attention within each rank, in a job of several: its mesh may be forgotten."""
    warnings.warn(
        f"{dist.get_world_size()} ranks run, and no attention of this graph is over a sharded"
        " sequence: each rank attends over the tensors that it was given. If they are shards of"
        ' one sequence, say so: options={"mesh": mesh}, DTensors, or context_parallel(mesh). If'
        ' they are whole, options={"mesh": None} says that',
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
