"""Rules of products of matrices: over features tokens stay apart, over tokens they are summed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cp_inductor.sequence.rules.call import SUMS, Mixes, OpCall, describe_kind, overloads, rule
from cp_inductor.sequence.types import Same, Shards, Sum, Type

aten = torch.ops.aten


@rule(aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.linear)
def multiply(call: OpCall) -> list[Type]:
    """Multiply matrices, or batches of them."""
    left, right = (call.bound[argument.name] for argument in call.op._schema.arguments[:2])
    found = _product(call, left, right, is_turned=call.op in overloads([aten.linear]))
    bias = call.bound.get("bias")
    return [found if bias is None else _plus(call, found, bias)]


@rule(aten.addmm, aten.addmm_, aten.baddbmm, aten.addmv, aten._addmm_activation)
def add_product(call: OpCall) -> list[Type]:
    """Add a product to a tensor."""
    added, left, right = (call.bound[a.name] for a in call.op._schema.arguments[:3])
    found = _product(call, left, right)
    if isinstance(found, Sum) and call.op in overloads([aten._addmm_activation]):
        raise Mixes(f"{call.op} of {describe_kind(found)}", SUMS)
    return [_plus(call, found, added)]


def _product(call: OpCall, left: Tensor, right: Tensor, *, is_turned: bool = False) -> Type:
    """Return the type of left @ right, or of left @ right.T."""
    one, other = call.type_of(left), call.type_of(right)
    if isinstance(one, Sum) or isinstance(other, Sum):
        if not isinstance(one, Same) and not isinstance(other, Same):
            raise Mixes(f"{call.op} of {describe_kind(one)} and {describe_kind(other)}", SUMS)
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
    call: OpCall, found: Shards, end: int, beside: Tensor, end_beside: int, is_batch: bool
) -> Type:
    """Return the type of tokens times what is the same on every rank."""
    if found.dim == end:
        call.check_beside(beside, end_beside)
        return Sum(is_mean=False)
    if is_batch and beside.ndim == 3:
        call.check_beside(beside, found.dim)
    return found


def _plus(call: OpCall, found: Type, added: Tensor) -> Type:
    """Return the type of a product and what is added to it."""
    given, out = call.type_of(added), call.outs[0]
    if isinstance(found, Sum):
        if given == found or (isinstance(given, Same) and found.is_mean):
            return found
        raise Mixes(f"{call.op} of {describe_kind(found)} and {describe_kind(given)}", SUMS)
    assert isinstance(found, Shards)
    dim = found.dim - out.ndim + added.ndim
    if isinstance(given, Shards) and given == replace(found, dim=dim):
        return found
    if not isinstance(given, Same):
        raise Mixes(f"{call.op} of tokens with {describe_kind(given)}")
    call.check_beside(added, dim)
    return found
