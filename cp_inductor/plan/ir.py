"""What a plan is made of: chunks, tiles, transfers, stages. Frozen, and imports no torch.

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

`cp_inductor.plan.grid` says what a chunk is. What computes with plans takes `PlanData`; `Plan`
(`cp_inductor.plan.facade`) is the same for users, who plan, simulate and print by its methods.

A stage is an exchange, the tiles that it feeds, and the exchange of what goes home from them. The
fetch of stage i + 1 starts before the tiles of stage i; what is homeward from stage i is in flight
over the tiles of stage i + 1. An exchange is one collective, in which every rank takes part if any
has something to send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from cp_inductor.plan.grid import Grid, Span


class Mask(Enum):
    """Which (query, key) pairs of a tile, or of a whole attention, exist."""

    FULL = "full"
    CAUSAL = "causal"  # key index <= query index, both counted from the corner
    PARTIAL = "partial"  # those that the rule of the plan says


class Direction(Enum):
    """Of the computation."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Payload(Enum):
    """What a transfer carries of its chunks.

    Attributes:
        word: for it in a plan's text.
        is_of_keys: its chunks are chunks of keys, and its heads KV heads.
        order: among the payloads of one span in a message.
    """

    word: str
    is_of_keys: bool
    order: int

    QUERY = ("q", False)
    KEY_VALUE = ("kv", True)
    PARTIAL = ("out", False)  # out and lse of the sender's tiles, going home
    QUERY_GRAD_OUT = ("q+do", False)  # q, the gradient of out, and two statistics of each row
    GRAD_OUT = ("do", False)  # the same where q was kept
    QUERY_GRAD = ("dq", False)  # going home
    KEY_VALUE_GRAD = ("dkv", True)  # going home

    def __init__(self, word: str, is_of_keys: bool) -> None:
        # Attributes, not properties: plans of many ranks ask for them a hundred thousand times.
        self.word, self.is_of_keys = word, is_of_keys
        self.order = len(type(self).__members__)


