"""What each aten op does along the dims of its tensors: a rule per op, matched by its overload.

    aten.mm(x [s d], w [d f])          positions along d are summed            => [s f]
    aten.cumsum(x [b s d], 1)          positions along s are mixed             => [b s d]
    aten.add(x [b s d], p [s' d])      s and s' are united: an input and a parameter

A rule unites tracks, records on its `Step` what the op does along which dim, and returns the dims
of the results. It judges nothing, because only after all ops is it known which track is the
sequence.

Assumes: ops as dispatch sees them below autograd, with composite ops decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from cp_inductor.sequence.tracks import (
    COMPUTED,
    FREE,
    Born,
    Dim,
    Kind,
    Track,
    United,
    along,
    divide,
    expand,
    fresh,
    join,
    pad,
    regroup,
    size_of,
    unite,
    window,
)
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.sizes import size_hint

aten = torch.ops.aten

Dims = tuple[Dim, ...]


@dataclass(eq=False, slots=True)
class Value:
    """A tensor.

    Attributes:
        dims: the track along each dim.
        base: for a view, the value that is written when the view is written.
        is_position: it holds integers that count positions, and nothing else.
        picked_of: if it is computed from a single position: the dim that the position is from.
    """

    dims: Dims
    base: Value | None = None
    is_position: bool = False
    picked_of: Dim = ()


@dataclass(eq=False, slots=True)
class Step:
    """A recorded op, and what it does along dims.

    Attributes:
        site: for messages.
        op: an aten op, or what the graph calls.
        inputs, outputs: values.
        mixed: dims along which every position may depend on every other.
        reduced: dims that are reduced to one value.
        aligned: dims that are combined position by position.
        united: dims that were united, but not position by position.
        windows: dims that were sliced, with the first position and whether the model names it.
        picked: dims of which one position was taken: the number of the result, the position, and
            the dim.
        sequences: dims that are the sequence of an attention.
        keys: those of them that are of keys.
        heads: the dims that an attention takes for its heads, of queries and of keys.
        written: dims of what was written to in place, and those of what it is a view of.
        is_unknown: there is no rule for the op.
        is_learned: the op multiplies by what may be weights, or normalises.
        is_allowed: the user has asked for what the op does.
        is_counting: its results are integers or bools.
    """

    site: str
    op: object
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    mixed: list[Dim] = field(default_factory=list)
    reduced: list[Dim] = field(default_factory=list)
    aligned: list[list[Dim]] = field(default_factory=list)
    united: list[tuple[United, Dim]] = field(default_factory=list)
    windows: list[tuple[Dim, int, bool]] = field(default_factory=list)
    picked: list[tuple[int, Dim, Dim]] = field(default_factory=list)
    sequences: list[Dim] = field(default_factory=list)
    keys: list[Dim] = field(default_factory=list)
    heads: list[tuple[Dim, Dim]] = field(default_factory=list)
    written: list[tuple[Dims, Dims]] = field(default_factory=list)
    is_unknown: bool = False
    is_learned: bool = False
    is_allowed: bool = False
    is_counting: bool = False


def sizes_of(tensor: Tensor) -> list[int]:
    """Return the sizes of a tensor in this compile; unbacked ones as large odd numbers."""
    return [_number(size) for size in tensor.shape]


def _number(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt) and has_free_unbacked_symbols(size):
        # Data decides: as long as itself, and as nothing else.
        return (1 << 31) - 1 + 2 * (hash(str(size)) % (1 << 20))
    return size_hint(size)


class Call:
    """A call of an op, as a rule sees it.

    Args:
        op: the op.
        args, kwargs: its arguments.
        out: its result.
        step: where to record what it does.
        value_of: returns the value of a tensor.
        is_explicit: whether a slice was written with its first position.
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        step: Step,
        value_of: Callable[[Tensor], Value],
        *,
        is_explicit: bool = False,
    ) -> None:
        self.op = op
        self.bound = bind_arguments(op, args, kwargs)
        self.out = out
        self.step = step
        self.value_of = value_of
        self.is_explicit = is_explicit
        self.tensors = [leaf for leaf in pytree.tree_leaves(self.bound) if isinstance(leaf, Tensor)]

    def dims(self, name: str) -> Dims:
        """Return the dims of an argument."""
        return self.value_of(self.bound[name]).dims

    def dim(self, name: str = "dim", of: str = "self") -> int:
        """Return an argument that is a dim of another argument."""
        number: int = self.bound[name]
        return number % max(self.bound[of].ndim, 1)

    def out_sizes(self, index: int = 0) -> list[int]:
        """Return the sizes of a result."""
        return sizes_of(self.outs[index])

    @property
    def outs(self) -> list[Tensor]:
        """The tensors that were returned."""
        return [leaf for leaf in pytree.tree_leaves(self.out) if isinstance(leaf, Tensor)]

    def unite(self, one: Dim, other: Dim) -> None:
        """Unite two dims, and record it if they do not match position by position."""
        outcome = unite(one, other)
        if outcome is not United.ALIKE:
            self.step.united += [(outcome, one), (outcome, other)]

    def combine(self, dims: Sequence[Dim]) -> Dim:
        """Unite dims of one size that are combined, and return the dim of the result."""
        bound = [dim for dim in dims if dim and not _is_free(dim)]
        if not bound:
            return next((dim for dim in dims if dim), ())
        for dim in bound[1:]:
            self.unite(bound[0], dim)
        self.step.aligned.append(bound)
        moving = [dim for dim in bound if not all(part.born.is_constant for part in dim)]
        return (moving or bound)[0]

    def broadcast(self, tensors: Iterable[Tensor], shape: Sequence[int]) -> Dims:
        """Combine tensors as pointwise ops do."""
        members: list[list[Dim]] = [[] for _ in shape]
        for tensor in tensors:
            dims = self.value_of(tensor).dims
            offset = len(shape) - len(dims)
            for place, size in enumerate(sizes_of(tensor)):
                if size != 1 and offset + place >= 0 and size == shape[offset + place]:
                    members[offset + place].append(dims[place])
        return tuple(self.combine(dims) for dims in members)

    def lose(self, dims: Iterable[Dim]) -> None:
        """Record dims that cannot be followed."""
        self.step.united += [(United.APART, dim) for dim in dims if dim]


