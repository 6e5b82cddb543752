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
    """Query chunk, key chunk, and blocks that may hold pairs; sorted by (query, key)."""

    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes, which are runs of tokens of a batch entry, sorted by (entry, position).

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


# The queries, or the keys, at each level: runs of chunks, chunks, parts of chunks, ..., blocks.
_Levels = tuple[_Level, ...]
# A query node and a key node for each box.
_Boxes = tuple[np.ndarray, np.ndarray]


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
        return Cells(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    sides = _levels_of(queries, batch), _levels_of(keys, batch)
    condition = _decidable(rule.allowed, True)
    tables = {
        number: _renumbered(table) if number in _only_equated(condition) else table
        for number, table in tables.items()
    }
    reads = {
        read: bounds
        for read in sorted(tables_of(condition), key=str)
        if (bounds := _bounds_of_read(read, tables, sides, batch, num_heads)) is not None
    }
    decider = _Decider(condition, sides, reads, num_heads)

    boxes = _meet(sides[0][0], sides[1][0])
    must, may = decider.decide(boxes, 0)
    boxes, is_full = _cut(_take(boxes, may), sides, 0, must[may])
    is_open = np.flatnonzero(~is_full)
    must, may = decider.decide(_take(boxes, is_open), 1)
    exists = is_full.copy()
    exists[is_open] = may
    is_full[is_open] = must
    boxes, is_full = _take(boxes, exists), is_full[exists]

    weight = _num_blocks(boxes, sides, 1)
    is_cut = ~is_full & (len(sides[0]) > 2)
    weight[is_cut] = 0
    parts, origin = _take(boxes, is_cut), np.flatnonzero(is_cut)
    for level in range(2, len(sides[0])):
        parts, origin = _cut(parts, sides, level - 1, origin)
        must, may = decider.decide(parts, level)
        is_counted = may if level == len(sides[0]) - 1 else must
        blocks = _num_blocks(_take(parts, is_counted), sides, level)
        weight += np.bincount(origin[is_counted], blocks, len(weight))
        is_open = may & ~must
        parts, origin = _take(parts, is_open), origin[is_open]
    boxes, weight = _take(boxes, weight > 0), weight[weight > 0]
    query, key = _by_position(queries)[boxes[0]], _by_position(keys)[boxes[1]]
    order = np.argsort(query * len(keys) + key, kind="stable")
    return Cells(query[order], key[order], weight[order])


@dataclass(frozen=True, eq=False)
class _Decider:
    """Decides boxes of any level.

    Attributes:
        condition: that can be bounded.
        sides: the levels of queries and keys.
        reads: for each read of a table that has bounds, those of each level, by (entry, query node
            of the entry, key node of the entry); a dim is 1 where the read does not depend on it.
        num_heads: of the attention.
    """

    condition: Boolean
    sides: tuple[_Levels, _Levels]
    reads: Mapping[Expr, tuple[Bounds, ...]]
    num_heads: int

    def decide(self, boxes: _Boxes, level: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each box whether all pairs surely exist, and whether any may."""
        queries, keys = (side[level] for side in self.sides)
        at_query, at_key = boxes
        entry = queries.entry[at_query]
        inside = at_query % queries.num_of_entry, at_key % keys.num_of_entry
        box: dict[Expr, Bounds] = {
            QUERY: _float(queries.first[at_query], queries.last[at_query]),
            KEY: _float(keys.first[at_key], keys.last[at_key]),
            BATCH: _float(entry, entry),
            HEAD: (np.array(0.0), np.array(self.num_heads - 1.0)),
        }
        for read, levels in self.reads.items():
            low, high = levels[level]
            place = tuple(
                index if size > 1 else 0
                for index, size in zip((entry, *inside), low.shape, strict=True)
            )
            box[read] = low[place], high[place]
        must, may = decide(self.condition, box)
        shape = at_query.shape
        return np.broadcast_to(must, shape), np.broadcast_to(may, shape)


def _float(low: np.ndarray, high: np.ndarray) -> Bounds:
    return low.astype(np.float64), high.astype(np.float64)


def _take(boxes: _Boxes, which: np.ndarray) -> _Boxes:
    return boxes[0][which], boxes[1][which]


def _by_position(chunks: Chunks) -> np.ndarray:
    """Return the chunks in the order of (entry, position)."""
    return np.lexsort((chunks.first, chunks.entry))


def _levels_of(chunks: Chunks, batch: int) -> _Levels:
    order = _by_position(chunks)
    first, length, entry = chunks.first[order], chunks.length[order], chunks.entry[order]
    sizes = [chunks.size]
    while sizes[-1] > BLOCK:
        sizes.append(max(BLOCK, sizes[-1] // CUT // BLOCK * BLOCK))
    levels: list[_Level] = []
    for size, finer in zip(sizes, [*sizes[1:], BLOCK], strict=True):
        num = -(-length // size)
        chunk_of, place = spread(num)
        token = place * size
        tokens = np.minimum(size, length[chunk_of] - token)
        num_children = -(-tokens // finer)
        levels.append(
            _Level(
                first[chunk_of] + token,
                first[chunk_of] + token + tokens - 1,
                entry[chunk_of],
                len(chunk_of) // batch,
                np.cumsum(num_children) - num_children,
                num_children,
            )
        )
    num_chunks = len(chunks) // batch
    starts = np.arange(0, num_chunks, CUT)
    begin = (np.arange(batch)[:, None] * num_chunks + starts).ravel()
    count = np.tile(np.minimum(CUT, num_chunks - starts), batch)
    last = levels[0].last[begin + count - 1]
    return _Level(first[begin], last, entry[begin], len(starts), begin, count), *levels


def _num_blocks(boxes: _Boxes, sides: tuple[_Levels, _Levels], level: int) -> np.ndarray:
    """Return of how many blocks each box of a level consists."""
    queries, keys = ((side[level].last - side[level].first) // BLOCK + 1.0 for side in sides)
    return queries[boxes[0]] * keys[boxes[1]]


def _meet(queries: _Level, keys: _Level) -> _Boxes:
    """Return all boxes of the same entry."""
    inside = np.arange(keys.num_of_entry)
    at_key = queries.entry[:, None] * keys.num_of_entry + inside
    at_query = np.repeat(np.arange(len(queries.entry)), keys.num_of_entry)
    return at_query, at_key.ravel()


def _cut(
    boxes: _Boxes, sides: tuple[_Levels, _Levels], level: int, label: np.ndarray
) -> tuple[_Boxes, np.ndarray]:
    """Return the boxes of the next level that boxes of a level consist of, and the label of each.

    The label of a box goes to all its parts.
    """
    queries, keys = (side[level] for side in sides)
    num_queries, num_keys = queries.num_children[boxes[0]], keys.num_children[boxes[1]]
    origin, index = spread(num_queries * num_keys)
    row, column = np.divmod(index, num_keys[origin])
    at_query = queries.child[boxes[0]][origin] + row
    at_key = keys.child[boxes[1]][origin] + column
    return (at_query, at_key), label[origin]


def _bounds_of_read(
    read: Expr,
    tables: Mapping[int, np.ndarray],
    sides: tuple[_Levels, _Levels],
    batch: int,
    num_heads: int,
) -> tuple[Bounds, ...] | None:
    """Return the bounds of a read of a table in every level; None if it has none."""
    table = tables.get(number_of(read))
    if table is None or table.ndim != len(read.args):
        return None
    lengths = [int(side[0].last[-1]) + 1 for side in sides]
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
            return None
    table = table[tuple(place)]
    order = [symbols.index(symbol) for symbol in sizes if symbol in symbols]
    missing = tuple(axis for axis, symbol in enumerate(sizes) if symbol not in symbols)
    table = np.expand_dims(table.transpose(order), missing)
    if table.shape[1] == 1:  # a copy of millions of numbers less
        low = high = table[:, 0]
    else:
        low, high = table.min(axis=1), table.max(axis=1)  # of heads
    found = []
    for level in reversed(range(len(sides[0]))):
        for axis, side in enumerate(sides, 1):
            if low.shape[axis] > 1:
                nodes, is_finest = side[level], level == len(side) - 1
                of_entry = slice(nodes.num_of_entry)
                starts = nodes.first[of_entry] if is_finest else nodes.child[of_entry]
                low = np.minimum.reduceat(low, starts, axis=axis)
                high = np.maximum.reduceat(high, starts, axis=axis)
        found.append(_exact(low, high))
    return tuple(found[::-1])


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
