"""Gradients of a compiled graph over DTensors that are of another class than autograd makes them.

    loss, logits = compiled(...)
    loss.backward()                      logits got no gradient: autograd fills in plain zeros

AOTAutograd compiles a backward for the gradients of all outputs, and expects a DTensor where an
output is a DTensor. Autograd fills in a plain tensor, which AOTAutograd (torch 2.13 to 2.15)
refuses.

    F.linear(DTensor, plain weight)      weight.grad: a DTensor [Partial], not yet summed

What torch takes for replicated (`implicit_replication`) gets gradients as DTensors. No optimizer
can step with those, and Dynamo (torch 2.13) cannot trace a plain parameter that has one. They
become plain and whole, as the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.torch_private.modes import run_uncompiled


def with_all_gradients(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Let some outputs of a compiled graph be differentiated without the others."""

    @wraps(compiled)
    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        if not isinstance(outputs, (tuple, list)):
            return outputs
        places = [
            place
            for place, output in enumerate(outputs)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        if len(places) < 2 or not any(isinstance(outputs[place], DTensor) for place in places):
            return outputs
        together = _Together.apply(*(outputs[place] for place in places))
        outputs = list(outputs)
        for place, output in zip(places, together, strict=True):
            outputs[place] = output
        return outputs

    return run


def with_plain_gradients(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Give plain inputs of a compiled graph plain gradients, of all ranks, beside DTensors."""

    @wraps(compiled)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled() or not any(isinstance(arg, DTensor) for arg in args):
            return compiled(*args)
        return compiled(
            *(
                _Plain.apply(arg)
                if isinstance(arg, Tensor) and arg.requires_grad and not isinstance(arg, DTensor)
                else arg
                for arg in args
            )
        )

    return run


class _Plain(torch.autograd.Function):
    """Identity on a plain tensor, whose gradient is plain and whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.full_tensor() if isinstance(grad, DTensor) else grad


class _Together(torch.autograd.Function):
    """Identity on several tensors; if one gets a gradient, the others get zeros."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.zeros = [_zeros_like(output) for output in outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(
            make() if grad is None else grad for make, grad in zip(ctx.zeros, grads, strict=True)
        )


def _zeros_like(output: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes zeros like a tensor, without keeping the tensor alive."""
    local = output.to_local() if isinstance(output, DTensor) else output
    shape, stride = local.shape, local.stride()
    dtype, device = local.dtype, local.device

    def zeros() -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()

    if not isinstance(output, DTensor):
        return zeros
    mesh, placements = output.device_mesh, output.placements
    whole: dict[str, Any] = {"shape": output.shape, "stride": output.stride()}
    return lambda: DTensor.from_local(zeros(), mesh, placements, run_check=False, **whole)


run_uncompiled(_Plain.backward)
run_uncompiled(_Together.backward)
