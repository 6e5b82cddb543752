"""The mask of one tile: made where it is used, from indices and what the rule reads.

    tile q[2:4] x kv[0:1] under (k - q <= 0) & (q - k - 127 <= 0)
      =>
    bias (1, 1, queries, keys): 0 where q - 127 <= k <= q, else -inf

No tensor here is as large as the sequence squared. A mask is computed from the indices of its tile,
and run-time tables are cut to them. A mask tensor that holds rows of the rank's own queries stays
with these queries.

Dropout drops a score by a hash of a seed and of the score's indices in the whole attention. So
forward and backward, all plans and all layouts drop the same scores. The seed contains the place of
this rank's batch entries and heads among all.

Shapes: B batch, H query heads of the tile, S its queries, T its keys; 1 where one does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor

from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import BATCH, HEAD, KEY, QUERY, SCORE, is_of_pairs
from cp_inductor.mask.rule import Rule
from cp_inductor.plan import Mask, Span, Tile
from cp_inductor.run.messages import Tokens

# Indices by the dims of a score.
SYMBOLS = (BATCH, HEAD, QUERY, KEY)


# How far apart keys are before they are hashed.
_STRIDE = 0x3C6EF35F


# How far apart batch entries are before they are hashed: more than there are heads.
BATCH_STRIDE = 1 << 16


def _as_float(value: Any) -> Any:
    """Return an integer of Python as a float: a power of integers is one, such as 0."""
    return float(value) if isinstance(value, int) else value


# The functions of `mask.language.FUNCTIONS`.
_FUNCTIONS: dict[str, Any] = {
    "Tanh": torch.tanh,
    "Exp": torch.exp,
    "Sigmoid": torch.sigmoid,
    "Power": lambda base, exponent: torch.pow(*map(_as_float, (base, exponent))),
}


# Scores that are made as a tensor at once, by a kernel that takes a mask: in bytes.
MAX_SCORE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Extras:
    """What an attention reads beside query, key and value.

    Attributes:
        tables: of the rule, by number. Whole ones, but a table of queries and keys holds only the
            rows of this rank's queries. Where the bias has a gradient, it is the last.
        seed: () int64, of dropout, of this rank's first batch entry and head; see `seed_of_shard`.
    """

    tables: tuple[Tensor, ...] = ()
    seed: Tensor | None = None


class TileMasks:
    """Makes the masks of a rank's tiles.

    Args:
        rule: of the plan.
        tokens: lengths of spans.
        own: this rank's chunks.
        extras: what the rule reads, and more.
        like: any tensor (B, H, S, D) of the attention.
    """

    def __init__(self, rule: Rule, tokens: Tokens, own: Span, extras: Extras, like: Tensor) -> None:
        self.rule, self.tokens, self.own = rule, tokens, own
        self.extras, self.like = extras, like

    @property
    def bias_dtype(self) -> torch.dtype:
        """The dtype of what is added to scores."""
        dtype = self.like.dtype
        return torch.promote_types(dtype, torch.float32) if self.rule.is_wide else dtype

    def bias(self, tile: Tile, rows: slice) -> Tensor | None:
        """Return what is added to some rows of a tile's scores, -inf where there is no pair.

        Args:
            tile: of the plan.
            rows: of its queries, counted from its first.

        Returns:
            (B | 1, H | 1, rows, T) in the dtype of the attention, or of a wide bias; None if it
            adds nothing.
        """
        if tile.mask is Mask.FULL and not self.rule.bias:
            return None
        indices = _Indices(self, tile, rows)
        value = self.like.new_zeros(())
        if self.rule.bias:
            value = indices.as_tensor(indices.evaluate(self.rule.bias)).to(self.bias_dtype)
        if tile.mask is not Mask.FULL:
            value = torch.where(indices.evaluate(self.rule.allowed), value, -float("inf"))
        return indices.as_scores(value)

    def change(self, tile: Tile, rows: slice) -> ScoreChange | None:
        """Return what changes the scores of some rows of a tile; None if nothing does.

        Takes the arguments of `bias`.
        """
        if self.rule.score == SCORE:
            return None
        return ScoreChange(_Indices(self, tile, rows))

    def put_together(self, parts: Sequence[tuple[Tile, Tensor]]) -> Tensor:
        """Return a tensor shaped as the bias from what tiles computed of it, each of its scores.

        Args:
            parts: tiles, and tensors (B | 1, H | 1, S, T) of theirs.
        """
        bias = self.extras.tables[-1]
        total = bias.new_zeros(bias.shape, dtype=torch.promote_types(bias.dtype, torch.float32))
        for tile, part in parts:
            row: int | SymInt = 0
            for span in tile.queries:
                first, last = _local(self, span)
                column: int | SymInt = 0
                for keys in tile.keys:
                    left, right = self.token_range(keys, of_keys=True)
                    piece = part[:, :, row : row + last - first, column : column + right - left]
                    total = total + self._padded(piece, tile.heads.start, first, left)
                    column += right - left
                row += last - first
        return total

    def _padded(self, piece: Tensor, head: int, first: int | SymInt, left: int | SymInt) -> Tensor:
        """Put zeros around a piece, which begins at a head, a row and a column."""
        bias = self.extras.tables[-1]
        places = (
            ((1, head), (2, first), (3, left)) if bias.shape[1] > 1 else ((2, first), (3, left))
        )
        for dim, before in places:
            after = bias.shape[dim] - before - piece.shape[dim]
            shape = list(piece.shape)
            around = [
                piece.new_zeros([*shape[:dim], n, *shape[dim + 1 :]]) for n in (before, after)
            ]
            piece = torch.cat([around[0], piece, around[1]], dim)
        return piece

    def keep(self, tile: Tile, rows: slice, dropout_p: float) -> Tensor:
        """Return 1 / (1 - p) where a score's probability is kept, and 0 where it is dropped.

        Returns:
            (B, H, rows, T) in float32 (float64 for float64).
        """
        assert self.extras.seed is not None
        indices = _Indices(self, tile, rows)
        batch, heads, queries, keys = (indices.of(symbol) for symbol in SYMBOLS)
        of_head = _once(_hash(self.extras.seed + batch * BATCH_STRIDE + heads))
        of_row = _once(_hash(of_head + queries))
        word = _hash(of_row ^ (keys * _STRIDE & 0xFFFFFFFF))
        dtype = torch.promote_types(self.like.dtype, torch.float32)
        is_kept = word >= int(dropout_p * (1 << 32))
        return is_kept.to(dtype) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)

    def token_range(self, span: Span, *, of_keys: bool) -> tuple[int | SymInt, int | SymInt]:
        """Return the first token of a span, and the one after its last, as they are stored."""
        start = self.tokens.of(Span(0, span.start), of_keys=of_keys) if span.start else 0
        return start, start + self.tokens.of(span, of_keys=of_keys)


def _local(masks: TileMasks, span: Span) -> tuple[int | SymInt, int | SymInt]:
    first, last = masks.token_range(span, of_keys=False)
    own, _ = masks.token_range(masks.own, of_keys=False)
    return first - own, last - own


def _hash(word: Tensor) -> Tensor:
    """Scramble 32 bits; no step leaves the range of int64, whose overflow is nobody's promise."""
    word = word & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    return (word >> 16) ^ word


