"""What each aten op makes of types: a rule per op, matched by its overload.

    mm(Shards(0), Same)             Shards(0)
    mm(Shards(1), Shards(0))        Sum: each rank adds up its own tokens
    softmax(Shards(1), dim=2)       Shards(1)
    softmax(Shards(1), dim=1)       raises Mixes
    mul(Sum, Sum)                   raises Mixes: a product of sums is no sum of products

Whatever is not proven raises `Mixes`: an op without a rule, numbers that stand at tokens and are
the same on every rank (positions from 0), a part of the tokens. Two rules need no table: what is
made of tensors that are the same on every rank is so too, and torch tags ops that compute entry by
entry.

Assumes: ops as dispatch sees them below autograd, with composite ops decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from cp_inductor.graph.collectives import WAIT
from cp_inductor.sequence.types import Mixed, Own, Same, Shards, Sum, Type, regroup
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.sizes import size_hint

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

POSITIONS = (
    "pass positions, and what else stands at tokens, as inputs that are sharded like the tokens"
)
SUMS = (
    "use dist.all_reduce first, or reduction='sum' and divide by the number of tokens of the whole"
    " sequence; or pass DTensors"
)


class Mixes(Exception):
    """What an op computes is not known to be anything of the whole."""

    def __init__(self, got: str, remedy: str = "", *, is_vote: bool = False) -> None:
        super().__init__(got)
        self.got, self.remedy, self.is_vote = got, remedy, is_vote


def numbers(sizes: Iterable[int | torch.SymInt]) -> list[int]:
    """Return sizes or strides in this compile; unbacked ones as large odd numbers."""
    return [_number(size) for size in sizes]


def _number(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt) and has_free_unbacked_symbols(size):
        # Data decides: as long as itself, and as nothing else.
        return (1 << 31) - 1 + 2 * (hash(str(size)) % (1 << 20))
    return size_hint(size)


class Call:
    """A call of an op, as a rule sees it."""

    def __init__(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        type_of: Callable[[Tensor], Type],
    ) -> None:
        self.op, self.type_of = op, type_of
        self.bound = bind_arguments(op, args, kwargs)
        self.tensors = [leaf for leaf in pytree.tree_leaves(self.bound) if isinstance(leaf, Tensor)]
        self.outs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self.types = [type_of(tensor) for tensor in self.tensors]

    def written(self) -> list[Tensor]:
        """Return the tensors that the op writes to and does not return."""
        names = [one.name for one in self.op._schema.arguments if one.is_write]
        leaves = pytree.tree_leaves([self.bound.get(name) for name in names])
        returned = {id(out) for out in self.outs}
        return [one for one in leaves if isinstance(one, Tensor) and id(one) not in returned]

    def of(self, types: Sequence[Type]) -> Call:
        """Return the call for other types of its tensors."""
        call = copy(self)
        known = {id(tensor): given for tensor, given in zip(self.tensors, types, strict=True)}
        call.types, call.type_of = list(types), lambda tensor: known[id(tensor)]
        return call

    def lengths(self) -> frozenset[int]:
        """Return how many tokens it is given; -1 for sums over tokens."""
        found = {given.length for given in self.types if isinstance(given, Shards)}
        found |= {-1 for given in self.types if isinstance(given, Sum)}
        return frozenset(found).union(*(g.lengths for g in self.types if isinstance(g, Mixed)))

    def shards(self, name: str = "self") -> Shards:
        """Return the type of an argument that must be of shards."""
        found = self.type_of(self.bound[name])
        if not isinstance(found, Shards):
            raise Mixes(f"{self.op} of {_describe(found)} and tokens")
        return found

    def is_same(self, name: str) -> bool:
        """Whether an argument is no tensor, or the same on every rank."""
        given = self.bound[name]
        return not isinstance(given, Tensor) or isinstance(self.type_of(given), Same)

    def dims(self, name: str = "dim", of: str = "self") -> tuple[int, ...]:
        """Return the dims that an argument names; all if it names none."""
        ndim, named = self.bound[of].ndim, self.bound.get(name)
        if isinstance(named, int):
            named = [named]
        return tuple(dim % max(ndim, 1) for dim in named) if named else tuple(range(ndim))


def infer_types(call: Call) -> list[Type]:
    """Return the types of the results of a call.

    Raises:
        Mixes: they are not known to be anything of the whole.
    """
    places = [given.places() if isinstance(given, Shards) else (given,) for given in call.types]
    if all(len(one) == 1 for one in places):
        return _infer(call)
    # A single token, which may be at several places: what it meets decides, or else the likely one.
    is_met = sum(isinstance(given, Shards) for given in call.types) > 1
    found: list[list[Type]] = []
    error: Mixes | None = None
    for types in product(*places):
        try:
            found.append(_infer(call.of(types)))
        except Mixes as mixes:
            error = error or mixes
            if not found and not is_met:
                break
    if not found:
        assert error is not None
        raise error
    return [_join_places(one) for one in zip(*found, strict=True)]


def _join_places(found: Sequence[Type]) -> Type:
    first = found[0]
    if not isinstance(first, Shards):
        return first
    return first.at([place for one in found if isinstance(one, Shards) for place in one.places()])


def _infer(call: Call) -> list[Type]:
    mixed = [given for given in call.types if isinstance(given, Mixed)]
    if mixed:
        return [_still_mixed(call, mixed[0])] * len(call.outs)
    if any(isinstance(given, Own) for given in call.types):
        return [Own()] * len(call.outs)
    if call.op in _UNIFORM:
        return [Same(is_uniform=True)] * len(call.outs)
    rule = find_rule(call.op)
    if all(isinstance(given, Same) for given in call.types):
        keeps = call.op in _UNIFORM_LIKE or (
            rule in (pointwise, view) and call.op not in _CUTTING and bool(call.types)
        )
        is_uniform = keeps and all(
            _is_uniform(tensor, call.type_of(tensor)) for tensor in call.tensors
        )
        return [Same(is_uniform)] * len(call.outs)
    if rule is None:
        raise Mixes(f"{call.op}, which is not known to keep tokens apart")
    return list(rule(call))


def _still_mixed(call: Call, given: Mixed) -> Mixed:
    """Return what is made of what was mixed, and of others."""
    is_alone = all(one is given or isinstance(one, Same) for one in call.types)
    is_vote = given.is_vote and is_alone and call.op in _COPIES | _overloads([aten.logical_not])
    return replace(given, lengths=call.lengths(), is_vote=is_vote)


def _is_uniform(tensor: Tensor, given: Type) -> bool:
    return isinstance(given, Same) and (given.is_uniform or tensor.numel() == 1)


def _describe(given: Type) -> str:
    if isinstance(given, Sum):
        return f"a {'mean' if given.is_mean else 'sum'} over each rank's own tokens"
    return "numbers that are the same on every rank" if isinstance(given, Same) else "tokens"


Rule = Callable[[Call], "list[Type]"]
RULES: dict[torch._ops.OpOverload, Rule] = {}


def _overloads(ops: Iterable[Any]) -> set[torch._ops.OpOverload]:
    found = set()
    for op in ops:
        is_one = isinstance(op, torch._ops.OpOverload)
        found |= {op} if is_one else {getattr(op, name) for name in op.overloads()}
    return found


def _rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register a rule for overloads, or for all overloads of packets."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(_overloads(ops), rule))
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


_UNIFORM = _overloads(
    (
        *(aten.zeros, aten.ones, aten.full, aten.empty, aten.scalar_tensor, aten.empty_strided),
        *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided),
    )
)
_UNIFORM_LIKE = _overloads((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like))
_COPIES = _overloads(
    (
        *(aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift, aten.lift_fresh, aten.neg),
        *(aten.contiguous, aten.copy_, aten.copy, aten.conj, aten._conj, aten.resolve_conj),
        *(torch.ops.prims.convert_element_type, aten.ones_like, aten.zeros_like, aten.empty_like),
    )
)
_ADDING = _overloads((aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub))
_DIVIDING = _overloads((aten.div, aten.div_))
_SCALING = _DIVIDING | _overloads((aten.mul, aten.mul_))


# Entry by entry.


@_rule(
    *(aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift, aten.lift_fresh, aten.copy_),
    *(aten.copy, aten.contiguous, aten.fill_, aten.zero_, aten.masked_fill, aten.masked_fill_),
    *(aten.where.self, aten.conj, aten._conj, aten._neg_view, aten.resolve_conj, aten.resolve_neg),
    *(aten.real, aten.imag, aten.view.dtype, aten.nan_to_num, aten.xlogy, aten.isnan, aten.polar),
    *(aten.complex, aten.prelu, aten._prelu_kernel, aten.native_dropout, aten.bernoulli),
    *(aten.bernoulli_, aten.normal_, aten.uniform_, aten.exponential_, aten.log_sigmoid_forward),
    *(aten.rand_like, aten.randn_like, aten.randint_like, aten.rrelu_with_noise),
    *(*_UNIFORM_LIKE, torch.ops.prims.convert_element_type, torch.ops.prims.device_put, WAIT),
)
def pointwise(call: Call) -> list[Type]:
    """Compute entry by entry, as broadcasting aligns them."""
    sums = [given for given in call.types if isinstance(given, Sum)]
    return [_linear(call, sums) if sums else _aligned(call, out) for out in call.outs]


def _linear(call: Call, sums: list[Sum]) -> Type:
    """Return the type of a result that is linear in sums over ranks."""
    others = [given for given in call.types if not isinstance(given, Sum)]
    shifts = [call.bound.get(name) for name in ("self", "other")]
    is_shifted = bool(others) or any(isinstance(one, (int, float)) and one for one in shifts)
    has_tokens = any(isinstance(given, Shards) for given in others)
    is_alike = len(set(sums)) == 1 and not has_tokens
    # A sum may be divided, and divides nothing.
    is_over = call.op in _DIVIDING and call.type_of(call.bound["self"]) not in sums
    is_copied = call.op in _COPIES and not others
    is_added = call.op in _ADDING and is_alike and (sums[0].is_mean or not is_shifted)
    is_scaled = call.op in _SCALING and len(sums) == 1 and not has_tokens and not is_over
    if is_copied or is_added or is_scaled:
        return sums[0]
    given = " and ".join(sorted({_describe(given) for given in call.types}))
    raise Mixes(f"{call.op} of {given}, which is not that of the whole sequence", SUMS)


def _aligned(call: Call, out: Tensor, tensors: Sequence[Tensor] | None = None) -> Shards:
    """Return where the tokens are in a result that tensors are broadcast to."""
    found: Shards | None = None
    tensors = call.tensors if tensors is None else tensors
    for tensor in tensors:
        given = call.type_of(tensor)
        if isinstance(given, Shards):
            moved = replace(given, dim=given.dim + out.ndim - tensor.ndim)
            if found not in (None, moved):
                raise Mixes(f"{call.op} of tokens with other tokens, or along two dims")
            found = moved
    if found is None:
        raise Mixes(f"{call.op} of what is no shard")
    if numbers(out.shape)[found.dim] != found.outer * found.length * found.inner:
        raise Mixes(f"{call.op}, which repeats a token")
    for tensor in tensors:
        _check_beside(call, tensor, found.dim - out.ndim + tensor.ndim)
    return found


def _check_beside(call: Call, tensor: Tensor, dim: int) -> None:
    """Refuse numbers that are the same on every rank but differ from token to token."""
    given = call.type_of(tensor)
    if not isinstance(given, Same) or dim < 0 or _is_uniform(tensor, given):
        return
    if _number(tensor.shape[dim]) != 1 and _number(tensor.stride(dim)) != 0:
        raise Mixes(
            f"{call.op} of tokens and of {_number(tensor.shape[dim])} numbers that are the same on"
            " every rank, though other tokens are there",
            POSITIONS,
        )


@_rule(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy)
@_rule(aten.binary_cross_entropy_with_logits, aten.soft_margin_loss)
def element_loss(call: Call) -> list[Type]:
    """Compute entry by entry, and reduce."""
    widest = max(call.tensors, key=lambda tensor: tensor.ndim)
    return [_reduced_loss(call, _aligned(call, widest))]


def _reduced_loss(call: Call, found: Shards) -> Type:
    reduction = call.bound["reduction"]
    if reduction == 1:
        _check_even(found, str(call.op))
    return found if reduction == 0 else Sum(is_mean=reduction == 1)


def _check_even(found: Shards, op: str) -> None:
    if not found.is_even:
        raise Mixes(f"{op} over shards that are unequally long: ranks weigh unequally", SUMS)


@_rule(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(call: Call) -> list[Type]:
    """Pick each token's log probability by its label."""
    scores, labels = call.shards("self"), call.shards("target")
    is_alike = replace(scores, dim=labels.dim) == labels
    if not is_alike or scores.dim != labels.dim + (labels.dim > 0) or not call.is_same("weight"):
        raise Mixes(f"{call.op} of tokens with labels of others")
    if call.bound["reduction"] == 1 and (call.bound["weight"] is not None or not labels.is_counted):
        raise Mixes(
            f"{call.op}: a mean by weights, or with labels left out, weighs ranks unequally", SUMS
        )
    return [_reduced_loss(call, labels)] * len(call.outs)


