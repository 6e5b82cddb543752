"""Answer questions about the whole sequence that eager code asks of whole-number buffers.

    position_ids: of 16 tokens, 8 of them here
    documents = (torch.diff(position_ids, prepend=...) != 1).cumsum(-1)
    if (documents[:, -1] == 0).all():       asked of all 16, on every rank

A region has the whole of every buffer that it shards. When Python reads a single number, and only
then, the functions of torch that made this number from a shard run once more, on the whole. A call
may contain this rank's length, as an index say, where the whole would need another length. So calls
with numbers of that size are not followed.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.sequence.follow import version_of

# A number that takes more calls to compute is not followed: it may take as long as a layer.
_MOST_CALLS = 64
_DRAWING = frozenset({torch.randint_like})


@dataclass(frozen=True, slots=True)
class _Whole:
    """How to make the whole tensor of which a rank has a part.

    Attributes:
        make: returns it.
        length: how many tokens this rank has.
        version: version counter of the part, which a write changes.
        calls: how many functions `make` calls, at most.
    """

    make: Callable[[], Tensor]
    length: int
    version: int
    calls: int = 0


class Wholes:
    """Remembers how to compute whole-number tensors of the whole sequence."""

    def __init__(self) -> None:
        self.made: MutableMapping[Tensor, _Whole] = WeakTensorKeyDictionary()

    def declare(self, shard: Tensor, whole: Tensor, length: int) -> None:
        """Take a whole tensor for that of a shard of so many tokens, if it holds whole numbers."""
        if _is_whole_number(shard):
            self.made[shard] = _Whole(lambda: whole, length, version_of(shard))

    def _get(self, tensor: Any) -> _Whole | None:
        known = self.made.get(tensor) if isinstance(tensor, Tensor) else None
        return known if known is not None and known.version == version_of(tensor) else None

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """Remember what a function returned."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = [known for known in map(self._get, tensors) if known is not None]
        if not found or not isinstance(out, Tensor) or func in _DRAWING:
            return
        calls = 1 + sum(one.calls for one in found)
        length = max(one.length for one in found)
        is_known = all(map(_is_whole_number, (out, *tensors))) and calls <= _MOST_CALLS
        is_written = any(out is tensor for tensor in tensors)
        if not is_known or is_written or any(_is_as_large(leaf, length) for leaf in leaves):
            return
        parts = [self._get(leaf) or leaf for leaf in leaves]

        def make() -> Tensor:
            wholes = [part.make() if isinstance(part, _Whole) else part for part in parts]
            args, kwargs = pytree.tree_unflatten(wholes, tree)
            return func(*args, **kwargs)

        self.made[out] = _Whole(make, length, version_of(out), calls)

    def find(self, tensor: Tensor) -> Tensor | None:
        """Return the single number that stands in a tensor, of the whole; None if not known."""
        known = self._get(tensor)
        if known is None or tensor.numel() != 1:
            return None
        try:
            whole = known.make()
        except (RuntimeError, IndexError, ValueError):
            return None  # it combines the whole with a tensor of this rank's length
        return whole if whole.numel() == 1 else None


def _is_whole_number(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_as_large(leaf: Any, length: int) -> bool:
    """Whether a number, or one in a slice, may have been computed from this rank's length."""
    if isinstance(leaf, slice):
        return any(_is_as_large(part, length) for part in (leaf.start, leaf.stop, leaf.step))
    return isinstance(leaf, int) and not isinstance(leaf, bool) and 2 * abs(leaf) >= length
