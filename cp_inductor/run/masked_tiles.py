"""A tile under a mask on the CPU, which computes the blocks that hold pairs, and no others.

    block_table(tables, rule, geometry)  -> cells      EMPTY, FULL or PARTIAL, of 128 x 128 scores
    masked_tile(query, key, value, cells, ...) -> out, lse
    masked_tile_backward(grad_out, query, key, value, out, lse, cells, ...) -> dq, dk, dv

                      keys 0   128  256  384
    queries 0              P    .    .    .       strip: keys [0, 128)
            128            F    P    .    .       strip: keys [0, 256)
            256            .    .    P    .       strip: keys [256, 384)      the shape of the first
            384            F    .    F    P       strip: keys [0, 128), [256, 512)

A row of blocks is a *strip*: its queries, and the keys of its blocks, brought next to each other.
So one softmax goes over all that a query sees in the tile. Neighbouring rows that see the same
blocks are one strip. Strips of one shape are computed by one call of flash attention, as entries of
its batch: the kernel's threads start and meet once for many strips. A call has a bias if one of its
blocks is PARTIAL, made block by block; no tensor grows with queries times keys.

Which blocks there are is known when the program runs, to the pair: interval arithmetic finds most,
and the rule is evaluated in those that it leaves open. The table is made by an op of its own, so
that the layers of a model, which read the same tables, share it.

Assumes: see `cp_inductor.run.kernels.FlashCPU`, which computes the calls; a positive scale.

Shapes: B batch, H query heads, G key-value heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.mask.language import BATCH
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.plan import Tile
from cp_inductor.run.block_tables import BLOCK, make_block_table
from cp_inductor.run.combine import accumulation_dtype
from cp_inductor.run.kernels import FlashCPU, Gradients, Kernel, Partial, TileCall
from cp_inductor.run.tile_masks import Geometry, Indices, TileMasks

# Pairs, of all heads, of the strips that one call computes. More make a call no faster, but its
# copies of keys larger.
MAX_PAIRS = 1 << 23

# Queries times keys of a strip with a bias.
MAX_BIAS = 1 << 22

# Blocks in which the rule is evaluated at once.
MAX_BLOCKS = 64

# Of fewer keys, the kernel loses NaN: see `FlashCPU`.
MIN_KEYS = 16


# --- The table --------------------------------------------------------------------------------


@torch.library.custom_op("cp_inductor::block_table", mutates_args=())
def block_table(
    tables: list[Tensor], rule: str, geometry: list[int], batch: int, dtype: torch.dtype
) -> Tensor:
    """Return which blocks of a tile hold pairs.

    Args:
        tables: what the rule reads, at least one.
        rule: its text.
        geometry: of the tile, encoded.
        batch: how many batch entries there are; 1 if what exists does not depend on them.
        dtype: of the attention.

    Returns:
        (B | 1, H | 1, ceil(S / 128), ceil(T / 128)) int8: `Cell.EMPTY` of a block without a pair,
        `Cell.FULL` of one that holds all pairs and to which no bias is added, else `Cell.PARTIAL`.
    """
    indices = Indices(
        Geometry.decode(geometry), tables, batch=batch, dtype=dtype, device=tables[0].device
    )
    return _find_cells(Rule.parse(rule), indices)


@block_table.register_fake
def _(
    tables: list[Tensor], rule: str, geometry: list[int], batch: int, dtype: torch.dtype
) -> Tensor:
    indices = Indices(
        Geometry.decode(geometry), tables, batch=batch, dtype=dtype, device=tables[0].device
    )
    return make_block_table(Rule.parse(rule), indices).contiguous()


def _find_cells(rule: Rule, indices: Indices) -> Tensor:
    """Return the block table, and evaluate the rule in blocks that interval arithmetic leaves."""
    cells = make_block_table(rule, indices).contiguous()
    of_blocks = (cells == Cell.PARTIAL).nonzero()
    for some in of_blocks.split(MAX_BLOCKS):
        place = _Blocks(indices.geometry, some, has_heads=cells.shape[1] > 1)
        allowed = indices.evaluate(rule.allowed, place).expand(len(some), -1, -1, -1).flatten(1)
        found = torch.full((len(some),), Cell.PARTIAL, dtype=cells.dtype)
        if not rule.bias:
            found[allowed.all(1)] = Cell.FULL
        found[~allowed.any(1)] = Cell.EMPTY
        cells[tuple(some.unbind(1))] = found
    return cells


@lru_cache(maxsize=64)
def _cells_without_tables(
    rule: str, geometry: tuple[int, ...], batch: int, dtype: torch.dtype
) -> Tensor:
    """Return the block table of a rule of indices alone."""
    device = torch.device("cpu")
    indices = Indices(Geometry.decode(geometry), (), batch=batch, dtype=dtype, device=device)
    return _find_cells(Rule.parse(rule), indices)


class _Blocks:
    """Takes what has a value for every score to some blocks of scores: (n, H | 1, 128, 128).

    Args:
        geometry: of the tile.
        of_blocks: (n, 4), of each block its batch entry, head, row and column.
        has_heads: a block is of one head, and not of all.
    """

    def __init__(self, geometry: Geometry, of_blocks: Tensor, *, has_heads: bool) -> None:
        entry, head, row, column = (index.view(-1, 1, 1, 1) for index in of_blocks.unbind(1))
        num_heads = geometry.heads[1] - geometry.heads[0]
        inside = torch.arange(BLOCK)
        # The last block repeats its last token, of which its kind is that of the others.
        rows = (row * BLOCK + inside.view(1, 1, BLOCK, 1)).clamp(max=geometry.num_queries - 1)
        columns = (column * BLOCK + inside).clamp(max=geometry.num_keys - 1)
        heads = head if has_heads else torch.arange(num_heads).view(1, -1, 1, 1)
        self.places, self.nowhere = (entry, heads, rows, columns), torch.zeros(1, 1, 1, 1).long()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the blocks' part of a tensor (B | 1, H | 1, S | 1, T | 1)."""
        sizes = zip(tensor.shape, self.places, strict=True)
        return tensor[tuple(self.nowhere if size == 1 else place for size, place in sizes)]


