"""Chunks of a sequence, and which rank holds them.

Chunks are numbered along the sequence: rank r holds chunks r R to (r + 1) R - 1. Queries and keys
have their own lengths, so chunk 5 of the queries and chunk 5 of the keys may hold different numbers
of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cp_inductor.kept import lru_cache


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The half-open range [start, stop) of chunks, or of heads."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]"

    def intersect(self, other: Span) -> Span | None:
        """Return the common part; None if it is empty."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None


@dataclass(frozen=True, slots=True)
class Grid:
    """How the sequence is cut into chunks, and which rank holds them."""

    world_size: int  # P, the number of ranks
    # R. Of a rank's T tokens, its chunk c holds those from c T // R on.
    chunks_per_rank: int
    # query_length and key_length: S, the tokens of the whole sequence. As torch.chunk cuts it,
    # every rank holds ceil(S / P) tokens, except the last ranks, which hold the rest.
    query_length: int
    key_length: int

    @property
    def num_chunks(self) -> int:
        """The number of chunks of all ranks."""
        return self.world_size * self.chunks_per_rank

    def own(self, rank: int) -> Span:
        """Return the chunks that a rank holds."""
        return Span(rank * self.chunks_per_rank, (rank + 1) * self.chunks_per_rank)

    def num_tokens(self, span: Span, *, of_keys: bool) -> int:
        """Return how many tokens a span of chunks holds."""
        before = tokens_before(self, of_keys=of_keys)
        return int(before[span.stop] - before[span.start])


@lru_cache(maxsize=64)
def tokens_before(grid: Grid, *, of_keys: bool) -> np.ndarray:
    """Return how many tokens are stored before each chunk, and in total."""
    length, size = grid.key_length if of_keys else grid.query_length, grid.chunks_per_rank
    tokens = np.array(shard_lengths(length, grid.world_size))[:, None]
    before = np.cumsum(tokens)[:, None] - tokens + np.arange(size) * tokens // size
    before = np.append(before, length)
    before.flags.writeable = False
    return before


def shard_lengths(length: int, world_size: int) -> list[int]:
    """Return how many tokens of a sequence each rank holds, as torch.chunk cuts it."""
    most = -(-length // world_size)
    return [min(max(length - rank * most, 0), most) for rank in range(world_size)]


def lengths_of(grid: Grid, *, of_keys: bool) -> np.ndarray:
    """Return the number of tokens of each chunk."""
    return np.diff(tokens_before(grid, of_keys=of_keys))


def join_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort spans, and join those that touch or overlap."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].stop:
            last = joined.pop()
            span = Span(last.start, max(last.stop, span.stop))
        joined.append(span)
    return tuple(joined)


def spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for runs of so many items, the run of each item, and its place within the run."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
