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

Assumes: see `cp_inductor.tiles.aten_kernels.FlashCPU`, which computes the calls; a positive scale.

Shapes: B batch, H query heads, G key-value heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import BATCH, SCORE
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.tiles.aten_kernels import FlashCPU
from cp_inductor.tiles.block_tables import BLOCK, make_block_table, shape_of_block_table
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.kernels import (
    Gradients,
    Partial,
    RuleKernel,
    TileCall,
    empty_like_rows,
    hide_blind_rows,
)
from cp_inductor.tiles.tile_masks import Geometry, Indices, Place, bias_dtype, make_bias

# Pairs, of all heads, of the strips that one call computes. More make a call no faster, but its
# copies of keys larger.
MAX_PAIRS = 1 << 23

# Queries times keys of a strip with a bias.
MAX_BIAS = 1 << 22

# Blocks in which the rule is evaluated at once.
MAX_BLOCKS = 128

# If there are fewer keys, the kernel loses NaN: see `FlashCPU`.
MIN_KEYS = 16


# --- The table --------------------------------------------------------------------------------


@torch.library.custom_op("cp_inductor::block_table", mutates_args=())
def block_table(
    tables: list[Tensor],
    rule: str,
    geometry: list[int],
    batch: int,
    dtype: torch.dtype,
    is_computed: Tensor | None = None,
) -> Tensor:
    """Return which blocks of a tile hold pairs: what `make_block_table` says, to the pair.

    It takes the text of the rule, at least one table, the geometry encoded, and one batch entry if
    what exists does not depend on them.
    """
    indices = Indices(Geometry.decode(geometry), tables, batch, dtype, tables[0].device)
    return _find_cells(Rule.parse(rule), indices, is_computed)


@block_table.register_fake
def _(tables: list[Tensor], rule: str, geometry: list[int], batch: int, *_: object) -> Tensor:
    shape = shape_of_block_table(Rule.parse(rule), Geometry.decode(geometry), batch)
    return tables[0].new_empty(shape, dtype=torch.int8)


def _find_cells(rule: Rule, indices: Indices, is_computed: Tensor | None = None) -> Tensor:
    """Return the block table, and evaluate the rule in blocks that interval arithmetic leaves."""
    cells = make_block_table(rule, indices, is_computed).contiguous()
    of_blocks = (cells == Cell.PARTIAL).nonzero()
    for some in of_blocks.split(MAX_BLOCKS):
        place = _at_blocks(indices.geometry, some, has_heads=cells.shape[1] > 1)
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
    indices = Indices(Geometry.decode(geometry), (), batch, dtype, torch.device("cpu"))
    return _find_cells(Rule.parse(rule), indices)


def _at_blocks(geometry: Geometry, of_blocks: Tensor, *, has_heads: bool) -> Place:
    """Return what takes (B | 1, H | 1, S | 1, T | 1) to blocks of it, (n, H | 1, 128, 128).

    Of each block there is its batch entry, head, row and column, (n, 4). If it `has_heads`, a block
    is of one head, and not of all.
    """
    entry, head, row, column = (index.view(-1, 1, 1, 1) for index in of_blocks.unbind(1))
    inside, nowhere = torch.arange(BLOCK), torch.zeros(1, 1, 1, 1).long()
    # The last block repeats its last token, of which its kind is that of the others.
    rows = (row * BLOCK + inside.view(1, 1, BLOCK, 1)).clamp(max=geometry.num_queries - 1)
    columns = (column * BLOCK + inside).clamp(max=geometry.num_keys - 1)
    all_heads = torch.arange(geometry.heads[1] - geometry.heads[0]).view(1, -1, 1, 1)
    places = entry, head if has_heads else all_heads, rows, columns

    def take(tensor: Tensor) -> Tensor:
        sizes = zip(tensor.shape, places, strict=True)
        return tensor[tuple(nowhere if size == 1 else place for size, place in sizes)]

    return take


# --- Strips -----------------------------------------------------------------------------------


class Strip(NamedTuple):
    """Neighbouring rows of blocks that see the same blocks of keys.

    Attributes:
        entry, head: of the batch, and of the tile's; 0 if it is of all of them.
        rows, columns: blocks of queries, and of keys, in order.
        is_full: all of the blocks are FULL.
    """

    entry: int
    head: int
    rows: range
    columns: tuple[int, ...]
    is_full: bool


