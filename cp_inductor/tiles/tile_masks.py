"""The mask of one tile: made where it is used, from indices and what the rule reads.

    tile q[2:4] x kv[0:1] under (k - q <= 0) & (q - k - 127 <= 0)
      =>
    bias (1, 1, queries, keys): 0 where q - 127 <= k <= q, else -inf

No tensor here is as large as the sequence squared. A mask is computed from the indices of its tile,
and run-time tables are cut to them. A mask tensor that holds rows of the rank's own queries stays
with these queries.

Shapes: B batch, H query heads of the tile, S its queries, T its keys; 1 where one does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import sympy
import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import BATCH, HEAD, INDICES, KEY, QUERY, SCORE, is_of_pairs
from cp_inductor.mask.rule import Rule
from cp_inductor.plan import Mask, Span, Tile
from cp_inductor.tiles.dims import Tokens
from cp_inductor.tiles.dropout import draw_kept
from cp_inductor.torch_private.sizes import is_known


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


class TileMasks:
    """Makes the masks of a rank's tiles.

    Args:
        rule, tokens: of the plan: what it computes under, and lengths of spans.
        own: this rank's chunks.
        tables: of the rule, by number. Whole ones, but a table of queries and keys holds only the
            rows of this rank's queries. Where the bias has a gradient, it is the last.
        like: any tensor (B, H, S, D) of the attention.
    """

    def __init__(
        self, rule: Rule, tokens: Tokens, own: Span, tables: Sequence[Tensor], like: Tensor
    ) -> None:
        self.rule, self.tokens, self.own = rule, tokens, own
        self.tables, self.like = tables, like

    def bias(self, tile: Tile, rows: slice) -> Tensor | None:
        """Return what is added to some rows of a tile's scores, -inf where there is no pair.

        Rows are counted from the tile's first query. The result is (B | 1, H | 1, rows, T) in the
        dtype of the attention, or of a wide bias; None if it adds nothing.
        """
        if tile.mask is Mask.FULL and not self.rule.bias:
            return None
        indices, place = self.indices(tile), _at_rows(rows)
        value = make_bias(self.rule, indices, place, is_full=tile.mask is Mask.FULL)
        # Kernels want rows and keys to be there.
        num_queries, num_keys = place(indices.of(QUERY)).shape[2], indices.of(KEY).shape[3]
        return value.expand(*value.shape[:2], num_queries, num_keys)

    def indices(self, tile: Tile) -> Indices:
        """Return the indices of a tile."""
        like = self.like
        return Indices(self.geometry(tile), self.tables, like.shape[0], like.dtype, like.device)

    def geometry(self, tile: Tile) -> Geometry:
        """Return where a tile is."""

        def runs(ranges: Iterable[tuple[int | SymInt, int | SymInt]]) -> Runs:
            return tuple((int(start), int(stop)) for start, stop in ranges)

        return Geometry(
            (tile.heads.start, tile.heads.stop),
            runs(self.token_range(span, of_keys=False) for span in tile.queries),
            runs(self.token_range(span, of_keys=True) for span in tile.keys),
            runs(_local(self, span) for span in tile.queries),
        )

    def change(self, tile: Tile, rows: slice) -> ScoreChange | None:
        """Return what changes the scores of some rows of a tile, as of `bias`; None if nothing."""
        if self.rule.score == SCORE:
            return None
        indices, place = self.indices(tile), _at_rows(rows)

        def of_scores(expression: sympy.Expr, scores: Tensor) -> Tensor:
            value = indices.as_tensor(indices.evaluate(expression, place, scores))
            return value.to(scores.dtype).expand(scores.shape)

        return ScoreChange(*(partial(of_scores, of) for of in (self.rule.score, self.rule.slope)))

    def put_together(self, parts: Sequence[tuple[Tile, Tensor]]) -> Tensor:
        """Put together a tensor shaped as the bias from parts of tiles, (B | 1, H | 1, S, T)."""
        bias = self.tables[-1]
        total = bias.new_zeros(bias.shape, dtype=torch.promote_types(bias.dtype, torch.float32))
        for tile, part in parts:
            heads = (tile.heads.start, bias.shape[1] - tile.heads.stop)
            row: int | SymInt = 0
            for span in tile.queries:
                first, last = _local(self, span)
                column: int | SymInt = 0
                for keys in tile.keys:
                    left, right = self.token_range(keys, of_keys=True)
                    piece = part[:, :, row : row + last - first, column : column + right - left]
                    around: list[Any] = [left, bias.shape[3] - right, first, bias.shape[2] - last]
                    around += heads if bias.shape[1] > 1 else ()
                    total = total + F.pad(piece, around)
                    column += right - left
                row += last - first
        return total

    def keep(self, tile: Tile, rows: slice, seed: Tensor, dropout_p: float) -> Tensor:
        """Return 1 / (1 - p) where a score's probability is kept, and 0 where it is dropped.

        Args:
            tile, rows: as of `bias`.
            seed: () int64, of this rank's first batch entry and head; see `seed_of_shard`.
            dropout_p: p.

        Returns (B, H, rows, T) in float32 (float64 for float64).
        """
        indices, place = self.indices(tile), _at_rows(rows)
        places = [place(indices.of(symbol)) for symbol in INDICES]
        dtype = torch.promote_types(self.like.dtype, torch.float32)
        return draw_kept(seed, places, dropout_p, dtype)

    def token_range(self, span: Span, *, of_keys: bool) -> tuple[int | SymInt, int | SymInt]:
        """Return the first token of a span, and the one after its last."""
        start = self.tokens.of(Span(0, span.start), of_keys=of_keys) if span.start else 0
        return start, start + self.tokens.of(span, of_keys=of_keys)


def bias_dtype(rule: Rule, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what a rule adds to the scores of an attention of some dtype."""
    return torch.promote_types(dtype, torch.float32) if rule.is_wide else dtype


