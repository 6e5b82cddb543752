"""Numbers of all tokens, of which each rank would hold a part: sums, losses, what Python reads.

    n = (labels != -100).sum()      labels (B, S) [Shard(1)]: n is DTensor () [Partial(sum)]
      =>                            n is DTensor () [Replicate]: summed at once
    x.norm(dim=1), x.amax(1)        likewise, of [Partial(norm)], [Partial(max)]
    w.T @ x                         stays [Partial(sum)]: a sum that DTensor's rules take further
    n.item(), if mask.all(): ...    all ranks read the number of the whole
    x[:, 3, 0].tolist()             reads what all ranks gather
    nll_loss(..., "mean")           the sum over all ranks / the tokens that count on all ranks

Code that reads a part, writes to it, or adds up parts of norms acts on the part. DTensor (torch
2.13 to 2.15) lets sums and concatenations act on the parts of norms, and each rank reads its own
part: it takes another branch than the others, and waits for them for ever. All ways in which Python
reads a number go through one op. `tolist` and `numpy` read memory, which torch refuses for every
DTensor: eager code reads a copy of the whole. All ranks must ask for it.

A sum stays partial in a backward, where it is a gradient on its way to its sum, and behind a matrix
product, as in layers whose weights are sharded by rows. DTensor's rules for both are linear. A
write to such a partial is computed on the whole, unless it is linear: see `writes`.

DTensor averages the means of the ranks. That is the mean only if every rank ignores equally many
targets; but padding is at the end, and one rank holds the last target. It refuses shards of unequal
length, and gradients of losses of elements (`mse_loss`, ...) are too large by the number of ranks.
Where this library is not used (`dtensor/axis.py`), programs may correct that by hand: it stays.

`torch.distributed.tensor.parallel.loss_parallel` has its own handlers for a sharded vocabulary,
which refuse the mean if tokens are sharded as well. They are asked for the sum instead.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_inductor.dtensor.axis import holds_sequences
from cp_inductor.dtensor.wrap import is_whole, whole_tensor, wrap_shard, wrap_whole
from cp_inductor.errors import UnsupportedWrite
from cp_inductor.source import user_line
from cp_inductor.torch_private.arguments import OpOverload, bind_arguments
from cp_inductor.torch_private.dtensor import (
    dispatch_as_dtensor,
    handler_of_loss_parallel,
    replicated,
    without_handler,
)
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
    a sum the first rank holds all, so that nothing is rounded; torch (2.13) makes no other partial.
    """
    mesh, places = like.device_mesh, list(like.placements)
    sums = [axis for axis, place in enumerate(places) if place.is_partial()]
    for axis in sums:
        if not _is_sum(places[axis]):
            raise UnsupportedWrite(
                site=f"a write in place ({user_line()})",
                expected="a DTensor of which ranks hold all, shards or summands",
                got=f"one with {like.placements}",
                remedy="make it whole before, by x.redistribute(placements=[Replicate()])",
            )
        places[axis] = Replicate()
    part = replicated(whole, mesh).redistribute(placements=places).to_local()
    is_first = all(mesh.get_local_rank(axis) == 0 for axis in sums)
    return part if is_first else torch.zeros_like(part)


def makes_parts(op: OpOverload, args: tuple[Any, ...], output_spec: Any) -> bool:
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


def compute_whole(op: OpOverload, args: Any, kwargs: Any) -> Any:
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


