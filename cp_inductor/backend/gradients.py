"""Gradients of a compiled graph over DTensors that are of another class than autograd makes them.

    loss, logits = compiled(...)
    loss.backward()                      logits got no gradient: autograd fills in plain zeros
    loss.backward(torch.tensor(0.5))     a plain gradient, which all ranks have

AOTAutograd compiles a backward for the gradients of all outputs, and expects a DTensor where an
output is a DTensor, and a plain tensor elsewhere. It (torch 2.13 to 2.15) refuses what is of the
other class, of the user or of autograd. The backward changes them first: outputs themselves stay
as they are, to be written to.

    F.linear(DTensor, plain weight)      weight.grad: a DTensor [Partial], not yet summed

What torch takes for replicated (`implicit_replication`) gets gradients as DTensors. No optimizer
can step with those, and Dynamo (torch 2.13) cannot trace a plain parameter that has one. They
become plain and whole, as the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.dtensor import replicated
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.torch_private.tracing import is_of_compiled_graph

# From a gradient, which may be None or plain, to that of an output's class.
_Complete = Callable[[Tensor | None], Tensor]


def complete_gradients(outputs: Sequence[Any], inputs: Sequence[Any], has_dtensors: bool) -> Any:
    """Let some outputs of a graph that has run, over DTensors, be differentiated without others.

    Return the node of its backward, which must run `completed`; None if it has none.
    """
    of_nodes: dict[Any, dict[int, _Complete]] = {}
    replayed = set()  # nodes with outputs whose base, kept by AOTAutograd, nothing here holds
    tensors = [tensor for tensor in inputs if isinstance(tensor, Tensor)]
    earlier = {_viewed(tensor).grad_fn for tensor in tensors}  # of graphs that ran before
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            made = _viewed(output)
            if is_of_compiled_graph(made.grad_fn) and made.grad_fn not in earlier:
                of_nodes.setdefault(made.grad_fn, {})[made.output_nr] = _completing(made)
            elif made.grad_fn is None:
                replayed.add(_node_behind(output.grad_fn))
    for written in tensors:
        # What the graph writes to an input is another output, of which torch expects plain zeros.
        for node, place in getattr(written.grad_fn, "next_functions", ()):
            if node in of_nodes:
                like = torch.zeros((), dtype=written.dtype, device=written.device)
                of_nodes[node][place] = partial(_or_zeros, like, written.shape)
    for node, completing in of_nodes.items() if has_dtensors else ():
        node.completing = completing
        # Autograd's zeros are plain, and of all ranks.
        node.set_materialize_grads(node in replayed)
    return next(iter(of_nodes), None)


def with_plain_gradients(inputs: Sequence[Any]) -> Sequence[Any]:
    """Return inputs of which plain ones get plain gradients, of all ranks, beside DTensors."""
    if not torch.is_grad_enabled() or not any(isinstance(value, DTensor) for value in inputs):
        return inputs
    return [
        _Plain.apply(value)
        if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, DTensor)
        else value
        for value in inputs
    ]


class _Plain(torch.autograd.Function):
    """Identity on a plain tensor, whose gradient is plain and whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _as_plain(grad)


def completed(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Complete gradients before a backward, to which AOTAutograd (2.13) passes them in a list."""

    @wraps(backward)
    def run(ctx: Any, *arguments: Any) -> Any:
        gradients = arguments[0] if isinstance(arguments[0], list) else [*arguments]
        for place, complete in getattr(ctx, "completing", {}).items():
            gradients[place] = complete(gradients[place])
        return backward(ctx, *(arguments if gradients is arguments[0] else gradients))

    run_uncompiled(run)
    return run


def _completing(output: Tensor) -> _Complete:
    """Return what makes the gradient that a tensor's backward gets, without keeping the tensor."""
    local = output.to_local() if isinstance(output, DTensor) else output
    shape, stride = local.shape, local.stride()
    dtype, device = local.dtype, local.device

    def zeros() -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()

    if not isinstance(output, DTensor):
        return lambda gradient: zeros() if gradient is None else _as_plain(gradient)
    mesh, placements = output.device_mesh, output.placements
    whole: dict[str, Any] = {"shape": output.shape, "stride": output.stride()}

    def complete(gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return DTensor.from_local(zeros(), mesh, placements, run_check=False, **whole)
        return gradient if isinstance(gradient, DTensor) else replicated(gradient, mesh)

    return complete


def _or_zeros(zero: Tensor, shape: torch.Size, gradient: Tensor | None) -> Tensor:
    return zero.new_zeros(shape) if gradient is None else gradient


def _viewed(tensor: Tensor) -> Tensor:
    """Return what AOTAutograd differentiates where a tensor is a view."""
    return tensor if tensor._base is None else tensor._base


def _node_behind(node: Any) -> Any:
    """Return the node of a compiled graph whose output a replayed view was made of, or None."""
    while node is not None and not is_of_compiled_graph(node):
        behind = [function for function, _ in node.next_functions if function is not None]
        node = behind[0] if len(behind) == 1 else None
    return node


def _as_plain(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


run_uncompiled(_Plain.backward)
