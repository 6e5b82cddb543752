"""The dims of query, key, value and out, (B, H, S, D), and how many tokens chunks are along S."""

from __future__ import annotations

from dataclasses import dataclass

from torch import SymInt

from cp_inductor.plan import Grid, Span

BATCH_DIM, HEADS_DIM, SEQUENCE_DIM = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Tokens:
    """Lengths of spans, in tokens, that may be symbolic."""

    grid: Grid  # of the plan
    # num_queries and num_keys: this rank's, from its tensors. Where the sequence divides evenly,
    # all ranks hold as many, whatever the length that the plan was made for.
    num_queries: int | SymInt
    num_keys: int | SymInt

    def of(self, span: Span, *, of_keys: bool) -> int | SymInt:
        """Return how many tokens a span of chunks holds."""
        whole = self.grid.key_length if of_keys else self.grid.query_length
        if whole % self.grid.world_size:
            return self.grid.num_tokens(span, of_keys=of_keys)
        local = self.num_keys if of_keys else self.num_queries
        return self._before(span.stop, local) - self._before(span.start, local)

    def range_of(self, span: Span, *, of_keys: bool) -> tuple[int | SymInt, int | SymInt]:
        """Return the first token of a span, and the one after its last."""
        start = self.of(Span(0, span.start), of_keys=of_keys) if span.start else 0
        return start, start + self.of(span, of_keys=of_keys)

    def _before(self, chunk: int, local: int | SymInt) -> int | SymInt:
        rank, offset = divmod(chunk, self.grid.chunks_per_rank)
        return rank * local + offset * local // self.grid.chunks_per_rank
