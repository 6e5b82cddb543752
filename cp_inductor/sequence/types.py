"""Types: which part of the whole a plain tensor is, where every rank holds one such tensor.

    ids (B, S)                  Shards(dim=1, length=S)         each rank has its own tokens
    x.flatten(0, 1) (B * S, D)  Shards(dim=0, length=S, outer=B)
    weight (D, F)               Same()                          each rank has the same numbers
    loss.sum()                  Sum(is_mean=False)              the ranks' numbers add up
    x.cumsum(1)                 Mixed(...)                      none of these

A rank with one token cannot tell from sizes where a view has put it: if (1, 32) becomes (1, 1, 32),
the token may be in dim 0 or 1. The type of such a tensor names the likely place and, as `others`,
the other places. The next op that combines it with other tokens, or an attention, decides. Ranks
with more tokens know the place.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

# The sequence dim of query, key and value (B, H, S, D), as in `cp_inductor.tiles.dims`.
ATTENDED_DIM = 2


@dataclass(frozen=True, slots=True)
class Same:
    """Every rank has the same numbers."""

    is_uniform: bool = False  # all of them are one number, so that they go with any tokens


@dataclass(frozen=True, slots=True)
class Shards:
    """Each rank has its tokens, in rank order, and its numbers depend on its tokens alone."""

    dim: int  # along which the tokens are: `outer` times `length` tokens of `inner` entries
    length: int  # how many tokens this rank has
    # Sizes of the dims that were flattened together with the tokens.
    outer: int = 1
    inner: int = 1
    # Whether all ranks have equally many tokens.
    is_even: bool = field(default=True, compare=False)
    # Whether ranks have found that as many labels count on each of them; bools say which these are.
    is_counted: bool = field(default=False, compare=False)
    others: tuple[Shards, ...] = ()  # the other places where a single token may be

    def places(self) -> tuple[Shards, ...]:
        """Return each place where the tokens may be, the likely one first."""
        places = (replace(self, others=()), *self.others)
        return tuple(replace(p, is_even=self.is_even, is_counted=self.is_counted) for p in places)

    def at(self, places: Sequence[Shards]) -> Shards:
        """Return this with other places."""
        first, *rest = dict.fromkeys(replace(place, others=()) for place in places)
        return replace(first, is_even=self.is_even, is_counted=self.is_counted, others=tuple(rest))


@dataclass(frozen=True, slots=True)
class Sum:
    """The numbers of the whole are the sum of the ranks' numbers, or their mean."""

    is_mean: bool
    # Every rank has the same numbers, as of labels that were counted.
    is_alike: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Own:
    """A rank computed it within its own shard, because the user said so."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Nothing is known about how it relates to the whole."""

    site: str  # where it was computed
    got: str  # the operation that does not keep tokens apart, for an error
    remedy: str  # what to do
    # Numbers of tokens in the tensors that it was made of; -1 for sums over tokens.
    lengths: frozenset[int] = frozenset()
    # Whether it is an `any` or `all` of tokens. If ranks have the same one, it is the whole's.
    is_vote: bool = False


Type = Same | Shards | Sum | Own | Mixed


def identity(kind: Type) -> Hashable:
    """Return what tells a type from all others, some of which count as equal to it."""
    return (kind, kind.is_even, kind.is_counted) if isinstance(kind, Shards) else kind


def describe(kind: Type) -> str:
    """Say what a tensor is, for people."""
    if isinstance(kind, Shards):
        is_plain = (kind.outer, kind.inner) == (1, 1)
        return f"{kind.length} tokens in dim {kind.dim}" + ("" if is_plain else ", among others")
    if isinstance(kind, Same):
        return "numbers that are the same on every rank"
    if isinstance(kind, Sum):
        return f"a {'mean' if kind.is_mean else 'sum'} over each rank's own tokens"
    return kind.got if isinstance(kind, Mixed) else "each rank's own"


def first_own(types: Iterable[Type | None]) -> Type | None:
    """Return the first type of a tensor that is not the whole's."""
    return next((kind for kind in types if isinstance(kind, (Shards, Sum, Mixed))), None)


def regroup(sizes: Sequence[int], shards: Shards, new_sizes: Sequence[int]) -> list[Shards]:
    """Return where tokens may be in a view, the likely place first; none if the view cuts them up.

    A view keeps the order of all entries. So there are as many entries outside and inside of the
    tokens as before, which leaves one place. A single token may have several: a place is likely if
    the sizes of the dims behind it, or before it, are unchanged.
    """
    outside = prod(sizes[: shards.dim]) * shards.outer
    inside = prod(sizes[shards.dim + 1 :]) * shards.inner
    places = []
    for dim, size in enumerate(new_sizes):
        before, behind = prod(new_sizes[:dim]), prod(new_sizes[dim + 1 :])
        if before == 0 or behind == 0 or outside % before or inside % behind:
            continue
        outer, inner = outside // before, inside // behind
        if outer * shards.length * inner == size:
            places.append(replace(shards, dim=dim, outer=outer, inner=inner, others=()))

    def unlikely(place: Shards) -> tuple[Any, ...]:
        is_other_behind = tuple(new_sizes[place.dim + 1 :]) != tuple(sizes[shards.dim + 1 :])
        is_other_before = tuple(new_sizes[: place.dim]) != tuple(sizes[: shards.dim])
        return is_other_behind, is_other_before, place.inner, place.outer, -place.dim

    return sorted(places, key=unlikely)
