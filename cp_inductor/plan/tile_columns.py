"""The tiles of a plan as columns of integers, so that those of all ranks are counted at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cp_inductor.plan.grid import Span
from cp_inductor.plan.ir import Mask, Tile


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

    def sums(self, before: np.ndarray, num_tiles: int) -> np.ndarray:
        """Return (tiles,), how many tokens each tile's spans hold.

        Args:
            before: tokens before each chunk, and in total.
            num_tiles: the number of tiles.
        """
        return np.bincount(self.tile, before[self.stop] - before[self.start], num_tiles)
