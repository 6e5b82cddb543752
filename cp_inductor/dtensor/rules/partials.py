"""Make a partial whole where it is made, unless only linear ops can meet it; read whole numbers.

    n = (labels != -100).sum()      labels (B, S) [Shard(1)]: n is DTensor () [Partial(sum)]
      =>                            n is DTensor () [Replicate]: summed at once
    x.norm(dim=1), x.amax(1)        likewise, of [Partial(norm)], [Partial(max)]
    w.T @ x                         stays [Partial(sum)]: a sum that DTensor's rules take further
    n.item(), if mask.all(): ...    all ranks read the number of the whole
    x[:, 3, 0].tolist()             reads what all ranks gather

Each rank of a partial holds a part of the number: a summand, or the largest of its own tokens. Code
that reads the number, writes to it, or adds up norms acts on the part. DTensor (torch 2.13 to 2.15)
lets sums and concatenations act on the parts of norms, and each rank reads its own part.

A sum stays partial in a backward, where it is a gradient on its way to its sum, and behind a matrix
product, as in layers whose weights are sharded by rows. DTensor's rules for both are linear. A
write to such a partial is computed on the whole, unless it is linear: see `writes`.

A rank that reads only its own part divides its loss by its own count, or takes another branch than
the others, and then waits for them for ever. All ways in which Python reads a number go through one
op (`item`, `int`, `bool`, `if`, an index, a format). `tolist` and `numpy` read memory, which torch
refuses for every DTensor: eager code reads a copy of the whole. All ranks must ask for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_inductor.dtensor.axis import holds_sequences
from cp_inductor.dtensor.wrap import whole_tensor, wrap_shard
from cp_inductor.torch_private.dtensor import dispatch_as_dtensor, replicated, without_handler
from cp_inductor.torch_private.modes import is_in_backward

aten = torch.ops.aten
# Sums over a sharded dim of what they multiply.
PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.mv.default, aten.addmv.default, aten.dot.default, aten.vdot.default),
    *(aten.convolution.default, aten.embedding.default),
)


def is_partial(tensor: DTensor) -> bool:
    """Whether ranks hold parts of a tensor's numbers."""
    return any(place.is_partial() for place in tensor.placements)


def make_whole(tensor: DTensor) -> DTensor:
    """Return a partial as every rank's own; sharded dims stay sharded."""
    mesh = tensor.device_mesh
    places = [Replicate() if place.is_partial() else place for place in tensor.placements]
    extremes = {place.reduce_op for place in tensor.placements if isinstance(place, Partial)}
    if not tensor.is_floating_point() or not extremes & {"max", "min"}:
        return tensor.redistribute(placements=places)
    # An all-reduce may drop a NaN (gloo, NCCL), so a second row of the same one tells of it.
    limit, sign = (-torch.inf, 1) if "max" in extremes else (torch.inf, -1)
    local = tensor.to_local()
    rows = torch.stack([local.masked_fill(local.isnan(), limit), sign * local.isnan().to(local)])
    of_rows, reduced = (
        [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in row]
        for row in (tensor.placements, places)
    )
    both = wrap_shard(rows, mesh, of_rows, (2, *tensor.shape)).redistribute(placements=reduced)
    extreme, is_nan = both.to_local()
    return wrap_shard(extreme.masked_fill(is_nan != 0, torch.nan), mesh, places, tensor.shape)


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """Return what this rank holds of a tensor that is placed like another.

    The tensor is plain, alike on all ranks, and of the shape of the other, which may be partial. Of
    a sum the first rank holds all, so that nothing is rounded.
    """
    mesh, places = like.device_mesh, list(like.placements)
    sums = [axis for axis, place in enumerate(places) if place.is_partial() and _is_sum(place)]
    for axis in sums:
        places[axis] = Replicate()
    part = replicated(whole, mesh).redistribute(placements=places).to_local()
    is_first = all(mesh.get_local_rank(axis) == 0 for axis in sums)
    return part if is_first else torch.zeros_like(part)


def makes_parts(op: torch._ops.OpOverload, args: tuple[Any, ...], output_spec: Any) -> bool:
    """Whether what DTensor would return of an op is partial, and more than a sum that may stay.

    DTensor remembers its choice for all calls alike, so this does not depend on the mesh, which may
    hold sequences later, nor on whether a backward runs: `compute_whole` asks for both. The choice
    is a DTensorSpec, several, or none.
    """
    specs = output_spec if isinstance(output_spec, (tuple, list)) else (output_spec,)
    places = [place for spec in specs for place in getattr(spec, "placements", ())]
    parts = [place for place in places if place.is_partial()]
    tensors = (leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, DTensor))
    # It multiplies matrices, or is linear in what is a sum already.
    may_sum = op in PRODUCTS or any(map(is_partial, tensors))
    return bool(parts) and not (may_sum and all(map(_is_sum, parts)))


def compute_whole(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Compute an op as DTensor does, and make whole what it returns, where sequences lie.

    What a gather along a sharded dim returns is made whole everywhere.
    """
    # A checkpoint computes its forward anew in a backward, with gradients on.
    is_gradient = is_in_backward() and not torch.is_grad_enabled()

    def whole(tensor: DTensor) -> DTensor:
        sums = [_is_sum(place) for place in tensor.placements if place.is_partial()]
        may_stay = (is_gradient and all(sums)) or not holds_sequences(tensor.device_mesh)
        # Parts of a gather have a mask of its shape, so a view of them, such as `squeeze`, fails.
        return tensor if may_stay and op is not aten.gather.default else make_whole(tensor)

    return pytree.tree_map_only(DTensor, whole, dispatch_as_dtensor(op, args, kwargs))


def _is_sum(place: Any) -> bool:
    # A norm's placement is derived from that of sums, which it is not.
    return place.reduce_op == "sum" and not hasattr(place, "norm_type")


def whole_of_sequence(tensor: DTensor) -> Tensor | None:
    """Return all of a tensor, where sequences lie; None to leave its memory to DTensor."""
    return whole_tensor(tensor) if holds_sequences(tensor.device_mesh) else None


def read_item(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Read the number of the whole."""
    if not holds_sequences(args[0].device_mesh):
        return without_handler(op, args, kwargs)
    return op(whole_tensor(args[0].detach()))
