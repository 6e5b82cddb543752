"""Rules of ops that compute: entry by entry, as broadcasting aligns them, and along dims."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cp_inductor.graph.collectives import WAIT
from cp_inductor.sequence.rules.call import (
    POSITIONS,
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
c10d = torch.ops._c10d_functional

UNIFORM_LIKE = overloads((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like))
COPIES = overloads(
    (
        *(aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift, aten.lift_fresh, aten.neg),
        *(aten.contiguous, aten.copy_, aten.copy, aten.conj, aten._conj, aten.resolve_conj),
        *(torch.ops.prims.convert_element_type, aten.ones_like, aten.zeros_like, aten.empty_like),
    )
)
_ADDING = overloads((aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub))
_DIVIDING = overloads((aten.div, aten.div_))
_SCALING = _DIVIDING | overloads((aten.mul, aten.mul_))


@rule(
    *(*COPIES, *UNIFORM_LIKE, aten.fill_, aten.zero_, aten.masked_fill, aten.masked_fill_),
    *(aten.where.self, aten._neg_view, aten.resolve_neg, aten.real, aten.imag, aten.view.dtype),
    *(aten.nan_to_num, aten.xlogy, aten.isnan, aten.polar, aten.complex, aten.prelu),
    *(aten._prelu_kernel, aten.native_dropout, aten.bernoulli, aten.bernoulli_, aten.normal_),
    *(aten.uniform_, aten.exponential_, aten.log_sigmoid_forward, aten.rand_like),
    *(aten.randn_like, aten.randint_like, aten.rrelu_with_noise, torch.ops.prims.device_put, WAIT),
    tag=torch.Tag.pointwise,
)
def pointwise(call: OpCall) -> list[Type]:
    """Compute entry by entry, as broadcasting aligns them."""
    sums = [kind for kind in call.types if isinstance(kind, Sum)]
    return [_linear(call, sums) if sums else call.aligned(out) for out in call.outs]


def _linear(call: OpCall, sums: list[Sum]) -> Type:
    """Return the type of a result that is linear in sums over ranks."""
    others = [kind for kind in call.types if not isinstance(kind, Sum)]
    shifts = [call.bound.get(name) for name in ("self", "other")]
    is_shifted = bool(others) or any(isinstance(shift, (int, float)) and shift for shift in shifts)
    has_tokens = any(isinstance(kind, Shards) for kind in others)
    is_alike = len(set(sums)) == 1 and not has_tokens
    # A sum may be divided, and divides nothing.
    is_over = call.op in _DIVIDING and call.type_of(call.bound["self"]) not in sums
    is_copied = call.op in COPIES and not others and len(set(sums)) == 1
    is_added = call.op in _ADDING and is_alike and (sums[0].is_mean or not is_shifted)
    is_scaled = call.op in _SCALING and len(sums) == 1 and not has_tokens and not is_over
    if (is_copied or is_added or is_scaled) and not _is_rounded(call):
        return replace(sums[0], is_alike=is_copied and sums[0].is_alike)
    if call.op in _DIVIDING and sums == call.types == [Sum(is_mean=False)] * 2 and sums[1].is_alike:
        return Sum(is_mean=True)  # over as many tokens on every rank
    kinds = " and ".join(sorted({describe_kind(kind) for kind in call.types}))
    raise Mixes(f"{call.op} of {kinds}, which is not that of the whole sequence", SUMS)


def _is_rounded(call: OpCall) -> bool:
    """Whether a result is rounded to whole numbers, or to a bool."""
    made = call.outs[0].dtype
    is_whole = not (made.is_floating_point or made.is_complex)
    read = {tensor.dtype for tensor in call.tensors} - {made}
    is_narrowed = made is torch.bool or any(dtype.is_floating_point for dtype in read)
    return (is_whole and bool(read) and is_narrowed) or call.bound.get("rounding_mode") is not None


@rule(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy)
@rule(aten.binary_cross_entropy_with_logits, aten.soft_margin_loss)
def element_loss(call: OpCall) -> list[Type]:
    """Compute entry by entry, and reduce."""
    widest = max(call.tensors, key=lambda tensor: tensor.ndim)
    return [_reduced_loss(call, call.aligned(widest))]


def _reduced_loss(call: OpCall, shards: Shards) -> Type:
    reduction = call.bound["reduction"]
    if reduction == 1:
        call.check_even(shards)
    return shards if reduction == 0 else Sum(is_mean=reduction == 1)


@rule(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(call: OpCall) -> list[Type]:
    """Pick each token's log probability by its label."""
    scores, labels = call.shards("self"), call.shards("target")
    is_alike = replace(scores, dim=labels.dim) == labels
    if not is_alike or scores.dim != labels.dim + (labels.dim > 0) or not call.is_same("weight"):
        raise Mixes(f"{call.op} of tokens with labels of others")
    if call.bound["reduction"] == 1 and (call.bound["weight"] is not None or not labels.is_counted):
        got = f"{call.op}: a mean by weights, or with labels left out, weighs ranks unequally"
        raise Mixes(got, SUMS)
    return [_reduced_loss(call, labels)] * len(call.outs)