def make_bias(rule: Rule, indices: Indices, place: Place, *, is_full: bool = False) -> Tensor:
    """Return what a rule adds to some scores, -inf where there is no pair, unless all exist."""
    dtype = bias_dtype(rule, indices.dtype)
    value = torch.zeros((), dtype=dtype, device=indices.device)
    if rule.bias:
        value = indices.as_tensor(indices.evaluate(rule.bias, place)).to(dtype)
    if is_full:
        return value
    return torch.where(indices.evaluate(rule.allowed, place), value, -float("inf"))


def _local(masks: TileMasks, span: Span) -> tuple[int | SymInt, int | SymInt]:
    first, last = masks.token_range(span, of_keys=False)
    own, _ = masks.token_range(masks.own, of_keys=False)
    return first - own, last - own


# Runs of tokens: [start, stop) each, one behind the other.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a tile's queries, keys and heads are in the whole attention, and in its tables.

    Attributes:
        heads: of the queries, [start, stop).
        queries, keys: positions along the sequence, as in tables of all queries or keys.
        row_places: where tables of pairs, which hold the rank's own rows, hold theirs.
    """

    heads: tuple[int, int]
    queries: Runs
    keys: Runs
    row_places: Runs

    def encode(self) -> list[int]:
        """Return it as numbers, which ops take."""
        numbers = list(self.heads)
        for runs in (self.queries, self.keys, self.row_places):
            numbers += [len(runs), *chain.from_iterable(runs)]
        return numbers

    @staticmethod
    def decode(numbers: Sequence[int]) -> Geometry:
        """Return what `encode` wrote."""
        heads, left = (numbers[0], numbers[1]), list(numbers[2:])
        runs = []
        while left:
            count, *left = left
            edges, left = left[: 2 * count], left[2 * count :]
            runs.append(tuple(zip(edges[::2], edges[1::2], strict=True)))
        return Geometry(heads, *runs)

    def run_of(self, symbol: sympy.Symbol) -> tuple[int, int] | None:
        """Return the positions of queries or keys, [start, stop), if they are one run."""
        runs = {QUERY: self.queries, KEY: self.keys}.get(symbol, ())
        return runs[0] if len(runs) == 1 else None

    @property
    def num_queries(self) -> int:
        """How many tokens ask."""
        return _length(self.queries)

    @property
    def num_keys(self) -> int:
        """How many tokens are asked."""
        return _length(self.keys)


def _length(runs: Runs) -> int:
    """Return how many tokens runs hold; nothing is computed of a length that is a symbol."""
    if _is_from_first(runs):
        return runs[0][1]
    return sum(stop - start for start, stop in runs)


def _is_from_first(runs: Runs) -> bool:
    return len(runs) == 1 and isinstance(runs[0][0], int) and runs[0][0] == 0


# Takes what has a value for every score of a tile, (B | 1, H | 1, S | 1, T | 1), to some scores.
Place = Callable[[Tensor], Tensor]


class Indices:
    """The indices of a tile, and what the rule says at them.

    Args:
        geometry: of the tile.
        tables: of the rule.
        batch: how many batch entries there are.
        dtype, device: of the attention; of what is made.
    """

    def __init__(
        self,
        geometry: Geometry,
        tables: Sequence[Tensor],
        batch: int | SymInt,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry, self.tables = geometry, tables
        self.batch, self.dtype, self.device = batch, dtype, device
        self.known: dict[sympy.Symbol, Tensor] = {}
        self.cuts: dict[tuple[int, tuple[sympy.Expr, ...]], Tensor] = {}

    def of(self, symbol: sympy.Symbol) -> Tensor:
        """Return an index as a tensor (B, 1, 1, 1), (1, H, 1, 1), (1, 1, S, 1) or (1, 1, 1, T)."""
        if symbol not in self.known:
            shape = [-1 if index == symbol else 1 for index in INDICES]
            self.known[symbol] = self._flat(symbol).view(shape)
        return self.known[symbol]

    def _flat(self, symbol: sympy.Symbol) -> Tensor:
        geometry, device = self.geometry, self.device
        if symbol == BATCH:
            batch: Any = self.batch  # torch's types know no SymInt here
            return torch.arange(batch, device=device)
        if symbol == HEAD:
            return torch.arange(*geometry.heads, device=device)
        ranges = geometry.keys if symbol == KEY else geometry.queries
        # Lengths are numbers here: under a rule they are constants of the graph.
        parts = [torch.arange(start, stop, device=device) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def evaluate(
        self, expression: object, place: Place = lambda tensor: tensor, score: Tensor | None = None
    ) -> Tensor:
        """Return the value of an expression, broadcast as far as it depends on indices.

        Args:
            expression: of the rule.
            place: at which scores.
            score: these, if they may occur.
        """
        operations = Operations(
            read=lambda number, values, where: self._read(number, values, where, place),
            floor_divide=lambda a, b: torch.div(a, b, rounding_mode="floor"),
            minimum=lambda a, b: torch.minimum(self.as_tensor(a), self.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(self.as_tensor(a), self.as_tensor(b)),
            choose=lambda c, a, b: torch.where(c, self.as_tensor(a), self.as_tensor(b)),
            as_integer=lambda condition: condition.to(torch.int64),
            boolean=self.boolean,
            apply=lambda name, *arguments: _FUNCTIONS[name](*arguments),
            number=self.number,
        )
        values = Lazily(lambda symbol: place(self.of(symbol)))
        if score is not None:
            values[SCORE] = score
        result: Tensor = evaluate(expression, values, operations)
        return result

    def boolean(self, value: bool) -> Tensor:
        """Return a condition that holds everywhere, or nowhere."""
        return torch.full((1, 1, 1, 1), value, dtype=torch.bool, device=self.device)

    def number(self, value: sympy.Expr) -> Any:
        """Return a constant of the rule in the dtype of the attention.

        An integer times a number of Python's is float32, in which the lowest float64 is infinite.
        """
        return self.as_tensor(float(value))

    def as_tensor(self, value: Any) -> Tensor:
        """Return a number as a tensor that is made in the graph, and not a constant beside it."""
        if isinstance(value, Tensor):
            return value
        dtype = torch.promote_types(self.dtype, torch.float32)
        if isinstance(value, int):
            dtype = torch.int64
        elif torch.finfo(dtype).max < abs(value) < float("inf"):
            dtype = torch.float64
        return torch.full((), value, dtype=dtype, device=self.device)

    def _read(
        self, number: int, values: tuple[object, ...], where: tuple[sympy.Expr, ...], place: Place
    ) -> Tensor:
        if self.is_cut(where):
            return place(self.cut(number, where))
        indices = [self.as_tensor(value) for value in values]
        result: Tensor = torch.ops.aten.index.Tensor(self.tables[number], indices)
        return _as_number(result)

    @staticmethod
    def is_cut(where: tuple[sympy.Expr, ...]) -> bool:
        """Whether a table is read at plain indices, so that a part of it is what the tile reads."""
        symbols = [index for index in where if index.is_Symbol]
        is_plain = all(index.is_Symbol or index.is_Integer for index in where)
        is_cut = is_plain and len(set(symbols)) == len(symbols)
        assert is_cut or not is_of_pairs(where), "a table of pairs is read at its own indices"
        return is_cut

    def cut(self, number: int, where: tuple[sympy.Expr, ...]) -> Tensor:
        """Return `part`, of which sums and differences do not wrap."""
        if (number, where) not in self.cuts:
            self.cuts[number, where] = _as_number(self.part(number, where))
        return self.cuts[number, where]

    def part(self, number: int, where: tuple[sympy.Expr, ...]) -> Tensor:
        """Return what a tile reads of a table at plain indices: (B | 1, H | 1, S | 1, T | 1)."""
        table, is_rows = self.tables[number], is_of_pairs(where)
        for dim in reversed(range(len(where))):
            if where[dim].is_Integer:
                table = table.select(dim, int(where[dim]))
        symbols = [index for index in where if index.is_Symbol]
        for dim, symbol in enumerate(symbols):
            ranges, length = self._ranges(symbol, is_rows=is_rows), table.shape[dim]
            if ranges is None or (_is_from_first(ranges) and is_known(ranges[0][1] == length)):
                continue
            parts = [table.narrow(dim, start, stop - start) for start, stop in ranges]
            table = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        order = sorted(range(len(symbols)), key=lambda dim: INDICES.index(symbols[dim]))
        if order != sorted(order):
            table = table.permute(order)
        lengths = dict(zip([symbols[dim] for dim in order], table.shape, strict=True))
        return table.reshape([lengths.get(symbol, 1) for symbol in INDICES])

    def _ranges(self, symbol: sympy.Symbol, *, is_rows: bool) -> Runs | None:
        geometry = self.geometry
        queries = geometry.row_places if is_rows else geometry.queries
        return {HEAD: (geometry.heads,), QUERY: queries, KEY: geometry.keys}.get(symbol)


def _as_number(values: Tensor) -> Tensor:
    """Sums and differences of narrower integers would wrap, and of bools there are none."""
    return values if values.is_floating_point() else values.to(torch.int64)


def _at_rows(rows: slice) -> Place:
    """Return what takes some rows of a tile, counted from its first."""
    is_all = rows == slice(None)
    return lambda tensor: tensor if is_all or tensor.shape[2] == 1 else tensor[:, :, rows]


class ScoreChange(NamedTuple):
    """What takes the place of scores (B, H, S, T), and its derivative by them."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


class Lazily(dict[sympy.Symbol, Any]):
    """Indices that are made when they are asked for."""

    def __init__(self, make: Callable[[sympy.Symbol], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, symbol: sympy.Symbol) -> Any:
        return self.make(symbol)
