"""Refusals: one class per user mistake, each saying site, expected, got and remedy.

Nothing here imports torch, so that plans and command lines can raise them too.

    try:
        torch.compile(model, backend="cp_inductor")(ids)
    except cp_inductor.CPError as error:
        error.site, error.expected, error.got, error.remedy
"""

from __future__ import annotations


class CPError(RuntimeError):
    """A sequence-sharded attention that cannot be rewritten correctly, and so is not rewritten.

    Args:
        site: the attention it is about, as ``sdpa_3 (model.py:41)``.
        expected: what would have worked.
        got: what came.
        remedy: the way out, as an imperative.
    """

    def __init__(self, *, site: str, expected: str, got: str, remedy: str) -> None:
        super().__init__(f"{site}: expected {expected}, got {got}; {remedy}")
        self.site = site
        self.expected = expected
        self.got = got
        self.remedy = remedy


class SequenceMixed(CPError):
    """What is not attention takes tokens of plain shards together, or counts them from 0."""


class SequenceWarning(UserWarning):
    """A model over a sharded sequence may not do what it does over the whole one."""


class ModifiedInPlace(CPError):
    """A DTensor that a backward reads was written to in place since the forward."""


class UnsupportedAttention(CPError):
    """The attention asks for something no plan computes: a mask, dropout, an odd rank."""


class UnsupportedBuffer(CPError, ValueError):
    """A buffer that `context_parallel` cannot shard in place; a ValueError, as torch's is."""


class UnsupportedPlacement(CPError):
    """Query, key and value are not sharded alike along the sequence on exactly one mesh axis."""


class UnevenSequence(CPError):
    """A length is not what the ranks were told, or dynamic and not divisible by their number."""


class UnsupportedKernel(CPError):
    """No attention kernel serves this device, dtype or head dim."""


class UnsupportedStrategy(CPError):
    """The strategy that was asked for does not fit the attention: its heads, layout or ranks."""


class ProcessGroupError(CPError):
    """There is no usable process group behind the mesh axis."""


class RanksDisagree(CPError):
    """Ranks that share a sequence are about to run different attentions, or some none."""


class UnsupportedTarget(CPError):
    """Code cannot be generated for this target here: unknown, or to be measured on the device."""


class InvalidArgument(CPError, ValueError):
    """A size, speed, count or rank that cannot be: negative, no number, or beyond all there is."""


class InvalidText(CPError, ValueError):
    """Text that is no mask, recipe or plan: it is read by a grammar, and never evaluated."""


class UntiedWeights(CPError):
    """Two parameters that were one: each gets a part of the gradient, and they train apart."""


class MissingTriton(CPError):
    """Triton code was asked for, and the triton that belongs to this torch is not installed."""