def read_item(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Read the number of the whole."""
    whole = whole_of_sequence(args[0].detach())
    return without_handler(op, args, kwargs) if whole is None else op(whole)


# Losses of elements. All elements count alike.
_LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
ELEMENT_OPS = [getattr(aten, name).default for name in _LOSSES]
ELEMENT_OPS += [getattr(aten, f"{name}_backward").default for name in _LOSSES]

MEAN, SUM = 1, 2  # at::Reduction
# In the input of nll_loss, (N, C) or (N, C, ...).
CLASS_DIM = 1


def compute_loss(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Compute a loss of what is sharded; leave others to `loss_parallel` if that is on, or DTensor.

    No loss is partial, whoever computes it.
    """
    bound, parallel = bind_arguments(op, args, kwargs), handler_of_loss_parallel(op)
    placed = [value for value in bound.values() if isinstance(value, DTensor)]
    mesh = placed[0].device_mesh
    is_ours, results = holds_sequences(mesh), None
    if is_ours and not all(map(is_whole, placed)):
        results = COMPUTED[op](parallel, op, bound, mesh)
    if results is None:
        results = (parallel or dispatch_as_dtensor)(op, args, kwargs)
    if "grad_output" in bound or not is_ours:
        return results
    return pytree.tree_map_only(DTensor, make_whole, results)


def _mean_loss(parallel: Any, op: Any, bound: dict[str, Any], mesh: DeviceMesh) -> Any:
    if not _is_mean_of_tokens(bound):
        return None
    total, weight = (parallel or dispatch_as_dtensor)(op, _as_sum(bound), {})
    if parallel is None:
        count = whole_tensor(weight)
        return _divided(total, count), wrap_whole(count, mesh)
    # It sums over this rank's tokens, and its backward divides by the count.
    shares = [Partial() if place.is_partial() else Replicate() for place in total.placements]
    count = whole_tensor(DTensor.from_local(weight, mesh, shares, run_check=False))
    return _divided(total, count), count


def _divided(total: DTensor, count: Any) -> DTensor:
    mean = total.to_local() / count
    return DTensor.from_local(mean, total.device_mesh, total.placements, run_check=False)


def _mean_loss_backward(parallel: Any, op: Any, bound: dict[str, Any], mesh: DeviceMesh) -> Any:
    weight = bound["total_weight"]
    # Our count covers all ranks; DTensor sums its own later. Between a forward and its backward, a
    # mesh may have started to hold sequences.
    is_counted = parallel is None and isinstance(weight, DTensor) and is_whole(weight)
    if not is_counted or not _is_mean_of_tokens(bound):
        return None
    return _sum_backward(op, bound, mesh, weight.to_local())


def _sum_backward(op: Any, bound: dict[str, Any], mesh: DeviceMesh, count: Any) -> Any:
    """Call the backward of the sum, with the gradient of a mean over a count."""
    grad = bound["grad_output"]
    grad = wrap_whole((whole_tensor(grad) if isinstance(grad, DTensor) else grad) / count, mesh)
    return dispatch_as_dtensor(op, _as_sum(bound | {"grad_output": grad}), {})


def _mean_of_elements(_: Any, op: Any, bound: dict[str, Any], mesh: DeviceMesh) -> Any:
    if bound["reduction"] != MEAN:
        return None
    count = prod(torch.broadcast_shapes(bound["self"].shape, bound["target"].shape))
    if "grad_output" in bound:
        return _sum_backward(op, bound, mesh, count)
    return _divided(dispatch_as_dtensor(op, _as_sum(bound), {}), count)


def _with_logits(parallel: Any, op: Any, bound: dict[str, Any], mesh: DeviceMesh) -> Any:
    """Compute the loss of each element, by the formula of ATen (Loss.cpp), and reduce these."""
    if parallel is not None:
        return None
    logits, target = bound["self"], bound["target"]
    of_ones = torch.nn.functional.logsigmoid(logits)
    if bound["pos_weight"] is not None:
        of_ones = of_ones * (1 + (bound["pos_weight"] - 1) * target)
    losses = (1 - target) * logits - of_ones
    if bound["weight"] is not None:
        losses = losses * bound["weight"]
    if bound["reduction"] == MEAN:
        return losses.sum() / losses.numel()
    return losses.sum() if bound["reduction"] == SUM else losses


def _is_mean_of_tokens(bound: dict[str, Any]) -> bool:
    tensor = bound["self"]
    if bound["reduction"] != MEAN or not isinstance(tensor, DTensor) or tensor.ndim <= CLASS_DIM:
        return False
    return bool({getattr(p, "dim", None) for p in tensor.placements} - {None, CLASS_DIM})


def _as_sum(bound: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((bound | {"reduction": SUM}).values())


# (what `loss_parallel` computes the op by; the op; its arguments by name; their mesh) -> the
# results, or None to leave the op to those who would compute it otherwise.
COMPUTED: dict[Any, Callable[[Any, Any, dict[str, Any], DeviceMesh], Any]] = {
    aten.nll_loss_forward.default: _mean_loss,
    aten.nll_loss2d_forward.default: _mean_loss,
    aten.nll_loss_backward.default: _mean_loss_backward,
    aten.nll_loss2d_backward.default: _mean_loss_backward,
    **dict.fromkeys(ELEMENT_OPS, _mean_of_elements),
    # torch 2.13 averages the ranks' means of this loss, or does not trace its sum.
    aten.binary_cross_entropy_with_logits.default: _with_logits,
}