# Along some dims.


@_rule(aten.sum, aten.mean, aten.max.default, aten.max.dim, aten.min.default, aten.min.dim)
@_rule(aten.median, aten.mode, aten.kthvalue, aten.nansum, aten.norm, aten.aminmax, aten.std_mean)
@_rule(aten.var_mean, aten.count_nonzero)
def reduce(call: Call) -> list[Type]:
    """Reduce over dims: over tokens, only sums and means are parts of the whole's."""
    tensor = call.tensors[0]
    given, dims = call.types[0], call.dims(of=_first(call))
    is_sum, is_mean = (call.op in _overloads([op]) for op in (aten.sum, aten.mean))
    if isinstance(given, Sum) and (is_sum or is_mean):
        return [given]
    if not isinstance(given, Shards) or len(call.tensors) > 1:
        raise Mixes(f"{call.op} of {_describe(given)}", SUMS)
    if given.dim in dims:
        if not (is_sum or is_mean):
            # A rank without tokens would not vote.
            is_vote = call.op in _overloads((aten.any, aten.all)) and given.is_even
            raise Mixes(f"{call.op} over each rank's own tokens", SUMS, is_vote=is_vote)
        if is_mean:
            _check_even(given, str(call.op))
        return [Sum(is_mean)]
    lost = 0 if call.outs[0].ndim == tensor.ndim else sum(dim < given.dim for dim in dims)
    return [replace(given, dim=given.dim - lost)] * len(call.outs)


