"""Tracks: what runs along the dims of tensors (tokens, heads, ...), and which dims share a track.

    x (B, S, D), w (F, D)                   tracks  b s d   f d
    y = mm(x.view(B * S, D), w.t())                 [b s] f
    q = y.view(B, S, H, F / H).transpose(1, 2)      b [f: h e] s e          f is split into h and e
    attention over dim 2 of q                       s is the sequence, also in x

A `Part` is a stretch of a track, and a dim is a row of parts: the inner part of the flattened (B,
S) is the sequence. Tracks of two tensors that turn out to be the same are united, in a union-find
whose links carry a shift. An op that combines a token with its neighbour unites a track with itself
at another shift. A split belongs to the track: all dims along it see it. Knows no torch; changes
only tracks.

Assumes: sizes are numbers, of the call being compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod


class Kind(Enum):
    """Where the values along a part come from."""

    GIVEN = "an input"
    COMPUTED = "a computation"
    WEIGHT = "a parameter"
    CONSTANT = "numbers made in the model"
    # Alike along the part, or random: goes with any position.
    FREE = "nothing"


@dataclass(frozen=True, slots=True)
class Born:
    """Where the values along a part come from, and where they begin.

    Attributes:
        kind: of source.
        start: for a constant or weight, the number or row that comes first; None if unknown.
        is_explicit: the model names the start, and may have computed it from the rank.
    """

    kind: Kind
    start: float | None = 0
    is_explicit: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether every rank has the same values, unless the start depends on the rank."""
        return self.kind in (Kind.WEIGHT, Kind.CONSTANT)


GIVEN, COMPUTED, FREE = Born(Kind.GIVEN), Born(Kind.COMPUTED), Born(Kind.FREE)


