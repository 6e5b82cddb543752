"""Convolve DTensors that are sharded along what is convolved, such as a spectrogram in time.

    conv(x (B, C, L) [Shard(2)], weight [Replicate])
      =>
    out = conv(x of all ranks, weight)        (B, C', L')
    this rank's part of out                   [Shard(2)]

torch's own handler (read in 2.13) convolves each rank's part alone, or exchanges borders where it
can, and calls the result whole. Its shape and its numbers are wrong, without an error. This handler
gathers first, which is right for every stride, padding and length, and where channels are sharded,
which torch's handler does not take. In a backward it places the gradient like the input, which
torch's handler takes for granted. It leaves all other convolutions to torch's handler: those over a
sharded batch or replicated tensors.
It is registered once a model is parallelized or a backend of this library is loaded; until then,
DTensor's table of handlers is unchanged.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cp_inductor.dtensor.axis import is_first_rank
from cp_inductor.dtensor.wrap import wrap_parts
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import dtensor_handler, register_dtensor_handler

FORWARD = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default
BATCH_DIM = 0  # (batch, channels, what is convolved)


def gather_in_convolutions() -> None:
    """Register the handlers; a second call changes nothing."""
    for op, handle in ((FORWARD, _forward), (BACKWARD, _backward)):
        registered = dtensor_handler(op)
        if not isinstance(registered, _Handler):
            register_dtensor_handler(op, _Handler(handle, registered))


class _Handler:
    """Calls a handler for what it takes, and otherwise the one that was there before."""

    def __init__(self, handle: Any, before: Any) -> None:
        self.handle, self.before = handle, before

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        bound = bind_arguments(op, args, kwargs)
        given = bound["input"]
        if not isinstance(given, DTensor):
            return self.before(op, args, kwargs)
        of_output = bound.get("grad_output", given)
        is_alike = isinstance(of_output, DTensor) and of_output.placements == given.placements
        if is_alike and not any(map(_is_gathered, given.placements)):
            return self.before(op, args, kwargs)
        if given.device_mesh.get_coordinate() is None:
            return self.before(op, args, kwargs)
        return self.handle(op, bound, given)


def _is_gathered(placement: Placement) -> bool:
    return placement.is_partial() or (placement.is_shard() and not _is_of_batch(placement))


def _is_of_batch(placement: Any) -> bool:
    return getattr(placement, "dim", None) == BATCH_DIM


def _forward(op: torch._ops.OpOverload, bound: dict[str, Any], given: DTensor) -> DTensor:
    if is_first_rank(given.device_mesh):
        warnings.warn(
            "a convolution along a sharded dim: every rank gathers the whole of it, computes it,"
            " and keeps its part",
            stacklevel=2,
        )
    return _part_of(op(**_gathered(bound, given)), given)


def _backward(
    op: torch._ops.OpOverload, bound: dict[str, Any], given: DTensor
) -> tuple[DTensor | None, ...]:
    of_input, *of_weights = op(**_gathered(bound, given))
    # If the batch is sharded, the gradient of a weight is a part of the sum. Otherwise it is whole.
    parts = [Partial() if _is_of_batch(place) else Replicate() for place in given.placements]
    wrapped = [
        None if grad is None else DTensor.from_local(grad, given.device_mesh, parts)
        for grad in of_weights
    ]
    return None if of_input is None else _part_of(of_input, given), *wrapped


def _gathered(bound: dict[str, Any], given: DTensor) -> dict[str, Any]:
    """Return the arguments with plain tensors: whole, but for the batch."""
    mesh = given.device_mesh
    places = {name: _places_of_batch(given) for name in ("input", "grad_output")}
    everywhere = [Replicate()] * mesh.ndim
    return {
        name: value.redistribute(mesh, places.get(name, everywhere)).to_local()
        if isinstance(value, DTensor)
        else value
        for name, value in bound.items()
    }


def _places_of_batch(given: DTensor) -> list[Placement]:
    return [place if _is_of_batch(place) else Replicate() for place in given.placements]


def _part_of(out: Tensor, given: DTensor) -> DTensor:
    shape = (given.shape[0], *out.shape[1:])
    whole = wrap_parts(out, given.device_mesh, _places_of_batch(given), shape)
    return whole.redistribute(given.device_mesh, given.placements)