def _first(call: Call) -> str:
    return str(call.op._schema.arguments[0].name)


@_rule(
    aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum, aten.cumsum_, aten.cumprod
)
@_rule(aten.cummax, aten.cummin, aten.logcumsumexp, aten.glu, aten.sort, aten.argsort, aten.topk)
@_rule(aten.flip, aten._fft_c2c, aten._fft_r2c, aten._fft_c2r)
def along_dims(call: Call) -> list[Type]:
    """Mix along dims."""
    given = call.shards()
    if given.dim in call.dims("dims" if "dims" in call.bound else "dim"):
        raise Mixes(f"{call.op}, which mixes tokens")
    return [given] * len(call.outs)


@_rule(aten.roll)
def roll(call: Call) -> list[Type]:
    """Shift along dims; without dims, along all at once."""
    return along_dims(call)


@_rule(aten.triu, aten.tril, aten.triu_, aten.tril_)
def triangle(call: Call) -> list[Type]:
    """Zero entries by their position in the last two dims."""
    given = call.shards()
    if given.dim >= call.tensors[0].ndim - 2:
        raise Mixes(f"{call.op}, which counts tokens from 0")
    return [given]


@_rule(aten.native_layer_norm, aten._fused_rms_norm)
def normalize(call: Call) -> list[Type]:
    """Normalise over the last dims."""
    given = call.shards("input")
    if given.dim >= call.tensors[0].ndim - len(call.bound["normalized_shape"]):
        raise Mixes(f"{call.op} over each rank's own tokens")
    if not all(isinstance(other, Same) for other in call.types[1:]):
        raise Mixes(f"{call.op} with weights that are made of tokens")
    return [given] * len(call.outs)


