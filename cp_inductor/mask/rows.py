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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr
from sympy.core.function import AppliedUndef

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import BATCH, HEAD, KEY, QUERY, number_of, table
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

    @property
    def has_heads(self) -> bool:
        """Whether it has a row for each head."""
        return HEAD in self.where


@dataclass(frozen=True, slots=True)
class RowRule:
    """A rule on rows.

    Attributes:
        rule: reads the four columns that every such rule has, and then `columns`.
        columns: in order; the first is table 4 of the rule.
    """

    rule: Rule
    columns: tuple[Column, ...]


@lru_cache(maxsize=256)
def rule_of_rows(text: str, num_groups: int = 1) -> RowRule:
    """Return a rule, given as text, on rows.

    Args:
        text: of the rule.
        num_groups: that heads are cut into; 1 if the rule knows heads.

    The result has the same pairs, biases and changed scores as the rule, for rows whose columns
    say where they come from.
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
    for function in sorted(rule.reads, key=str):
        column = Column(number_of(function), function.args, _side(function.args))
        if column.side is None:
            column = Column(column.number, (), None)
        if column not in columns:
            is_integer = bool(function.func(*function.args).is_integer)
            columns[column] = table(4 + len(columns), is_integer=is_integer)

    def on_rows(expression: Any) -> Any:
        if isinstance(expression, AppliedUndef):
            number, where = number_of(expression), expression.args
            side = _side(where)
            if side is None:
                return columns[Column(number, (), None)](*map(on_rows, where))
            column = Column(number, where, side)
            heads = (HEAD,) if column.has_heads else ()
            return columns[column](*heads, side)
        if isinstance(expression, sympy.Symbol):
            return on_row.get(expression, expression)
        return expression.func(*map(on_rows, expression.args)) if expression.args else expression

    lanes = table(LANE_OF_QUERY)(QUERY), table(LANE_OF_KEY)(KEY)
    same_lane = sympy.Eq(*lanes, evaluate=False)
    allowed = sympy.And(same_lane, on_rows(rule.allowed))
    changed = Rule(allowed, on_rows(rule.bias), rule.is_wide, on_rows(rule.score))
    return RowRule(changed, tuple(columns))


# A pair is of one batch entry: that of its query. A row of none, which makes no pairs, computes as
# if it were of the first: a table may be read there.
_ENTRY = sympy.Max(table(LANE_OF_QUERY)(QUERY), 0)


def _side(where: Sequence[Expr]) -> sympy.Symbol | None:
    """Return whose rows a table read at these indices has values for; None if it is read whole.

    What depends on the batch entry alone is a value of the query's row.
    """
    symbols = [index for index in where if index.is_Symbol]
    if len(symbols) != len(set(symbols)) or not all(i.is_Symbol or i.is_Integer for i in where):
        return None
    found = set(symbols)
    if KEY in found:
        return None if QUERY in found else KEY
    return QUERY if found & {QUERY, BATCH} else None
