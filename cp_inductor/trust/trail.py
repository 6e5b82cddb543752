"""Trails: what a rank has come to, as digests that others compare.

    attention, attention, batch 2, attention    =>    count 3, digests "9f86d081 884c7d65 9a2feaa0"

The digest after an event covers all events before it. So two trails part at the first event whose
digests differ.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# So many events are told to others, and so many of these in words. No rank is further ahead.
MOST_TOLD, MOST_WORDS = 512, 16

# So many bytes of a digest are compared, and so many numbers of a batch.
DIGEST_BYTES, NUM_SAMPLES = 4, 64


class Trail:
    """The events of one sort that a rank has come to: after each, a digest of all so far."""

    def __init__(self) -> None:
        self.count = 0
        self.digest = b""
        self.digests: deque[str] = deque(maxlen=MOST_TOLD)
        self.words: deque[str] = deque(maxlen=MOST_WORDS)

    def add(self, what: str, words: str) -> None:
        """Add an event: what is compared of it, and how people are told of it."""
        self.digest = hashlib.blake2b(
            self.digest + what.encode(), digest_size=DIGEST_BYTES
        ).digest()
        self.count += 1
        self.digests.append(self.digest.hex())
        self.words.append(words)

    def told(self) -> Told:
        """Return what others are told."""
        return Told(self.count, "".join(self.digests), list(self.words))


@dataclass(frozen=True, slots=True)
class Told:
    """What others are told about a trail: digests of the last events, words of the very last."""

    count: int
    digests: str
    words: Sequence[str]

    def digest_at(self, number: int) -> str | None:
        """Return the digest after an event, counted from 1; None if it is not told."""
        at = 2 * DIGEST_BYTES * (number - self.count - 1)
        end = at + 2 * DIGEST_BYTES or None
        return self.digests[at:end] if -len(self.digests) <= at < 0 else None

    def words_at(self, number: int) -> str:
        """Return the words for an event, counted from 1."""
        at = number - self.count - 1
        return self.words[at] if -len(self.words) <= at < 0 else "another"

    def first_difference(self, other: Told) -> int | None:
        """Return the first event, counted from 1, after which two trails differ."""
        stop = min(self.count, other.count)
        for number in range(max(1, stop - MOST_TOLD + 1), stop + 1):
            one, another = self.digest_at(number), other.digest_at(number)
            if one is not None and another is not None and one != another:
                return number
        return None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is.

    Attributes:
        attentions, batches: its trails.
        inside: the attention or graph that it is in; "" if in none.
        since: when it came there, in seconds since 1970.
        is_over: whether its program has ended.
    """

    attentions: Told
    batches: Told
    inside: str
    since: float
    is_over: bool

    @staticmethod
    def parse(text: bytes) -> Position:
        """Return the position that `json.dumps(asdict(position))` wrote."""
        read: dict[str, Any] = json.loads(text)
        attentions, batches = (Told(**read.pop(name)) for name in ("attentions", "batches"))
        return Position(attentions, batches, **read)

    def describe(self) -> str:
        """Describe the position, for people."""
        count, waited = self.attentions.count, max(0.0, time.time() - self.since)
        done = f"{count} attention{'s' * (count != 1)}"
        if self.is_over:
            return f"its program has ended, after {done}"
        if self.inside:
            return f"in {self.inside}, since {waited:.0f} s, after {count - 1} others"
        last = f", the last: {self.attentions.words[-1]}" if self.attentions.words else ""
        return f"outside of any attention, since {waited:.0f} s, after {done}{last}"


def sample_batch(tensor: Tensor) -> tuple[str, str]:
    """Return some numbers of a tensor, and how people are told of them."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // NUM_SAMPLES)][:NUM_SAMPLES].tolist()
    shape = "x".join(map(str, tensor.shape))
    begin = ", ".join(map(str, some[:4]))
    return repr((shape, some)), f"{shape} numbers with {begin}, ... in them"
