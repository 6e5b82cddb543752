"""A rule on rows: on tokens that a plan has gathered, wherever they come from.

    rule        (k - q <= 0) & Eq(t0(b, k), t0(b, q))
      =>
    on rows     (t3(k) - t2(q) <= 0) & Eq(t0(q), t1(k)) & Eq(t5(k), t4(q))
    columns     0, 1: the lanes of queries and keys              2, 3: their positions
                4, 5: what t0 holds for them

A rule speaks of positions in a whole sequence. A plan made at run time gathers rows of queries and
of keys from several ranks, and from several batch entries, into one tile. There, q and k number the
rows, and whatever the rule says of a token is read from a column that was gathered with the rows.
A lane is a group of heads of a batch entry: lane = entry * groups + group. Rows of different lanes
make no pairs; so a row of no lane makes none at all. Heads are cut into groups only if a rule does
not tell them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr
from sympy.core.function import AppliedUndef

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import BATCH, HEAD, KEY, QUERY, is_of_pairs, number_of, table
from cp_inductor.mask.rule import Rule

# The columns that every rule on rows has.
LANE_OF_QUERY, LANE_OF_KEY, POSITION_OF_QUERY, POSITION_OF_KEY = range(4)


@dataclass(frozen=True, slots=True)
class Column:
    """What a table of a rule on rows holds, behind the four that every such rule has.

    Attributes:
        number: of the table of the rule that it comes from.
        where: the indices at which that table is read. If they are plain indices of the batch,
            of heads and of queries or keys, the column holds the values for the rows: (rows,), or
            (H, rows) if heads are among them.
        side: `QUERY` or `KEY`: whose rows. None: the whole table is read, at computed indices.
    """

    number: int
    where: tuple[Expr, ...]
    side: sympy.Symbol | None


@lru_cache(maxsize=256)
def rule_of_rows(text: str, num_groups: int) -> tuple[Rule, tuple[Column, ...]]:
    """Return a rule, given as text, on rows, for heads in so many groups: 1 if it knows heads.

    The result has the same pairs, biases and changed scores as the rule, for rows whose columns
    say where they come from. It reads the four that every such rule has, and then those returned.
    """
    rule = Rule.parse(text)
    assert not rule.reads_pairs, text
    assert num_groups == 1 or not rule.knows_heads, text
    on_row = {
        BATCH: sympy.floor(_ENTRY / num_groups),
        QUERY: table(POSITION_OF_QUERY)(QUERY),
        KEY: table(POSITION_OF_KEY)(KEY),
    }
    columns: dict[Column, Any] = {}
    for read in sorted(rule.reads, key=str):
        column = _column_of(read)
        if column not in columns:
            columns[column] = table(4 + len(columns), is_integer=bool(read.is_integer))

    def on_rows(expression: Any) -> Any:
        if isinstance(expression, AppliedUndef):
            column = _column_of(expression)
            if column.side is None:
                return columns[column](*map(on_rows, expression.args))
            heads = (HEAD,) if HEAD in column.where else ()
            return columns[column](*heads, column.side)
        if isinstance(expression, sympy.Symbol):
            return on_row.get(expression, expression)
        return expression.func(*map(on_rows, expression.args)) if expression.args else expression

    lanes = table(LANE_OF_QUERY)(QUERY), table(LANE_OF_KEY)(KEY)
    same_lane = sympy.Eq(*lanes, evaluate=False)
    allowed = sympy.And(same_lane, on_rows(rule.allowed))
    changed = Rule(allowed, on_rows(rule.bias), rule.is_wide, on_rows(rule.score))
    return changed, tuple(columns)


# A pair is of one batch entry: that of its query. A row of none, which makes no pairs, computes as
# if it were of the first: a table may be read there.
_ENTRY = sympy.Max(table(LANE_OF_QUERY)(QUERY), 0)


def _column_of(read: Any) -> Column:
    """Return the column of what a rule reads.

    What depends on the batch entry alone is a value of the query's row.
    """
    symbols = [index for index in read.args if index.is_Symbol]
    are_plain = all(index.is_Symbol or index.is_Integer for index in read.args)
    if are_plain and len(symbols) == len(set(symbols)) and not is_of_pairs(symbols):
        if KEY in symbols:
            return Column(number_of(read), read.args, KEY)
        if QUERY in symbols or BATCH in symbols:
            return Column(number_of(read), read.args, QUERY)
    return Column(number_of(read), (), None)