@rule(aten.sum, aten.mean, aten.max.default, aten.max.dim, aten.min.default, aten.min.dim)
@rule(aten.median, aten.mode, aten.kthvalue, aten.nansum, aten.norm, aten.aminmax, aten.std_mean)
@rule(aten.var_mean, aten.count_nonzero, tag=torch.Tag.reduction)
def reduce(call: OpCall) -> list[Type]:
    """Reduce over dims: over tokens, only sums and means are parts of the whole's."""
    tensor = call.tensors[0]
    kind, dims = call.types[0], call.dims(of=call.op._schema.arguments[0].name)
    is_sum, is_mean = (call.op in overloads([op]) for op in (aten.sum, aten.mean))
    if isinstance(kind, Sum) and (is_sum or is_mean) and not _is_rounded(call):
        return [kind]
    if not isinstance(kind, Shards) or len(call.tensors) > 1:
        raise Mixes(f"{call.op} of {describe_kind(kind)}", SUMS)
    if kind.dim in dims:
        if not (is_sum or is_mean):
            # A rank without tokens would not vote.
            is_vote = call.op in overloads((aten.any, aten.all)) and kind.is_even
            raise Mixes(f"{call.op} over each rank's own tokens", SUMS, is_vote=is_vote)
        if is_mean:
            call.check_even(kind)
        is_count = is_sum and kind.is_counted and tensor.dtype == torch.bool
        return [Sum(is_mean, is_alike=is_count)]
    lost = 0 if call.outs[0].ndim == tensor.ndim else sum(dim < kind.dim for dim in dims)
    return [replace(kind, dim=kind.dim - lost)] * len(call.outs)


@rule(aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum, aten.cumsum_, aten.cumprod)
@rule(aten.cummax, aten.cummin, aten.logcumsumexp, aten.glu, aten.sort, aten.argsort, aten.topk)
@rule(aten.flip, aten.roll, aten._fft_c2c, aten._fft_r2c, aten._fft_c2r)
def along_dims(call: OpCall) -> list[Type]:
    """Mix along dims, or along all at once where no dims are named."""
    shards = call.shards()
    if shards.dim in call.dims("dims" if "dims" in call.bound else "dim"):
        raise Mixes(f"{call.op}, which mixes tokens")
    return [shards] * len(call.outs)


@rule(aten.triu, aten.tril, aten.triu_, aten.tril_)
def triangle(call: OpCall) -> list[Type]:
    """Zero entries by their position in the last two dims."""
    shards = call.shards()
    if shards.dim >= call.tensors[0].ndim - 2:
        raise Mixes(f"{call.op}, which counts tokens from 0")
    return [shards]


@rule(aten.native_layer_norm, aten._fused_rms_norm)
def normalize(call: OpCall) -> list[Type]:
    """Normalise over the last dims."""
    shards = call.shards("input")
    if shards.dim >= call.tensors[0].ndim - len(call.bound["normalized_shape"]):
        raise Mixes(f"{call.op} over each rank's own tokens")
    if not all(isinstance(other, Same) for other in call.types[1:]):
        raise Mixes(f"{call.op} with weights that are made of tokens")
    return [shards] * len(call.outs)