@_rule(aten.convolution)
def convolve(call: Call) -> list[Type]:
    """Convolve: each token alone, or patches of tokens that no border cuts."""
    given = call.shards("input")
    if not (call.is_same("weight") and call.is_same("bias")) or given.dim == 1:
        raise Mixes(f"{call.op} with weights that are made of tokens")
    if given.dim == 0:
        return [given]
    place = given.dim - 2
    size = _number(call.bound["weight"].shape[given.dim])
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


# Products.


@_rule(aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.linear)
def multiply(call: Call) -> list[Type]:
    """Multiply matrices, or batches of them."""
    left, right = (call.bound[argument.name] for argument in call.op._schema.arguments[:2])
    found = _product(call, left, right, is_turned=call.op in _overloads([aten.linear]))
    bias = call.bound.get("bias")
    return [found if bias is None else _plus(call, found, bias)]


@_rule(aten.addmm, aten.addmm_, aten.baddbmm, aten.addmv, aten._addmm_activation)
def add_product(call: Call) -> list[Type]:
    """Add a product to a tensor."""
    added, left, right = (call.bound[a.name] for a in call.op._schema.arguments[:3])
    found = _product(call, left, right)
    if isinstance(found, Sum) and call.op in _overloads([aten._addmm_activation]):
        raise Mixes(f"{call.op} of {_describe(found)}", SUMS)
    return [_plus(call, found, added)]


