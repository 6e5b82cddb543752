"""Compute what DTensor has no sharding rule for on all tokens, on every rank.

    masked_scatter(x (B, S, H) [Shard(1)], mask (B, S, H) [Shard(1)], images (N, H) [Replicate])
      =>
    out = masked_scatter(x of all ranks, mask of all ranks, images)    (B, S, H), by every rank
    this rank's part of out                                            [Shard(1)]

DTensor (torch 2.13 to 2.15) raises for such an op, either in the forward or only in the backward.
An op on whole tensors is right by construction. So is its gradient, which is another op on whole or
sharded tensors. This costs a gather, which is logged once for each op. A result that has the shape
of an input is sharded like that input, so that the rest of the model stays sharded. So is the
result of a convolution along a sharded dim, such as a spectrogram in time. All other results stay
whole.

An op that writes to its input writes to a whole copy, and every rank takes its part of that copy.
An op that draws random numbers takes those of the first rank. If a size depends on values, as that
of x[mask] does, every rank gets the size of the whole. Rules of torch (read in 2.13) that are wrong
are not used: `is_misjudged` and `HANDLED` know them.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import SymInt, Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_inductor.dtensor.axis import is_first_rank
from cp_inductor.dtensor.rules.in_parts import take_from_first
from cp_inductor.dtensor.rules.partials import part_of
from cp_inductor.dtensor.wrap import is_whole, whole_tensor
from cp_inductor.errors import CPError, UnsupportedPlacement
from cp_inductor.kept import cache
from cp_inductor.source import user_line
from cp_inductor.torch_private.arguments import OpOverload, bind_arguments, tensors_written_by
from cp_inductor.torch_private.dispatch import as_view, become, is_composite
from cp_inductor.torch_private.dtensor import (
    dispatch_as_dtensor,
    dtensor_handler,
    replicated,
    without_handler,
)

log = logging.getLogger("cp_inductor")

aten = torch.ops.aten

# Their indices may be masks; DTensor (2.13) would apply a mask of all tokens to each rank's part.
INDEXED = (
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
    *(aten._index_put_impl_.default, aten._unsafe_index_put.default),
)
# (B, C * 4, H, W) -> (B, C, 2 * H, 2 * W): uneven parts of H do not become the parts of 2 * H.
PIXELS = (aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
# DTensor calls the results contiguous, but their strides follow those of the input.
LAID_LIKE_INPUT = (
    *(aten.native_batch_norm.default, aten.native_batch_norm_backward.default),
    *(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
    *(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    aten._adaptive_avg_pool2d_backward.default,
)
# Ops without a right rule => others that compute the same. torch 2.13 takes a name that ends in "_"
# for that of an op which writes to its first argument. Complex numbers have no hash.
EQUALS: dict[Any, Callable[..., Any]] = {
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
    aten.mul.Scalar: torch.mul,
}
# No dims are all dims to other reductions, as in the backward of x.amax(), and none to DTensor.
KEEP_ALL_OF_NO_DIMS = (aten.any.dims, aten.all.dims)
BATCH_DIM = 0  # of what is convolved: (batch, channels, ...)
# Ops that move data between ranks are no functions of whole tensors.
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "cp_inductor")


def run_if_right(op: Any, args: Any, kwargs: Any) -> Any:
    """Call what torch has for an op, if it gets the call right."""
    if not HANDLED[op](bind_arguments(op, args, kwargs)):
        return run_on_whole(op, args, kwargs)
    return TORCHS.get(op, without_handler)(op, args, kwargs)


def _is_found_in_parts(bound: dict[str, Any]) -> bool:
    """Whether torch's handlers of argmax and argmin (2.13) are right.

    They search among the largest elements of all ranks. They do not know _StridedShard, and need
    the number at which a rank's part begins, which a compiler does not have.
    """
    tensor, dim = bound["self"], bound["dim"]
    dims = range(tensor.ndim) if dim is None else (dim % max(tensor.ndim, 1),)
    is_traced = type(tensor.to_local()) is not Tensor
    # The first of equal elements counts. Those of lower ranks come first along one dim alone.
    is_in_order = dim is not None or tensor.ndim == 1
    return not any(
        type(place) not in (Shard, Replicate, Partial)
        or (isinstance(place, Shard) and place.dim in dims and (is_traced or not is_in_order))
        for place in tensor.placements
    )


def _is_convolved_in_parts(bound: dict[str, Any]) -> bool:
    """Whether torch's handlers of convolutions (2.13) are right: over replicas, or a sharded batch.

    Otherwise they convolve each rank's part alone, or exchange borders where they can, and call the
    result whole. In a backward they take the gradient as placed like the input.
    """
    tensor = bound["input"]
    output = bound.get("grad_output", tensor)
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return True
    is_alike = isinstance(output, DTensor) and output.placements == tensor.placements
    return is_alike and all(
        place.is_replicate() or getattr(place, "dim", None) == BATCH_DIM
        for place in tensor.placements
    )


# Ops for which torch has a rule that is wrong at times => whether it is right for a call.
HANDLED: dict[Any, Callable[[dict[str, Any]], bool]] = {
    aten.argmax.default: _is_found_in_parts,
    aten.argmin.default: _is_found_in_parts,
    aten.convolution.default: _is_convolved_in_parts,
    aten.convolution_backward.default: _is_convolved_in_parts,
    aten.embedding_dense_backward.default: lambda bound: not bound["scale_grad_by_freq"],
    # It draws for elements below 0 alone.
    aten.rrelu_with_noise.default: lambda bound: not bound["training"],
}
# What torch calls for some of them.
TORCHS = {op: own for op in HANDLED if (own := dtensor_handler(op)) is not dispatch_as_dtensor}


def view_as_strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View a tensor as it is, or what every rank has whole; else refuse."""
    bound = bind_arguments(op, args, kwargs)
    tensor, offset = bound["self"], bound["storage_offset"]
    # The stride of a dim of size 1 says nothing.
    strides = zip(tensor.size(), tensor.stride(), bound["stride"], strict=False)
    is_same = tensor.size() == tuple(bound["size"])
    is_same = is_same and all(size == 1 or own == asked for size, own, asked in strides)
    if is_same and (offset is None or tensor.storage_offset() == offset):
        return aten.alias.default(tensor)
    part = tensor.to_local()
    if is_whole(tensor) and part.stride() == tensor.stride():
        view = op(part, *args[1:], **kwargs)
        return as_view(op, args, kwargs, replicated(view, tensor.device_mesh))
    raise UnsupportedPlacement(
        site=f"{op} ({user_line()})",
        expected="views that ranks can take of their parts",
        got=f"as_strided, as torch.stft uses it, of a DTensor {tensor.placements}",
        remedy="use unfold or slices, name the module that calls it in parallelize(..., whole=), or"
        " call it on x.full_tensor()",
    )


