"""Rules of ops that compute along some dims: reductions, sorts, normalisations, convolutions."""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_inductor.sequence.rules.call import (
    SUMS,
    Mixes,
    OpCall,
    describe_kind,
    number,
    overloads,
    rule,
)
from cp_inductor.sequence.types import Same, Shards, Sum, Type

aten = torch.ops.aten


@rule(aten.sum, aten.mean, aten.max.default, aten.max.dim, aten.min.default, aten.min.dim)
@rule(aten.median, aten.mode, aten.kthvalue, aten.nansum, aten.norm, aten.aminmax, aten.std_mean)
@rule(aten.var_mean, aten.count_nonzero, tag=torch.Tag.reduction)
def reduce(call: OpCall) -> list[Type]:
    """Reduce over dims: over tokens, only sums and means are parts of the whole's."""
    tensor = call.tensors[0]
    given, dims = call.types[0], call.dims(of=call.op._schema.arguments[0].name)
    is_sum, is_mean = (call.op in overloads([op]) for op in (aten.sum, aten.mean))
    if isinstance(given, Sum) and (is_sum or is_mean):
        return [given]
    if not isinstance(given, Shards) or len(call.tensors) > 1:
        raise Mixes(f"{call.op} of {describe_kind(given)}", SUMS)
    if given.dim in dims:
        if not (is_sum or is_mean):
            # A rank without tokens would not vote.
            is_vote = call.op in overloads((aten.any, aten.all)) and given.is_even
            raise Mixes(f"{call.op} over each rank's own tokens", SUMS, is_vote=is_vote)
        if is_mean:
            call.check_even(given)
        is_count = is_sum and given.is_counted and tensor.dtype == torch.bool
        return [Sum(is_mean, is_alike=is_count)]
    lost = 0 if call.outs[0].ndim == tensor.ndim else sum(dim < given.dim for dim in dims)
    return [replace(given, dim=given.dim - lost)] * len(call.outs)


@rule(aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum, aten.cumsum_, aten.cumprod)
@rule(aten.cummax, aten.cummin, aten.logcumsumexp, aten.glu, aten.sort, aten.argsort, aten.topk)
@rule(aten.flip, aten.roll, aten._fft_c2c, aten._fft_r2c, aten._fft_c2r)
def along_dims(call: OpCall) -> list[Type]:
    """Mix along dims, or along all at once where no dims are named."""
    given = call.shards()
    if given.dim in call.dims("dims" if "dims" in call.bound else "dim"):
        raise Mixes(f"{call.op}, which mixes tokens")
    return [given] * len(call.outs)


@rule(aten.triu, aten.tril, aten.triu_, aten.tril_)
def triangle(call: OpCall) -> list[Type]:
    """Zero entries by their position in the last two dims."""
    given = call.shards()
    if given.dim >= call.tensors[0].ndim - 2:
        raise Mixes(f"{call.op}, which counts tokens from 0")
    return [given]


@rule(aten.native_layer_norm, aten._fused_rms_norm)
def normalize(call: OpCall) -> list[Type]:
    """Normalise over the last dims."""
    given = call.shards("input")
    if given.dim >= call.tensors[0].ndim - len(call.bound["normalized_shape"]):
        raise Mixes(f"{call.op} over each rank's own tokens")
    if not all(isinstance(other, Same) for other in call.types[1:]):
        raise Mixes(f"{call.op} with weights that are made of tokens")
    return [given] * len(call.outs)


@rule(aten.convolution)
def convolve(call: OpCall) -> list[Type]:
    """Convolve: each token alone, or patches of tokens that no border cuts."""
    given = call.shards("input")
    if not (call.is_same("weight") and call.is_same("bias")) or given.dim == 1:
        raise Mixes(f"{call.op} with weights that are made of tokens")
    if given.dim == 0:
        return [given]
    place = given.dim - 2
    size = number(call.bound["weight"].shape[given.dim])
    stride, padding, dilation = (
        call.bound[n][place % len(call.bound[n])] for n in ("stride", "padding", "dilation")
    )
    is_apart = (stride, padding) == (size, 0) and (dilation == 1 or size == 1)
    if (
        not is_apart
        or given.length % size
        or not (given.is_even or size == 1)
        or call.bound["transposed"]
    ):
        raise Mixes(f"{call.op}, which mixes adjacent tokens")
    return [replace(given, length=given.length // size)]