def _product(call: Call, left: Tensor, right: Tensor, *, is_turned: bool = False) -> Type:
    """Return the type of left @ right, or of left @ right.T."""
    one, other = call.type_of(left), call.type_of(right)
    if isinstance(one, Sum) or isinstance(other, Sum):
        if not isinstance(one, Same) and not isinstance(other, Same):
            raise Mixes(f"{call.op} of {_describe(one)} and {_describe(other)}", SUMS)
        return other if isinstance(one, Same) else one
    ends = (left.ndim - 1, max(right.ndim - 2, 0))
    columns = right.ndim - 1
    if is_turned:
        ends, columns = (left.ndim - 1, right.ndim - 1), right.ndim - 2
    if isinstance(one, Shards) and isinstance(other, Shards):
        is_alike = replace(one, dim=other.dim) == other
        if is_alike and (one.dim, other.dim) == ends:
            return Sum(is_mean=False)
        if is_alike and one.dim == other.dim == 0 and left.ndim == right.ndim == 3:
            return one
        raise Mixes(f"{call.op}, which multiplies each token with every other")
    if isinstance(one, Shards):
        return _times_same(call, one, ends[0], right, ends[1], left.ndim == 3 and one.dim == 0)
    assert isinstance(other, Shards)
    is_batch = other.dim not in (ends[1], columns)
    found = _times_same(call, other, ends[1], left, ends[0], is_batch)
    if isinstance(found, Shards) and not is_batch:
        return replace(found, dim=left.ndim - 1)
    return found


