"""Errors: one class per user mistake, each with the site, what was expected, what came, what to do.

Nothing here imports torch, so that plans and the command line can raise these errors as well.

    try:
        torch.compile(model, backend="cp_inductor")(ids)
    except cp_inductor.CPError as error:
        error.site, error.expected, error.got, error.remedy
"""

from __future__ import annotations

import sys
from typing import Any


class CPError(RuntimeError):
    """The base class: a sequence-sharded attention cannot be computed correctly, so it is refused.

    Args:
        site: the attention or call that the error is about, as ``sdpa_3 (model.py:41)``.
        expected: what would have worked.
        got: what came instead.
        remedy: what to do, as an imperative.
    """

    def __init__(self, *, site: str, expected: str, got: str, remedy: str) -> None:
        super().__init__(f"{site}: expected {expected}, got {got}; {remedy}")
        if sys.version_info >= (3, 11):
            self.add_note(f"See docs/support.md#{self.page_anchor()}")
        self.site = site
        self.expected = expected
        self.got = got
        self.remedy = remedy

    @classmethod
    def page_anchor(cls) -> str:
        """Return the heading of docs/support.md that this error, or what it derives from, has."""
        public = next(base for base in cls.__mro__ if base.__module__ == __name__)
        return public.__name__.lower()


class SequenceMixed(CPError):
    """An operation other than attention mixes tokens of plain shards, or counts them from 0."""


class SequenceWarning(UserWarning):
    """A model over a sharded sequence may compute something else than over the whole sequence."""


class ModifiedInPlace(CPError):
    """A DTensor that a backward reads was written to in place since the forward."""


class UnsupportedAttention(CPError):
    """No plan computes this attention: its mask, dropout, number of dims or kind of call."""


class UnsupportedBuffer(CPError, ValueError):
    """`context_parallel` cannot shard a buffer in place; a ValueError, as in torch."""


class UnsupportedPlacement(CPError):
    """Query, key and value are not sharded alike, along the sequence, on exactly one mesh axis."""


class UnevenSequence(CPError):
    """A length is not the one that was declared, or is dynamic and not divisible by the ranks."""


class UnsupportedWrite(CPError):
    """A write in place to a sharded DTensor would not reach all that it reaches on one process."""


class UnsupportedKernel(CPError):
    """No enabled attention kernel supports this device, dtype or head dim."""


class UnsupportedStrategy(CPError):
    """The strategy does not fit the attention: its heads, mask or number of ranks."""


class ProcessGroupError(CPError):
    """There is no usable process group behind the mesh axis."""


class RanksDisagree(CPError):
    """Ranks that share a sequence are about to run different attentions, or one runs none."""


class ExchangeFailed(CPError):
    """An exchange has failed: a rank has ended or stopped, or did not come within the timeout.

    Args:
        site, expected, got, remedy: as of every `CPError`.
        step: which exchange, as in ``exchange 2 of 4 of its backward``.
        ranks_missing: global ranks that were not in it, as far as that can be known.
        waited_s: for how long this rank had been in that forward or backward.
    """

    def __init__(
        self,
        *,
        site: str,
        expected: str,
        got: str,
        remedy: str,
        step: str = "",
        ranks_missing: tuple[int, ...] = (),
        waited_s: float = 0.0,
    ) -> None:
        super().__init__(site=site, expected=expected, got=got, remedy=remedy)
        self.step = step
        self.ranks_missing = ranks_missing
        self.waited_s = waited_s


class UnsupportedTarget(CPError):
    """Code cannot be generated here for this target: unknown, or to be measured on a device."""


class InvalidArgument(CPError, ValueError):
    """A size, speed, count or rank is impossible: negative, not a number, or too large."""


class InvalidText(CPError, ValueError):
    """Text is not a mask or a recipe; such text is parsed and never evaluated."""


class UntiedWeights(CPError):
    """Two parameters were one: each gets only a part of the gradient, and they train apart."""


class MissingTriton(CPError):
    """Triton code was asked for, but the triton that belongs to this torch is not installed."""


def refuse_version(site: str, tensor: Any, version: int) -> None:
    """Refuse a tensor that was written to since it had a version that a backward needs."""
    if tensor._version != version:
        raise ModifiedInPlace(
            site=site,
            expected=f"version {version}, which its backward needs",
            got=f"version {tensor._version}: one of the variables needed for gradient"
            " computation has been modified by an inplace operation",
            remedy="write to a clone of it, or after the backward",
        )
