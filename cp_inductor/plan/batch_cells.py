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
from itertools import pairwise

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
    """Cut the shards of all ranks into chunks; each rank has so many tokens of each entry, or none.

    With groups of heads, the same tokens are a chunk of each group.
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
    """A query chunk x a key chunk each, of those that may hold pairs; sorted by (query, key)."""

    # queries and keys: the chunks; both have equally many groups of heads.
    queries: Chunks
    keys: Chunks
    # query and key: the chunks of each cell.
    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray  # blocks of 128 x 128 that may hold pairs, of each cell

    @property
    def sides(self) -> tuple[tuple[Chunks, np.ndarray], tuple[Chunks, np.ndarray]]:
        """The chunks of queries, and which each cell has; the same of keys."""
        return (self.queries, self.query), (self.keys, self.key)


# Nodes are runs of blocks. Where those of a level begin in an entry, and the last ends: its token,
# and its node of the next level (of the last level, its token).
_Edges = tuple[np.ndarray, np.ndarray]
_Level = tuple[_Edges, _Edges]  # of the queries, and of the keys


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
    levels = list(zip(_levels_of(queries), _levels_of(keys), strict=True))
    condition = _decidable(rule.allowed, True)
    tables = {
        number: _renumbered(table) if number in _only_equated(condition) else table
        for number, table in tables.items()
    }
    bounds = {
        read: _bounds_of_read(read, tables, levels, batch, num_heads)
        for read in sorted(tables_of(condition), key=str)
    }

    def decide_boxes(level: int, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each box whether all pairs surely exist, and whether any may."""
        entry, *nodes = boxes
        box = {BATCH: _float(entry, entry), HEAD: (np.array(0.0), np.array(num_heads - 1.0))}
        for index, (edges, _), at in zip((QUERY, KEY), levels[level], nodes, strict=True):
            box[index] = _float(edges[at], edges[at + 1] - 1)
        for read, of_levels in bounds.items():
            if of_levels:
                low, high = of_levels[level]
                place = tuple(at if n > 1 else 0 for at, n in zip(boxes, low.shape, strict=True))
                box[read] = low[place], high[place]
        must, may = decide(condition, box)
        return np.broadcast_to(must, entry.shape), np.broadcast_to(may, entry.shape)

    # Each box is an entry, a query node and a key node.
    boxes = np.indices((batch, *(len(edges) - 1 for edges, _ in levels[0]))).reshape(3, -1)
    _, may = decide_boxes(0, boxes)
    chunks, _ = _cut(boxes[:, may], levels[0])
    boxes, weight, origin = chunks, np.zeros(chunks.shape[1]), np.arange(chunks.shape[1])
    for level in range(1, len(levels)):
        must, may = decide_boxes(level, boxes)
        is_last = level == len(levels) - 1
        is_counted = may if is_last else must
        of_query, of_key = (
            (-(-np.diff(edges) // BLOCK))[at]
            for (edges, _), at in zip(levels[level], boxes[1:, is_counted], strict=True)
        )
        weight += np.bincount(origin[is_counted], of_query * of_key, len(weight))
        if not is_last:
            is_open = may & ~must
            boxes, of_box = _cut(boxes[:, is_open], levels[level])
            origin = origin[is_open][of_box]
    # The cells of each group of heads are the same.
    (entry, *nodes), weight = chunks[:, weight > 0], weight[weight > 0]
    orders = (np.lexsort((side.group, side.first, side.entry)) for side in (queries, keys))
    query, key = (
        order.reshape(batch, -1, keys.num_groups)[entry, at].ravel()
        for order, at in zip(orders, nodes, strict=True)
    )
    weight = np.repeat(weight, keys.num_groups)
    order = np.argsort(query * len(keys) + key, kind="stable")
    return Cells(queries, keys, query[order], key[order], weight[order])


def _levels_of(chunks: Chunks) -> list[_Edges]:
    """Return the levels of a side: runs of chunks, chunks, parts of chunks, ..., blocks."""
    is_lane = (chunks.entry == 0) & (chunks.group == 0)
    edges = np.append(chunks.first[is_lane], chunks.length[is_lane].sum())
    levels, size = [np.append(edges[:-1:CUT], edges[-1]), edges], chunks.size
    while size > BLOCK:
        size = max(BLOCK, size // CUT // BLOCK * BLOCK)
        node, place = spread(-(-np.diff(edges) // size))
        edges = np.append(edges[node] + size * place, edges[-1])
        levels.append(edges)
    children = [np.searchsorted(finer, coarse) for coarse, finer in pairwise(levels)]
    return list(zip(levels, [*children, edges], strict=True))


def _cut(boxes: np.ndarray, level: _Level) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes of the next level that boxes consist of, and the box of each."""
    entry, *nodes = boxes
    children = [of_side for _, of_side in level]
    num_queries, num_keys = (np.diff(of)[at] for of, at in zip(children, nodes, strict=True))
    of_box, index = spread(num_queries * num_keys)
    inside = np.divmod(index, num_keys[of_box])
    parts = [of[at][of_box] + n for of, at, n in zip(children, nodes, inside, strict=True)]
    return np.stack([entry[of_box], *parts]), of_box


def _bounds_of_read(
    read: Expr,
    tables: Mapping[int, np.ndarray],
    levels: Sequence[_Level],
    batch: int,
    num_heads: int,
) -> list[Bounds]:
    """Return the bounds of a read of a table for each level, if it has any.

    They are by (entry, query node, key node); a dim is 1 where the read does not depend on it.
    """
    table = tables.get(number_of(read))
    if table is None or table.ndim != len(read.args):
        return []
    lengths = (int(edges[-1]) for edges, _ in levels[0])
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
            return []
    table = table[tuple(place)]
    order = [symbols.index(symbol) for symbol in sizes if symbol in symbols]
    missing = tuple(axis for axis, symbol in enumerate(sizes) if symbol not in symbols)
    table = np.expand_dims(table.transpose(order), missing)
    if table.shape[1] == 1:  # a copy of millions of numbers less
        low = high = table[:, 0]
    else:
        low, high = table.min(axis=1), table.max(axis=1)  # of heads
    bounds = []
    for level in reversed(levels):
        for axis, (_, children) in enumerate(level, 1):
            if low.shape[axis] > 1:
                low = np.minimum.reduceat(low, children[:-1], axis=axis)
                high = np.maximum.reduceat(high, children[:-1], axis=axis)
        bounds.append(_exact(low, high))
    return bounds[::-1]


def _float(low: np.ndarray, high: np.ndarray) -> Bounds:
    return low.astype(np.float64), high.astype(np.float64)


@lru_cache(maxsize=256)
def _only_equated(condition: Boolean) -> frozenset[int]:
    """Return the tables of which only values of one row are compared, and only for equality."""
    equated: set[int] = set()
    others: set[int] = set()
    for relation in condition.atoms(Relational):
        reads = sorted(tables_of(relation), key=str)
        is_equation = isinstance(relation, (sympy.Eq, sympy.Ne)) and len(reads) == 2
        if is_equation:
            first, second = reads
            difference = sympy.expand(relation.lhs - relation.rhs)
            is_equation = difference in (first - second, second - first)
            is_equation &= first.func == second.func and first.args[:-1] == second.args[:-1]
        (equated if is_equation else others).update(map(number_of, reads))
    return frozenset(equated - others)


def _renumbered(table: np.ndarray) -> np.ndarray:
    """Number the values of each row by where they occur first.

    Document numbers may be anything, such as hashes; in order, their bounds say more.
    """
    if table.dtype.kind not in "iu" or table.size == 0:
        return table
    result = np.empty(table.shape, np.int64)
    num = table.shape[-1]
    for values, numbers in zip(table.reshape(-1, num), result.reshape(-1, num), strict=True):
        starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
        _, first, place = np.unique(values[starts], return_index=True, return_inverse=True)
        numbers[:] = np.repeat(first[place], np.diff(starts, append=num))
    return result


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