@dataclass(frozen=True, slots=True)
class Call:
    """Strips of one shape.

    Attributes:
        queries, keys: their tokens, one strip behind the other: a range, or where they are in
            tokens of all batch entries, and heads, that strips tell apart.
        num_queries, num_keys: of a strip.
        num_hidden: how many of these keys are not of its blocks.
        of_blocks: (n, 4), entry, head, row and column of each PARTIAL block.
        numbers: (strips, rows, columns) of blocks: the number among these, n if it is FULL.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    num_queries: int
    num_keys: int
    num_hidden: int
    of_blocks: Tensor
    numbers: Tensor


@lru_cache(maxsize=64)
def _arrange(
    of_cells: bytes,
    shape: tuple[int, ...],
    num_entries: int,
    lengths: tuple[int, int],
    num_heads: tuple[int, int],
) -> tuple[Call, ...]:
    """Put the blocks of a tile that hold pairs into calls of flash attention.

    Args:
        of_cells, shape: exact cells, (B | 1, H | 1, ceil(S / 128), ceil(T / 128)).
        num_entries: so many batch entries are computed by themselves, be the cells of all or not.
        lengths, num_heads: S and T, H and G.
    """
    cells = np.frombuffer(of_cells, dtype=np.int8).reshape(shape)
    cells = np.broadcast_to(cells, (num_entries, *shape[1:]))
    has_heads = shape[1] > 1

    def join(strips: Sequence[tuple[Any, ...]], side: int) -> slice | Tensor:
        """Return which tokens of queries or keys strips hold: see `Call`."""
        parts = []
        for strip, *tokens in strips:
            part = tokens[side] + strip.entry * lengths[side]
            if has_heads:
                part = part * num_heads[side] + strip.head * num_heads[side] // num_heads[0]
            parts.append(part)
        together = np.concatenate(parts)
        if (np.diff(together) == 1).all():
            return slice(int(together[0]), int(together[-1]) + 1)
        return torch.from_numpy(together)

    by_shape = defaultdict[tuple[int, ...], list[tuple[Any, ...]]](list)
    for strip in _strips(cells):
        queries, keys = map(_tokens_of, (strip.rows, strip.columns), lengths)
        if lengths[1] - keys[0] < MIN_KEYS <= lengths[1]:
            # The last block is too short for the kernel: some keys before it are hidden.
            keys = np.arange(lengths[1] - MIN_KEYS, lengths[1])
        num_hidden = strip.columns[0] * BLOCK - int(keys[0])
        alike = len(queries), len(keys), strip.is_full, num_hidden
        by_shape[alike].append((strip, queries, keys))
    calls = []
    for (rows, columns, _, num_hidden), strips in sorted(by_shape.items()):
        at_once = max(1, MAX_PAIRS // (rows * columns * (1 if has_heads else num_heads[0])))
        for start in range(0, len(strips), at_once):
            some = strips[start : start + at_once]
            blocks = [
                (strip.entry, strip.head, *block)
                for strip, *_ in some
                for block in product(strip.rows, strip.columns)
            ]
            places = np.array(blocks)
            is_partial = cells[tuple(places.T)] == Cell.PARTIAL
            numbers = np.where(is_partial, np.cumsum(is_partial) - 1, is_partial.sum())
            numbers = numbers.reshape(len(some), -1, len(some[0][0].columns))
            of_blocks = torch.from_numpy(places[is_partial]), torch.from_numpy(numbers)
            tokens = join(some, 0), join(some, 1)
            calls.append(Call(*tokens, rows, columns, num_hidden, *of_blocks))
    return tuple(calls)


def _strips(cells: np.ndarray) -> Iterator[Strip]:
    for entry, head in np.ndindex(*cells.shape[:2]):
        seen = [
            (tuple(np.flatnonzero(of_row).tolist()), not (of_row == Cell.PARTIAL).any())
            for of_row in cells[entry, head]
        ]
        for (columns, is_full), alike in groupby(range(len(seen)), seen.__getitem__):
            if not columns:
                continue
            rows = list(alike)
            at_once = len(rows) if is_full else max(1, MAX_BIAS // (len(columns) * BLOCK**2))
            for start in range(rows[0], rows[-1] + 1, at_once):
                stop = min(start + at_once, rows[-1] + 1)
                yield Strip(entry, head, range(start, stop), columns, is_full)


def _tokens_of(blocks: Sequence[int], length: int) -> np.ndarray:
    """Return the tokens of blocks, of so many in all."""
    tokens = np.add.outer(np.array(blocks) * BLOCK, np.arange(BLOCK)).ravel()
    return tokens[tokens < length]


# --- The tile ---------------------------------------------------------------------------------


class _Work:
    """A tile, its calls, and what they read and write.

    Tensors of tokens are (entries, tokens, heads, ...): of all batch entries if strips are of all
    of them; else the tokens of all entries follow each other, and so do the heads of each token if
    strips are of one head.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        cells: Tensor | None,
        tables: Sequence[Tensor],
        rule: str,
        geometry: Sequence[int],
    ) -> None:
        self.rule, self.batch = Rule.parse(rule), query.shape[0]
        decoded = Geometry.decode(geometry)
        self.indices = Indices(decoded, tables, self.batch, query.dtype, query.device)
        if cells is None:
            of_batch = self.batch if BATCH in self.rule.allowed.free_symbols else 1
            cells = _cells_without_tables(rule, tuple(geometry), of_batch, query.dtype)
        self.has_heads = cells.shape[1] > 1
        is_by_entry = self.has_heads or BATCH in self.rule.bias.free_symbols
        self.has_entries = is_by_entry or cells.shape[0] > 1
        self.calls: tuple[Call, ...] = ()
        if self.batch:
            entries = self.batch if is_by_entry else cells.shape[0]
            sides = (query.shape[2], key.shape[2]), (query.shape[1], key.shape[1])
            of_cells = cells.numpy().tobytes(), tuple(cells.shape)
            self.calls = _arrange(*of_cells, entries, *sides)

    def tokens_of(self, tensor: Tensor) -> Tensor:
        """(B, H, S, ...) -> (entries, tokens, heads, ...); a copy if strides make it one."""
        tokens = tensor.transpose(1, 2)
        if self.has_heads:
            return tokens.flatten(0, 2)[None, :, None]
        return tokens.flatten(0, 1)[None] if self.has_entries else tokens

    def read(self, tokens: Tensor, which: slice | Tensor, call: Call) -> Tensor:
        """Return what a call reads, (entries x strips, heads, tokens, ...)."""
        part = tokens[:, which] if isinstance(which, slice) else tokens.index_select(1, which)
        return part.unflatten(1, (len(call.numbers), -1)).flatten(0, 1).transpose(1, 2)

    def write(self, tokens: Tensor, part: Tensor, call: Call) -> None:
        """Write what a call computed of its queries."""
        part = _in_order(part, tokens)
        if isinstance(call.queries, slice):
            tokens[:, call.queries] = part
        else:
            tokens.index_copy_(1, call.queries, part)

    def add(self, tokens: Tensor, part: Tensor, call: Call) -> None:
        """Add what a call computed of its keys."""
        part = _in_order(part, tokens)
        if isinstance(call.keys, slice):
            tokens[:, call.keys] += part
        else:
            tokens.index_add_(1, call.keys, part.to(tokens.dtype))

    def with_biases(self) -> Iterator[tuple[Call, Tensor | None]]:
        """Yield calls, and what is added to their scores.

        The rule is evaluated once for several calls: what takes little time takes longer to start
        on several threads.
        """
        some: list[Call] = []
        for call in self.calls:
            if sum(len(one.of_blocks) for one in (*some, call)) > MAX_BLOCKS and some:
                yield from self._biases(some)
                some = []
            some.append(call)
        if some:
            yield from self._biases(some)

    def _biases(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Tensor | None]]:
        of_blocks = torch.cat([call.of_blocks for call in calls])
        blocks, start = self._bias_of_blocks(of_blocks), 0
        for call in calls:
            number = len(call.of_blocks)
            if not number and not call.num_hidden:
                yield call, None
                continue
            where = torch.where(call.numbers == number, len(of_blocks), call.numbers + start)
            start += number
            yield call, self._bias_of_call(blocks, where, call)

    def _bias_of_call(self, blocks: Tensor, where: Tensor, call: Call) -> Tensor:
        """Return what is added, (entries x strips | 1, H | 1, s, t), from blocks' rows."""
        num_heads = blocks.shape[1]
        heads = torch.arange(num_heads).view(1, -1, 1, 1, 1)
        rows = (where[:, None, :, None] * num_heads + heads) * BLOCK
        rows = rows + torch.arange(BLOCK).view(1, 1, 1, -1, 1)
        bias = blocks.view(-1, BLOCK).index_select(0, rows.flatten())
        bias = bias.view(len(where), num_heads, rows.shape[2] * BLOCK, -1)
        bias = bias[:, :, : call.num_queries, : call.num_keys - call.num_hidden]
        if call.num_hidden:
            bias = torch.nn.functional.pad(bias, (call.num_hidden, 0), value=-float("inf"))
        # Of all batch entries, if strips do not tell them apart.
        is_of_all = not self.has_entries and len(bias) > 1
        return bias.repeat(self.batch, 1, 1, 1) if is_of_all else bias

    def _bias_of_blocks(self, of_blocks: Tensor) -> Tensor:
        """Return what is added to the scores of blocks, (n + 1, H | 1, 128, 128).

        The last is 0, for all blocks that are FULL.
        """
        indices, number = self.indices, len(of_blocks)
        if not number:
            return torch.zeros((1, 1, BLOCK, BLOCK), dtype=bias_dtype(self.rule, indices.dtype))
        place = _at_blocks(indices.geometry, of_blocks, has_heads=self.has_heads)
        value = make_bias(self.rule, indices, place)
        blocks = value.new_zeros((number + 1, value.shape[1], BLOCK, BLOCK))
        blocks[:number] = value
        return blocks