@rule(aten.convolution)
def convolve(call: OpCall) -> list[Type]:
    """Convolve: each token alone, or patches of tokens that no border cuts."""
    shards = call.shards("input")
    if not (call.is_same("weight") and call.is_same("bias")) or shards.dim == 1:
        raise Mixes(f"{call.op} with weights that are made of tokens")
    if shards.dim == 0:
        return [shards]
    place = shards.dim - 2
    size = number(call.bound["weight"].shape[shards.dim])
    stride, padding, dilation = (
        call.bound[n][place % len(call.bound[n])] for n in ("stride", "padding", "dilation")
    )
    is_apart = (stride, padding) == (size, 0) and (dilation == 1 or size == 1)
    is_cut = shards.length % size or not (shards.is_even or size == 1)
    if not is_apart or is_cut or call.bound["transposed"]:
        raise Mixes(f"{call.op}, which mixes adjacent tokens")
    return [replace(shards, length=shards.length // size)]


@rule(c10d.all_reduce, c10d.all_reduce_, c10d.all_gather_into_tensor)
def communicate(call: OpCall) -> list[Type]:
    """Give every rank the same numbers: a program that communicates knows that there are ranks."""
    return [Same()] * len(call.outs)


@rule(aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.linear)
def multiply(call: OpCall) -> list[Type]:
    """Multiply matrices, or batches of them."""
    product = _product(call, *call.tensors[:2])
    bias = call.bound.get("bias")
    return [product if bias is None else _plus(call, product, bias)]


@rule(aten.addmm, aten.addmm_, aten.baddbmm, aten.addmv, aten._addmm_activation)
def add_product(call: OpCall) -> list[Type]:
    """Add a product to a tensor."""
    added, left, right = call.tensors[:3]
    product = _product(call, left, right)
    if isinstance(product, Sum) and call.op in overloads([aten._addmm_activation]):
        raise Mixes(f"{call.op} of {describe_kind(product)}", SUMS)
    return [_plus(call, product, added)]


# The labels of the dims of the right factor, by how many it has. The left one has 0, 1, ... and
# "in", which is summed over; the product has those of both without it.
_RIGHT: dict[int, tuple[int | str, ...]] = {1: ("in",), 2: ("in", "out"), 3: (0, "in", "out")}


def _product(call: OpCall, left: Tensor, right: Tensor) -> Type:
    """Return the type of left @ right, or of left @ right.T."""
    first, other = call.type_of(left), call.type_of(right)
    if isinstance(first, Same) and isinstance(other, Same):
        got = f"{call.op} of a product of numbers that are the same on every rank, and of others"
        raise Mixes(got, POSITIONS)
    if isinstance(first, Sum) or isinstance(other, Sum):
        if not isinstance(first, Same) and not isinstance(other, Same):
            raise Mixes(f"{call.op} of {describe_kind(first)} and {describe_kind(other)}", SUMS)
        return other if isinstance(first, Same) else first
    rows = (*range(left.ndim - 1), "in")
    is_turned = call.op in overloads([aten.linear])
    columns = _RIGHT[right.ndim][::-1] if is_turned else _RIGHT[right.ndim]
    if isinstance(first, Shards) and isinstance(other, Shards):
        is_alike = replace(first, dim=other.dim) == other
        if not is_alike or rows[first.dim] != columns[other.dim]:
            raise Mixes(f"{call.op}, which multiplies each token with every other")
    if isinstance(first, Shards):
        shards, label, beside, labels = first, rows[first.dim], right, columns
    else:
        assert isinstance(other, Shards)
        shards, label, beside, labels = other, columns[other.dim], left, rows
    if label in labels:
        call.check_beside(beside, labels.index(label))
    if label == "in":
        return Sum(is_mean=False)
    return replace(shards, dim=(*rows[:-1], "out").index(label))


def _plus(call: OpCall, kind: Type, added: Tensor) -> Type:
    """Return the type of a product and what is added to it."""
    added_kind, out = call.type_of(added), call.outs[0]
    if isinstance(kind, Sum):
        if added_kind == kind or (isinstance(added_kind, Same) and kind.is_mean):
            return kind
        raise Mixes(f"{call.op} of {describe_kind(kind)} and {describe_kind(added_kind)}", SUMS)
    assert isinstance(kind, Shards)
    dim = kind.dim - out.ndim + added.ndim
    if isinstance(added_kind, Shards) and added_kind == replace(kind, dim=dim):
        return kind
    if not isinstance(added_kind, Same):
        raise Mixes(f"{call.op} of tokens with {describe_kind(added_kind)}")
    call.check_beside(added, dim)
    return kind
