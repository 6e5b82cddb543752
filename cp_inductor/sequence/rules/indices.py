"""Rules of ops that join tensors, or look entries up by an index, and of collectives."""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_inductor.sequence.rules.call import SUMS, Mixes, OpCall, describe_kind, rule
from cp_inductor.sequence.types import Same, Sum, Type

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Of indices that keep the entries where they are True.
MASKS = (torch.bool, torch.uint8)


@rule(aten.cat, aten.stack)
def join(call: OpCall) -> list[Type]:
    """Join along a dim that has no tokens."""
    sums = {given for given in call.types if isinstance(given, Sum)}
    if sums:
        if len(set(call.types)) > 1:
            raise Mixes(f"{call.op} of {describe_kind(sums.pop())} and others", SUMS)
        return [call.types[0]]
    (tensor, *_), is_new = call.tensors, call.op is aten.stack.default
    place = call.bound["dim"] % (tensor.ndim + is_new)
    found = call.aligned(tensor)
    if not is_new and place == found.dim:
        raise Mixes(f"{call.op} along the sequence, which puts each rank's own pieces together")
    return [replace(found, dim=found.dim + (is_new and place <= found.dim))]


@rule(aten.embedding)
def embed(call: OpCall) -> list[Type]:
    """Look up rows of a table."""
    if not call.is_same("weight"):
        raise Mixes(f"{call.op} in a table that is made of tokens")
    if call.bound["scale_grad_by_freq"]:
        raise Mixes(
            "an embedding with scale_grad_by_freq=True, which counts each rank's own tokens"
        )
    return [call.shards("indices")]


@rule(aten.index_select)
def select_rows(call: OpCall) -> list[Type]:
    """Look up entries along a dim."""
    (place,) = call.dims()
    if call.is_same("self"):
        return [replace(call.shards("index"), dim=place)]
    given = call.shards()
    if place == given.dim or not call.is_same("index"):
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    return [given]


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
    found = call.aligned(call.bound["index"])
    if place == found.dim or call.bound["self"].ndim != call.bound["index"].ndim:
        raise Mixes(f"{call.op}, which writes tokens by their position in the shard")
    return [found]


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
        found = call.aligned(widest, tensors)
        return [replace(found, dim=start + found.dim)]
    given = call.shards()
    if given.dim in places or not all(isinstance(call.type_of(t), Same) for t in tensors):
        raise Mixes(f"{call.op}, which takes tokens by their position in the shard")
    kept = given.dim - sum(place < given.dim for place in places)
    return [replace(given, dim=kept + (widest.ndim if kept >= start else 0))]


@rule(c10d.all_reduce, c10d.all_reduce_, c10d.all_gather_into_tensor)
def communicate(call: OpCall) -> list[Type]:
    """Give every rank the same numbers: a program that communicates knows that there are ranks."""
    return [Same()] * len(call.outs)
