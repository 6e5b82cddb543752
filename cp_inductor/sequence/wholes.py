"""Ask of the whole sequence what a rank's shard does not say.

    cross_entropy(scores, labels)  =>  cross_entropy(scores, count_labels(labels, ...))

Each rank divides by its own number of labels that are not `ignore_index`. The mean of the ranks'
means is the mean of the whole only if all ranks have the same number. These numbers are data, so
ranks compare them in every run, with one message of two numbers.

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
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.errors import SequenceMixed
from cp_inductor.sequence.follow import version_of
from cp_inductor.torch_private.groups import group_of

c10d = torch.ops._c10d_functional
COUNTED_LOSSES = frozenset({F.cross_entropy, F.nll_loss})

# A number that takes more calls to compute is not followed: it may take as long as a layer.
_MOST_CALLS = 64
_DRAWING = frozenset({torch.randint_like})


def range_over_ranks(number: Tensor, group_name: str) -> tuple[int, int]:
    """Return the least and the greatest of the numbers, integers, that the ranks have."""
    ends = torch.stack([-number, number])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group_of(group_name))
    least, most = ends.tolist()
    return -least, most


def count_labels(
    labels: Tensor, scores: Tensor, ignore_index: int, group_name: str, site: str
) -> Tensor:
    """Return labels, after checking that equally many of them count on every rank.

    The message is a functional collective, so that a graph that sends parts of an attention keeps
    it in the order of all ranks. The scores, with which the integer labels are compared, only make
    attentions run before this. If the numbers differ, all ranks raise `SequenceMixed`.
    """
    none = scores.flatten()[:0].sum().to(torch.int64)
    count = (labels != ignore_index).sum() + none
    ends = c10d.all_reduce(torch.stack([-count, count]), "max", group_name)
    return check_labels(labels, c10d.wait_tensor(ends), site)


@torch.library.custom_op("cp_inductor::check_labels", mutates_args=())
def check_labels(labels: Tensor, ends: Tensor, site: str) -> Tensor:
    """Return labels, if `ends`, the least number on a rank, negated, and the greatest, agree."""
    least, most = (-ends[0]).item(), ends[1].item()
    if most != least:
        raise SequenceMixed(
            site=site,
            expected="a mean over as many labels on every rank",
            got=f"{least} labels that count on one rank and {most} on another, so that a mean of"
            " their means is not that of the whole sequence",
            remedy="use reduction='sum' and divide by the number of labels of the whole sequence;"
            " or pass DTensors",
        )
    return labels.clone()


@check_labels.register_fake
def _(labels: Tensor, ends: Tensor, site: str) -> Tensor:
    return torch.empty_like(labels)


@dataclass(frozen=True, slots=True)
class _Whole:
    """How to make the whole tensor of which a rank has a part."""

    make: Callable[[], Tensor]
    length: int  # tokens of this rank
    version: int  # of the part, which a write changes
    calls: int = 0  # of functions by `make`, at most


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
        read = [known for known in map(self._get, tensors) if known is not None]
        if not read or not isinstance(out, Tensor) or func in _DRAWING:
            return
        calls = 1 + sum(whole.calls for whole in read)
        length = max(whole.length for whole in read)
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