def _in_order(part: Tensor, tokens: Tensor) -> Tensor:
    """(entries x strips, heads, tokens, ...) -> (entries, strips' tokens, heads, ...)."""
    return part.transpose(1, 2).unflatten(0, (len(tokens), -1)).flatten(1, 2)


def _empty_partial(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a tile writes to, as aten's kernel lays it out."""
    return empty_like_rows(query), empty_like_rows(query[..., 0], accumulation_dtype(query))


def _empty_grads(query: Tensor, key: Tensor) -> Gradients:
    dk, dv = (empty_like_rows(key, accumulation_dtype(key)) for _ in range(2))
    return empty_like_rows(query), dk, dv


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
        query, key, value: (B, H, S, D), (B, G, T, D) and (B, G, T, D), any strides.
        cells: from `block_table`; None if the rule reads no tables.
        tables, rule, geometry: as there.
        scale: of the scores, positive.

    Returns:
        out (B, H, S, D) in the dtype of query; lse (B, H, S). Of rows that see nothing, out is 0
        and lse -inf.
    """
    work = _Work(query, key, cells, tables, rule, geometry)
    out, lse = _empty_partial(query)
    whole_out, whole_lse = work.tokens_of(out.zero_()), work.tokens_of(lse.fill_(-float("inf")))
    of_tile = [work.tokens_of(tensor) for tensor in (query, key, value)]
    for call, bias in work.with_biases():
        which = (call.queries, call.keys, call.keys)
        q, k, v = (work.read(t, w, call) for t, w in zip(of_tile, which, strict=True))
        of_call = FlashCPU().forward(TileCall(q, k, v, False, scale, bias))
        work.write(whole_out, of_call.out, call)
        work.write(whole_lse, of_call.lse, call)
        counters["cp_inductor"]["blocks_computed"] += call.numbers.numel()
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
    dq, dk, dv = grads = _empty_grads(query, key)
    wholes = [work.tokens_of(grad.zero_()) for grad in grads]
    of_tile = [work.tokens_of(t) for t in (query, key, value, grad_out, out, hide_blind_rows(lse))]
    for call, bias in work.with_biases():
        which = (call.queries, call.keys, call.keys, *[call.queries] * 3)
        q, k, v, grad, *whole = (work.read(t, w, call) for t, w in zip(of_tile, which, strict=True))
        tile_call = TileCall(q, k, v, False, scale, bias)
        of_call = FlashCPU().backward(tile_call, grad, Partial(*whole))
        work.write(wholes[0], of_call[0], call)
        work.add(wholes[1], of_call[1], call)
        work.add(wholes[2], of_call[2], call)
    return dq, dk, dv


@masked_tile_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, *args: object) -> Gradients:
    return _empty_grads(query, key)


class MaskedCPU(RuleKernel):
    """Flash attention on the CPU over the blocks of a tile that hold pairs; it has no templates."""

    forward_op = torch.ops.cp_inductor.masked_tile.default
    backward_op = torch.ops.cp_inductor.masked_tile_backward.default
    device, name = "cpu", "flash by blocks"

    def __init__(
        self, rule: Rule, indices: Indices, options: str = "", is_computed: Tensor | None = None
    ) -> None:
        text, tables, geometry = rule.format(), list(indices.tables), indices.geometry.encode()
        cells = None
        assert rule.tables or is_computed is None, "only the batch leaves blocks out"
        if rule.tables:
            batch = indices.batch if BATCH in rule.allowed.free_symbols else 1
            cells = torch.ops.cp_inductor.block_table(
                tables, text, geometry, batch, indices.dtype, is_computed
            )
        self.how = (cells, tables, text, geometry)

    @classmethod
    def obstacle(cls, rule: Rule, head_dim: object) -> str | None:
        """See `RuleKernel.obstacle`."""
        return None if rule.score == SCORE else "a score_mod that computes with scores, on the CPU"

    def _attend(self, call: TileCall) -> Partial:
        return Partial(*torch.ops.cp_inductor.masked_tile(*call.tensors, *self.how, call.factor))

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        grads: Gradients = torch.ops.cp_inductor.masked_tile_backward(
            grad_out, *call.tensors, *whole, *self.how, call.factor
        )
        return grads