def is_misjudged(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the rule that DTensor has for a call is wrong."""
    if op in INDEXED:
        masks = (torch.bool, torch.uint8)
        return any(getattr(index, "dtype", None) in masks for index in args[1])
    if op is aten.gather.default and isinstance(args[0], DTensor) and args[0].ndim:
        # A rank without elements along the dim would fail, and others wait.
        tensor, dim = args[:2]
        along, length = Shard(dim % tensor.ndim), tensor.shape[dim]
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        ranks = prod(size for place, size in sizes if place == along)
        return bool((ranks - 1) * -(-length // ranks) >= length)
    is_known = op in PIXELS or op in LAID_LIKE_INPUT or torch.Tag.inplace_view in op.tags
    return is_known or _place_of_no_dims(op, args) is not None


def _place_of_no_dims(op: OpOverload, args: tuple[Any, ...]) -> int | None:
    """Return which argument of a reduction is an empty list of dims; None if none is."""
    if torch.Tag.reduction not in op.tags or op in KEEP_ALL_OF_NO_DIMS:
        return None
    named = zip(op._schema.arguments, args, strict=False)
    return next((i for i, (it, dims) in enumerate(named) if it.name == "dim" and dims == []), None)


def run_on_whole(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an op on whole tensors. DTensor's error may be the one that is being handled."""
    if torch.Tag.inplace_view in op.tags:
        return _change_shape(op, args, kwargs)
    no_dims = _place_of_no_dims(op, args)
    if no_dims is not None:
        all_dims = [*range(args[0].ndim)]
        return op(*args[:no_dims], all_dims, *args[no_dims + 1 :], **kwargs)
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    error, meshes = sys.exc_info()[1], {t.device_mesh for t in inputs}
    if (
        isinstance(error, CPError)
        or op.namespace in COLLECTIVES
        or is_composite(op)
        or len(meshes) != 1
        or inputs[0].device_mesh.get_coordinate() is None
    ):
        assert error is not None, op
        raise error
    written = tensors_written_by(op, args, kwargs)
    plain = next((tensor for tensor in written if not isinstance(tensor, DTensor)), None)
    if plain is not None:  # of which no rank could keep its part
        raise UnsupportedPlacement(
            site=f"{op} ({user_line()})",
            expected="a DTensor to write a DTensor into",
            got=f"a plain tensor of shape {tuple(plain.shape)}",
            remedy="make it from a DTensor (torch.zeros_like, x.new_zeros), write x.full_tensor(),"
            " or name the module that does it in parallelize(..., whole=)",
        )
    _tell(op, inputs)
    mesh, is_view = inputs[0].device_mesh, op._schema._is_view_op()
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, whole_tensor, (args, kwargs))
    results = op(*whole_args, **whole_kwargs)
    copies = tensors_written_by(op, whole_args, whole_kwargs)
    if torch.Tag.nondeterministic_seeded in op.tags:
        for drawn in (*pytree.tree_leaves(results), *copies):
            if type(drawn) is Tensor:  # a fake one is traced
                take_from_first(replicated(drawn, mesh))
    # What was written to is returned itself, also beside other results and in lists.
    returned = dict[int, DTensor]()
    for tensor, whole in zip(written, copies, strict=True):
        assert isinstance(tensor, DTensor)
        returned[id(whole)] = tensor
        if not is_whole(tensor):  # else it was written to itself
            tensor.to_local().detach().copy_(part_of(whole, tensor))

    def wrap(whole: Tensor) -> DTensor:
        """Shard a result like the first sharded input of its shape, or like what is convolved."""
        if id(whole) in returned:
            return returned[id(whole)]
        made = replicated(whole, mesh)
        for like in inputs:
            is_sharded = not is_view and any(place.is_shard() for place in like.placements)
            is_convolved = op is aten.convolution.default and like is inputs[0]
            if is_sharded and (is_convolved or whole.shape == like.shape):
                places = [place if place.is_shard() else Replicate() for place in like.placements]
                return made.redistribute(placements=places)
        return made

    made = pytree.tree_map_only(Tensor, wrap, results)
    return as_view(op, args, kwargs, made) if is_view else made


def _change_shape(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change the shape of a tensor in place, as `unsqueeze_` does, by the op that returns it."""
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(aten, name)
    taken = [str(argument.type) for argument in op._schema.arguments]
    views = (getattr(packet, overload) for overload in packet.overloads())
    view = next(v for v in views if [str(a.type) for a in v._schema.arguments] == taken)
    return become(args[0], view(*args, **kwargs), op, args, kwargs)


def _tell(op: OpOverload, inputs: Sequence[DTensor]) -> None:
    moved = [tensor for tensor in inputs if not is_whole(tensor)]
    if moved and is_first_rank(moved[0].device_mesh):
        if op is aten.convolution.default:
            warnings.warn(
                "a convolution along a sharded dim: every rank gathers the whole of it, computes"
                " it, and keeps its part",
                stacklevel=2,
            )
        sizes = [tensor.numel() * tensor.element_size() for tensor in moved]
        _tell_once(op, sum(size for size in sizes if not isinstance(size, SymInt)))


@cache
def _tell_once(op: OpOverload, num_bytes: int) -> None:
    log.info(
        f"{op} ({user_line()}): DTensor has no sharding rule for it, so every rank gathers its"
        f" inputs, {num_bytes:,} bytes, and computes all of it"
    )