# --- Strips -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Strip:
    """Neighbouring rows of blocks that see the same blocks of keys.

    Attributes:
        entry, head: of the batch, and of the tile's; None is all of them.
        rows: blocks of queries, [start, stop).
        columns: blocks of keys, in order.
        is_full: all of the blocks are FULL.
    """

    entry: int | None
    head: int | None
    rows: tuple[int, int]
    columns: tuple[int, ...]
    is_full: bool

    def queries(self, length: int) -> slice:
        """Return its queries, of so many."""
        return slice(self.rows[0] * BLOCK, min(self.rows[1] * BLOCK, length))

    def keys(self, length: int) -> list[slice]:
        """Return its keys, of so many, in runs.

        Of a last block that is too short for the kernel, some keys before it are among them.
        """
        if self.num_hidden(length):
            return [slice(length - MIN_KEYS, length)]
        runs = [
            [column for _, column in run]
            for _, run in groupby(enumerate(self.columns), lambda pair: pair[1] - pair[0])
        ]
        return [slice(run[0] * BLOCK, min((run[-1] + 1) * BLOCK, length)) for run in runs]

    def num_hidden(self, length: int) -> int:
        """Return how many of the keys are not of its blocks."""
        own = length - self.columns[0] * BLOCK
        return MIN_KEYS - own if own < MIN_KEYS <= length else 0


@dataclass(frozen=True, slots=True)
class Call:
    """Strips of one shape.

    Attributes:
        strips: at least one.
        of_blocks: (n, 4), entry, head, row and column of each PARTIAL block.
        places: (3, n), their strips, and their rows and columns of blocks in these.
    """

    strips: tuple[Strip, ...]
    of_blocks: Tensor
    places: Tensor

    @property
    def num_blocks(self) -> int:
        """How many blocks are computed."""
        return sum((s.rows[1] - s.rows[0]) * len(s.columns) for s in self.strips)


