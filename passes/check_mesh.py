"""Refuse, or warn, where the user's mesh or way of compiling does not fit. Changes nothing.

options={"mesh": mesh}    a graph break: refused; no fullgraph=True: a warning
nothing                   several ranks, and attention over tensors that nobody shards: a warning

Nothing about a plain tensor says that it is a shard; the option alone does. Ways of compiling that
lose exchanges are refused. And an op may turn the sequence of DTensors from Shard to Replicate:

    x (B, S, D) [Shard(1)]
    y = x.roll(1, 1)                       y: [Replicate]: every rank has all of it
    out = attention(split(linear(y)))      every rank computes it for the whole sequence

The results are right, but the mesh brings nothing, and DTensor does not say so: a warning.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.wrap import is_whole
from cp_inductor.errors import InvalidArgument, SequenceWarning, UnsupportedAttention
from cp_inductor.graph.nodes import name_of
from cp_inductor.graph.subgraphs import Calls, calls_of, method_of, source_of
from cp_inductor.kept import cache
from cp_inductor.passes.attentions import CAPTURED, calls_to
from cp_inductor.passes.graph_types import REWRAPPING
from cp_inductor.passes.nodes import walk_back
from cp_inductor.region.marks import regions_of
from cp_inductor.torch_private.dynamo import (
    are_gradients_reduced,
    is_capturing_whole,
    is_compiled_ahead,
    is_compiled_for_all_ranks,
)
from cp_inductor.torch_private.tracing import INVOKE_SUBGRAPH

log = logging.getLogger("cp_inductor")


def check_mesh(
    gm: fx.GraphModule, axis: SequenceAxis | None, *, is_mesh_named: bool, has_attention: bool
) -> None:
    """Check a graph against the axis of the mesh that the user named; None without one.

    If `is_mesh_named`, options say what plain tensors are; `{"mesh": None}`: whole. If they alone
    say that these are shards, a graph break is refused.
    """
    if axis is None:
        if has_attention and not is_mesh_named and _is_of_whole_tensors(gm):
            _warn_of_no_shards()
        return
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        # Python code that Dynamo runs between two graphs would attend within the local shard.
        raise UnsupportedAttention(
            site='options={"mesh": ...}',
            expected="a model that Dynamo captures as one graph",
            got=f"a graph break: {reason.reason}",
            remedy="compile with fullgraph=True and remove the break, or pass DTensors to the"
            " model",
        )
    if axis.rank == 0 and not is_capturing_whole():  # for all ranks
        _warn_of_fallback()


def _is_of_whole_tensors(gm: fx.GraphModule) -> bool:
    """Whether several ranks run, and nothing of a graph is sharded; said on the first of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_rank() != 0:
        return False
    if are_gradients_reduced():  # over ranks that each have batches of their own
        return False
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    is_cut = any(isinstance(value, DTensor) and not is_whole(value) for value in values)
    return not is_cut and not regions_of(gm)


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


def check_ways(gm: fx.GraphModule) -> None:
    """Refuse to compile a graph in a way that loses its exchanges."""
    if not dist.is_initialized():
        return
    if is_compiled_for_all_ranks():
        raise InvalidArgument(
            site="torch.compile",
            expected="a graph that each rank compiles for itself",
            got="compile_on_one_rank, which gives all ranks one graph",
            remedy="unset TORCH_COMPILE_ON_ONE_RANK and TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK",
        )
    if is_compiled_ahead():
        raise InvalidArgument(
            site="torch.compile",
            expected="a graph that runs where it is compiled",
            got="aot_compile, which saves it without its rank and mesh",
            remedy="call the compiled model: Inductor's cache keeps what it compiles",
        )
    for node in gm.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH):
        values = [argument.meta.get("example_value") for argument in node.all_input_nodes]
        if any(isinstance(value, DTensor) for value in values):
            # Once it was called, Dynamo takes DTensors for plain tensors.
            raise InvalidArgument(
                site=name_of(node),
                expected="plain tensors in a nested_compile_region",
                got="DTensors, which torch (2.13 to 2.15) does not trace there",
                remedy="compile each layer instead: layer.compile(backend='cp_inductor')",
            )


def check_placements(gm: fx.GraphModule) -> None:
    """Warn of every attention that an earlier op keeps from being sharded."""
    calls = calls_of(gm)
    for node in calls_to(gm, CAPTURED):
        query: Any = node.args[0] if node.args else node.kwargs["query"]
        for axis, placement in enumerate(_placements(query)):
            op = _first_loss(query, axis, calls) if isinstance(placement, Replicate) else None
            if op is not None:
                before = next(p for source in op.all_input_nodes if (p := _placements(source)))
                warnings.warn(
                    f"{name_of(node)}: every rank computes attention over the whole sequence,"
                    f" because {name_of(op)} turned {before} into {_placements(op)}. Call {op.name}"
                    " before the sequence is sharded, or redistribute its result",
                    SequenceWarning,
                    stacklevel=2,
                )


def _placements(node: object) -> tuple[object, ...]:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.placements) if isinstance(value, DTensor) else ()


def _first_loss(query: fx.Node, axis: int, calls: Calls) -> fx.Node | None:
    """Return the op ahead of a query that gave up its sharding on an axis; None if none did."""
    for node in walk_back([query], origin=partial(source_of, calls=calls)):
        placements = _placements(node)
        is_whole_here = len(placements) > axis and isinstance(placements[axis], Replicate)
        # Who writes what converts DTensors says so himself.
        if not is_whole_here or (method_of(node) or node.target) in REWRAPPING:
            continue
        for source in node.all_input_nodes:
            before = _placements(source)
            is_weight = isinstance(source.meta.get("example_value"), nn.Parameter)
            if len(before) > axis and isinstance(before[axis], Shard) and not is_weight:
                return node
    return None
