"""Run modules that mix the tokens of a sequence on all of it, such as state-space layers.

    mixer(hidden (B, S, H) [Shard(1)]) -> out
      =>
    whole = hidden's tokens of all ranks, a plain tensor        gathered
    weight = weight.to_local(grad_placements=[Partial()])
    out = mixer's own forward(whole)                            by every rank
    from_local(this rank's tokens of out)                       [Shard(1)]

A recurrence passes from token to token, so a rank cannot compute its part before the previous rank
has computed its own. This module does what is simple and right: every rank computes all tokens and
keeps its own. That costs each rank the time and the memory of the module on one process. The rest
of the model stays sharded, attention included.

A rank's gradients, of weights and of what it gathered, are those of the tokens that it keeps: a
part of the sum. The backward of the gather is a reduce-scatter.

Modules that begin a sequence, such as the patches of an image, are treated alike: every rank
computes all tokens, and the result is sharded.

Assumes: the batch is dim 0. A result has the sequence in the dim in which it was sharded before, or
in dim 1. Random numbers may differ from rank to rank. Then each rank keeps the tokens, and their
gradients, of its own draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_inductor.dtensor.wrap import wrap_parts, wrap_whole
from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.reading import (
    ReadsLocally,
    computing,
    computing_with,
    locally,
    reading_of,
    scale_gradient,
)
from cp_inductor.modules.whole_batches import map_parts, tensors_of
from cp_inductor.plan.grid import shard_lengths

# The sequence dim of what a module returns, if the sequence begins in that module.
FIRST_DIM = 1


class OnWhole(ReadsLocally):
    """Computes on all tokens, and returns this rank's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the arguments, and compute."""
        given = [leaf for leaf in tensors_of((args, kwargs)) if isinstance(leaf, DTensor)]
        reading = reading_of(self) if computing().is_running else None
        if given:
            mesh = given[0].device_mesh
        elif reading is not None:
            mesh = reading.mesh
        else:
            return super().forward(*args, **kwargs)
        placements = _placements_of_result(given, mesh, type(self).__name__)
        args, kwargs = map_parts(lambda _, leaf: gathered(leaf), "", (args, kwargs), is_ours=False)
        # A checkpoint may recompute this together with modules that share the sequence.
        left: list[tuple[nn.Module, str]] = []
        with computing_with(sequence=None, left=left):
            result = locally(super().forward, *args, **kwargs)
        _share_what_is_left(left, mesh, placements)
        of_batch = (tensor for tensor in given if Shard(0) in tensor.placements)
        batch = next(((one.to_local().shape[0], one.shape[0]) for one in of_batch), None)
        return map_parts(
            lambda _, leaf: own_part(leaf, mesh, placements, batch), "", result, is_ours=True
        )