def _is_free(dim: Dim) -> bool:
    return all(part.born is FREE for part in dim)


def _fresh(shape: Sequence[int], born: Born = COMPUTED) -> Dims:
    return tuple(fresh(size, born) for size in shape)


Rule = Callable[[Call], "list[Dims] | None"]
RULES: dict[torch._ops.OpOverload, Rule] = {}


def _rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register a rule for overloads, or for all overloads of packets."""

    def register(rule: Rule) -> Rule:
        for op in ops:
            if isinstance(op, torch._ops.OpOverload):
                RULES[op] = rule
            else:
                RULES.update({getattr(op, overload): rule for overload in op.overloads()})
        return rule

    return register


def find_rule(op: torch._ops.OpOverload) -> Rule | None:
    """Return the rule of an op; torch tags pointwise ops and reductions."""
    if op in RULES:
        return RULES[op]
    if torch.Tag.pointwise in op.tags:
        return pointwise
    if torch.Tag.reduction in op.tags:
        return reduce
    return None


# Position by position.


@_rule(
    aten._to_copy,
    aten.clone,
    aten.detach,
    aten.alias,
    aten.lift,
    aten.lift_fresh,
    aten.lift_fresh_copy,
    aten.native_dropout,
    aten.bernoulli,
    aten.bernoulli_,
    aten.copy_,
    aten.copy,
    aten.fill_,
    aten.zero_,
    aten.masked_fill,
    aten.masked_fill_,
    aten.where.self,
    aten.conj,
    aten._conj,
    aten._neg_view,
    aten.resolve_conj,
    aten.resolve_neg,
    aten.real,
    aten.imag,
    aten.view.dtype,
    aten.nan_to_num,
    aten.xlogy,
    aten.isnan,
    aten.normal_,
    aten.uniform_,
    aten.exponential_,
    aten.set_,
    aten._to_dense,
    aten.contiguous,
    aten.polar,
    aten.complex,
    aten.prelu,
    aten._prelu_kernel,
    torch.ops.prims.convert_element_type,
    torch.ops.prims.device_put,
)
def pointwise(call: Call) -> list[Dims] | None:
    """Broadcast, and compute position by position."""
    results = []
    for out in call.outs:
        shape = sizes_of(out)
        results.append(call.broadcast(call.tensors, shape))
    return results


_SHIFTING = frozenset(
    {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.add.Scalar}
)


@_rule(*_SHIFTING)
def add(call: Call) -> list[Dims] | None:
    """Add, also to position numbers, which then begin elsewhere."""
    results = pointwise(call)
    assert results is not None
    one, other, alpha = call.bound["self"], call.bound["other"], call.bound["alpha"]
    counted = [
        value
        for value in (call.value_of(t) for t in (one, other) if isinstance(t, Tensor))
        if value.is_position
    ]
    if len(counted) != 1:
        return results
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # Somebody's numbers: of where the shard begins, perhaps.
        return [tuple(_renumbered(dim, None) for dim in dims) for dims in results]
    sign = -1 if call.op in (aten.sub.Tensor, aten.sub_.Tensor) else 1
    by = None if isinstance(other, torch.SymInt) else sign * alpha * other
    return [tuple(_renumbered(dim, by) for dim in dims) for dims in results]


def _renumbered(dim: Dim, by: float | None) -> Dim:
    parts = []
    for part in dim:
        born = part.born
        if born.kind is Kind.CONSTANT and born.start is not None:
            start = None if by is None else born.start + by
            born = replace(born, start=start, is_explicit=True)
        parts.append(replace(part, born=born))
    return tuple(parts)


@_rule(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss)
@_rule(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits)
def elementwise_loss(call: Call) -> list[Dims] | None:
    """Compute a loss position by position, and reduce it if asked to."""
    shape = sizes_of(call.bound["self"])
    dims = call.broadcast(call.tensors, shape)
    if not call.bound["reduction"]:
        return [dims]
    call.step.reduced += dims
    return [()]


@_rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(call: Call) -> list[Dims] | None:
    """Pick from (N, C, ...) along C, and reduce the rest if asked to."""
    logits, target = call.dims("self"), call.dims("target")
    if len(logits) == 1:
        call.step.mixed += logits
        return [(), ()]
    classes, rest = logits[1], (logits[0], *logits[2:])
    call.step.mixed.append(classes)
    dims = tuple(call.combine([a, b]) for a, b in zip(rest, target, strict=True))
    if not call.bound["reduction"]:
        return [dims, ()]
    call.step.reduced += dims
    return [(), ()]


# One value of many.


@_rule(
    aten.sum,
    aten.mean,
    aten.prod,
    aten.amax,
    aten.amin,
    aten.aminmax,
    aten.any,
    aten.all,
    aten.argmax,
    aten.argmin,
    aten.std,
    aten.std_mean,
    aten.var,
    aten.var_mean,
    aten.max.default,
    aten.max.dim,
    aten.min.default,
    aten.min.dim,
    aten.median,
    aten.nanmedian,
    aten.mode,
    aten.kthvalue,
    aten.nansum,
    aten.logsumexp,
    aten.norm,
    aten.linalg_vector_norm,
    aten.count_nonzero,
)
def reduce(call: Call) -> list[Dims] | None:
    """Reduce some dims to one value."""
    dims = call.dims("self")
    given = call.bound.get("dim")
    given = [given] if isinstance(given, int) else given
    gone = {dim % max(len(dims), 1) for dim in given} if given else set(range(len(dims)))
    call.step.reduced += [dim for place, dim in enumerate(dims) if place in gone]
    if call.bound.get("keepdim"):
        kept: Dims = tuple(() if place in gone else dim for place, dim in enumerate(dims))
    else:
        kept = tuple(dim for place, dim in enumerate(dims) if place not in gone)
    return [kept] * len(call.outs)


@_rule(aten.mm.default, aten._int_mm.default, aten.mv.default, aten.dot.default, aten.vdot.default)
def multiply(call: Call) -> list[Dims] | None:
    """Multiply matrices, or vectors."""
    return [_product(call, *(call.value_of(tensor).dims for tensor in call.tensors[:2]))]


def _product(call: Call, left: Dims, right: Dims) -> Dims:
    call.unite(left[-1], right[0])
    call.step.reduced.append(left[-1] or right[0])
    call.step.is_learned = True
    return (*left[:-1], *right[1:])


@_rule(aten.addmm.default, aten.addmv.default, aten._addmm_activation.default)
def add_product(call: Call) -> list[Dims] | None:
    """Multiply and add."""
    left, right = [name for name in ("mat1", "mat", "mat2", "vec") if name in call.bound][:2]
    product = _product(call, call.dims(left), call.dims(right))
    return [_with_bias(call, product)]


def _with_bias(call: Call, product: Dims) -> Dims:
    bias, shape = call.bound["self"], call.out_sizes()
    dims, sizes = call.value_of(bias).dims, sizes_of(bias)
    offset = len(shape) - len(dims)
    combined = list(product)
    for place, dim in enumerate(dims):
        if sizes[place] == shape[offset + place] != 1:
            combined[offset + place] = call.combine([product[offset + place], dim])
    return tuple(combined)


@_rule(aten.bmm.default, aten.baddbmm.default)
def multiply_batches(call: Call) -> list[Dims] | None:
    """Multiply batches of matrices."""
    names = ("batch1", "batch2") if "batch1" in call.bound else ("self", "mat2")
    left, right = (call.dims(name) for name in names)
    batch = call.combine([left[0], right[0]])
    product = (batch, *_product(call, left[1:], right[1:]))
    return [_with_bias(call, product) if "batch1" in call.bound else product]


# Every position from every other.


@_rule(
    aten._softmax,
    aten._log_softmax,
    aten._safe_softmax,
    aten.cumsum,
    aten.cumsum_,
    aten.cumprod,
    aten.cumprod_,
    aten.cummax,
    aten.cummin,
    aten.logcumsumexp,
    aten.glu,
    aten.renorm,
)
def mix_dim(call: Call) -> list[Dims] | None:
    """Mix along one dim."""
    dims, place = call.dims("self"), call.dim()
    if not dims:
        return [()] * len(call.outs)
    if dims[place] and _is_free(dims[place]):
        # Of ones, a cumulative sum counts positions.
        counted = fresh(sizes_of(call.bound["self"])[place], Born(Kind.CONSTANT, start=1))
        dims = (*dims[:place], counted, *dims[place + 1 :])
    else:
        call.step.mixed.append(dims[place])
    call.step.is_learned = True
    shape = call.out_sizes()
    same = shape[place] == sizes_of(call.bound["self"])[place]
    out = dims if same else (*dims[:place], along(dims[place], shape[place]), *dims[place + 1 :])
    return [out] * len(call.outs)


@_rule(aten.sort, aten.argsort, aten.topk, aten.msort)
def sort(call: Call) -> list[Dims] | None:
    """Order along a dim."""
    key = call.bound["self"]
    dims, place = call.dims("self"), call.dim() if "dim" in call.bound else 0
    if not dims:
        return [()] * len(call.outs)
    if key.dtype.is_floating_point:
        call.step.mixed.append(dims[place])
        ordered = along(dims[place], call.out_sizes()[place])
    else:
        # Tokens by their expert, say, which are brought back into order later.
        ordered = fresh(call.out_sizes()[place], COMPUTED)
        call.lose([dims[place], ordered])
    return [(*dims[:place], ordered, *dims[place + 1 :])] * len(call.outs)


@_rule(aten.flip, aten.roll, aten._fft_r2c, aten._fft_c2c, aten._fft_c2r)
def mix_dims(call: Call) -> list[Dims] | None:
    """Mix along several dims, or along all."""
    dims = call.dims("self")
    given = call.bound["dim" if "dim" in call.bound else "dims"]
    mixed = {place % len(dims) for place in given} or set(range(len(dims)))
    call.step.mixed += [dims[place] for place in mixed]
    shape = call.out_sizes()
    known = sizes_of(call.bound["self"])
    return [
        tuple(
            dim if size == before else along(dim, size)
            for dim, size, before in zip(dims, shape, known, strict=True)
        )
    ]


@_rule(aten.tril, aten.triu, aten.tril_, aten.triu_)
def cut_triangle(call: Call) -> list[Dims] | None:
    """Compare the positions along the last two dims."""
    dims = list(call.dims("self"))
    sizes = sizes_of(call.bound["self"])
    for place in (-2, -1):
        if dims[place] and _is_free(dims[place]):
            dims[place] = fresh(sizes[place], Born(Kind.CONSTANT))
        else:
            call.step.mixed.append(dims[place])
    return [tuple(dims)]


@_rule(aten.native_layer_norm, aten._fused_rms_norm)
def normalise(call: Call) -> list[Dims] | None:
    """Normalise over the last dims."""
    dims = call.dims("input")
    last = len(call.bound["normalized_shape"])
    call.step.mixed += dims[-last:]
    call.step.is_learned = True
    for name in ("weight", "bias"):
        if call.bound.get(name) is not None:
            for one, other in zip(dims[-last:], call.dims(name), strict=True):
                call.combine([one, other])
    statistics: Dims = (*dims[:-last], *[()] * last)
    return [dims, *[statistics] * (len(call.outs) - 1)]


@_rule(aten.native_group_norm)
def normalise_groups(call: Call) -> list[Dims] | None:
    """Normalise over groups of channels, and all positions."""
    dims = call.dims("input")
    call.step.mixed += dims[1:]
    call.step.is_learned = True
    return [dims, *[_fresh(sizes_of(out)) for out in call.outs[1:]]]


@_rule(
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.cudnn_batch_norm,
)
def normalise_batch(call: Call) -> list[Dims] | None:
    """Normalise each channel over all other dims, or by given statistics."""
    dims = call.dims("input")
    is_given = call.op is aten._native_batch_norm_legit_no_training.default
    if not is_given and call.bound.get("training", True):
        call.step.mixed += (dims[0], *dims[2:])
    call.step.is_learned = True
    return [dims, *[_fresh(sizes_of(out)) for out in call.outs[1:]]]


@_rule(aten.mkldnn_rnn_layer, aten._cudnn_rnn, aten.miopen_rnn)
def recur(call: Call) -> list[Dims] | None:
    """Run along the first dims."""
    dims = call.dims("input")
    call.step.mixed += dims[:-1]
    outs = [_fresh(sizes_of(out)) for out in call.outs]
    return [(*dims[:-1], outs[0][-1]), *outs[1:]]


@_rule(aten.convolution.default, aten.convolution_overrideable.default)
def convolve(call: Call) -> list[Dims] | None:
    """Mix along positions, except in patches side by side."""
    bound = call.bound
    dims, weights, kernel = call.dims("input"), call.dims("weight"), sizes_of(bound["weight"])[2:]
    call.step.reduced.append(dims[1])
    call.step.is_learned = True
    channels = fresh(call.out_sizes()[1], COMPUTED) if bound["transposed"] else weights[0]
    strides, paddings, dilations = (
        _each(bound[name], len(kernel)) for name in ("stride", "padding", "dilation")
    )
    spatial = []
    for place, size in enumerate(kernel):
        is_side_by_side = not bound["transposed"] and dilations[place] == 1
        dim = dims[2 + place]
        if not is_side_by_side or strides[place] != size or paddings[place]:
            size = 0
        spatial.append(_patches(call, dim, size, call.out_sizes()[2 + place]))
    return [(dims[0], channels, *spatial)]


def _each(given: Sequence[int], number: int) -> list[int]:
    return list(given) * number if len(given) == 1 else list(given)


def _patches(call: Call, dim: Dim, length: int, number: int) -> Dim:
    """Return the dim of patches of a length; length 0 means patches that overlap."""
    if length == 1 or not dim:
        return dim
    parts = expand(dim)
    halves = divide(parts[-1], length) if length and len(parts) == 1 else None
    if halves is None or halves[0].size != number:
        call.step.mixed.append(dim)
        return along(dim, number)
    call.step.reduced.append((halves[1],))
    return (halves[0],)


# How many dims are pooled.
_POOLED = {
    aten.avg_pool1d: 1,
    aten.avg_pool2d: 2,
    aten.avg_pool3d: 3,
    aten.max_pool2d_with_indices: 2,
    aten.max_pool3d_with_indices: 3,
}


@_rule(*_POOLED)
def pool(call: Call) -> list[Dims] | None:
    """Reduce patches."""
    dims = call.dims("self")
    number = _POOLED[call.op.overloadpacket]
    length = _each(call.bound["kernel_size"], number)
    stride = _each(call.bound["stride"] or length, number)
    padding = _each(call.bound["padding"], number)
    first = len(dims) - number
    spatial = []
    for place in range(number):
        is_side_by_side = stride[place] == length[place] and not padding[place]
        size = length[place] if is_side_by_side else 0
        spatial.append(_patches(call, dims[first + place], size, call.out_sizes()[first + place]))
    return [(*dims[:first], *spatial)] * len(call.outs)


# Views, and what only moves.


@_rule(aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias)
def view(call: Call) -> list[Dims] | None:
    """Split and flatten dims."""
    dims = call.dims("self")
    shape = call.out_sizes()
    regrouped = regroup(dims, shape)
    if regrouped is None:
        lost = _fresh(shape)
        call.lose((*dims, *lost))
        return [lost]
    return [tuple(regrouped)]


@_rule(aten.expand)
def stretch(call: Call) -> list[Dims] | None:
    """Repeat dims of size 1."""
    dims, sizes = call.dims("self"), sizes_of(call.bound["self"])
    shape = call.out_sizes()
    new = len(shape) - len(dims)
    return [
        tuple(
            fresh(size, FREE) if place < new or sizes[place - new] != size else dims[place - new]
            for place, size in enumerate(shape)
        )
    ]


@_rule(aten.repeat)
def repeat(call: Call) -> list[Dims] | None:
    """Repeat whole dims."""
    dims = call.dims("self")
    repeats = call.bound["repeats"]
    new = len(repeats) - len(dims)
    padded = (*[()] * new, *dims)
    return [
        tuple(
            (*fresh(_number(times), FREE), *dim) for times, dim in zip(repeats, padded, strict=True)
        )
    ]


@_rule(aten.permute)
def permute(call: Call) -> list[Dims] | None:
    """Reorder dims."""
    dims = call.dims("self")
    return [tuple(dims[place] for place in call.bound["dims"])]


@_rule(aten.transpose.int, aten.transpose_, aten.swapaxes, aten.t, aten.t_, aten.numpy_T)
def transpose(call: Call) -> list[Dims] | None:
    """Exchange two dims."""
    dims = list(call.dims("self"))
    one, other = call.bound.get("dim0", 0), call.bound.get("dim1", -1)
    if len(dims) > 1:
        dims[one], dims[other] = dims[other], dims[one]
    return [tuple(dims)]


@_rule(aten.unsqueeze, aten.unsqueeze_)
def unsqueeze(call: Call) -> list[Dims] | None:
    """Insert a dim of size 1."""
    dims = list(call.dims("self"))
    dims.insert(call.bound["dim"] % (len(dims) + 1), ())
    return [tuple(dims)]


@_rule(aten.squeeze, aten.squeeze_)
def squeeze(call: Call) -> list[Dims] | None:
    """Drop dims of size 1."""
    dims, sizes = call.dims("self"), sizes_of(call.bound["self"])
    given = call.bound.get("dim", range(len(dims)))
    given = [given] if isinstance(given, int) else given
    gone = {place % max(len(dims), 1) for place in given}
    return [
        tuple(
            dim
            for place, (dim, size) in enumerate(zip(dims, sizes, strict=True))
            if place not in gone or size != 1
        )
    ]


@_rule(aten.slice.Tensor)
def cut(call: Call) -> list[Dims] | None:
    """Take a range of positions."""
    place = call.dim()
    start = _start(call.bound["start"], sizes_of(call.bound["self"])[place])
    return [_cut(call, place, start, call.out_sizes()[place], _number(call.bound["step"]))]


def _start(start: Any, size: int) -> int:
    start = 0 if start is None else _number(start)
    return min(start + size if start < 0 else start, size)


def _cut(call: Call, place: int, start: int, size: int, step: int = 1, number: int = 0) -> Dims:
    dims = call.dims("self")
    dim, length = dims[place], sizes_of(call.bound["self"])[place]
    if step != 1:
        parts = expand(dim)
        halves = divide(parts[-1], step) if len(parts) == 1 and start < step else None
        taken: Dim | None = None if halves is None else (halves[0],)
    else:
        taken = window(dim, start, size, is_explicit=call.is_explicit)
        if size == 1 != length:
            _pick(call, dim, start, number)
        elif size != length:
            call.step.windows.append((dim, start, call.is_explicit))
    if taken is None:
        call.lose([dim])
        taken = fresh(size, COMPUTED)
    return (*dims[:place], taken, *dims[place + 1 :])


@_rule(aten.select.int)
def select(call: Call) -> list[Dims] | None:
    """Take one position."""
    dims, place = call.dims("self"), call.dim()
    index = _start(call.bound["index"], sizes_of(call.bound["self"])[place])
    _pick(call, dims[place], index)
    return [(*dims[:place], *dims[place + 1 :])]


def _pick(call: Call, dim: Dim, index: int, number: int = 0) -> None:
    """Record that result `number` is made of one position of a dim."""
    if dim:
        outer, *_ = expand(dim)
        root, shift = outer.track.find()
        position = (replace(outer, track=Track(root, shift + index)),)
        call.step.picked.append((number, position, dim))


@_rule(aten.unbind)
def unbind(call: Call) -> list[Dims] | None:
    """Take every position separately."""
    dims, place = call.dims("self"), call.dim()
    for index in range(len(call.outs)):
        _pick(call, dims[place], index, index)
    return [(*dims[:place], *dims[place + 1 :])] * len(call.outs)


@_rule(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unsafe_split)
@_rule(aten.split_copy, aten.split_with_sizes_copy)
def split(call: Call) -> list[Dims] | None:
    """Cut into ranges of positions."""
    place, start, results = call.dim(), 0, []
    call.is_explicit = True
    for number, out in enumerate(call.outs):
        size = sizes_of(out)[place]
        results.append(_cut(call, place, start, size, number=number))
        start += size
    return results


@_rule(aten.unfold)
def unfold(call: Call) -> list[Dims] | None:
    """Cut into windows, which become a dim at the end."""
    dims = call.dims("self")
    place = call.bound["dimension"] % max(len(dims), 1)
    size, step = call.bound["size"], call.bound["step"]
    parts = expand(dims[place])
    halves = divide(parts[-1], size) if len(parts) == 1 and size == step else None
    if halves is None:
        call.step.mixed.append(dims[place])
        windows = along(dims[place], call.out_sizes()[place])
        return [(*dims[:place], windows, *dims[place + 1 :], fresh(size, COMPUTED))]
    return [(*dims[:place], halves[:1], *dims[place + 1 :], halves[1:])]


@_rule(aten.cat)
def concatenate(call: Call) -> list[Dims] | None:
    """Concatenate tensors."""
    tensors = [t for t in call.bound["tensors"] if t.ndim == call.outs[0].ndim]
    place = call.bound["dim"] % call.outs[0].ndim
    values = [call.value_of(tensor).dims for tensor in tensors]
    dims = [
        call.combine([value[other] for value in values]) if other != place else ()
        for other in range(len(values[0]))
    ]
    joined, outcomes = join(
        [value[place] for value in values], [sizes_of(tensor)[place] for tensor in tensors]
    )
    call.step.united += [(o, joined) for o in outcomes if o is not United.ALIKE]
    dims[place] = joined
    return [tuple(dims)]


@_rule(aten.stack)
def stack(call: Call) -> list[Dims] | None:
    """Put tensors along a new dim."""
    values = [call.value_of(tensor).dims for tensor in call.bound["tensors"]]
    dims = [call.combine(list(members)) for members in zip(*values, strict=True)]
    place = call.bound["dim"] % (len(dims) + 1)
    # Of what was taken apart, position by position, the same is put together.
    origins = [call.value_of(tensor).picked_of for tensor in call.bound["tensors"]]
    is_whole = size_of(origins[0]) == len(origins) and all(
        origin and origin[0].track.outermost() is origins[0][0].track.outermost()
        for origin in origins
    )
    new = along(origins[0], len(origins)) if is_whole else fresh(len(origins), COMPUTED)
    dims.insert(place, new)
    return [tuple(dims)]


@_rule(aten.constant_pad_nd)
def pad_dims(call: Call) -> list[Dims] | None:
    """Add positions before and after."""
    dims, shape = list(call.dims("self")), call.out_sizes()
    amounts = [_number(amount) for amount in call.bound["pad"]]
    for index in range(len(amounts) // 2):
        place = len(dims) - 1 - index
        before, behind = amounts[2 * index : 2 * index + 2]
        if not before and not behind:
            continue
        padded = pad(dims[place], before, shape[place]) if dims[place] else None
        if padded is None:
            call.lose([dims[place]])
            padded = fresh(shape[place], COMPUTED)
        dims[place] = padded
    return [tuple(dims)]


@_rule(
    aten.reflection_pad1d,
    aten.reflection_pad2d,
    aten.reflection_pad3d,
    aten.replication_pad1d,
    aten.replication_pad2d,
    aten.replication_pad3d,
)
def pad_with_own(call: Call) -> list[Dims] | None:
    """Add positions before and after that are copies of others."""
    dims, shape = call.dims("self"), call.out_sizes()
    sizes = sizes_of(call.bound["self"])
    changed = [place for place in range(len(dims)) if sizes[place] != shape[place]]
    call.step.mixed += [dims[place] for place in changed]
    return [
        tuple(
            along(dim, shape[place]) if place in changed else dim for place, dim in enumerate(dims)
        )
    ]


@_rule(aten.view_as_complex)
def view_as_complex(call: Call) -> list[Dims] | None:
    """View pairs as complex numbers."""
    return [call.dims("self")[:-1]]


@_rule(aten.view_as_real)
def view_as_real(call: Call) -> list[Dims] | None:
    """View complex numbers as pairs."""
    return [(*call.dims("self"), fresh(2, COMPUTED))]


# By index.


@_rule(aten.embedding.default)
def look_up(call: Call) -> list[Dims] | None:
    """Read rows of a table."""
    _, *rest = call.dims("weight")
    call.step.is_learned = False
    return [(*call.dims("indices"), *rest)]


@_rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> list[Dims] | None:
    """Read at indices."""
    dims, given = call.dims("self"), call.bound["indices"]
    named = [place for place, tensor in enumerate(given) if tensor is not None]
    if any(given[place].dtype in (torch.bool, torch.uint8) for place in named):
        lost = _fresh(call.out_sizes())
        call.lose([*(dims[place] for place in named), *lost])
        return [lost]
    sizes, members = sizes_of(call.bound["self"]), []
    number = max(given[place].ndim for place in named)
    for place in named:
        value = call.value_of(given[place])
        along = list(value.dims)
        if _walks(given[place], value, sizes[place]):
            # Each index at its own position.
            along = [dims[place] if dim else dim for dim in along]
        else:
            call.lose([dims[place]])
        members.append([()] * (number - len(along)) + along)
    picked = [call.combine([dim for dim in column if dim]) for column in zip(*members, strict=True)]
    is_in_a_row = named == list(range(named[0], named[-1] + 1))
    at = named[0] if is_in_a_row else 0
    rest = [dim for place, dim in enumerate(dims) if place not in named]
    return [(*rest[:at], *picked, *rest[at:])]


def _walks(tensor: Tensor, value: Value, size: int) -> bool:
    """Whether indices are 0 to size - 1, along one dim."""
    parts = [part for dim in value.dims for part in dim]
    return (
        value.is_position
        and len(parts) == 1
        and parts[0].size == size == tensor.numel()
        and parts[0].born.start == 0
    )


@_rule(aten.index_select.default)
def select_indices(call: Call) -> list[Dims] | None:
    """Read positions of one dim."""
    dims, place = call.dims("self"), call.dim()
    (along,) = call.dims("index") or ((),)
    call.lose([dims[place]])
    return [(*dims[:place], along, *dims[place + 1 :])]


@_rule(aten.gather.default)
def gather(call: Call) -> list[Dims] | None:
    """Read along a dim, by an index for each of the other positions."""
    place = call.dim()
    dims, along = call.dims("self"), call.dims("index")
    sizes, lengths = sizes_of(call.bound["self"]), sizes_of(call.bound["index"])
    call.lose([dims[place]] if dims else [])
    return [
        tuple(
            call.combine([dims[other], dim])
            if other != place and sizes[other] == lengths[other]
            else dim
            for other, dim in enumerate(along)
        )
    ]


@_rule(aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce)
@_rule(aten.scatter_reduce_)
def scatter(call: Call) -> list[Dims] | None:
    """Write along a dim, by an index for each of the other positions."""
    place = call.dim()
    dims, along = list(call.dims("self")), call.dims("index")
    sizes, lengths = sizes_of(call.bound["self"]), sizes_of(call.bound["index"])
    call.lose([dims[place]] if dims else [])
    for other, dim in enumerate(along):
        if other != place and sizes[other] == lengths[other]:
            _write(call, dims, other, dim)
    return [tuple(dims)]


def _write(call: Call, dims: list[Dim], place: int, dim: Dim) -> None:
    """Unite a dim of the written tensor with the source; a constant tensor takes its track."""
    if dims[place] and dim:
        call.unite(dims[place], dim)
        if _is_free(dims[place]):
            dims[place] = dim


@_rule(aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_)
@_rule(aten.index_fill, aten.index_fill_, aten.index_put, aten.index_put_, aten._unsafe_index_put)
def write_indices(call: Call) -> list[Dims] | None:
    """Write at indices."""
    dims = call.dims("self")
    if "dim" in call.bound:
        call.lose([dims[call.dim()]])
    else:
        named = [place for place, t in enumerate(call.bound["indices"]) if t is not None]
        call.lose([dims[place] for place in named])
    return [dims]


# Made from nothing.


@_rule(
    aten.zeros,
    aten.ones,
    aten.full,
    aten.empty,
    aten.empty_strided,
    aten.empty_permuted,
    aten.rand,
    aten.randn,
    aten.randint,
    aten.normal,
    aten.scalar_tensor,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.new_empty,
    aten.new_empty_strided,
)
def fill(call: Call) -> list[Dims] | None:
    """Make a tensor that is equal at all positions, or random."""
    return [_fresh(sizes_of(out), FREE) for out in call.outs]


@_rule(aten.arange)
def count(call: Call) -> list[Dims] | None:
    """Number positions."""
    start = call.bound.get("start", 0)
    born = Born(
        Kind.CONSTANT,
        start=start if isinstance(start, int) else None,
        is_explicit="start" in call.bound,
    )
    return [_fresh(call.out_sizes(), born)]


@_rule(aten.linspace, aten.logspace, aten.eye, aten.randperm, aten.tril_indices, aten.triu_indices)
def make_constant(call: Call) -> list[Dims] | None:
    """Make a tensor that differs from position to position."""
    return [_fresh(call.out_sizes(), Born(Kind.CONSTANT))]


# Attention within the shard, where the user wants it.


@_rule(
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
    aten._scaled_dot_product_attention_math,
    aten._scaled_dot_product_attention_math_for_mps,
    aten.scaled_dot_product_attention,
)
def attend(call: Call) -> list[Dims] | None:
    """Attend: queries run along dim 2 of the result."""
    query, key, value = (call.dims(name) for name in ("query", "key", "value"))
    call.unite(key[2], value[2])
    call.combine([query[0], key[0], value[0]])
    call.step.mixed.append(key[2])
    rest = [_fresh(sizes_of(out)) for out in call.outs[1:]]
    return [(*query[:3], value[3]), *rest]
