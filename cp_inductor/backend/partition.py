"""Split a joint graph so that its backward reads what its forward read, and does what others do.

    y = mul(x, clone(buffer));  copy_(buffer, mul(buffer, 0.9));  save buffer
      => saved = clone(buffer);  y = ...;  copy_(buffer, ...);  save saved

AOTAutograd writes to inputs at the end of a forward. torch's partitioner (2.13) saves inputs and
recomputes from them in the backward, as though nobody had written to them. `_save_as_read` can go
once pytorch/pytorch#197039 is in every torch that is supported.

What is recomputed is decided by sizes, and ranks must start the same collectives: see
`_split_as_ranks_with_tokens` and `_drop_unread`. A partitioner of the user's decides for itself;
ranks compare what it leaves to the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from cp_inductor.graph.collectives import WAIT, is_start
from cp_inductor.source import source_hash
from cp_inductor.torch_private.sizes import is_zero
from cp_inductor.torch_private.tracing import fake_mode_of

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class Partition(CustomPartitionerFn):
    """Splits as Inductor does, or as the user's own partitioner."""

    def __init__(
        self,
        inner: CustomPartitionerFn | None = None,
        note_backward: Callable[[fx.GraphModule], object] | None = None,
    ) -> None:
        self.inner = inner
        self.note_backward = note_backward

    def __reduce__(self) -> tuple[Any, ...]:
        # What copies of Inductor's config have of it, and of these its cache.
        return Partition, (self.inner,)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward."""
        # What a checkpoint computes again, another rank may read.
        has_checkpoint = any(node.meta.get("recompute") in _AGAIN for node in gm.graph.nodes)
        split: Any = self.inner or _split_as_ranks_with_tokens
        forward, backward = split(gm, joint_inputs, **kwargs)
        _save_as_read(forward, kwargs["num_fwd_outputs"])
        _save_meshes_last(forward, backward, kwargs["num_fwd_outputs"])
        if not has_checkpoint:
            _drop_unread(backward)
        if self.note_backward is not None:
            self.note_backward(backward)
        return forward, backward

    def uuid(self) -> object | None:
        """Return what Inductor's cache keys have of it."""
        return (source_hash(), self.inner.uuid() if self.inner else None)


def _split_as_ranks_with_tokens(
    gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Weigh tensors without tokens as those of one token, where torch (2.13-2.15) weighs nothing.

    What costs nothing is saved. The rank would not recompute what it is computed of, as others do:
    in a checkpoint that has collectives, which they would wait in for ever.
    """
    weighed: dict[int, tuple[Tensor, Tensor]] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(map(is_zero, value.shape)):
            with fake_mode_of(value):
                sizes = [1 if is_zero(size) else size for size in value.shape]
                node.meta["val"] = value.new_empty(sizes)
            weighed[id(node.meta["val"])] = node.meta["val"], value
    parts = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    for node in (node for graph in (gm, *parts) for node in graph.graph.nodes):
        if id(value := node.meta.get("val")) in weighed:
            node.meta["val"] = weighed[id(value)][1]
    return parts


def _save_as_read(forward: fx.GraphModule, num_outputs: int) -> None:
    """Copy what is saved of memory that the graph writes to, before it does."""
    aten = torch.ops.aten
    writes = forward.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {_memory_of(write.args[0]) for write in writes} - {None}
    output: Any = forward.graph.output_node()
    outputs = list(output.args[0])
    for place, node in enumerate(outputs[num_outputs:], num_outputs):
        if _memory_of(node) in written:
            before = node.next
            while before.op == "placeholder":
                before = before.next
            with forward.graph.inserting_before(before):
                outputs[place] = forward.graph.call_function(aten.clone.default, (node,))
            outputs[place].meta = {**node.meta, "val": node.meta["val"].clone()}
    output.args = (tuple(outputs),)
    forward.recompile()


def _save_meshes_last(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Save meshes of DTensors behind all tensors and before sizes, where the runtime expects them.

    torch (2.13) appends states of generators, from which a checkpoint draws again, to both.
    """
    output: Any = forward.graph.output_node()
    returned, saved = output.args[0][:num_outputs], output.args[0][num_outputs:]
    output.args = ((*returned, *sorted(saved, key=_place_of)),)
    inputs = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    meshes = [node for node in inputs if _place_of(node) == 1]
    end: Any = inputs[-1].next if meshes else None
    for mesh in meshes:
        end.prepend(mesh)
    forward.recompile()
    backward.recompile()


def _drop_unread(backward: fx.GraphModule) -> None:
    """Drop collectives of the forward that nobody reads.

    torch (2.13-2.15) copies waits that can be computed of what is saved. Which sizes are, by
    chance, differs between ranks.
    """

    def is_kept(node: fx.Node) -> bool:
        start: Any = node.args[0] if node.target is WAIT else node
        return node.is_impure() and not (is_start(start) and not start.target._schema.is_mutable)

    backward.graph.eliminate_dead_code(is_kept)
    backward.recompile()


def _place_of(saved: fx.Node) -> int:
    value = saved.meta["val"]  # of a tensor, a mesh, or a size
    return 0 if isinstance(value, Tensor) else 2 if isinstance(value, py_sym_types) else 1


def _memory_of(node: Any) -> StorageWeakRef | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())
