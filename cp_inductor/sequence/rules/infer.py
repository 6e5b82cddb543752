"""What each aten op makes of types: a rule per op, matched by its overload.

    mm(Shards(0), Same)             Shards(0)
    mm(Shards(1), Shards(0))        Sum: each rank adds up its own tokens
    softmax(Shards(1), dim=2)       Shards(1)
    softmax(Shards(1), dim=1)       raises Mixes
    mul(Sum, Sum)                   raises Mixes: a product of sums is no sum of products

Whatever is not proven raises `Mixes`: an op without a rule, numbers that stand at tokens and are
the same on every rank (positions from 0), a part of the tokens. Two things need no row in the
table: a result that is computed from equal tensors is equal on every rank, and torch itself tags
ops that compute entry by entry.

    call            a call as rules see it; where rules are registered
    computing, views    the rules, by family

Assumes: ops as dispatch sees them below autograd, with composite ops decomposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from cp_inductor.sequence.rules.call import Mixes, OpCall, find_rule, is_uniform, overloads
from cp_inductor.sequence.rules.computing import COPIES, UNIFORM_LIKE, pointwise
from cp_inductor.sequence.rules.views import view
from cp_inductor.sequence.types import Mixed, Own, Same, Shards, Type

aten = torch.ops.aten

_FILLED = overloads(
    (
        *(aten.zeros, aten.ones, aten.full, aten.empty, aten.scalar_tensor, aten.empty_strided),
        *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided),
    )
)

# A view of what it is given, beside other numbers.
_PADDING = overloads((aten.constant_pad_nd,))


def infer_types(call: OpCall) -> list[Type]:
    """Return the types of the results of a call.

    Raises:
        Mixes: they are not known to be anything of the whole.
    """
    places = [kind.places() if isinstance(kind, Shards) else (kind,) for kind in call.types]
    if all(len(kinds) == 1 for kinds in places):
        return _infer(call)
    # A single token, which may be at several places: what it meets decides, or else the likely one.
    is_met = sum(isinstance(kind, Shards) for kind in call.types) > 1
    inferred: list[list[Type]] = []
    error: Mixes | None = None
    for types in product(*places):
        try:
            inferred.append(_infer(call.of(types)))
        except Mixes as mixes:
            error = error or mixes
            if not inferred and not is_met:
                break
    if not inferred:
        assert error is not None
        raise error
    return [_join_places(kinds) for kinds in zip(*inferred, strict=True)]


def _join_places(kinds: Sequence[Type]) -> Type:
    first = kinds[0]
    if not isinstance(first, Shards):
        return first
    return first.at([p for kind in kinds if isinstance(kind, Shards) for p in kind.places()])


def _infer(call: OpCall) -> list[Type]:
    mixed = [kind for kind in call.types if isinstance(kind, Mixed)]
    if mixed:
        return [_still_mixed(call, mixed[0])] * len(call.outs)
    if any(isinstance(kind, Own) for kind in call.types):
        return [Own()] * len(call.outs)
    if call.op in _FILLED:
        return [Same(is_uniform=True)] * len(call.outs)
    rule = find_rule(call.op)
    if all(isinstance(kind, Same) for kind in call.types):
        keeps = call.op in UNIFORM_LIKE or (
            rule in (pointwise, view) and call.op not in _PADDING and bool(call.types)
        )
        is_one = keeps and all(is_uniform(tensor, call.type_of(tensor)) for tensor in call.tensors)
        return [Same(is_one)] * len(call.outs)
    if rule is None:
        raise Mixes(f"{call.op}, which is not known to keep tokens apart")
    return list(rule(call))


def _still_mixed(call: OpCall, mixed: Mixed) -> Mixed:
    """Return the type of a result that is computed from a mixed tensor, and from others."""
    is_alone = all(kind is mixed or isinstance(kind, Same) for kind in call.types)
    is_vote = mixed.is_vote and is_alone and call.op in COPIES | overloads([aten.logical_not])
    return replace(mixed, lengths=call.lengths(), is_vote=is_vote)