def _share_what_is_left(
    left: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Give each rank its share of the gradient of a loss that all have left in an attribute.

    Every rank differentiates it, and they sum their gradients of what it was made of.
    """
    sizes = zip(mesh.shape, placements, strict=True)
    num_alike = math.prod([size for size, place in sizes if place != Shard(0)])
    for module, name in left:
        loss = getattr(module, name, None)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            continue
        if num_alike < mesh.size():
            raise UnsupportedPlacement(
                site=f"{type(module).__name__}.{name}",
                expected="a module that leaves no loss, as the batch is sharded",
                got="one of this rank's part of the batch",
                remedy="compute it from what the module returns",
            )
        # Whoever adds it to what is of all tokens has a DTensor's gradient for it.
        whole = loss if isinstance(loss, DTensor) else wrap_whole(loss, mesh)
        setattr(module, name, scale_gradient(whole, 1 / num_alike))


def _placements_of_result(given: Sequence[DTensor], mesh: DeviceMesh, site: str) -> list[Placement]:
    """Return the placements of the first argument along the sequence, or those of its beginning."""
    for tensor in given:
        if any(isinstance(place, Shard) and place.dim > 0 for place in tensor.placements):
            return list(tensor.placements)
    places: list[Placement] = [Replicate()] * mesh.ndim
    for tensor in given:
        for axis, placement in enumerate(tensor.placements):
            if placement == Shard(0):
                places[axis] = placement
    free = [axis for axis, placement in enumerate(places) if placement == Replicate()]
    if len(free) != 1:
        raise UnsupportedPlacement(
            site=site,
            expected="an argument that is sharded along the sequence, or one mesh axis on which"
            " none is sharded, for the sequence that begins here",
            got=f"{len(free)} such axes of {mesh.mesh_dim_names}",
            remedy="parallelize the model on the axis of the sequence alone, or shard the batch on"
            " the others",
        )
    places[free[0]] = Shard(FIRST_DIM)
    return places


def gathered(leaf: Any) -> Any:
    """Return the whole sequence of this rank's batch entries, whose gradient is a part."""
    if not isinstance(leaf, DTensor):
        return leaf
    mesh = leaf.device_mesh
    places = [p if p == Shard(0) and leaf.ndim > 1 else Replicate() for p in leaf.placements]
    parts = [p if p == Shard(0) else Partial() for p in places]
    return leaf.redistribute(mesh, places).to_local(grad_placements=parts)


@contextmanager
def drawing_alike(block: nn.Module, tokens: DTensor) -> Iterator[None]:
    """Refuse random numbers for unequally many tokens: the ranks would draw apart from then on."""
    is_uneven = any(
        tokens.shape[place.dim] % size
        for place, size in zip(tokens.placements, tokens.device_mesh.shape, strict=True)
        if isinstance(place, Shard)
    )
    before = _states_of_generators(tokens.device) if is_uneven else ()
    yield
    after = _states_of_generators(tokens.device) if is_uneven else ()
    if not all(map(torch.equal, before, after)):
        raise UnsupportedPlacement(
            site=type(block).__name__,
            expected="a module that draws as many numbers on every rank",
            got=f"random numbers for this rank's part of {tuple(tokens.shape)}, which the ranks do"
            " not divide",
            remedy="pad the sequence to a multiple of the ranks, or draw outside of the module",
        )


def _states_of_generators(device: torch.device) -> tuple[Tensor, Tensor]:
    of_device = getattr(torch.get_device_module(device), "get_rng_state", torch.get_rng_state)
    return torch.get_rng_state(), of_device()


def dims_of_tokens(tokens: Tensor) -> int:
    """Return how many dims tell tokens apart: of (B, S, ...) two, of (T, ...) one."""
    return 2 if tokens.ndim > 2 else 1


def shared_out(tokens: DTensor, dims: int | None = None) -> list[Shard]:
    """Return placements of tokens of which each rank computes its own: shards of the first dims."""
    # If ranks hold the same tokens, each takes a part. Otherwise gradients would count twice.
    dims = dims or dims_of_tokens(tokens)
    return [p if type(p) is Shard and p.dim < dims else Shard(dims - 1) for p in tokens.placements]


def wrap_tokens(out: Tensor, tokens: DTensor, dims: int | None = None) -> DTensor:
    """Wrap what was computed of this rank's tokens, with as many features as it has."""
    dims = dims or dims_of_tokens(tokens)
    shape = (*tokens.shape[:dims], *out.shape[dims:])
    return wrap_parts(out, tokens.device_mesh, tokens.placements, shape)


def part_beside(other: Tensor, tokens: DTensor) -> Tensor:
    """Return what a rank's own tokens meet of another tensor, whose gradient is a part.

    Args:
        other: (B, S, ...) or (1, S, ...) of all tokens, of which the rank takes those of its own;
            (B, ...), of which it takes those of its batch entries; or anything, all of it.
        tokens: (B, S, ...), or (T, ...).
    """
    mesh, dims = tokens.device_mesh, dims_of_tokens(tokens)
    if not isinstance(other, DTensor):
        other = wrap_whole(other, mesh)
    has_batch = other.ndim > 0 and other.shape[0] == tokens.shape[0]
    is_of_tokens = other.ndim >= dims and other.shape[dims - 1] == tokens.shape[dims - 1]
    is_of_tokens = is_of_tokens and (has_batch or (dims == 2 and other.shape[0] == 1))
    places = [
        place if (is_of_tokens if place == Shard(dims - 1) else has_batch) else Replicate()
        for place in shared_out(tokens)
    ]
    parts = [Partial() if place.is_replicate() else place for place in places]
    own: Tensor = other.redistribute(mesh, places).to_local(grad_placements=parts)
    return own


def own_part(
    leaf: Any, mesh: DeviceMesh, placements: Sequence[Placement], batch: tuple[int, int] | None
) -> Any:
    """Return a DTensor of this rank's part of a plain tensor that has all tokens.

    Args:
        leaf: (B, S, ...), or with the sequence in the dim that `placements` shard. Anything but a
            plain tensor is returned as it is.
        mesh, placements: of the result.
        batch: how many entries the batch has on this rank and on all of them, if it is sharded.
    """
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    (dim,) = {p.dim for p in placements if isinstance(p, Shard) and p.dim > 0}
    if leaf.ndim <= dim:
        raise UnsupportedPlacement(
            site="parallelize(..., whole=)",
            expected=f"modules that return tensors with the sequence in dim {dim}",
            got=f"one of shape {tuple(leaf.shape)}",
            remedy="name a module inside it that returns tokens",
        )
    shape = list(leaf.shape)
    if batch is not None and shape[0] == batch[0]:
        shape[0] = batch[1]
    # If ranks hold the same tokens, each takes a part. Otherwise gradients would count twice.
    places: list[Shard] = [p if isinstance(p, Shard) else Shard(dim) for p in placements]
    for axis, place in enumerate(places):
        if place.dim == dim:
            rank = mesh.get_local_rank(axis)
            lengths = shard_lengths(leaf.shape[dim], mesh.size(axis))
            leaf = leaf.narrow(dim, sum(lengths[:rank]), lengths[rank])
    return wrap_parts(leaf, mesh, places, shape).redistribute(mesh, placements)