def _times_same(
    call: Call, found: Shards, end: int, beside: Tensor, end_beside: int, is_batch: bool
) -> Type:
    """Return the type of tokens times what is the same on every rank."""
    if found.dim == end:
        _check_beside(call, beside, end_beside)
        return Sum(is_mean=False)
    if is_batch and beside.ndim == 3:
        _check_beside(call, beside, found.dim)
    return found


def _plus(call: Call, found: Type, added: Tensor) -> Type:
    """Return the type of a product and what is added to it."""
    given, out = call.type_of(added), call.outs[0]
    if isinstance(found, Sum):
        if given == found or (isinstance(given, Same) and found.is_mean):
            return found
        raise Mixes(f"{call.op} of {_describe(found)} and {_describe(given)}", SUMS)
    assert isinstance(found, Shards)
    dim = found.dim - out.ndim + added.ndim
    if isinstance(given, Shards) and given == replace(found, dim=dim):
        return found
    if not isinstance(given, Same):
        raise Mixes(f"{call.op} of tokens with {_describe(given)}")
    _check_beside(call, added, dim)
    return found


# Views, and what only moves entries.


@_rule(aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.expand)
@_rule(aten.unsqueeze, aten.unsqueeze_, aten.squeeze, aten.squeeze_, aten.permute, aten.transpose)
@_rule(aten.transpose_, aten.t, aten.t_, aten.slice.Tensor, aten.select.int, aten.unbind.int)
@_rule(aten.split.Tensor, aten.split_with_sizes, aten.unsafe_split.Tensor, aten.repeat)
@_rule(aten.view_as_real, aten.view_as_complex, aten.constant_pad_nd, aten.swapaxes, aten.chunk)
def view(call: Call) -> list[Type]:
    """Move entries, whole tokens at a time."""
    given, tensor = call.types[0], call.tensors[0]
    if isinstance(given, Sum) and call.op is not aten.constant_pad_nd.default:
        return [given] * len(call.outs)
    if not isinstance(given, Shards):
        raise Mixes(f"{call.op} of {_describe(given)}", SUMS)
    return [_moved(call, given, tensor, out) for out in call.outs]


def _moved(call: Call, given: Shards, tensor: Tensor, out: Tensor) -> Shards:
    op, bound, dim = call.op, call.bound, given.dim
    size = given.outer * given.length * given.inner
    moved: int | None = dim
    if op in _REGROUPING:
        found = regroup(numbers(tensor.shape), given, numbers(out.shape))
        if not found:
            raise Mixes(f"{op} to {tuple(numbers(out.shape))}, which cuts the sequence up")
        return given.at(found)
    if op in _TURNING:
        moved = _order(call, tensor.ndim).index(dim)
    elif op in _overloads((aten.unsqueeze, aten.unsqueeze_)):
        moved = dim + (bound["dim"] % (tensor.ndim + 1) <= dim)
    elif op in _overloads((aten.squeeze, aten.squeeze_)):
        dims = call.dims()
        lost = [place for place in dims if _number(tensor.shape[place]) == 1]
        moved = None if dim in lost else dim - sum(place < dim for place in lost)
    elif op in _overloads((aten.select.int, aten.unbind.int)):
        (place,) = call.dims()
        moved = None if place == dim else dim - (place < dim)
    elif op in _overloads((aten.expand, aten.repeat)):
        moved = dim + out.ndim - tensor.ndim
    if (
        moved is None
        or numbers(out.shape)[moved] != size
        or (op in _CUTTING and _is_cut(call, dim))
    ):
        raise Mixes(f"{op}, which takes a part of the sequence, or repeats it")
    return replace(given, dim=moved)


def _order(call: Call, ndim: int) -> list[int]:
    if "dims" in call.bound:
        return [dim % ndim for dim in call.bound["dims"]]
    order = list(range(ndim))
    one, other = (call.bound.get(f"dim{n}", call.bound.get(f"axis{n}", n)) % ndim for n in (0, 1))
    order[one], order[other] = order[other], order[one]
    return order


