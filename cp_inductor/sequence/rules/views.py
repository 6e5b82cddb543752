"""Rules of ops that only move entries, whole tokens at a time: views, joins, and look-ups."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cp_inductor.sequence.rules.call import (
    SUMS,
    Mixes,
    OpCall,
    describe_kind,
    number,
    numbers,
    overloads,
    rule,
)
from cp_inductor.sequence.types import Same, Shards, Sum, Type, regroup

aten = torch.ops.aten

# The dtypes of indices that keep the entries where they are True.
MASKS = (torch.bool, torch.uint8)


def _turn(call: OpCall, dim: int) -> int:
    ndim = call.tensors[0].ndim
    if "dims" in call.bound:
        return [moved % ndim for moved in call.bound["dims"]].index(dim)
    first, other = (call.bound.get(f"dim{n}", call.bound.get(f"axis{n}", n)) % ndim for n in (0, 1))
    return {first: other, other: first}.get(dim, dim)


def _unsqueeze(call: OpCall, dim: int) -> int:
    return dim + bool(call.bound["dim"] % (call.tensors[0].ndim + 1) <= dim)


def _squeeze(call: OpCall, dim: int) -> int | None:
    lost = [place for place in call.dims() if number(call.tensors[0].shape[place]) == 1]
    return None if dim in lost else dim - sum(place < dim for place in lost)


def _select(call: OpCall, dim: int) -> int | None:
    (place,) = call.dims()
    return None if place == dim else dim - (place < dim)


def _broadcast(call: OpCall, dim: int) -> int:
    return dim + call.outs[0].ndim - call.tensors[0].ndim


def _pad(call: OpCall, dim: int) -> int | None:
    """Return the dim, unless the pad shifts tokens, as (1, -1) does."""
    place = 2 * (call.tensors[0].ndim - 1 - dim)
    return None if any(call.bound["pad"][place : place + 2]) else dim


_REGROUPING = overloads((aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias))

# Where the dim of the tokens is afterwards; None if it is lost. The other ops leave it in place.
_MOVES: dict[torch._ops.OpOverload, Callable[[OpCall, int], int | None]] = {
    op: move
    for move, ops in {
        _turn: (aten.permute, aten.transpose, aten.transpose_, aten.t, aten.t_, aten.swapaxes),
        _unsqueeze: (aten.unsqueeze, aten.unsqueeze_),
        _squeeze: (aten.squeeze, aten.squeeze_),
        _select: (aten.select.int, aten.unbind.int),
        _broadcast: (aten.expand, aten.repeat),
        _pad: (aten.constant_pad_nd,),
    }.items()
    for op in overloads(ops)
}


@rule(*_REGROUPING, *_MOVES, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes)
@rule(aten.unsafe_split.Tensor, aten.view_as_real, aten.view_as_complex, aten.chunk)
def view(call: OpCall) -> list[Type]:
    """Move entries, whole tokens at a time."""
    kind, tensor = call.types[0], call.tensors[0]
    if isinstance(kind, Sum) and call.op is not aten.constant_pad_nd.default:
        return [kind] * len(call.outs)
    if not isinstance(kind, Shards):
        raise Mixes(f"{call.op} of {describe_kind(kind)}", SUMS)
    return [_moved(call, kind, tensor, out) for out in call.outs]


def _moved(call: OpCall, shards: Shards, tensor: Tensor, out: Tensor) -> Shards:
    """Return where the tokens of a tensor are in a result."""
    if call.op in _REGROUPING:
        places = regroup(numbers(tensor.shape), shards, numbers(out.shape))
        if not places:
            raise Mixes(f"{call.op} to {tuple(numbers(out.shape))}, which cuts the sequence up")
        return shards.at(places)
    move = _MOVES.get(call.op)
    moved = shards.dim if move is None else move(call, shards.dim)
    size = shards.outer * shards.length * shards.inner
    is_beyond = _is_bound_beyond(call, shards.dim, size)
    if moved is None or numbers(out.shape)[moved] != size or is_beyond:
        raise Mixes(f"{call.op}, which takes a part of the sequence, or repeats it")
    return replace(shards, dim=moved)


def _is_bound_beyond(call: OpCall, dim: int, size: int) -> bool:
    """Whether a slice or split ends or steps beyond this rank's tokens, to where others' may be."""
    asked = [call.bound.get(name) for name in ("start", "end", "step", "split_size")]
    bounds = [abs(number(place)) for place in asked if place is not None]
    return any(size < bound < sys.maxsize for bound in bounds) and dim in call.dims()


@rule(aten.cat, aten.stack)
def join(call: OpCall) -> list[Type]:
    """Join along a dim that has no tokens."""
    sums = {kind for kind in call.types if isinstance(kind, Sum)}
    if sums:
        if len(set(call.types)) > 1:
            raise Mixes(f"{call.op} of {describe_kind(sums.pop())} and others", SUMS)
        return [call.types[0]]
    (tensor, *_), is_new = call.tensors, call.op is aten.stack.default
    place = call.bound["dim"] % (tensor.ndim + is_new)
    shards = call.aligned(tensor)
    if not is_new and place == shards.dim:
        raise Mixes(f"{call.op} along the sequence, which puts each rank's own pieces together")
    return [replace(shards, dim=shards.dim + (is_new and place <= shards.dim))]


@rule(aten.embedding)
def embed(call: OpCall) -> list[Type]:
    """Look up rows of a table."""
    if not call.is_same("weight"):
        raise Mixes(f"{call.op} in a table that is made of tokens")
    if call.bound["scale_grad_by_freq"]:
        raise Mixes("an embedding with scale_grad_by_freq=True, which counts a rank's own tokens")
    return [call.shards("indices")]


@rule(aten.index_select)
def select_rows(call: OpCall) -> list[Type]:
    """Look up entries along a dim."""
    (place,) = call.dims()
    if call.is_same("self"):
        return [replace(call.shards("index"), dim=place)]
    shards = call.shards()
    if place == shards.dim or not call.is_same("index"):
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    return [shards]


@rule(aten.gather)
def gather(call: OpCall) -> list[Type]:
    """Look up an entry for each index."""
    (place,) = call.dims()
    index = call.shards("index")
    if call.is_same("self"):
        if place != index.dim:
            call.check_beside(call.bound["self"], index.dim)
        return [index]
    if call.shards() != index or place == index.dim:
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    return [index]


@rule(aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_)
def scatter(call: OpCall) -> list[Type]:
    """Write an entry for each index."""
    (place,) = call.dims()
    shards = call.aligned(call.bound["index"])
    if place == shards.dim or call.bound["self"].ndim != call.bound["index"].ndim:
        raise Mixes(f"{call.op}, which writes tokens by their position in the shard")
    return [shards]


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: OpCall) -> list[Type]:
    """Look up entries along some dims, for all indices that are broadcast to one shape."""
    indices = [place for place in enumerate(call.bound["indices"]) if place[1] is not None]
    tensors, places = [tensor for _, tensor in indices], [place for place, _ in indices]
    if any(tensor.dtype in MASKS for tensor in tensors):
        raise Mixes(f"{call.op} by a mask, which keeps another number of tokens on each rank")
    widest = max(tensors, key=lambda tensor: tensor.ndim)
    is_adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if is_adjacent else 0
    if call.is_same("self"):
        tokens = call.aligned(widest, tensors)
        return [replace(tokens, dim=start + tokens.dim)]
    shards = call.shards()
    if shards.dim in places or not all(isinstance(call.type_of(t), Same) for t in tensors):
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    kept = shards.dim - sum(place < shards.dim for place in places)
    return [replace(shards, dim=kept + (widest.ndim if kept >= start else 0))]
