"""The parts of a plan: chunks, tiles, transfers, stages. Frozen data; imports no torch.

    plan 2 ranks, 2 chunks each, blocks, causal, forward
    stage 0
      rank 0: tile q[0:2] x kv[0:2] h[0:4] causal
      rank 1: tile q[2:4] x kv[2:4] h[0:4] causal
    stage 1
      fetch: q[2:4] h[0:4] 1 -> 0
      fetch: kv[1:2] h[0:4] 0 -> 1
      rank 0: tile q[2:4] x kv[0:1] h[0:4] full
      rank 1: tile q[2:4] x kv[1:2] h[0:4] full
      home: out[2:4] h[0:4] 0 -> 1

`cp_inductor.plan.grid` defines chunks. Code that computes with plans takes `PlanData`; users get
the subclass `Plan` (`cp_inductor.plan.facade`), with methods to plan, simulate and print.

A stage is an exchange, the tiles that it feeds, and the exchange that sends their results home. The
fetch of stage i + 1 starts before the tiles of stage i. Results of stage i are sent home during the
tiles of stage i + 1. An exchange is one collective, in which every rank takes part if any rank has
something to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_inductor.plan.grid import Grid, Span, tokens_before

# The columns of `Transfers`, by which messages are sorted, the first one first. Payloads of one
# span are adjacent, and are sent as one record. Where transfers of all stages are one array, the
# stage stands behind them.
SOURCE, DESTINATION, START, STOP, PAYLOAD, FIRST_HEAD, LAST_HEAD, STAGE = range(8)
_NONE = np.empty((0, 7), np.int64)


class Mask(Enum):
    """Which (query, key) pairs of a tile, or of a whole attention, exist."""

    FULL = "full"
    CAUSAL = "causal"  # key index <= query index, both counted from the corner
    PARTIAL = "partial"  # those that the rule of the plan says


class Direction(Enum):
    """Forward or backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Payload(Enum):
    """What a transfer carries.

    Attributes:
        word: its name in the text of a plan.
        tensors: what it consists of: a row of numbers for each token and head.
        statistics: and with these, one number for each token and head.
        parts: its tensors, then its statistics.
        is_of_keys: the transfer's chunks are chunks of keys, and its heads are KV heads.
        order: its place among the payloads of one span in a message.
    """

    QUERY = ("q", ("query",))
    KEY_VALUE = ("kv", ("key", "value"), (), True)
    PARTIAL = ("out", ("out",), ("lse",))  # of the sender's tiles, going home
    QUERY_GRAD_OUT = ("q+do", ("query", "grad_out"), ("lse", "delta"))
    GRAD_OUT = ("do", ("grad_out",), ("lse", "delta"))  # where the query was kept
    QUERY_GRAD = ("dq", ("grad_query",))  # going home
    KEY_VALUE_GRAD = ("dkv", ("grad_key", "grad_value"), (), True)  # going home

    def __init__(
        self,
        word: str,
        tensors: tuple[str, ...],
        statistics: tuple[str, ...] = (),
        is_of_keys: bool = False,
    ) -> None:
        # Attributes, not properties: plans of many ranks ask for them a hundred thousand times.
        self.word, self.tensors, self.statistics = word, tensors, statistics
        self.parts, self.is_of_keys = tensors + statistics, is_of_keys
        self.order = len(type(self).__members__)


# By the order of payloads, for columns of transfers.
IS_OF_KEYS = np.array([payload.is_of_keys for payload in Payload])


@dataclass(frozen=True, slots=True)
class Tile:
    """One attention call of one rank."""

    rank: int  # the rank that computes it
    # queries and keys: spans of chunks, in the order of their positions; the call sees them
    # concatenated.
    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    heads: Span  # query heads
    # CAUSAL only if queries and keys are the same spans; PARTIAL only in plans with a rule.
    mask: Mask

    def at(self, rank: int, heads: Span) -> Tile:
        """Return the same tile of another rank, for other heads."""
        return Tile(rank, self.queries, self.keys, heads, self.mask)

    def num_tokens(self, grid: Grid) -> tuple[int, int]:
        """Return how many queries and keys it has; in short sequences some chunks are empty."""
        queries = sum(grid.num_tokens(span, of_keys=False) for span in self.queries)
        return queries, sum(grid.num_tokens(span, of_keys=True) for span in self.keys)

    def side(self, shape: Shape, *, of_keys: bool) -> tuple[tuple[Span, ...], Span]:
        """Return the spans and the heads of its queries, or of its keys."""
        return (self.keys, shape.kv_heads(self.heads)) if of_keys else (self.queries, self.heads)


