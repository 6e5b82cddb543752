"""Which blocks of a tile hold pairs: interval arithmetic on tensors, from a rule and its tables.

    tile q[0:512] x kv[0:512] under (k - q <= 0) & Eq(t0(b, q), t0(b, k)), t0 = 0 x 256, 1 x 256
      =>
    PARTIAL EMPTY   EMPTY   EMPTY
    FULL    PARTIAL EMPTY   EMPTY          a cell for each block of 128 queries x 128 keys
    EMPTY   EMPTY   PARTIAL EMPTY
    EMPTY   EMPTY   FULL    PARTIAL

An index or a table becomes its least and its greatest value in each block of rows or columns. The
rule is then evaluated on these bounds by the same `evaluate`: by the same operations, in the same
order, as on single values. So bounds hold for what is computed, and not only for what is meant.
Integers that may be beyond 2^52 are unbounded, and so are floats, which are rounded, and may be
infinite or NaN. How operations map intervals is said in `cp_inductor.mask.intervals`; here is how
their ends are computed in tensors.

No value is read on the host and no shape depends on one. In a graph it would be two hundred nodes
per tile, half a minute to compile. So an op computes it, which layers that read the same tables
share.

    list_blocks   of CUDA: the blocks of each row, as the templates of flex attention take them
    block_table   of the CPU, which reads values: exact, as it evaluates the rule in PARTIAL blocks

Shapes: B batch, H heads of the tile, S its queries, T its keys.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from cp_inductor.kept import lru_cache
from cp_inductor.mask.evaluate import evaluate
from cp_inductor.mask.intervals import Decision, Interval
from cp_inductor.mask.language import BATCH, HEAD, number_of
from cp_inductor.mask.rule import Cell, Rule
from cp_inductor.tiles.tile_masks import Geometry, Indices, Place

# Queries and keys of a block: what flex attention's kernels have.
BLOCK = 128

# Blocks in which the rule is evaluated at once.
MAX_BLOCKS = 128


def make_block_table(rule: Rule, indices: Indices, is_computed: Tensor | None = None) -> Tensor:
    """Return what a rule says of the blocks of a tile.

    Args:
        rule, indices: of the attention; of the tile, of which geometry and tables are read.
        is_computed: (ceil(S / 128), ceil(T / 128)), the blocks that the tile computes; None is all.

    Returns:
        (B | 1, H | 1, ceil(S / 128), ceil(T / 128)) int8, of `Cell`: EMPTY, FULL or PARTIAL.
        PARTIAL may hold any pairs, none and all among them. Nothing is FULL if the rule has a
        bias. B and H are 1 if what exists does not depend on them.
    """

    def make(low: Any, high: Any) -> Interval:
        return _interval(indices.as_tensor(low), indices.as_tensor(high))

    operations = _Integers.operations(
        lambda symbol: _bounds_of_blocks(indices.of(symbol)),
        lambda read, _: _read(indices, read),
        make,
        indices.boolean,
    )
    decision: Decision = evaluate(rule.allowed, operations)
    shape = shape_of_block_table(rule, indices.geometry, indices.batch)
    cells = decision.may.to(torch.int8) * Cell.PARTIAL
    if not rule.bias:
        cells = torch.where(decision.must, Cell.FULL, cells)
    # Each of `may` and `must` comes from bounds of its own: where no pair may be, none is.
    may = decision.may if is_computed is None else decision.may & is_computed
    return torch.where(may, cells, Cell.EMPTY).to(torch.int8).expand(shape)


def shape_of_block_table(
    rule: Rule, geometry: Geometry, batch: int | torch.SymInt
) -> tuple[int | torch.SymInt, ...]:
    """Return the shape of the block table of a tile, for so many batch entries."""
    free = rule.allowed.free_symbols
    return (
        batch if BATCH in free else 1,
        geometry.heads[1] - geometry.heads[0] if HEAD in free else 1,
        -(-geometry.num_queries // BLOCK),
        -(-geometry.num_keys // BLOCK),
    )


def _read(indices: Indices, read: sympy.Expr) -> Interval:
    if indices.is_cut(read.args):
        return _bounds_of_blocks(indices.cut(number_of(read), read.args))
    # Read at computed indices: some value of the table.
    table = indices.tables[number_of(read)]
    return _interval(table.amin().view(1, 1, 1, 1), table.amax().view(1, 1, 1, 1))


def _bounds_of_blocks(values: Tensor) -> Interval:
    """Return the bounds of (B | 1, H | 1, S | 1, T | 1) in each block of rows and columns."""
    low = high = values
    for dim in (2, 3):
        if (length := values.shape[dim]) > 1:
            low, high = (_in_blocks(end, dim, -length % BLOCK) for end in (low, high))
            low, high = low.amin(dim + 1), high.amax(dim + 1)
    return _interval(low, high)


def _in_blocks(values: Tensor, dim: int, missing: int) -> Tensor:
    """(..., n, ...) -> (..., blocks, 128, ...), the last block filled up with its last value."""
    if missing:
        shape = list(values.shape)
        shape[dim] = missing
        values = torch.cat([values, values.narrow(dim, -1, 1).expand(shape)], dim)
    return values.unflatten(dim, (-1, BLOCK))


# --- Ops ----------------------------------------------------------------------------------------


@torch.library.custom_op("cp_inductor::block_table", mutates_args=())
def block_table(
    tables: list[Tensor],
    rule: str,
    geometry: list[int],
    batch: int,
    dtype: torch.dtype,
    is_computed: Tensor | None = None,
) -> Tensor:
    """Return what `make_block_table` does, to the pair: the rule is evaluated in PARTIAL blocks.

    It takes the text of the rule, the geometry encoded, and the dtype of the attention; and one
    batch entry if what exists does not depend on them.
    """
    indices = Indices(Geometry.decode(geometry), tables, batch, dtype, torch.device("cpu"))
    parsed = Rule.parse(rule)
    cells = make_block_table(parsed, indices, is_computed).contiguous()
    of_blocks = (cells == Cell.PARTIAL).nonzero()
    for some in of_blocks.split(MAX_BLOCKS):
        allowed = indices.evaluate(parsed.allowed, _at_blocks(indices.geometry, some))
        allowed = allowed.expand(len(some), -1, -1, -1).flatten(1)
        kinds = torch.full((len(some),), Cell.PARTIAL, dtype=cells.dtype)
        if not parsed.bias:
            kinds[allowed.all(1)] = Cell.FULL
        kinds[~allowed.any(1)] = Cell.EMPTY
        cells[tuple(some.unbind(1))] = kinds
    return cells


@block_table.register_fake
def _(tables: list[Tensor], rule: str, geometry: list[int], batch: int, *_: object) -> Tensor:
    shape = shape_of_block_table(Rule.parse(rule), Geometry.decode(geometry), batch)
    return tables[0].new_empty(shape, dtype=torch.int8)


@lru_cache(maxsize=64)
def cells_without_tables(
    rule: str, geometry: tuple[int, ...], batch: int, dtype: torch.dtype
) -> Tensor:
    """Return the block table of a rule of indices alone."""
    cells: Tensor = block_table([], rule, list(geometry), batch, dtype)
    return cells


def _at_blocks(geometry: Geometry, of_blocks: Tensor) -> Place:
    """Return what takes (B | 1, H | 1, S | 1, T | 1) to blocks of it, (n, 1, 128, 128).

    Of each block there is its batch entry, head, row and column, (n, 4).
    """
    entry, head, row, column = (index.view(-1, 1, 1, 1) for index in of_blocks.unbind(1))
    inside, nowhere = torch.arange(BLOCK), torch.zeros(1, 1, 1, 1).long()
    # The last block repeats its last token, of which its kind is that of the others.
    rows = (row * BLOCK + inside.view(1, 1, BLOCK, 1)).clamp(max=geometry.num_queries - 1)
    columns = (column * BLOCK + inside).clamp(max=geometry.num_keys - 1)
    places = entry, head, rows, columns

    def take(tensor: Tensor) -> Tensor:
        sizes = zip(tensor.shape, places, strict=True)
        return tensor[tuple(nowhere if size == 1 else place for size, place in sizes)]

    return take


@torch.library.custom_op("cp_inductor::list_blocks", mutates_args=())
def list_blocks(
    like: Tensor,
    tables: list[Tensor],
    rule: str,
    geometry: list[int],
    batch: int,
    dtype: torch.dtype,
    has_columns: bool,
    is_computed: Tensor | None = None,
) -> list[Tensor]:
    """List the blocks of a tile that hold pairs, without reading a value on the host.

    Args:
        like: any tensor on the device.
        tables, rule, geometry, batch, dtype, is_computed: as of `block_table`.
        has_columns: list the blocks of each column as well.

    Returns:
        int32. Of the PARTIAL blocks how many each row has, (B | 1, H | 1, rows), and which: these
        first, in order, (B | 1, H | 1, rows, columns). The same of those that are FULL. Then the
        same four of columns, (B | 1, H | 1, columns) and (B | 1, H | 1, columns, rows).
    """
    indices = Indices(Geometry.decode(geometry), tables, batch, dtype, like.device)
    # A change of scores makes no block empty.
    cells = make_block_table(Rule.parse(rule), indices, is_computed)
    kinds = [cells == kind for kind in (Cell.PARTIAL, Cell.FULL)]
    if has_columns:
        kinds += [kind.transpose(-1, -2) for kind in kinds]
    lists = []
    for kind in kinds:
        numbers = kind.to(torch.int32, memory_format=torch.contiguous_format)
        order = torch.argsort(numbers, dim=-1, descending=True, stable=True)
        lists += [numbers.sum(-1, dtype=torch.int32), order.to(torch.int32)]
    return lists


@list_blocks.register_fake
def _(like: Tensor, tables: list[Tensor], *how: Any) -> list[Tensor]:
    rule, geometry, batch, _, has_columns = how[:5]
    *of, rows, columns = shape_of_block_table(Rule.parse(rule), Geometry.decode(geometry), batch)
    sizes = [(rows, columns)] * 2 + [(columns, rows)] * 2 * has_columns
    shapes = [(*of, *size[:dims]) for size in sizes for dims in (1, 2)]
    return [like.new_empty(shape, dtype=torch.int32) for shape in shapes]


# --- Intervals --------------------------------------------------------------------------------

# Integers that are further from 0 have no bounds. Nearer ones, their sums and whole quotients are
# exact in float64, and none of them wraps in int64.
_LARGE = float(1 << 52)


def _interval(low: Tensor, high: Tensor) -> Interval:
    """Make an interval of the least and the greatest of some values."""
    if low.is_floating_point():
        return _Floats(low, high)
    return _Integers(*_open_beyond(low.double(), high.double()))


def _open_beyond(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return two ends, or neither: sums of integers that are large may wrap."""
    is_open = torch.maximum(-low, high) > _LARGE
    return low.masked_fill(is_open, -torch.inf), high.masked_fill(is_open, torch.inf)