def _once(word: Tensor) -> Tensor:
    """Return the same, behind a reduction: what is before it is not computed again by each reader.

    A hash reads every step twice, and Inductor writes out what is read as often as it is.
    """
    return word.unsqueeze(-1).expand(*word.shape, 16).amax(-1)


class _Indices:
    """The indices of some rows of a tile, and what the rule says at them."""

    def __init__(self, masks: TileMasks, tile: Tile, rows: slice) -> None:
        self.masks, self.tile, self.rows = masks, tile, rows
        self.known: dict[sympy.Symbol, Tensor] = {}

    def of(self, symbol: sympy.Symbol) -> Tensor:
        """Return an index as a tensor (B, 1, 1, 1), (1, H, 1, 1), (1, 1, S, 1) or (1, 1, 1, T)."""
        if symbol not in self.known:
            dim = SYMBOLS.index(symbol)
            flat = self._flat(symbol)
            self.known[symbol] = flat.view([-1 if d == dim else 1 for d in range(4)])
        return self.known[symbol]

    def _flat(self, symbol: sympy.Symbol) -> Tensor:
        masks, tile, device = self.masks, self.tile, self.masks.like.device
        if symbol == BATCH:
            return torch.arange(masks.like.shape[0], device=device)
        if symbol == HEAD:
            return torch.arange(tile.heads.start, tile.heads.stop, device=device)
        of_keys = symbol == KEY
        spans = tile.keys if of_keys else tile.queries
        ranges = [run for span in spans for run in masks.tokens.positions(span, of_keys=of_keys)]
        # Lengths are numbers here: under a rule they are constants of the graph.
        parts = [torch.arange(int(a), int(b), device=device) for a, b in ranges]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat if of_keys else flat[self.rows]

    def evaluate(self, expression: object, score: Tensor | None = None) -> Tensor:
        """Return the value of an expression, broadcast as far as it depends on indices.

        Args:
            expression: of the rule.
            score: (B, H, S, T), if it may occur.
        """
        values = _Lazily(self)
        if score is not None:
            values[SCORE] = score
        operations = Operations(
            read=self._read,
            floor_divide=lambda a, b: torch.div(a, b, rounding_mode="floor"),
            minimum=lambda a, b: torch.minimum(self.as_tensor(a), self.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(self.as_tensor(a), self.as_tensor(b)),
            choose=lambda c, a, b: torch.where(c, self.as_tensor(a), self.as_tensor(b)),
            as_integer=lambda condition: condition.to(torch.int64),
            boolean=lambda value: torch.full(
                (1, 1, 1, 1), value, dtype=torch.bool, device=self.masks.like.device
            ),
            apply=lambda name, *arguments: _FUNCTIONS[name](*arguments),
        )
        result: Tensor = evaluate(expression, values, operations)
        return result

    def as_tensor(self, value: Any) -> Tensor:
        """Return a number as a tensor that is made in the graph, and not a constant beside it."""
        if isinstance(value, Tensor):
            return value
        like = self.masks.like
        dtype = torch.promote_types(like.dtype, torch.float32)
        if isinstance(value, int):
            dtype = torch.int64
        elif torch.finfo(dtype).max < abs(value) < float("inf"):
            dtype = torch.float64
        return torch.full((), value, dtype=dtype, device=like.device)

    def as_scores(self, bias: Tensor) -> Tensor:
        """Expand a bias to rows and keys, which kernels want to be there."""
        num_queries, num_keys = self.of(QUERY).shape[2], self.of(KEY).shape[3]
        return bias.expand(*bias.shape[:2], num_queries, num_keys)

    def _read(
        self, number: int, values: tuple[object, ...], where: tuple[sympy.Expr, ...]
    ) -> Tensor:
        table = self.masks.extras.tables[number]
        # Sums and differences of narrower integers would wrap, and of bools there are none.
        is_number = table.is_floating_point()
        is_rows = is_of_pairs(where)
        symbols = [index for index in where if index.is_Symbol]
        if all(index.is_Symbol or index.is_Integer for index in where) and (
            len(set(symbols)) == len(symbols)
        ):
            part = self._read_at(table, where, is_rows=is_rows)
            return part if is_number else part.to(torch.int64)
        assert not is_rows, "a table of pairs is read at its own indices"
        indices = [self.as_tensor(value) for value in values]
        result: Tensor = torch.ops.aten.index.Tensor(table, indices)
        return result if is_number else result.to(torch.int64)

    def _read_at(self, table: Tensor, where: Sequence[sympy.Expr], *, is_rows: bool) -> Tensor:
        """Read a table at plain indices: cut it, and bring its dims to their places."""
        for dim in reversed(range(len(where))):
            if where[dim].is_Integer:
                table = table.select(dim, int(where[dim]))
        symbols = [index for index in where if index.is_Symbol]
        for dim, symbol in enumerate(symbols):
            ranges = self._ranges(symbol, is_rows=is_rows)
            if ranges is not None:
                parts = [table.narrow(dim, start, stop - start) for start, stop in ranges]
                table = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            if symbol == QUERY:
                table = table[(slice(None),) * dim + (self.rows,)]
        order = sorted(range(len(symbols)), key=lambda dim: SYMBOLS.index(symbols[dim]))
        table = table.permute(order)
        lengths = dict(zip([symbols[dim] for dim in order], table.shape, strict=True))
        return table.reshape([lengths.get(symbol, 1) for symbol in SYMBOLS])

    def _ranges(
        self, symbol: sympy.Symbol, *, is_rows: bool
    ) -> list[tuple[int | SymInt, int | SymInt]] | None:
        masks, tile = self.masks, self.tile
        if symbol == HEAD:
            return [(tile.heads.start, tile.heads.stop)]
        if symbol == KEY:
            return [masks.token_range(span, of_keys=True) for span in tile.keys]
        if symbol == QUERY and is_rows:
            return [_local(masks, span) for span in tile.queries]
        if symbol == QUERY:
            return [masks.token_range(span, of_keys=False) for span in tile.queries]
        return None


class ScoreChange:
    """What takes the place of scores (B, H, S, T): an expression of them, and its derivative."""

    def __init__(self, indices: _Indices) -> None:
        self.indices = indices

    def value(self, scores: Tensor) -> Tensor:
        """Return what takes their place."""
        return self._of(self.indices.masks.rule.score, scores)

    def slope(self, scores: Tensor) -> Tensor:
        """Return its derivative by the scores."""
        return self._of(self.indices.masks.rule.slope, scores)

    def _of(self, expression: sympy.Expr, scores: Tensor) -> Tensor:
        value = self.indices.as_tensor(self.indices.evaluate(expression, score=scores))
        return value.to(scores.dtype).expand(scores.shape)


class _Lazily(dict[sympy.Symbol, Tensor]):
    """Indices that are made when they are asked for."""

    def __init__(self, indices: _Indices) -> None:
        super().__init__()
        self.indices = indices

    def __missing__(self, symbol: sympy.Symbol) -> Tensor:
        return self.indices.of(symbol)