def _is_cut(call: Call, dim: int) -> bool:
    """Whether a pad shifts tokens, as (1, -1) does."""
    pad = call.bound["pad"]
    place = 2 * (call.tensors[0].ndim - 1 - dim)
    return any(pad[place : place + 2])


_REGROUPING = _overloads((aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias))
_TURNING = _overloads(
    (aten.permute, aten.transpose, aten.transpose_, aten.t, aten.t_, aten.swapaxes)
)
_CUTTING = _overloads((aten.constant_pad_nd,))


@_rule(aten.cat, aten.stack)
def join(call: Call) -> list[Type]:
    """Join along a dim that has no tokens."""
    sums = {given for given in call.types if isinstance(given, Sum)}
    if sums:
        if len(set(call.types)) > 1:
            raise Mixes(f"{call.op} of {_describe(sums.pop())} and others", SUMS)
        return [call.types[0]]
    (tensor, *_), is_new = call.tensors, call.op is aten.stack.default
    place = call.bound["dim"] % (tensor.ndim + is_new)
    found = _aligned(call, tensor)
    if not is_new and place == found.dim:
        raise Mixes(f"{call.op} along the sequence, which puts each rank's own pieces together")
    return [replace(found, dim=found.dim + (is_new and place <= found.dim))]


# By index.


@_rule(aten.embedding)
def embed(call: Call) -> list[Type]:
    """Look up rows of a table."""
    if not call.is_same("weight"):
        raise Mixes(f"{call.op} in a table that is made of tokens")
    if call.bound["scale_grad_by_freq"]:
        raise Mixes(
            "an embedding with scale_grad_by_freq=True, which counts each rank's own tokens"
        )
    return [call.shards("indices")]


@_rule(aten.index_select)
def select_rows(call: Call) -> list[Type]:
    """Look up entries along a dim."""
    (place,) = call.dims()
    if call.is_same("self"):
        return [replace(call.shards("index"), dim=place)]
    given = call.shards()
    if place == given.dim or not call.is_same("index"):
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    return [given]


@_rule(aten.gather)
def gather(call: Call) -> list[Type]:
    """Look up an entry for each index."""
    (place,) = call.dims()
    index = call.shards("index")
    if call.is_same("self"):
        if place != index.dim:
            _check_beside(call, call.bound["self"], index.dim)
        return [index]
    if call.shards() != index or place == index.dim:
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    return [index]


@_rule(aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_)
def scatter(call: Call) -> list[Type]:
    """Write an entry for each index."""
    (place,) = call.dims()
    found = _aligned(call, call.bound["index"])
    if place == found.dim or call.bound["self"].ndim != call.bound["index"].ndim:
        raise Mixes(f"{call.op}, which writes tokens by their position in the shard")
    return [found]


@_rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> list[Type]:
    """Look up entries along some dims, for all indices that are broadcast to one shape."""
    indices = [place for place in enumerate(call.bound["indices"]) if place[1] is not None]
    tensors, places = [tensor for _, tensor in indices], [place for place, _ in indices]
    if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors):
        raise Mixes(f"{call.op} by a mask, which keeps another number of tokens on each rank")
    widest = max(tensors, key=lambda tensor: tensor.ndim)
    is_adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if is_adjacent else 0
    if call.is_same("self"):
        found = _aligned(call, widest, tensors)
        return [replace(found, dim=start + found.dim)]
    given = call.shards()
    if given.dim in places or not all(isinstance(call.type_of(t), Same) for t in tensors):
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    kept = given.dim - sum(place < given.dim for place in places)
    return [replace(given, dim=kept + (widest.ndim if kept >= start else 0))]


# Who communicates knows that there are ranks.


@_rule(c10d.all_reduce, c10d.all_reduce_, c10d.all_gather_into_tensor)
def communicate(call: Call) -> list[Type]:
    """Give every rank the same."""
    return [Same()] * len(call.outs)