class _Integers(Interval):
    """Tensors of float64, integers all. An infinite end means that there is none."""

    minimum, maximum = staticmethod(torch.minimum), staticmethod(torch.maximum)
    where = staticmethod(torch.where)

    @staticmethod
    def times(end: Tensor, other: Tensor) -> Tensor:
        # 0 times what has no end is 0.
        return (end * other).nan_to_num(0.0, torch.inf, -torch.inf)

    @staticmethod
    def floor_divide(end: Tensor, divisor: int) -> Tensor:
        return (end / divisor).floor()

    def beside(self, other: Interval) -> type[Interval]:
        return type(other)

    def __add__(self, other: Interval) -> Interval:
        low, high = self.low + other.low, self.high + other.high
        low = low.masked_fill(low.abs() > _LARGE, -torch.inf)
        return self.beside(other)(low, high.masked_fill(high.abs() > _LARGE, torch.inf))

    def __mul__(self, other: Interval) -> Interval:
        product = super().__mul__(other)
        return type(product)(*_open_beyond(product.low, product.high))

    def __pow__(self, other: Interval) -> Interval:
        return _Floats(self.low, self.high)


class _Floats(_Integers):
    """Tensors of floats, and what is computed with them. They have no bounds, and ends no meaning.

    A bound would have to be rounded as values are, and to know whether these may be NaN.
    """

    def beside(self, other: Interval) -> type[Interval]:
        return _Floats

    @classmethod
    def decide(cls, must: Tensor, may: Tensor) -> Decision:
        return Decision(torch.zeros_like(must), torch.ones_like(may))
