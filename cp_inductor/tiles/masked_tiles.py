"""A tile under a mask on the CPU, which computes the blocks that hold pairs, and no others.

    cells = block_table(tables, rule, geometry, ...)   EMPTY, FULL or PARTIAL, of 128 x 128 scores
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

Which blocks there are is known when the program runs, to the pair: see `block_table`.

Assumes: see `cp_inductor.tiles.aten_kernels.FlashCPU`, which computes the calls; a positive scale.

Shapes: B batch, H query heads, G key-value heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import BATCH, SCORE
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.tiles.aten_kernels import FlashCPU
from cp_inductor.tiles.block_tables import (
    BLOCK,
    MAX_BLOCKS,
    at_blocks,
    block_table,
    cells_without_tables,
)
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.kernels import (
    Gradients,
    Partial,
    RuleKernel,
    TileCall,
    empty_like_rows,
    hide_blind_rows,
)
from cp_inductor.tiles.tile_masks import Geometry, Indices, bias_dtype, make_bias

# Pairs, of all heads, of the strips that one call computes. More make a call no faster, but its
# copies of keys larger.
MAX_PAIRS = 1 << 23

# Queries times keys of a strip with a bias.
MAX_BIAS = 1 << 22

# If there are fewer keys, the kernel loses NaN: see `FlashCPU`.
MIN_KEYS = 16


# --- Strips -----------------------------------------------------------------------------------


class Strip(NamedTuple):
    """Neighbouring rows of blocks that see the same blocks of keys.

    Attributes:
        blocks: (rows, columns, 4), entry of the batch, head of the tile, row and column of each;
            entry or head is 0 if they are of all of them.
        is_full: all of the blocks are FULL.
        queries, keys: their tokens.
    """

    blocks: np.ndarray
    is_full: bool
    queries: np.ndarray
    keys: np.ndarray

    @property
    def num_hidden(self) -> int:
        """How many of its keys are before its blocks."""
        return int(self.blocks[0, 0, 3] * BLOCK - self.keys[0])


@dataclass(frozen=True, slots=True)
class Call:
    """Strips of one shape.

    Attributes:
        queries, keys: their tokens, one strip behind the other: a range, or where they are in
            tokens of all batch entries, and heads, that strips tell apart.
        num_queries, num_keys, num_hidden: of a strip.
        has_bias: some of these are not to be seen.
        numbers: (strips, rows, columns) of blocks: 0 if FULL, else the number of its bias.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    num_queries: int
    num_keys: int
    num_hidden: int
    has_bias: bool
    numbers: Tensor


# Calls whose biases are made at once, and (n, 4): entry, head, row and column of the PARTIAL blocks
# that have the numbers 1 to n. What takes little time takes longer to start on several threads.
Group = tuple[Tensor, tuple[Call, ...]]


