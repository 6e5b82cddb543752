"""Refuse writes to DTensors that the backward of a compiled graph is going to read.

    out = compiled(q, k, v)         saved: the local tensors of q, k, v and out
    out.mul_(2)                     the version of the DTensor rises, that of its local tensor not
    out.sum().backward()            => ModifiedInPlace, as autograd does over plain tensors

AOTAutograd (torch 2.13 to 2.15) saves local tensors for the backward, whose versions are not those
of the DTensors around them: it would read what was written behind the graph. So the versions of the
DTensors whose local tensors are saved are kept, and compared before the backward runs.

Assumes: which inputs and outputs are saved is the same whenever a graph runs. What goes through
hooks for saved tensors (a checkpoint, which computes it again; offloading, which copies it) is
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.errors import refuse_version
from cp_inductor.torch_private.checkpoint import has_saved_tensor_hooks, is_backward_kept
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.torch_private.tracing import is_fake

# Tensors that a backward reads, with the names and versions that they had when they were saved.
_Held = list[tuple[str, Tensor, int]]
# The places of the inputs, and of the outputs, whose local tensors are saved.
_Places = tuple[list[int], list[int]]


def with_versions_checked(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Have the backward of a compiled graph refuse DTensors that were written to since it ran."""
    places: _Places | None = None

    @wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal places
        outputs = compiled(*args)
        if torch.is_grad_enabled() and not has_saved_tensor_hooks():
            leaves = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            # What a region around sees of a program is not to see this.
            with torch._C.DisableTorchFunction():
                places = _hold(args, leaves, places)
        return outputs

    return run


def _hold(args: Sequence[Any], outputs: Sequence[Any], places: _Places | None) -> _Places | None:
    """Have the backward compare versions; return the places of inputs and outputs it reads."""
    node = _node_of(outputs)
    if node is None:
        return places
    if places is None:
        if any(map(is_fake, node.saved_tensors)):
            # Dynamo's splitter for DDP runs a piece to know what the next one gets.
            return None
        saved = [_reach(tensor) for tensor in node.saved_tensors]
        places = (_that_are_saved(args, saved), _that_are_saved(outputs, saved))
    held: _Held = [(f"input {i}", args[i], args[i]._version) for i in places[0]]
    # An output would hold the node that holds it; its alias has its version.
    held += [(f"output {i}", outputs[i].detach(), outputs[i]._version) for i in places[1]]
    if held:
        node.register_prehook(partial(_check, held))
    return places


def _node_of(outputs: Iterable[Any]) -> Any:
    """Return the node of a compiled graph's backward; None if it has none."""
    for output in outputs:
        node = output.grad_fn if isinstance(output, Tensor) else None
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node
    return None


def _reach(tensor: Tensor) -> tuple[int, int]:
    """Return from where to where a tensor reaches in memory."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize if tensor.numel() else start


def _that_are_saved(tensors: Sequence[Any], saved: Sequence[tuple[int, int]]) -> list[int]:
    places = []
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            start, end = _reach(tensor._local_tensor)
            if any(start < other_end and other < end for other, other_end in saved):
                places.append(place)
    return places


def _check(held: _Held, _: object) -> None:
    """Refuse what was written to, and let go of all if this backward is the last."""
    for name, tensor, version in held:
        refuse_version(f"{name} (shape {tuple(tensor.shape)}) of a compiled graph", tensor, version)
    if not is_backward_kept():
        held.clear()


run_uncompiled(_check)
