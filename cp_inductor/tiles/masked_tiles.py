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
blocks are one strip, which one call of flash attention computes. It has a bias if one of its blocks
is PARTIAL; no tensor grows with queries times keys.

Which blocks there are is known when the program runs, to the pair: see `block_table`.

Assumes: see `cp_inductor.tiles.aten_kernels.FlashCPU`, which computes the calls; a positive scale.

Shapes: B batch, H query heads, G key-value heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from cp_inductor.mask.language import BATCH, SCORE
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.tiles.aten_kernels import FlashCPU
from cp_inductor.tiles.block_tables import BLOCK, block_table, cells_without_tables
from cp_inductor.tiles.combine import accumulation_dtype
from cp_inductor.tiles.kernels import (
    Gradients,
    Partial,
    RuleKernel,
    TileCall,
    empty_like_rows,
    hide_blind_rows,
)
from cp_inductor.tiles.tile_masks import Geometry, Indices, make_bias

# Queries times keys of a strip with a bias.
MAX_BIAS = 1 << 22

# If there are fewer keys, the kernel loses NaN: see `FlashCPU`.
MIN_KEYS = 16

# A part of batch entries, heads and tokens.
Part = tuple[slice, slice, slice | Tensor]


class Strip(NamedTuple):
    """Neighbouring rows of blocks that see the same blocks of keys."""

    # of_queries and of_keys: where they are in (B, H, S, ...) and in (B, G, T, D).
    of_queries: Part
    of_keys: Part
    num_blocks: int  # rows times columns
    bias: Tensor | None  # what is added to its scores; None if all of its blocks are FULL


def _strips(
    query: Tensor,
    key: Tensor,
    cells: Tensor | None,
    tables: Sequence[Tensor],
    rule: str,
    geometry: Sequence[int],
) -> Iterator[Strip]:
    """Yield the strips of a tile, one of whose biases is there at once."""
    (batch, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = query.shape, key.shape
    if not batch:
        return
    indices = Indices(Geometry.decode(geometry), tables, batch, query.dtype, query.device)
    if cells is None:
        cells = cells_without_tables(rule, tuple(geometry), batch, query.dtype)
    for entry, head in product(*map(range, cells.shape[:2])):
        entries = heads = kv_heads = slice(None)
        if len(cells) > 1:
            entries = slice(entry, entry + 1)
        if cells.shape[1] > 1:
            kv_head = head * num_kv_heads // num_heads
            heads, kv_heads = slice(head, head + 1), slice(kv_head, kv_head + 1)
        for rows, columns, is_full in _rows_alike(cells[entry, head].tolist()):
            queries = slice(rows[0] * BLOCK, min((rows[-1] + 1) * BLOCK, num_queries))
            first, stop = columns[0] * BLOCK, min((columns[-1] + 1) * BLOCK, num_keys)
            gaps = (columns[-1] + 1 - columns[0] - len(columns)) * BLOCK
            # The last block may be too short for the kernel: then some keys before it are hidden.
            num_hidden = min(max(0, MIN_KEYS - (stop - first - gaps)), first)
            keys: slice | Tensor = slice(first - num_hidden, stop)
            if gaps:
                tokens = torch.arange(first - num_hidden, stop)
                keys = tokens[(tokens < first) | torch.isin(tokens // BLOCK, torch.tensor(columns))]
            bias = None
            if num_hidden or not is_full:
                place = partial(_cut, (entries, heads, queries, keys))
                bias = make_bias(Rule.parse(rule), indices, place)
                size = queries.stop - queries.start, num_hidden + stop - first - gaps
                bias = bias.expand(*bias.shape[:2], *size)
            if bias is not None and num_hidden:
                bias = F.pad(bias[..., num_hidden:], (num_hidden, 0), value=-float("inf"))
            num_blocks = len(rows) * len(columns)
            yield Strip((entries, heads, queries), (entries, kv_heads, keys), num_blocks, bias)


def _rows_alike(cells: list[list[int]]) -> Iterator[tuple[range, list[int], bool]]:
    """Yield the rows of blocks of strips, their columns, and whether all of the blocks are FULL."""
    seen = [([c for c, cell in enumerate(row) if cell], Cell.PARTIAL not in row) for row in cells]
    for (columns, is_full), group in groupby(range(len(cells)), seen.__getitem__):
        rows = [*group]
        at_once = len(rows) if is_full else max(1, MAX_BIAS // (len(columns) * BLOCK**2))
        for start in range(rows[0], rows[-1] + 1, at_once) if columns else ():
            yield range(start, min(start + at_once, rows[-1] + 1)), columns, is_full


def _cut(parts: Sequence[slice | Tensor], tensor: Tensor) -> Tensor:
    """Cut (B | 1, H | 1, S | 1, T | 1) in each dim that it has."""
    for dim, part in enumerate(parts):
        if tensor.shape[dim] > 1:
            tensor = tensor.movedim(dim, 0)[part].movedim(0, dim)
    return tensor


# --- The ops ------------------------------------------------------------------------------------


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
    out, lse = _empty_partial(query)
    out.zero_()
    lse.fill_(-float("inf"))
    for strip in _strips(query, key, cells, tables, rule, geometry):
        of_keys = key[strip.of_keys], value[strip.of_keys]
        call = TileCall(query[strip.of_queries], *of_keys, False, scale, strip.bias)
        out[strip.of_queries], lse[strip.of_queries] = FlashCPU().forward(call)
        counters["cp_inductor"]["blocks_computed"] += strip.num_blocks
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
    grads = _empty_grads(query, key)
    dq, dk, dv = (grad.zero_() for grad in grads)
    lse = hide_blind_rows(lse)
    for strip in _strips(query, key, cells, tables, rule, geometry):
        of_keys = key[strip.of_keys], value[strip.of_keys]
        call = TileCall(query[strip.of_queries], *of_keys, False, scale, strip.bias)
        grad, *whole = (tensor[strip.of_queries] for tensor in (grad_out, out, lse))
        of_strip = FlashCPU().backward(call, grad, Partial(*whole))
        dq[strip.of_queries] = of_strip[0]
        dk[strip.of_keys] += of_strip[1]
        dv[strip.of_keys] += of_strip[2]
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
        self.tile = (cells, tables, text, geometry)

    @classmethod
    def obstacle(cls, rule: Rule, head_dim: object) -> str | None:
        """See `RuleKernel.obstacle`."""
        return None if rule.score == SCORE else "a score_mod that computes with scores, on the CPU"

    def _attend(self, call: TileCall) -> Partial:
        return Partial(*torch.ops.cp_inductor.masked_tile(*call.tensors, *self.tile, call.factor))

    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        grads: Gradients = torch.ops.cp_inductor.masked_tile_backward(
            grad_out, *call.tensors, *whole, *self.tile, call.factor
        )
        return grads