@dataclass(frozen=True, slots=True)
class Tile:
    """One attention call of one rank.

    Attributes:
        rank: that computes it.
        queries, keys: spans of chunks, in the order of their positions; the call sees them
            concatenated.
        heads: query heads.
        mask: CAUSAL only where queries and keys are the same spans; PARTIAL only in plans that
            have a rule.
    """

    rank: int
    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    heads: Span
    mask: Mask


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks of one rank on their way to another.

    Attributes:
        payload: what of them.
        span: chunks, all with one owner.
        heads: query heads, or KV heads where the payload is of keys.
        source, destination: ranks.
    """

    payload: Payload
    span: Span
    heads: Span
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One exchange, the tiles it feeds, and what goes home from them; of all ranks."""

    fetch: tuple[Transfer, ...]
    tiles: tuple[Tile, ...]
    home: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of an attention, but for its lengths: batch B, query heads H, KV heads G, head dim D.

    Attributes:
        itemsize: bytes of an element of query, key and value.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    def kv_heads(self, heads: Span) -> Span:
        """Return the KV heads that query heads attend with."""
        group = self.num_heads // self.num_kv_heads
        return Span(heads.start // group, (heads.stop - 1) // group + 1)

    @property
    def all_heads(self) -> Span:
        """Every query head."""
        return Span(0, self.num_heads)


@dataclass(frozen=True)
class PlanData:
    """Who computes which tile of an attention, what moves, and when; for all ranks.

    Attributes:
        grid: the chunks.
        shape: of the attention.
        mask: of the attention.
        strategy: which assignment it is, for people.
        direction: forward or backward.
        num_kept: the fetches of so many stages, from the first, are kept for the backward.
        stages: in order.
        kept_fetches: backward only: what the forward fetched and kept.
        rule: which pairs exist where the mask is partial; see `cp_inductor.mask.rule`.
    """

    grid: Grid
    shape: Shape
    mask: Mask
    strategy: str
    direction: Direction
    num_kept: int
    stages: tuple[Stage, ...]
    kept_fetches: tuple[Transfer, ...] = ()
    rule: str = ""

    @cached_property
    def _by_rank(self) -> tuple[tuple[Stage, ...], ...]:
        world_size = self.grid.world_size
        programs: list[list[Stage]] = [[] for _ in range(world_size)]
        for stage in self.stages:
            tiles: list[list[Tile]] = [[] for _ in range(world_size)]
            for tile in stage.tiles:
                tiles[tile.rank].append(tile)
            fetch = _by_end(stage.fetch, world_size)
            home = _by_end(stage.home, world_size)
            for rank, program in enumerate(programs):
                program.append(Stage(tuple(fetch[rank]), tuple(tiles[rank]), tuple(home[rank])))
        return tuple(tuple(program) for program in programs)

    def program(self, rank: int) -> tuple[Stage, ...]:
        """Return a rank's part: its tiles, and the transfers that start or end with it."""
        return self._by_rank[rank]

    def num_bytes(self, transfer: Transfer) -> int:
        """Return how many bytes a transfer moves."""
        of_keys = transfer.payload.is_of_keys
        rows = self.shape.batch * len(transfer.heads)
        rows *= self.grid.num_tokens(transfer.span, of_keys=of_keys)
        return rows * bytes_per_row(transfer.payload, self.shape)

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes that leave a rank."""
        return sum(self.num_bytes(t) for t in self._transfers(rank) if t.source == rank)

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that reach a rank."""
        return sum(self.num_bytes(t) for t in self._transfers(rank) if t.destination == rank)

    @cached_property
    def exchanges(self) -> tuple[tuple[Transfer, ...], ...]:
        """The collectives of all ranks, in the order in which each rank starts them."""
        started = [self.stages[0].fetch]
        for stage, following in zip(self.stages, [*self.stages[1:], None], strict=True):
            started += [following.fetch if following else (), stage.home]
        return tuple(exchange for exchange in started if exchange)

    @cached_property
    def exchange_bytes(self) -> tuple[int, ...]:
        """Of each exchange, the most bytes that a rank sends or receives in it."""
        most = []
        for exchange in self.exchanges:
            sent, received = Counter[int](), Counter[int]()
            for transfer in exchange:
                sent[transfer.source] += self.num_bytes(transfer)
                received[transfer.destination] += self.num_bytes(transfer)
            most.append(max(*sent.values(), *received.values()))
        return tuple(most)

    def _transfers(self, rank: int) -> Iterator[Transfer]:
        for stage in self.program(rank):
            yield from stage.fetch
            yield from stage.home

    def num_pairs(self, tile: Tile) -> int:
        """Return the (query, key) pairs of a tile, of one head."""
        num_queries = sum(self.grid.num_tokens(span, of_keys=False) for span in tile.queries)
        if tile.mask is Mask.CAUSAL:
            return num_queries * (num_queries + 1) // 2
        return num_queries * sum(self.grid.num_tokens(span, of_keys=True) for span in tile.keys)

    def tile_flops(self, tile: Tile) -> int:
        """Return the floating-point operations of a tile.

        Two matmuls forward and five backward (Dao 2023, arXiv 2307.08691, section 3.1), of two
        operations per pair and head dim.
        """
        num_matmuls = 2 if self.direction is Direction.FORWARD else 5
        pairs = self.num_pairs(tile) * len(tile.heads) * self.shape.batch
        return 2 * num_matmuls * pairs * self.shape.head_dim

    def flops(self, rank: int) -> int:
        """Return the floating-point operations of a rank's tiles."""
        return sum(self.tile_flops(tile) for stage in self.program(rank) for tile in stage.tiles)

    def num_pairs_of(self, rank: int) -> float:
        """Return the (query, key) pairs that a rank computes, of a head on average."""
        tiles = (tile for stage in self.program(rank) for tile in stage.tiles)
        return sum(self.num_pairs(t) * len(t.heads) for t in tiles) / self.shape.num_heads

    @property
    def balance(self) -> float:
        """Flops of the busiest rank over the mean of all: 1.0 is perfect."""
        flops = [self.flops(rank) for rank in range(self.grid.world_size)]
        return max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0

    @property
    def skipped(self) -> float:
        """Part of all pairs of queries and keys that no tile computes."""
        tiles = (tile for stage in self.stages for tile in stage.tiles)
        pairs = sum(self.num_pairs(tile) * len(tile.heads) for tile in tiles)
        all_pairs = self.grid.query_length * self.grid.key_length * self.shape.num_heads
        return 1 - pairs / max(1, all_pairs)


def _by_end(transfers: tuple[Transfer, ...], world_size: int) -> list[list[Transfer]]:
    """Give every transfer to its two ends."""
    ends: list[list[Transfer]] = [[] for _ in range(world_size)]
    for transfer in transfers:
        ends[transfer.source].append(transfer)
        ends[transfer.destination].append(transfer)
    return ends


def bytes_per_row(payload: Payload, shape: Shape) -> int:
    """Return the bytes of a payload per token, head and batch entry.

    A row of a tensor, and float32 statistics (float64 for float64) that go along: the lse of a
    partial; the lse and one more of a query whose gradient is computed elsewhere.
    """
    row, statistic = shape.head_dim * shape.itemsize, max(4, shape.itemsize)
    match payload:
        case Payload.QUERY | Payload.QUERY_GRAD:
            return row
        case Payload.KEY_VALUE | Payload.KEY_VALUE_GRAD:
            return 2 * row
        case Payload.PARTIAL:
            return row + statistic
        case Payload.QUERY_GRAD_OUT:
            return 2 * row + 2 * statistic
        case Payload.GRAD_OUT:
            return row + 2 * statistic
