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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import sympy
import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from cp_inductor.mask.evaluate import Operations, evaluate
from cp_inductor.mask.language import HEAD, INDICES, KEY, QUERY, SCORE, is_of_pairs, number_of
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


@dataclass(frozen=True, slots=True)
class TileMasks:
    """Makes the masks of a rank's tiles."""

    # rule and tokens: what the plan computes under, and lengths of its spans.
    rule: Rule
    tokens: Tokens
    own: Span  # this rank's chunks
    # The tables of the rule, by number: whole, but a table of queries and keys holds only the
    # rows of this rank's queries. Where the bias has a gradient, it is the last.
    tables: Sequence[Tensor]
    like: Tensor  # any tensor (B, H, S, D) of the attention

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
        queries, keys = (
            [self.tokens.range_of(span, of_keys=of_keys) for span in spans]
            for of_keys, spans in ((False, tile.queries), (True, tile.keys))
        )
        own, _ = self.tokens.range_of(self.own, of_keys=False)
        rows = [(first - own, last - own) for first, last in queries]
        # Under a rule, lengths are constants of the graph.
        runs = [tuple((int(a), int(b)) for a, b in side) for side in (queries, keys, rows)]
        return Geometry((tile.heads.start, tile.heads.stop), *runs)

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
            geometry, row = self.geometry(tile), 0
            for first, last in geometry.row_places:
                column = 0
                for left, right in geometry.keys:
                    piece = part[:, :, row : row + last - first, column : column + right - left]
                    around: list[Any] = [left, bias.shape[3] - right, first, bias.shape[2] - last]
                    around += heads if bias.shape[1] > 1 else ()
                    total = total + F.pad(piece, around)
                    column += right - left
                row += last - first
        return total

    def keep(self, tile: Tile, rows: slice, seed: Tensor, dropout_p: float) -> Tensor:
        """Return what `draw_kept` draws of some rows of a tile, as of `bias`, in float32 at least.

        The seed is of this rank's first batch entry and head; see `seed_of_shard`.
        """
        indices, place = self.indices(tile), _at_rows(rows)
        places = [place(indices.of(symbol)) for symbol in INDICES]
        dtype = torch.promote_types(self.like.dtype, torch.float32)
        return draw_kept(seed, places, dropout_p, dtype)


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


# Runs of tokens: [start, stop) each, one behind the other.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a tile's queries, keys and heads are in the whole attention, and in its tables."""

    heads: tuple[int, int]  # of the queries, [start, stop)
    # queries and keys: positions along the sequence, as in tables of all queries or keys.
    queries: Runs
    keys: Runs
    row_places: Runs  # where tables of pairs, which hold the rank's own rows, hold theirs

    def encode(self) -> list[int]:
        """Return it as numbers, which ops take."""
        numbers = list(self.heads)
        for runs in (self.queries, self.keys, self.row_places):
            numbers += [len(runs), *chain.from_iterable(runs)]
        return numbers

    @staticmethod
    def decode(numbers: Sequence[int]) -> Geometry:
        """Return what `encode` wrote."""
        left = iter(numbers)
        heads = next(left), next(left)
        runs = [tuple((next(left), next(left)) for _ in range(next(left))) for _ in range(3)]
        return Geometry(heads, *runs)

    def runs_of(self, symbol: sympy.Symbol) -> Runs:
        """Return where heads, queries or keys are; () of batch entries, which are all there."""
        return {HEAD: (self.heads,), QUERY: self.queries, KEY: self.keys}.get(symbol, ())

    def run_of(self, symbol: sympy.Symbol) -> tuple[int, int] | None:
        """Return where heads, queries or keys are, [start, stop), if they are one run."""
        runs = self.runs_of(symbol)
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


@dataclass(eq=False)
class Indices:
    """The indices of a tile, for so many batch entries, and what the rule says at them."""

    geometry: Geometry
    tables: Sequence[Tensor]
    batch: int | SymInt
    dtype: torch.dtype
    device: torch.device
    known: dict[sympy.Symbol, Tensor] = field(default_factory=dict)
    cuts: dict[tuple[int, tuple[sympy.Expr, ...]], Tensor] = field(default_factory=dict)

    def of(self, symbol: sympy.Symbol) -> Tensor:
        """Return an index as a tensor (B, 1, 1, 1), (1, H, 1, 1), (1, 1, S, 1) or (1, 1, 1, T)."""
        if symbol not in self.known:
            batch: Any = self.batch  # torch's types know no SymInt here
            # Lengths are numbers here: under a rule they are constants of the graph.
            runs = self.geometry.runs_of(symbol) or ((batch,),)
            parts = [torch.arange(*run, device=self.device) for run in runs]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            self.known[symbol] = whole.view([-1 if index == symbol else 1 for index in INDICES])
        return self.known[symbol]

    def evaluate(
        self, expression: object, place: Place = lambda tensor: tensor, score: Tensor | None = None
    ) -> Tensor:
        """Return the value of an expression, broadcast as far as it depends on indices.

        It is that at the scores of a place; these are given if they may occur in it.
        """
        operations = Operations(
            index=lambda symbol: score if symbol == SCORE else place(self.of(symbol)),
            read=lambda read, values: self._read(read, values, place),
            floor_divide=lambda a, b: torch.div(a, b, rounding_mode="floor"),
            minimum=lambda a, b: torch.minimum(self.as_tensor(a), self.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(self.as_tensor(a), self.as_tensor(b)),
            choose=lambda c, a, b: torch.where(c, self.as_tensor(a), self.as_tensor(b)),
            as_integer=lambda condition: condition.to(torch.int64),
            boolean=self.boolean,
            apply=lambda name, *arguments: _FUNCTIONS[name](*arguments),
            number=self.number,
        )
        result: Tensor = evaluate(expression, operations)
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

    def _read(self, read: sympy.Expr, values: tuple[object, ...], place: Place) -> Tensor:
        number = number_of(read)
        if self.is_cut(read.args):
            return place(self.cut(number, read.args))
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
        table = self.tables[number]
        for dim in reversed(range(len(where))):
            if where[dim].is_Integer:
                table = table.select(dim, int(where[dim]))
        symbols = [index for index in where if index.is_Symbol]
        for dim, symbol in enumerate(symbols):
            runs = self.geometry.runs_of(symbol)
            if symbol == QUERY and is_of_pairs(where):
                runs = self.geometry.row_places
            if not runs or (_is_from_first(runs) and is_known(runs[0][1] == table.shape[dim])):
                continue
            parts = [table.narrow(dim, start, stop - start) for start, stop in runs]
            table = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        order = sorted(range(len(symbols)), key=lambda dim: INDICES.index(symbols[dim]))
        if order != sorted(order):
            table = table.permute(order)
        lengths = dict(zip([symbols[dim] for dim in order], table.shape, strict=True))
        return table.reshape([lengths.get(symbol, 1) for symbol in INDICES])


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