@lru_cache(maxsize=64)
def _arrange(
    of_cells: bytes,
    shape: tuple[int, ...],
    num_entries: int,
    lengths: tuple[int, int],
    num_heads: tuple[int, int],
) -> tuple[Group, ...]:
    """Put the blocks of a tile that hold pairs into calls of flash attention.

    Args:
        of_cells, shape: exact cells, (B | 1, H | 1, ceil(S / 128), ceil(T / 128)).
        num_entries: so many batch entries are computed by themselves, be the cells of all or not.
        lengths, num_heads: S and T, H and G.
    """
    cells = np.frombuffer(of_cells, dtype=np.int8).reshape(shape)
    cells = np.broadcast_to(cells, (num_entries, *shape[1:]))
    has_heads = shape[1] > 1

    def join(strips: Sequence[Strip], side: int) -> slice | Tensor:
        """Return which tokens of queries or keys strips hold: see `Call`."""
        parts = []
        for strip in strips:
            entry, head, _, _ = strip.blocks[0, 0]
            part = (strip.queries, strip.keys)[side] + entry * lengths[side]
            if has_heads:
                part = part * num_heads[side] + head * num_heads[side] // num_heads[0]
            parts.append(part)
        together = np.concatenate(parts)
        if (np.diff(together) == 1).all():
            return slice(int(together[0]), int(together[-1]) + 1)
        return torch.from_numpy(together)

    by_shape = defaultdict[tuple[int, ...], list[Strip]](list)
    for strip in _strips(cells, lengths):
        alike = len(strip.queries), len(strip.keys), strip.is_full, strip.num_hidden
        by_shape[alike].append(strip)
    groups: list[tuple[list[np.ndarray], list[Call]]] = []
    for (rows, columns, is_full, num_hidden), strips in sorted(by_shape.items()):
        at_once = max(1, MAX_PAIRS // (rows * columns * (1 if has_heads else num_heads[0])))
        for start in range(0, len(strips), at_once):
            some = strips[start : start + at_once]
            places = np.stack([strip.blocks for strip in some])
            is_partial = cells[tuple(np.moveaxis(places, -1, 0))] == Cell.PARTIAL
            if not groups or sum(map(len, groups[-1][0])) + is_partial.sum() > MAX_BLOCKS:
                groups.append(([], []))
            blocks, calls = groups[-1]
            counted = np.cumsum(is_partial).reshape(is_partial.shape)
            numbers = np.where(is_partial, sum(map(len, blocks)) + counted, 0)
            blocks.append(places[is_partial])
            has_bias, of_strips = not is_full or num_hidden > 0, torch.from_numpy(numbers)
            tokens = join(some, 0), join(some, 1)
            calls.append(Call(*tokens, rows, columns, num_hidden, has_bias, of_strips))
    return tuple((torch.from_numpy(np.concatenate(b)), tuple(calls)) for b, calls in groups)


def _strips(cells: np.ndarray, lengths: tuple[int, int]) -> Iterator[Strip]:
    num_keys = lengths[1]
    for entry, head in np.ndindex(*cells.shape[:2]):
        seen = [
            (tuple(np.flatnonzero(of_row).tolist()), not (of_row == Cell.PARTIAL).any())
            for of_row in cells[entry, head]
        ]
        for (columns, is_full), alike in groupby(range(len(seen)), seen.__getitem__):
            if not columns:
                continue
            keys = _tokens_of(columns, num_keys)
            if num_keys - keys[0] < MIN_KEYS <= num_keys:
                # The last block is too short for the kernel: some keys before it are hidden.
                keys = np.arange(num_keys - MIN_KEYS, num_keys)
            rows = list(alike)
            at_once = len(rows) if is_full else max(1, MAX_BIAS // (len(columns) * BLOCK**2))
            for start in range(rows[0], rows[-1] + 1, at_once):
                some = range(start, min(start + at_once, rows[-1] + 1))
                blocks = np.array([[(entry, head, row, col) for col in columns] for row in some])
                yield Strip(blocks, is_full, _tokens_of(some, lengths[0]), keys)


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
            cells = cells_without_tables(rule, tuple(geometry), self.batch, query.dtype)
        self.has_heads = cells.shape[1] > 1
        is_by_entry = self.has_heads or BATCH in self.rule.bias.free_symbols
        self.has_entries = is_by_entry or cells.shape[0] > 1
        self.groups: tuple[Group, ...] = ()
        if self.batch:
            entries = self.batch if is_by_entry else cells.shape[0]
            sides = (query.shape[2], key.shape[2]), (query.shape[1], key.shape[1])
            of_cells = cells.numpy().tobytes(), tuple(cells.shape)
            self.groups = _arrange(*of_cells, entries, *sides)

    def tokens_of(self, *tensors: Tensor) -> list[Tensor]:
        """(B, H, S, ...) -> (entries, tokens, heads, ...); copies if strides make it them."""
        tokens = [tensor.transpose(1, 2) for tensor in tensors]
        if self.has_heads:
            return [of.flatten(0, 2)[None, :, None] for of in tokens]
        return [of.flatten(0, 1)[None] for of in tokens] if self.has_entries else tokens

    def read(self, call: Call, which: slice | Tensor, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Return what a call reads, (entries x strips, heads, tokens, ...)."""
        if isinstance(which, slice):
            parts = [of[:, which] for of in tokens]
        else:
            parts = [of.index_select(1, which) for of in tokens]
        sizes = len(call.numbers), -1
        return [part.unflatten(1, sizes).flatten(0, 1).transpose(1, 2) for part in parts]

    def write(
        self, tokens: Tensor, which: slice | Tensor, part: Tensor, *, is_sum: bool = False
    ) -> None:
        """Write what a call computed of its queries, or add what it computed of its keys."""
        # (entries x strips, heads, tokens, ...) -> (entries, strips' tokens, heads, ...).
        part = part.transpose(1, 2).unflatten(0, (len(tokens), -1)).flatten(1, 2)
        if isinstance(which, slice):
            place = tokens[:, which]
            place.add_(part) if is_sum else place.copy_(part)
        elif is_sum:
            tokens.index_add_(1, which, part.to(tokens.dtype))
        else:
            tokens.index_copy_(1, which, part)

    def with_biases(self) -> Iterator[tuple[Call, Tensor | None]]:
        """Yield calls, and what is added to their scores."""
        for of_blocks, calls in self.groups:
            blocks = self._bias_of_blocks(of_blocks)
            for call in calls:
                yield call, self._bias_of_call(blocks, call) if call.has_bias else None

    def _bias_of_blocks(self, of_blocks: Tensor) -> Tensor:
        """Return what is added to the scores of blocks, (n + 1, H | 1, 128, 128).

        The first is 0, for all blocks that are FULL.
        """
        indices = self.indices
        if not len(of_blocks):
            return torch.zeros((1, 1, BLOCK, BLOCK), dtype=bias_dtype(self.rule, indices.dtype))
        place = at_blocks(indices.geometry, of_blocks, has_heads=self.has_heads)
        value = make_bias(self.rule, indices, place)
        blocks = value.new_zeros((len(of_blocks) + 1, value.shape[1], BLOCK, BLOCK))
        blocks[1:] = value
        return blocks

    def _bias_of_call(self, blocks: Tensor, call: Call) -> Tensor:
        """Return what is added, (entries x strips | 1, H | 1, s, t), from blocks' rows."""
        num_heads = blocks.shape[1]
        heads = torch.arange(num_heads).view(1, -1, 1, 1, 1)
        rows = (call.numbers[:, None, :, None] * num_heads + heads) * BLOCK
        rows = rows + torch.arange(BLOCK).view(1, 1, 1, -1, 1)
        bias = blocks.view(-1, BLOCK).index_select(0, rows.flatten())
        bias = bias.view(len(call.numbers), num_heads, rows.shape[2] * BLOCK, -1)
        bias = bias[:, :, : call.num_queries, : call.num_keys - call.num_hidden]
        if call.num_hidden:
            bias = torch.nn.functional.pad(bias, (call.num_hidden, 0), value=-float("inf"))
        # Of all batch entries, if strips do not tell them apart.
        is_of_all = not self.has_entries and len(bias) > 1
        return bias.repeat(self.batch, 1, 1, 1) if is_of_all else bias


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
    results = work.tokens_of(out.zero_(), lse.fill_(-float("inf")))
    of_queries, of_keys = work.tokens_of(query), work.tokens_of(key, value)
    for call, bias in work.with_biases():
        (q,) = work.read(call, call.queries, of_queries)
        k, v = work.read(call, call.keys, of_keys)
        of_call = FlashCPU().forward(TileCall(q, k, v, False, scale, bias))
        for tokens, part in zip(results, of_call, strict=True):
            work.write(tokens, call.queries, part)
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
    grads = _empty_grads(query, key)
    of_query, *of_key_value = work.tokens_of(*(grad.zero_() for grad in grads))
    of_queries = work.tokens_of(query, grad_out, out, hide_blind_rows(lse))
    of_keys = work.tokens_of(key, value)
    for call, bias in work.with_biases():
        q, grad, *whole = work.read(call, call.queries, of_queries)
        k, v = work.read(call, call.keys, of_keys)
        tile_call = TileCall(q, k, v, False, scale, bias)
        of_q, *of_kv = FlashCPU().backward(tile_call, grad, Partial(*whole))
        work.write(of_query, call.queries, of_q)
        for tokens, part in zip(of_key_value, of_kv, strict=True):
            work.write(tokens, call.keys, part, is_sum=True)
    return grads


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
            cells = block_table(tables, text, geometry, batch, indices.dtype, is_computed)
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
