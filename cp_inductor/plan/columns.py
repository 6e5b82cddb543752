"""Transfers and tiles as columns of integers, which are counted and checked all at once.

    kv[1:2] h[0:4] 0 -> 1   =>   0  1  1  2  1  0  4      source, destination, span, payload, heads

A plan of a thousand ranks has half a million transfers. The columns stand in the order in which
transfers are sorted within an exchange (`transfers.message_order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cp_inductor.plan.grid import Span
    from cp_inductor.plan.ir import Tile

SOURCE, DESTINATION, START, STOP, PAYLOAD, FIRST_HEAD, LAST_HEAD = range(7)


def are_in_order(columns: np.ndarray) -> bool:
    """Whether every transfer comes after the one before it in the order of messages."""
    steps = np.diff(columns[:, :LAST_HEAD], axis=0)
    if not len(steps):
        return True
    first = (steps != 0).argmax(1)
    return bool((steps[np.arange(len(steps)), first] > 0).all())


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
            (stage, tile.rank, tile.heads.start, tile.heads.stop, tile.mask.value == "causal")
            for stage, tile in flat
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        spans = (
            SpanColumns.of([tile.queries for _, tile in flat]),
            SpanColumns.of([tile.keys for _, tile in flat]),
        )
        return TileColumns(*columns[:4], columns[4] > 0, *spans)


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
