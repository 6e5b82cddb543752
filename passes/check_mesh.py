"""Refuse, or warn, where what the user said of the mesh does not fit the graph. Changes nothing.

options={"mesh": mesh}    a graph break: refused; no fullgraph=True: a warning
nothing                   several ranks, and attention over tensors that nobody shards: a warning

Nothing about a plain tensor says that it is a shard; the option alone does.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

import logging
import warnings

import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.wrap import is_whole
from cp_inductor.errors import SequenceWarning, UnsupportedAttention
from cp_inductor.kept import cache
from cp_inductor.region.marks import regions_of
from cp_inductor.torch_private.dynamo import (
    are_gradients_reduced,
    is_capturing_whole,
)

log = logging.getLogger("cp_inductor")


def check_mesh(
    gm: fx.GraphModule, axis: SequenceAxis | None, *, is_mesh_named: bool, has_attention: bool
) -> None:
    """Check a graph against the mesh that the user named, or did not name.

    Args:
        gm: from Dynamo.
        axis: the axis of the mesh that the user named; None without one.
        is_mesh_named: options say what plain tensors are; `{"mesh": None}`: whole.
        has_attention: the graph has any attention.

    Raises:
        UnsupportedAttention: the graph ends at a graph break, and only options say that plain
            tensors are shards.
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
    return not regions_of(gm) and not any(
        isinstance(value, DTensor) and not is_whole(value) for value in values
    )


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