class TileColumns(NamedTuple):
    """The tiles of all ranks and stages, as integers."""

    # stage, rank, first_head, last_head, is_causal: (tiles,).
    stage: np.ndarray
    rank: np.ndarray
    first_head: np.ndarray
    last_head: np.ndarray
    is_causal: np.ndarray
    # queries and keys: (3, spans), of each span its tile, its first chunk and that behind it.
    queries: np.ndarray
    keys: np.ndarray

    @staticmethod
    def of(stages: Iterable[Sequence[Tile]]) -> TileColumns:
        """Return the tiles of each stage as columns."""
        stages = [*stages]
        tiles = [tile for own in stages for tile in own]
        stage = np.repeat(np.arange(len(stages)), [len(own) for own in stages])
        # Flat lists, because Python looks through as many tuples for garbage.
        rows = [
            number
            for t in tiles
            for number in (t.rank, t.heads.start, t.heads.stop, t.mask is Mask.CAUSAL)
        ]
        queries, keys = (
            [number for at, of in enumerate(side) for s in of for number in (at, s.start, s.stop)]
            for side in ([tile.queries for tile in tiles], [tile.keys for tile in tiles])
        )
        of_tiles, *of_sides = (
            np.array(numbers, np.int64).reshape(-1, width).T
            for numbers, width in ((rows, 4), (queries, 3), (keys, 3))
        )
        return TileColumns(stage, *of_tiles, *of_sides)

    def tokens(self, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
        """Return (tiles,) each, how many queries and how many keys the tiles have."""
        queries, keys = (
            np.bincount(of_tile, before[stop] - before[start], len(self.rank)).astype(int)
            for (of_tile, start, stop), before in (
                (self.queries, tokens_before(grid, of_keys=False)),
                (self.keys, tokens_before(grid, of_keys=True)),
            )
        )
        return queries, keys


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks of one owner that a rank sends to another; its heads are KV heads if it is of keys."""

    payload: Payload
    span: Span
    heads: Span
    source: int
    destination: int


class Transfers:
    """The transfers of an exchange, in the order of messages, which both ends derive.

    They are (transfers, 7) integers, in which all are counted and checked at once: a plan of a
    thousand ranks has half a million.
    """

    def __init__(self, columns: np.ndarray = _NONE) -> None:
        self.columns = columns

    @staticmethod
    def of(transfers: Iterable[Transfer]) -> Transfers:
        """Return transfers as columns, in the order in which they are given."""
        if isinstance(transfers, Transfers):
            return transfers
        rows = [
            (*ends, t.span.start, t.span.stop, t.payload.order, t.heads.start, t.heads.stop)
            for t in transfers
            for ends in [(t.source, t.destination)]
        ]
        return Transfers(np.array(rows, dtype=np.int64).reshape(-1, 7))

    @staticmethod
    def joined(parts: Iterable[Iterable[Transfer]]) -> Transfers:
        """Return the transfers of all parts, one part behind the other."""
        return Transfers(np.concatenate([_NONE, *(Transfers.of(part).columns for part in parts)]))

    def sorted(self) -> Transfers:
        """Return them in the order of messages."""
        return Transfers(self.columns[message_order(self.columns)])

    def __len__(self) -> int:
        return len(self.columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transfers) and np.array_equal(self.columns, other.columns)

    def __repr__(self) -> str:
        return f"Transfers({self.columns.tolist()})"  # ranks compare digests of it

    def __iter__(self) -> Iterator[Transfer]:
        payloads = tuple(Payload)
        for source, destination, start, stop, payload, first, last in self.columns.tolist():
            span, heads = Span(start, stop), Span(first, last)
            yield Transfer(payloads[payload], span, heads, source, destination)

    def of_rank(self, rank: int) -> Transfers:
        """Return those that start or end at a rank."""
        return Transfers(self.columns[(self.columns[:, [SOURCE, DESTINATION]] == rank).any(1)])


def message_order(columns: np.ndarray, *before: np.ndarray) -> np.ndarray:
    """Return the order of messages of transfers, those with a less number `before` first."""
    return np.lexsort((*columns[:, FIRST_HEAD::-1].T, *before))


@dataclass(frozen=True, slots=True)
class Stage:
    """One exchange, the tiles that it feeds, and the results sent home; for all ranks.

    If the backward of a forward plan computes other tiles, its stages have those of the backward
    that their fetch feeds. Whatever these read is fetched in the forward, and kept.
    """

    fetch: Transfers = field(default_factory=Transfers)
    tiles: tuple[Tile, ...] = ()
    home: Transfers = field(default_factory=Transfers)
    backward_tiles: tuple[Tile, ...] = ()

    def of_rank(self, rank: int) -> Stage:
        """Return a rank's tiles, and the transfers that start or end at it."""
        tiles, later = (
            tuple(tile for tile in tiles if tile.rank == rank)
            for tiles in (self.tiles, self.backward_tiles)
        )
        return Stage(self.fetch.of_rank(rank), tiles, self.home.of_rank(rank), later)


@dataclass(frozen=True, slots=True)
class Shape:
    """Batch B, query heads H, KV heads G, head dim D, and bytes of an element; not lengths."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    def kv_heads(self, heads: Span) -> Span:
        """Return the KV heads that the given query heads attend with."""
        group = self.num_heads // self.num_kv_heads
        return Span(heads.start // group, (heads.stop - 1) // group + 1)

    @property
    def all_heads(self) -> Span:
        """Every query head."""
        return Span(0, self.num_heads)


@dataclass(frozen=True)
class PlanData:
    """Which rank computes which tile of an attention, what moves, and when; for all ranks."""

    grid: Grid
    shape: Shape
    mask: Mask
    strategy: str  # the name of the strategy that assigned the tiles
    direction: Direction
    num_kept: int  # number of stages, from the first, whose fetched data is kept for the backward
    stages: tuple[Stage, ...]
    # In a backward plan, the transfers that the forward fetched and kept.
    kept_fetches: Transfers = field(default_factory=Transfers)
    rule: str = ""  # which pairs exist, if the mask is partial; see `cp_inductor.mask.rule`
    # Over how many nodes heads are split. With more than one, inputs enter a node at one rank,
    # which passes them on.
    num_nodes: int = 1

    @property
    def returns(self) -> bool:
        """Whether results go back the way their inputs came, and ranks on it add what they have."""
        return self.num_nodes > 1

    @cached_property
    def _programs(self) -> dict[int, tuple[Stage, ...]]:
        return {}

    def program(self, rank: int) -> tuple[Stage, ...]:
        """Return one rank's part: its tiles, and the transfers that start or end at it."""
        if rank not in self._programs:
            self._programs.clear()  # a process is one rank, or one after the other
            self._programs[rank] = tuple(stage.of_rank(rank) for stage in self.stages)
        return self._programs[rank]

    @property
    def tiles(self) -> list[Tile]:
        """The tiles of all stages."""
        return [tile for stage in self.stages for tile in stage.tiles]

    @cached_property
    def columns(self) -> TileColumns:
        """The tiles of all stages, as integers."""
        return TileColumns.of(stage.tiles for stage in self.stages)

    @cached_property
    def tiles_of_heads(self) -> list[tuple[Span, list[Tile]]]:
        """Runs of heads that each tile has all of, or none, and the tiles that have them."""
        edges = sorted({end for tile in self.tiles for end in (tile.heads.start, tile.heads.stop)})
        return [
            (Span(start, stop), [t for t in self.tiles if t.heads.start <= start < t.heads.stop])
            for start, stop in pairwise(edges)
        ]

    @cached_property
    def loads(self) -> np.ndarray:
        """(stages, 2, 2, P), bytes: of fetches and results, that each rank sends and receives."""
        return self.loads_between(range(self.grid.world_size))

    def loads_between(self, nodes: Sequence[int]) -> np.ndarray:
        """Return the same of what leaves a node, if rank r is in nodes[r]."""
        node_of = np.array(nodes)

        def load(moved: Transfers) -> list[np.ndarray]:
            ends = moved.columns[:, [SOURCE, DESTINATION]].T
            num_bytes = self.bytes_of(moved) * (node_of[ends[0]] != node_of[ends[1]])
            # Below 2 ** 53, these sums of whole numbers are exact.
            return [np.bincount(ranks, num_bytes, len(node_of)) for ranks in ends]

        return np.array([(load(s.fetch), load(s.home)) for s in self.stages]).astype(np.int64)

    def bytes_of(self, transfers: Transfers) -> np.ndarray:
        """Return how many bytes each transfer moves."""
        _, _, start, stop, payload, first_head, last_head = transfers.columns.T
        per_row = np.array([bytes_per_row(payload, self.shape) for payload in Payload])
        before = np.stack([tokens_before(self.grid, of_keys=of_keys) for of_keys in (False, True)])
        kind = IS_OF_KEYS[payload].astype(int)
        rows = (before[kind, stop] - before[kind, start]) * self.shape.batch
        return np.asarray(rows * (last_head - first_head) * per_row[payload])

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes that a rank sends."""
        return int(self.loads[:, :, 0, rank].sum())

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that a rank receives."""
        return int(self.loads[:, :, 1, rank].sum())

    @cached_property
    def exchange_bytes(self) -> tuple[int, ...]:
        """The most bytes that any rank sends or receives in each exchange, as ranks start them.

        The fetch of a stage starts before the results of the stage before it go home.
        """
        fetch, home = self.loads.max((2, 3)).T.tolist()
        started = zip([*fetch, 0], [0, *home], strict=True)
        return tuple(num_bytes for both in started for num_bytes in both if num_bytes)

    @cached_property
    def head_pairs(self) -> list[int]:
        """The (query, key, head) triples that each rank computes."""
        tiles, pairs = self.columns, np.zeros(self.grid.world_size, object)
        queries, keys = tiles.tokens(self.grid)
        of_head = np.where(tiles.is_causal, queries * (queries + 1) // 2, queries * keys)
        # In integers of Python, which do not overflow.
        np.add.at(pairs, tiles.rank, of_head.astype(object) * (tiles.last_head - tiles.first_head))
        return pairs.tolist()

    def flops(self, rank: int) -> int:
        """Return the floating-point operations of all tiles of a rank."""
        return self.head_pairs[rank] * flops_per_pair(self.direction, self.shape)

    @property
    def balance(self) -> float:
        """Flops of the busiest rank over the mean of all ranks; 1.0 is perfect."""
        pairs = self.head_pairs
        return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0

    @property
    def skipped(self) -> float:
        """The fraction of all (query, key) pairs that no tile computes."""
        all_pairs = self.grid.query_length * self.grid.key_length * self.shape.num_heads
        return 1 - sum(self.head_pairs) / max(1, all_pairs)


# Matmuls of a tile (Dao 2023, arXiv 2307.08691, section 3.1).
NUM_MATMULS = {Direction.FORWARD: 2, Direction.BACKWARD: 5}


def flops_per_pair(direction: Direction, shape: Shape) -> int:
    """Return the floating-point operations of a (query, key) pair of one head, in all of a batch.

    A matmul has two operations per pair and head dim.
    """
    return 2 * NUM_MATMULS[direction] * shape.head_dim * shape.batch


def bytes_per_row(payload: Payload, shape: Shape) -> int:
    """Return the bytes of a payload per token, head and batch entry.

    That is a row of a tensor, and the statistics sent with it in float32 (float64 for float64): the
    lse of a partial; the lse and delta of a query whose gradient another rank computes.
    """
    row, statistic = shape.head_dim * shape.itemsize, max(4, shape.itemsize)
    return len(payload.tensors) * row + len(payload.statistics) * statistic


class Price(NamedTuple):
    """What a token of all heads costs, forward and backward together."""

    fetch: float  # the rank that fetches it: q; q again and the gradient of out
    home: float  # its owner, to whom results of it come: out; dq

    @property
    def both(self) -> float:
        """What it costs both."""
        return self.fetch + self.home


class Prices(NamedTuple):
    """The price of queries, and of keys."""

    queries: Price
    keys: Price

    @staticmethod
    def of(shape: Shape) -> Prices:
        """Return bytes per token and batch entry, if nothing is kept."""

        def of_heads(heads: int, *payloads: Payload) -> int:
            return heads * sum(bytes_per_row(payload, shape) for payload in payloads)

        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        return Prices(
            Price(
                of_heads(heads, Payload.QUERY, Payload.QUERY_GRAD_OUT),
                of_heads(heads, Payload.PARTIAL, Payload.QUERY_GRAD),
            ),
            Price(
                of_heads(kv_heads, Payload.KEY_VALUE, Payload.KEY_VALUE),
                of_heads(kv_heads, Payload.KEY_VALUE_GRAD),
            ),
        )

    @staticmethod
    def in_elements(num_heads: int, num_kv_heads: int) -> Prices:
        """Return them in the elements of a token's K and V. Statistics of rows hardly count."""
        ratio = num_heads / (2 * num_kv_heads)
        return Prices(Price(3 * ratio, 2 * ratio), Price(2.0, 1.0))
