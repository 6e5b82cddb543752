"""Tiles as columns of integers, and when ranks use which chunks: of all ranks and stages at once.

rank 0: tile q[2:4] x kv[0:1], in stage 1
  =>
chunks of queries      0  1  2  3        rank 0, heads 0:4: the stage in which it first, or
                      -1 -1  1  1        last, uses each chunk that another rank holds
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_inductor.plan.grid import Grid, Span, spread, tokens_before
from cp_inductor.plan.ir import Mask, Shape, Tile

# Heads of an attention are fewer: a rank and a span of heads are one integer.
_MAX_HEADS = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class TileColumns:
    """The tiles of all ranks and stages.

    Attributes:
        stage, rank, first_head, last_head: (tiles,) integers.
        is_causal: (tiles,) bool.
        queries, keys: the spans of all tiles.
    """

    stage: np.ndarray
    rank: np.ndarray
    first_head: np.ndarray
    last_head: np.ndarray
    is_causal: np.ndarray
    queries: SpanColumns
    keys: SpanColumns

    @staticmethod
    def of(stages: Iterable[Sequence[Tile]]) -> TileColumns:
        """Return the tiles of each stage as columns."""
        flat = [(stage, tile) for stage, tiles in enumerate(stages) for tile in tiles]
        rows = [
            (stage, tile.rank, tile.heads.start, tile.heads.stop, tile.mask is Mask.CAUSAL)
            for stage, tile in flat
        ]
        stage, rank, first, last, is_causal = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        queries = SpanColumns.of([tile.queries for _, tile in flat])
        keys = SpanColumns.of([tile.keys for _, tile in flat])
        return TileColumns(stage, rank, first, last, is_causal > 0, queries, keys)

    def tokens(self, grid: Grid, *, of_keys: bool) -> np.ndarray:
        """Return (tiles,), how many queries, or keys, each tile has."""
        spans, before = self.keys if of_keys else self.queries, tokens_before(grid, of_keys=of_keys)
        lengths = np.array(before)[spans.stop] - np.array(before)[spans.start]
        return np.bincount(spans.tile, lengths, len(self.rank))


@dataclass(frozen=True, slots=True, eq=False)
class SpanColumns:
    """Spans of many owners: spans ``tile[i] == t`` are those of tile t.

    Attributes:
        tile, start, stop: (spans,) integers.
    """

    tile: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @staticmethod
    def of(spans_of: Sequence[Sequence[Span]]) -> SpanColumns:
        """Return the spans of each tile as columns."""
        rows = [(at, s.start, s.stop) for at, spans in enumerate(spans_of) for s in spans]
        return SpanColumns(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """In which stage ranks use which chunks of others.

    Attributes:
        lines: (lines,) a rank and a span of heads each, as `line_of` writes them; sorted.
        edges: (parts + 1,) chunks where parts of the sequence begin and end, each of one owner and
            used as a whole.
        owners: (parts,) the rank that holds each.
        tokens: (parts,) how many each holds.
        stages: (lines, parts), the stage; -1 for none, for own parts, and for those without tokens.
    """

    lines: np.ndarray
    edges: np.ndarray
    owners: np.ndarray
    tokens: np.ndarray
    stages: np.ndarray

    @staticmethod
    def of(
        grid: Grid,
        shape: Shape,
        tiles: TileColumns,
        *,
        of_keys: bool,
        is_last: bool = False,
        by_chunk: bool = False,
    ) -> Uses:
        """Return the first, or the last, uses of chunks; with `by_chunk` each chunk is a part."""
        group = shape.num_heads // shape.num_kv_heads if of_keys else 1
        heads = tiles.first_head // group, (tiles.last_head - 1) // group + 1
        lines, line = np.unique(line_of(tiles.rank, *heads), return_inverse=True)
        spans = tiles.keys if of_keys else tiles.queries
        is_edge = np.full(grid.num_chunks + 1, by_chunk)
        is_edge[:: grid.chunks_per_rank] = is_edge[spans.start] = is_edge[spans.stop] = True
        edges, part_of = np.flatnonzero(is_edge), np.cumsum(is_edge) - 1
        owners = edges[:-1] // grid.chunks_per_rank
        tokens = np.diff(np.array(tokens_before(grid, of_keys=of_keys))[edges])
        stages = np.full((len(lines), len(owners)), -1, np.int16)
        first = part_of[spans.start]
        of, place = spread(part_of[spans.stop] - first)
        # Tiles stand in the order of stages, and what is written last remains.
        of, place = (of, place) if is_last else (of[::-1], place[::-1])
        is_used = (tiles.tokens(grid, of_keys=not of_keys) > 0)[spans.tile[of]]
        of, place = of[is_used], place[is_used]
        stages[line[spans.tile[of]], first[of] + place] = tiles.stage[spans.tile[of]]
        uses = Uses(lines, edges, owners, tokens, stages)
        stages[(uses.rank[:, None] == owners) | (tokens == 0)] = -1
        return uses

    def with_lines(self, lines: np.ndarray) -> Uses:
        """Return the same uses, with more lines that use nothing."""
        every = np.union1d(self.lines, lines)
        stages = np.full((len(every), len(self.owners)), -1, np.int16)
        stages[np.searchsorted(every, self.lines)] = self.stages
        return replace(self, lines=every, stages=stages)

    @property
    def rank(self) -> np.ndarray:
        """(lines,), the ranks."""
        return self.lines // _MAX_HEADS**2

    @property
    def heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The first head of each line, and the one behind its last."""
        return self.lines // _MAX_HEADS % _MAX_HEADS, self.lines % _MAX_HEADS

    @property
    def num_heads(self) -> np.ndarray:
        """(lines,), how many heads each has."""
        first, last = self.heads
        return last - first


def line_of(rank: np.ndarray, first_head: np.ndarray, last_head: np.ndarray) -> np.ndarray:
    """Return a rank and a span of heads as one integer."""
    return (rank * _MAX_HEADS + first_head) * _MAX_HEADS + last_head