def arrange_calls(
    cells: Tensor, num_queries: int, num_keys: int, num_heads: int, entries: int | None = None
) -> tuple[Call, ...]:
    """Put the blocks of a tile that hold pairs into calls of flash attention.

    Args:
        cells: (B | 1, H | 1, ceil(S / 128), ceil(T / 128)), exact.
        num_queries, num_keys, num_heads: of the tile.
        entries: so many batch entries are computed by themselves, although the cells do not
            depend on them.
    """
    array = cells.numpy()
    shape = (entries or array.shape[0], *array.shape[1:])
    return _arrange(array.tobytes(), array.shape, shape[0], num_queries, num_keys, num_heads)


@lru_cache(maxsize=64)
def _arrange(
    cells: bytes,
    shape: tuple[int, ...],
    num_entries: int,
    num_queries: int,
    num_keys: int,
    num_heads: int,
) -> tuple[Call, ...]:
    array = np.broadcast_to(
        np.frombuffer(cells, dtype=np.int8).reshape(shape), (num_entries, *shape[1:])
    )
    by_shape: dict[tuple[int, int, bool, bool], list[Strip]] = {}
    for strip in _strips(array):
        queries, keys = strip.queries(num_queries), strip.keys(num_keys)
        sizes = (queries.stop - queries.start, sum(run.stop - run.start for run in keys))
        alike = (*sizes, strip.is_full, strip.num_hidden(num_keys) > 0)
        by_shape.setdefault(alike, []).append(strip)
    calls = []
    for (rows, columns, *_), strips in sorted(by_shape.items()):
        heads = num_heads if shape[1] == 1 else 1
        at_once = max(1, MAX_PAIRS // (rows * columns * heads))
        for start in range(0, len(strips), at_once):
            calls.append(_make_call(array, strips[start : start + at_once]))
    return tuple(calls)


def _strips(cells: np.ndarray) -> Iterator[Strip]:
    for entry, head in np.ndindex(*cells.shape[:2]):
        of = (entry if cells.shape[0] > 1 else None, head if cells.shape[1] > 1 else None)
        last: Strip | None = None
        for row, of_row in enumerate(cells[entry, head]):
            columns = tuple(np.flatnonzero(of_row).tolist())
            is_full = not (of_row == Cell.PARTIAL).any()
            first = row
            if last and (last.columns, last.is_full) == (columns, is_full):
                num_pairs = (row + 1 - last.rows[0]) * len(columns) * BLOCK**2
                if is_full or num_pairs <= MAX_BIAS:
                    first, last = last.rows[0], None
            if last:
                yield last
            last = Strip(*of, (first, row + 1), columns, is_full) if columns else None
        if last:
            yield last


def _make_call(cells: np.ndarray, strips: Sequence[Strip]) -> Call:
    blocks = [
        ((strip.entry or 0, strip.head or 0, row, column), (number, row - strip.rows[0], place))
        for number, strip in enumerate(strips)
        if not strip.is_full
        for row in range(*strip.rows)
        for place, column in enumerate(strip.columns)
        if cells[strip.entry or 0, strip.head or 0, row, column] == Cell.PARTIAL
    ]
    of_blocks = torch.tensor([block for block, _ in blocks], dtype=torch.int64).view(-1, 4)
    places = torch.tensor([place for _, place in blocks], dtype=torch.int64).view(-1, 3)
    return Call(tuple(strips), of_blocks, places.T.contiguous())


# --- The tile ---------------------------------------------------------------------------------


class _Work:
    """A tile, its calls, and what they read and write."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        cells: Tensor | None,
        tables: Sequence[Tensor],
        rule: str,
        geometry: Sequence[int],
    ) -> None:
        self.rule, batch = Rule.parse(rule), query.shape[0]
        self.num_groups = query.shape[1] // key.shape[1]
        self.indices = Indices(
            Geometry.decode(geometry), tables, batch=batch, dtype=query.dtype, device=query.device
        )
        if cells is None:
            of_batch = batch if BATCH in self.rule.allowed.free_symbols else 1
            cells = _cells_without_tables(rule, tuple(geometry), of_batch, query.dtype)
        self.has_heads = cells.shape[1] > 1
        entries = batch if BATCH in self.rule.bias.free_symbols else None
        lengths = (query.shape[2], key.shape[2], query.shape[1])
        self.num_queries, self.num_keys, _ = lengths
        self.calls = arrange_calls(cells, *lengths, entries)
        dtype = query.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.bias_dtype = wide if self.rule.is_wide else dtype

    def tile_call(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float
    ) -> TileCall:
        """Return what a call attends to."""
        return TileCall(
            self.of_queries(query, call),
            self.of_keys(key, call),
            self.of_keys(value, call),
            scale=scale,
            bias=self.bias(call),
        )

    def of_queries(self, tensor: Tensor, call: Call) -> Tensor:
        """(B, H, S, ...) -> (strips' entries, H | 1, s, ...)."""
        parts = [
            self._of(tensor, strip)[:, :, strip.queries(self.num_queries)] for strip in call.strips
        ]
        return _concatenated(parts, 0)

    def of_keys(self, tensor: Tensor, call: Call) -> Tensor:
        """(B, G, T, D) -> (strips' entries, G | 1, t, D)."""
        parts = [
            _concatenated([of[:, :, run] for run in strip.keys(self.num_keys)], 2)
            for strip in call.strips
            for of in [self._of(tensor, strip, of_keys=True)]
        ]
        return _concatenated(parts, 0)

    def put(self, whole: Tensor, part: Tensor, call: Call) -> None:
        """Write what a call computed of its queries."""
        for strip, of_strip in zip(call.strips, part.chunk(len(call.strips)), strict=True):
            self._of(whole, strip)[:, :, strip.queries(self.num_queries)] = of_strip

    def add(self, whole: Tensor, part: Tensor, call: Call) -> None:
        """Add what a call computed of its keys."""
        for strip, of_strip in zip(call.strips, part.chunk(len(call.strips)), strict=True):
            target, start = self._of(whole, strip, of_keys=True), 0
            for run in strip.keys(self.num_keys):
                length = run.stop - run.start
                target[:, :, run] += of_strip[:, :, start : start + length]
                start += length

    def _of(self, tensor: Tensor, strip: Strip, *, of_keys: bool = False) -> Tensor:
        """Return the batch entries and heads of a strip."""
        if strip.entry is not None:
            tensor = tensor[strip.entry : strip.entry + 1]
        if strip.head is not None:
            head = strip.head // self.num_groups if of_keys else strip.head
            tensor = tensor[:, head : head + 1]
        return tensor

    def bias(self, call: Call) -> Tensor | None:
        """Return what is added to the scores of a call, (strips' entries | 1, H | 1, s, t)."""
        first = call.strips[0]
        num_hidden = first.num_hidden(self.num_keys)
        if first.is_full and not num_hidden:
            return None
        blocks = self._bias_of_blocks(call)
        num_rows, num_columns = first.rows[1] - first.rows[0], len(first.columns)
        bias = blocks.new_zeros(
            (len(call.strips), num_rows, num_columns, blocks.shape[1], BLOCK, BLOCK)
        )
        bias[tuple(call.places)] = blocks
        bias = bias.permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3, 4)
        queries = first.queries(self.num_queries)
        num_keys = sum(run.stop - run.start for run in first.keys(self.num_keys)) - num_hidden
        bias = bias[:, :, : queries.stop - queries.start, :num_keys]
        if num_hidden:
            bias = torch.nn.functional.pad(bias, (num_hidden, 0), value=-float("inf"))
        batch = self.indices.batch
        if first.entry is None and isinstance(batch, int) and batch > 1 and len(bias) > 1:
            bias = bias.repeat_interleave(batch, 0)
        return bias

    def _bias_of_blocks(self, call: Call) -> Tensor:
        """Return what is added to the scores of PARTIAL blocks, (n, H | 1, 128, 128)."""
        rule, indices, number = self.rule, self.indices, len(call.of_blocks)
        place = _Blocks(indices.geometry, call.of_blocks, has_heads=self.has_heads)
        value = torch.zeros((), dtype=self.bias_dtype)
        if not number:
            return value.view(1, 1, 1, 1).expand(0, 1, BLOCK, BLOCK)
        if rule.bias:
            value = indices.as_tensor(indices.evaluate(rule.bias, place)).to(self.bias_dtype)
        value = torch.where(indices.evaluate(rule.allowed, place), value, -float("inf"))
        return value.expand(number, value.shape[1], BLOCK, BLOCK)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _empty_partial(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a tile writes to, as aten's kernel lays it out: heads next to each other."""
    b, h, s, d = query.shape
    out = query.new_empty((b, s, h, d)).transpose(1, 2)
    return out, query.new_empty((b, h, s), dtype=accumulation_dtype(query))


def _empty_grads(query: Tensor, key: Tensor) -> Gradients:
    b, h, s, d = query.shape
    g, t = key.shape[1:3]
    wide = accumulation_dtype(key)
    dk, dv = (key.new_empty((b, t, g, d), dtype=wide).transpose(1, 2) for _ in range(2))
    return query.new_empty((b, s, h, d)).transpose(1, 2), dk, dv


@torch.library.custom_op("cp_inductor::masked_tile", mutates_args=())
def masked_tile(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cells: Tensor | None,
    tables: list[Tensor],
    rule: str,
    geometry: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of a tile under a rule.

    Args:
        query: (B, H, S, D), any strides.
        key, value: (B, G, T, D), any strides.
        cells: from `block_table`; None if the rule reads no tables.
        tables: what the rule reads.
        rule: its text.
        geometry: of the tile, encoded.
        scale: of the scores, positive.

    Returns:
        out (B, H, S, D) in the dtype of query; lse (B, H, S). Of rows that see nothing, out is 0
        and lse -inf.
    """
    work = _Work(query, key, cells, tables, rule, geometry)
    out, lse = _empty_partial(query)
    out.zero_()
    lse.fill_(-float("inf"))
    for call in work.calls:
        partial = FlashCPU().forward(work.tile_call(query, key, value, call, scale))
        work.put(out, partial.out, call)
        work.put(lse, partial.lse, call)
        counters["cp_inductor"]["blocks_computed"] += call.num_blocks
    return out, lse


@masked_tile.register_fake
def _(query: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return _empty_partial(query)


@torch.library.custom_op("cp_inductor::masked_tile_backward", mutates_args=())
def masked_tile_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cells: Tensor | None,
    tables: list[Tensor],
    rule: str,
    geometry: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `masked_tile`, given out and lse of the tile or of whole rows.

    Returns:
        dq (B, H, S, D) in the dtype of query; dk and dv (B, G, T, D), sums over queries, in float32
        (float64 for float64). They are not rounded before they are added to those of other tiles.
    """
    work = _Work(query, key, cells, tables, rule, geometry)
    dq, dk, dv = _empty_grads(query, key)
    for grad in (dq, dk, dv):
        grad.zero_()
    for call in work.calls:
        of_rows = [work.of_queries(t, call) for t in (grad_out, out, lse)]
        of_call = FlashCPU().backward(
            work.tile_call(query, key, value, call, scale), of_rows[0], Partial(*of_rows[1:])
        )
        work.put(dq, of_call[0], call)
        work.add(dk, of_call[1], call)
        work.add(dv, of_call[2], call)
    return dq, dk, dv


@masked_tile_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, *args: object) -> Gradients:
    return _empty_grads(query, key)


class MaskedCPU(Kernel):
    """Flash attention on the CPU over the blocks of a tile that hold pairs.

    Args:
        masks: of the rank.
        tile: of the plan.
    """

    def __init__(self, masks: TileMasks, tile: Tile) -> None:
        rule, tables = masks.rule, list(masks.extras.tables)
        geometry = masks.geometry(tile).encode()
        cells = None
        if rule.tables:
            batch = masks.like.shape[0] if BATCH in rule.allowed.free_symbols else 1
            cells = torch.ops.cp_inductor.block_table(
                tables, rule.format(), geometry, batch, masks.like.dtype
            )
        self.how = (cells, tables, rule.format(), geometry)

    def forward(self, call: TileCall) -> Partial:
        """See `Kernel.forward`; the call has no bias: it is the rule's."""
        return Partial(*torch.ops.cp_inductor.masked_tile(*call.tensors, *self.how, call.factor))

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """See `Kernel.backward`; gradients of key and value are in float32."""
        grads: Gradients = torch.ops.cp_inductor.masked_tile_backward(
            grad_out, *call.tensors, *whole, *self.how, call.factor
        )
        return grads