class Track:
    """What runs along a dim. Position i of it is position i + shift of its parent."""

    __slots__ = ("parent", "shift", "split")

    def __init__(self, parent: Track | None = None, shift: int = 0) -> None:
        self.parent = parent
        self.shift = shift
        # Of a root: what runs outside, what inside, and how long the inside is.
        self.split: tuple[Track, Track, int] | None = None

    def find(self) -> tuple[Track, int]:
        """Return the root, and the shift to it."""
        track, shift = self, 0
        while track.parent is not None:
            shift += track.shift
            track = track.parent
        return track, shift

    def outermost(self) -> Track:
        """Return the root of the outermost part: contiguous pieces of a dim are pieces of it."""
        root, _ = self.find()
        while root.split is not None:
            root, _ = root.split[0].find()
        return root


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a track, from position 0 of `track` on."""

    track: Track
    size: int
    born: Born


# Outermost first; without parts: a dim of size 1, or of nothing that is known.
Dim = tuple[Part, ...]


class United(Enum):
    """The outcome of uniting two dims."""

    ALIKE = "position by position"
    SHIFTED = "they run along one track, from different positions"
    APART = "they are cut up differently"


def fresh(size: int, born: Born) -> Dim:
    """Return a dim along a new track."""
    return () if size == 1 else (Part(Track(), size, born),)


def expand(dim: Iterable[Part]) -> list[Part]:
    """Return the parts of a dim, with all splits made that its tracks have by now."""
    parts: list[Part] = []
    for part in dim:
        root, shift = part.track.find()
        if root.split is None:
            parts.append(part)
            continue
        outer, inner, length = root.split
        if part.size % length or shift % length:
            parts.append(part)
            continue
        outside = Part(Track(outer, shift // length), part.size // length, part.born)
        inside = Part(inner, length, part.born)
        parts += expand(half for half in (outside, inside) if half.size > 1)
    return parts


def divide(part: Part, length: int) -> tuple[Part, Part] | None:
    """Split a part, and its track, into an outer and an inner one; None if that is impossible.

    Args:
        part: as `expand` returns it.
        length: of the inner one.
    """
    root, shift = part.track.find()
    if root.split is not None or length == 0 or part.size % length or shift % length:
        return None
    root.split = (Track(), Track(), length)
    outer, inner = expand([part])
    return outer, inner


def unite(one: Dim, other: Dim) -> United:
    """Make two dims of one size run along the same track, position by position."""
    left, right = expand(one), expand(other)
    outcome = United.ALIKE
    while left and right:
        x, y = left.pop(), right.pop()
        if x.size > y.size:
            halves = divide(x, y.size)
            rest = left
        elif x.size < y.size:
            halves = divide(y, x.size)
            rest = right
        else:
            halves, rest = None, None
        if rest is not None:
            if halves is None:
                return United.APART
            rest.append(halves[0])
            x, y = (halves[1], y) if rest is left else (x, halves[1])
        merged = _merge(x, y)
        if merged is United.APART:
            return merged
        if merged is United.SHIFTED:
            outcome = merged
    return outcome


def _merge(x: Part, y: Part) -> United:
    (root, shift), (other, other_shift) = x.track.find(), y.track.find()
    if root is other:
        return United.ALIKE if shift == other_shift else United.SHIFTED
    if other.split is not None:
        if root.split is not None:
            return United.APART
        root, shift, other, other_shift = other, other_shift, root, shift
    other.parent, other.shift = root, shift - other_shift
    return United.ALIKE


def regroup(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
    """Return the dims of a view, which splits and flattens; None if it reorders."""
    parts = expand(part for dim in dims for part in dim)
    regrouped = _take(parts, shape) if 0 not in shape else _regroup_nothing(parts, shape)
    return None if parts else regrouped


def _take(parts: list[Part], shape: Sequence[int]) -> list[Dim] | None:
    """Take the last parts away, as the dims of a shape without zeros; None if they do not fit."""
    taken: list[Dim] = []
    for size in reversed(shape):
        dim: list[Part] = []
        while size > 1:
            if not parts or parts[-1].size == 0:
                return None
            part = parts.pop()
            if part.size > size:
                halves = divide(part, size)
                if halves is None:
                    return None
                parts.append(halves[0])
                part = halves[1]
            if size % part.size:
                return None
            size //= part.size
            dim.append(part)
        taken.append(tuple(reversed(dim)))
    return taken[::-1]


def _regroup_nothing(parts: list[Part], shape: Sequence[int]) -> list[Dim] | None:
    """Regroup parts of which some are of size 0, as on a rank without tokens, and take them away.

    Sizes tell what stands before the first dim of size 0 and behind the last. Between are the parts
    of size 0: as many as there are dims, or one dim is made of all that is left.
    """
    first, last = shape.index(0), len(shape) - 1 - shape[::-1].index(0)
    behind = _take(parts, shape[last + 1 :])
    size, num_before = prod(shape[:first]), 0
    while size > 1 and num_before < len(parts) and parts[num_before].size > 0:
        size, rest = divmod(size, parts[num_before].size)
        size = size if rest == 0 else 0
        num_before += 1
    outer, inner = parts[:num_before], parts[num_before:]
    before = _take(outer, shape[:first]) if size == 1 else None
    parts.clear()
    if behind is None or before is None:
        return None
    if first == last:
        return [*before, tuple(inner), *behind]
    sizes = [part.size for part in inner]
    between = [(part,) for part in inner]
    return [*before, *between, *behind] if sizes == list(shape[first : last + 1]) else None


def window(dim: Dim, start: int, size: int, *, is_explicit: bool = False) -> Dim | None:
    """Return positions `start` to `start + size` of a dim; None if they cut through inner parts."""
    if not dim or size == size_of(dim):
        return dim
    outer, *inner = expand(dim)
    length = size_of(inner)
    if start % length or size % length:
        return None
    start, size = start // length, size // length
    root, shift = outer.track.find()
    born = outer.born
    if born.is_constant and born.start is not None:
        born = replace(
            born, start=born.start + start, is_explicit=born.is_explicit or is_explicit or start > 0
        )
    part = Part(Track(root, shift + start), size, born)
    return tuple(part for part in (part, *inner) if part.size > 1)


def pad(dim: Dim, before: int, size: int) -> Dim | None:
    """Return a dim with some positions added before it, `size` in all; None if unknown."""
    parts = expand(dim)
    if len(parts) != 1:
        return None
    root, shift = parts[0].track.find()
    return (Part(Track(root, shift - before), size, COMPUTED),)


def along(dim: Dim, size: int) -> Dim:
    """Return a dim of another size along the same track, in any order."""
    if not dim or size == 1:
        return fresh(size, COMPUTED)
    outer = expand(dim)[0]
    return (Part(outer.track, size, COMPUTED),)


def join(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, list[United]]:
    """Return the dim of a concatenation, and the outcome of uniting its pieces with it."""
    joined = fresh(sum(sizes), COMPUTED)
    outcomes, start = [], 0
    for dim, size in zip(dims, sizes, strict=True):
        piece = window(joined, start, size)
        if dim and piece and not all(part.born is FREE for part in dim):
            outcomes.append(unite(piece, dim))
        start += size
    return joined, outcomes


def rescale(dim: Dim, size: int) -> Dim:
    """Return a dim of another size, to go from a shard to the whole or back."""
    if not dim or size == size_of(dim):
        return dim
    outer, *inner = expand(dim)
    length = size_of(inner)
    if length == 0 or size % length or size == length:
        return fresh(size, COMPUTED)
    return (replace(outer, size=size // length), *inner)


def size_of(dim: Iterable[Part]) -> int:
    """Return how many positions a dim has."""
    size = 1
    for part in dim:
        size *= part.size
    return size
