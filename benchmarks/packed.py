"""Lengths of packed documents, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

# The length of one document.
Draw = Callable[[np.random.Generator], float]
KINDS: Mapping[str, Draw] = {
    "short": lambda generator: generator.lognormal(7.5, 1.0),
    "long": lambda generator: generator.lognormal(9.0, 1.5),
    "Pareto": lambda generator: generator.pareto(1.0) * 2000 + 200,
    "8k": lambda generator: generator.exponential(8192),
    "one": lambda _: 2**62,
}


def pack(kind: str, length: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """Return the lengths of documents, times a scale, that fill a batch; the last is cut."""
    generator, left, lengths = np.random.default_rng(seed), length, []
    while left:
        lengths.append(min(left, max(16, int(scale * KINDS[kind](generator)))))
        left -= lengths[-1]
    return np.array(lengths)
