"""Chunks of a batch, and which of them meet: a rule and its tables, bounded by blocks.

    ranks of 300 and 200 tokens, chunks of 256, one entry
      => rank 0: tokens 0..255, 256..299     rank 1: tokens 300..499

    t0(b, q), block by block of 128     [3, 3] [3, 4] [4, 4]     the least and the greatest value
    Eq(t0(b, q), t0(b, k))              holds for every pair, for none, or may hold for some
      =>
    cells: query chunk, key chunk, weight (blocks of 128 x 128 that may hold pairs)

Boxes are decided from coarse to fine, by interval arithmetic. A box without pairs is dropped. One
in which all pairs exist is not looked at again. Any other is cut. What cannot be bounded (a table
read at a computed index, NaN, numbers beyond those that float64 holds exactly) may have every
value, so that no cell that holds a pair is ever dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sympy
from sympy import And, Expr, Not, Or
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from cp_inductor.kept import lru_cache
from cp_inductor.mask.intervals import Bounds, decide
from cp_inductor.mask.language import BATCH, HEAD, KEY, QUERY, number_of, tables_of
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.grid import spread

BLOCK = 128  # tokens of a side of a block, in which work is counted
# Integers up to here are exact in float64, and so are sums of some thousands of them.
MAX_EXACT = 2.0**40
# Integers up to here are exact in every floating-point dtype that a program may compare in.
MAX_EXACT_OF_ANY = 256
# Nodes of the next level that a side of a box is cut into; the coarsest boxes have so many chunks.
CUT = 8


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks, sorted by (rank, entry, group, position); arrays of int64 with one number per chunk.

    Attributes:
        rank: the rank that stores it.
        entry: its batch entry.
        group: its group of heads.
        first: the position of its first token along the sequence.
        length: its tokens, 1 to `size`. All but the last of a rank's entry are full.
        row: its first row in its rank's storage, whose rows are (entry, local token, group). The
            next token's is `num_groups` behind it.
        size: tokens of a full chunk, a multiple of BLOCK.
        num_groups: of heads.
    """

    rank: np.ndarray
    entry: np.ndarray
    group: np.ndarray
    first: np.ndarray
    length: np.ndarray
    row: np.ndarray
    size: int
    num_groups: int

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def num_blocks(self) -> np.ndarray:
        """The blocks of each chunk; the last may be short."""
        return -(-self.length // BLOCK)


def chunks_of(batch: int, lengths: Sequence[int], size: int, num_groups: int = 1) -> Chunks:
    """Cut the shards of all ranks into chunks.

    With groups of heads, the same tokens are a chunk of each group.

    Args:
        batch: number of batch entries.
        lengths: the tokens of each rank, of one entry; may be 0 and need not be equal.
        size: tokens of a full chunk, a multiple of BLOCK.
        num_groups: of heads.
    """
    assert size > 0 and size % BLOCK == 0, size
    local = np.asarray(lengths, dtype=np.int64)
    start = np.cumsum(local) - local
    num_of_entry = -(-local // size)
    num_of_rank = num_of_entry * batch * num_groups
    rank, index = spread(num_of_rank)
    lane, number = np.divmod(index, np.maximum(1, num_of_entry)[rank])
    entry, group = np.divmod(lane, num_groups)
    token = number * size
    return Chunks(
        rank=rank,
        entry=entry,
        group=group,
        first=start[rank] + token,
        length=np.minimum(size, local[rank] - token),
        row=(entry * local[rank] + token) * num_groups + group,
        size=size,
        num_groups=num_groups,
    )


@dataclass(frozen=True, eq=False)
class Cells:
    """A query chunk x a key chunk each, of those that may hold pairs; sorted by (query, key).

    Attributes:
        queries, keys: the chunks; both have equally many groups of heads.
        query, key: the chunks of each cell.
        weight: blocks of 128 x 128 that may hold pairs, of each cell.
    """

    queries: Chunks
    keys: Chunks
    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray

    @property
    def sides(self) -> tuple[tuple[Chunks, np.ndarray], tuple[Chunks, np.ndarray]]:
        """The chunks of queries, and which each cell has; the same of keys."""
        return (self.queries, self.query), (self.keys, self.key)


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes, which are runs of blocks of a batch entry, sorted by (entry, position).

    All entries are cut alike: node n is the (n % num_of_entry)-th of its entry.

    Attributes:
        first, last: positions of the first and the last token.
        entry: the batch entry.
        num_of_entry: nodes of an entry.
        child, num_children: the first node of the next level, and how many there are.
    """

    first: np.ndarray
    last: np.ndarray
    entry: np.ndarray
    num_of_entry: int
    child: np.ndarray
    num_children: np.ndarray


# Nodes of the queries, and of the keys.
_Levels = tuple[_Level, _Level]


def find_cells(
    rule: Rule,
    tables: Mapping[int, np.ndarray],
    queries: Chunks,
    keys: Chunks,
    *,
    batch: int,
    num_heads: int,
) -> Cells:
    """Return the cells that may hold pairs, by what the rule allows; see `plan_batch`."""
    if not len(queries) or not len(keys):
        return Cells(queries, keys, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    orders = _by_position(queries), _by_position(keys)
    # Runs of chunks, chunks, parts of chunks, ..., blocks.
    sides = _levels_of(queries, orders[0], batch), _levels_of(keys, orders[1], batch)
    levels = list(zip(*sides, strict=True))
    condition = _decidable(rule.allowed, True)
    tables = {
        number: _renumbered(table) if number in _only_equated(condition) else table
        for number, table in tables.items()
    }
    bounds: list[dict[Expr, Bounds]] = [{} for _ in levels]
    for read in sorted(tables_of(condition), key=str):
        _add_bounds_of_read(bounds, read, tables, levels, batch, num_heads)

    # A query node and a key node for each box: first all of the same entry.
    of_query, of_key = levels[0]
    at_query, inside = spread(np.full(len(of_query.entry), of_key.num_of_entry))
    boxes = np.stack([at_query, of_query.entry[at_query] * of_key.num_of_entry + inside])
    _, may = _decide(condition, boxes, levels[0], bounds[0], num_heads)
    boxes, _ = _cut(boxes[:, may], levels[0])
    chunks, weight, origin = boxes, np.zeros(boxes.shape[1]), np.arange(boxes.shape[1])
    for level, nodes in enumerate(levels[1:], 1):
        must, may = _decide(condition, boxes, nodes, bounds[level], num_heads)
        is_last = nodes is levels[-1]
        is_counted = may if is_last else must
        num_blocks = np.ones(np.count_nonzero(is_counted))
        for side, at in zip(nodes, boxes, strict=True):
            num_blocks *= ((side.last - side.first) // BLOCK + 1)[at[is_counted]]
        weight += np.bincount(origin[is_counted], num_blocks, len(weight))
        if not is_last:
            is_open = may & ~must
            boxes, of_box = _cut(boxes[:, is_open], nodes)
            origin = origin[is_open][of_box]
    # The cells of each group of heads are the same.
    chunks, weight = chunks[:, weight > 0], weight[weight > 0]
    query, key = (order[at].ravel() for order, at in zip(orders, chunks, strict=True))
    order = np.argsort(query * len(keys) + key, kind="stable")
    weight = np.repeat(weight, keys.num_groups)
    return Cells(queries, keys, query[order], key[order], weight[order])


def _decide(
    condition: Boolean,
    boxes: np.ndarray,
    nodes: _Levels,
    reads: Mapping[Expr, Bounds],
    num_heads: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each box whether all pairs surely exist, and whether any may.

    Reads have bounds by (entry, query node of the entry, key node of the entry); a dim is 1 where
    the read does not depend on it.
    """
    (queries, keys), (at_query, at_key) = nodes, boxes
    entry = queries.entry[at_query]
    index = entry, at_query % queries.num_of_entry, at_key % keys.num_of_entry
    box: dict[Expr, Bounds] = {
        QUERY: _float(queries.first[at_query], queries.last[at_query]),
        KEY: _float(keys.first[at_key], keys.last[at_key]),
        BATCH: _float(entry, entry),
        HEAD: (np.array(0.0), np.array(num_heads - 1.0)),
    }
    for read, (low, high) in reads.items():
        place = tuple(at if size > 1 else 0 for at, size in zip(index, low.shape, strict=True))
        box[read] = low[place], high[place]
    must, may = decide(condition, box)
    return np.broadcast_to(must, entry.shape), np.broadcast_to(may, entry.shape)


def _float(low: np.ndarray, high: np.ndarray) -> Bounds:
    return low.astype(np.float64), high.astype(np.float64)


def _by_position(chunks: Chunks) -> np.ndarray:
    """Return (n, groups), the chunks in the order of (entry, position)."""
    order = np.lexsort((chunks.group, chunks.first, chunks.entry))
    return order.reshape(-1, chunks.num_groups)


def _levels_of(chunks: Chunks, order: np.ndarray, batch: int) -> list[_Level]:
    """Return the nodes of each level, from runs of chunks to blocks, given `_by_position`."""
    order = order[:, 0]
    chunk, place = spread(chunks.num_blocks[order])
    first = chunks.first[order][chunk] + place * BLOCK
    last = np.minimum(first + BLOCK, (chunks.first + chunks.length)[order][chunk]) - 1
    entry = chunks.entry[order][chunk]
    # The blocks at which nodes of each level begin.
    starts = [np.flatnonzero((place == 0) & (chunk % (len(order) // batch) % CUT == 0))]
    size = chunks.size
    while True:
        place = place % (size // BLOCK)
        starts.append(np.flatnonzero(place == 0))
        if size == BLOCK:
            break
        size = max(BLOCK, size // CUT // BLOCK * BLOCK)
    levels = []
    for at, finer in zip(starts, [*starts[1:], starts[-1]], strict=True):
        child, end = np.searchsorted(finer, at), np.append(at[1:], len(chunk)) - 1
        num_children = np.diff(child, append=len(finer))
        num_of_entry = len(at) // batch
        levels.append(_Level(first[at], last[end], entry[at], num_of_entry, child, num_children))
    return levels


def _cut(boxes: np.ndarray, nodes: _Levels) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes of the next level that boxes consist of, and the box of each."""
    num_queries, num_keys = (side.num_children[at] for side, at in zip(nodes, boxes, strict=True))
    of_box, index = spread(num_queries * num_keys)
    inside = np.divmod(index, num_keys[of_box])
    parts = [side.child[at][of_box] + n for side, at, n in zip(nodes, boxes, inside, strict=True)]
    return np.stack(parts), of_box


def _add_bounds_of_read(
    bounds: Sequence[dict[Expr, Bounds]],
    read: Expr,
    tables: Mapping[int, np.ndarray],
    levels: Sequence[_Levels],
    batch: int,
    num_heads: int,
) -> None:
    """Add the bounds of a read of a table to those of every level, if it has any."""
    table = tables.get(number_of(read))
    if table is None or table.ndim != len(read.args):
        return
    lengths = [int(side.last[-1]) + 1 for side in levels[0]]
    sizes = dict(zip((BATCH, HEAD, QUERY, KEY), (batch, num_heads, *lengths), strict=True))
    place: list[slice | int] = []
    symbols: list[Expr] = []
    for index, size in zip(read.args, table.shape, strict=True):
        if index.is_Integer and 0 <= int(index) < size:
            place.append(int(index))
        elif sizes.get(index) == size and index not in symbols:
            place.append(slice(None))
            symbols.append(index)
        else:
            return
    table = table[tuple(place)]
    order = [symbols.index(symbol) for symbol in sizes if symbol in symbols]
    missing = tuple(axis for axis, symbol in enumerate(sizes) if symbol not in symbols)
    table = np.expand_dims(table.transpose(order), missing)
    if table.shape[1] == 1:  # a copy of millions of numbers less
        low = high = table[:, 0]
    else:
        low, high = table.min(axis=1), table.max(axis=1)  # of heads
    for level in reversed(range(len(levels))):
        for axis, nodes in enumerate(levels[level], 1):
            if low.shape[axis] > 1:
                starts = nodes.first if level == len(levels) - 1 else nodes.child
                starts = starts[: nodes.num_of_entry]
                low = np.minimum.reduceat(low, starts, axis=axis)
                high = np.maximum.reduceat(high, starts, axis=axis)
        bounds[level][read] = _exact(low, high)


@lru_cache(maxsize=256)
def _only_equated(condition: Boolean) -> frozenset[int]:
    """Return the tables of which only values of one row are compared, and only for equality."""
    equated: set[int] = set()
    others: set[int] = set()
    for relation in condition.atoms(Relational):
        reads = sorted(tables_of(relation), key=str)
        is_equation = isinstance(relation, (sympy.Eq, sympy.Ne)) and len(reads) == 2
        if is_equation:
            one, two = reads
            difference = sympy.expand(relation.lhs - relation.rhs)
            is_equation = difference in (one - two, two - one)
            is_equation &= one.func == two.func and one.args[:-1] == two.args[:-1]
        (equated if is_equation else others).update(map(number_of, reads))
    return frozenset(equated - others)


def _renumbered(table: np.ndarray) -> np.ndarray:
    """Number the values of each row in the order in which they occur, if they are not in order.

    Document numbers may be anything, such as hashes; in order, their bounds say more.
    """
    if table.dtype.kind not in "iu" or table.size == 0:
        return table
    rows = table.reshape(-1, table.shape[-1])
    is_new = np.ones(rows.shape, dtype=bool)
    np.not_equal(rows[:, 1:], rows[:, :-1], out=is_new[:, 1:])
    falls = (rows[:, 1:] < rows[:, :-1]).any(1)
    is_far = (rows.min(1) < -MAX_EXACT) | (rows.max(1) > MAX_EXACT)
    which = np.flatnonzero(falls | is_far)
    if not len(which):
        return table
    result = np.where(is_far[:, None], 0, rows).astype(np.int64)
    for row in which:
        starts = np.flatnonzero(is_new[row])
        _, first, place = np.unique(rows[row, starts], return_index=True, return_inverse=True)
        number = np.empty(len(first), dtype=np.int64)
        number[np.argsort(first, kind="stable")] = np.arange(len(first))
        result[row] = np.repeat(number[place], np.diff(starts, append=rows.shape[1]))
    return result.reshape(table.shape)


def _exact(low: np.ndarray, high: np.ndarray) -> Bounds:
    """Return bounds in float64; infinite where they are not exact, or are no numbers."""
    is_integer = low.dtype.kind in "biu"
    limit = MAX_EXACT if is_integer else np.inf
    low, high = _float(low, high)
    # Comparisons with NaN are false.
    is_known = (low > -limit) & (high < limit)
    return np.where(is_known, low, -np.inf), np.where(is_known, high, np.inf)


@lru_cache(maxsize=256)
def _decidable(condition: Boolean, otherwise: bool) -> Boolean:
    """Return a condition that can be bounded, and holds at least where the given one does.

    `otherwise` replaces a relation that cannot be bounded, and is flipped under a negation.
    """
    if isinstance(condition, Not):
        return Not(_decidable(condition.args[0], not otherwise))
    if isinstance(condition, (And, Or)):
        return condition.func(*(_decidable(part, otherwise) for part in condition.args))
    if not tables_of(condition) or _is_exact(condition):
        return condition
    return sympy.sympify(otherwise)


def _is_exact(relation: Boolean) -> bool:
    """Whether the difference of the sides of a relation has the right sign in float64."""
    difference = sympy.expand(relation.args[0] - relation.args[1])
    for product in difference.atoms(sympy.Mul):
        number, rest = product.as_coeff_Mul()
        if tables_of(product) and (abs(number) > 1 or rest.is_Mul):
            return False
    if difference.is_integer:
        return True
    # A program may round what it computes of floats; it compares them as they are.
    numbers, reads = [], []
    for term in sympy.Add.make_args(difference):
        sign, rest = term.as_coeff_Mul()
        if term.is_Number:
            numbers.append(term)
        elif rest in tables_of(rest) and not rest.is_integer and sign in (1, -1):
            reads.append(sign)
        else:
            return False
    if len(reads) == 2:
        return not numbers and sum(reads) == 0
    return len(reads) == 1 and all(
        number == int(number) and abs(number) <= MAX_EXACT_OF_ANY for number in numbers
    )
