"""The strategies, one row each. To add one, write a file beside these, and add a row here.

ring, allgather     queries stay with their owners
rows                rows of queries move between ranks until all have the same work
blocks              two-dimensional; see `cp_inductor.plan.strategies.blocks`
heads               every rank computes all queries and keys of some heads
heads_own           the same, but for the tile of its own chunks, which it computes for all heads
heads_own_forward   the same in the forward; the backward is that of `heads`
headsN+other        groups of N ranks split the heads, and the groups split the rest as `other` does
headsN_own+blocks   the same with own tiles
nodesN+other        N nodes split the heads, and the ranks of each split the rest as `other` does
"""

from __future__ import annotations

import re

from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.kept import lru_cache
from cp_inductor.mask.grammar import shortened
from cp_inductor.plan.assign_cells import Strategy
from cp_inductor.plan.strategies.blocks import BLOCKS
from cp_inductor.plan.strategies.heads import (
    HEADS,
    HEADS_OWN,
    HEADS_OWN_FORWARD,
    in_groups,
    in_nodes,
    own_in_groups,
)
from cp_inductor.plan.strategies.rows import ALLGATHER, RING, ROWS

TABLE = {
    strategy.name: strategy
    for strategy in (RING, ALLGATHER, ROWS, BLOCKS, HEADS, HEADS_OWN, HEADS_OWN_FORWARD)
}
STRATEGIES = ("auto", *TABLE)

_GROUPS = re.compile("(heads|nodes)([1-9][0-9]{0,3})(_own)?")


@lru_cache(maxsize=256)
def parse_strategy(text: str, *, site: str = "a strategy") -> Strategy:
    """Return the strategy of a name: a row of the table, or "headsN+" or "nodesN+" before some.

    "headsN_own" goes with blocks only.

    Raises:
        UnsupportedStrategy: there is no strategy of that name.
    """
    if text in TABLE:
        return TABLE[text]
    name, plus, rest = text.partition("+")
    groups = _GROUPS.fullmatch(name)
    groupable = [strategy.name for strategy in TABLE.values() if strategy.is_groupable]
    if groups and groups[3] and groups[1] == "heads" and rest == "blocks":
        return own_in_groups(int(groups[2]))
    if groups and not groups[3] and rest in groupable:
        split = in_groups if groups[1] == "heads" else in_nodes
        return split(int(groups[2]), TABLE[rest])
    expected, remedy = f"one of {', '.join(STRATEGIES)}", "use strategy='auto'"
    if plus:
        splits = [f"{split}+{n}" for split in ("headsN", "nodesN") for n in sorted(groupable)]
        expected = " or ".join(["headsN_own+blocks", *splits])
        remedy = "name the number of ranks that split the heads, as in 'heads2+blocks'"
    elif groups:
        expected = "'headsN' or 'nodesN' with a strategy for the rest"
        remedy = f"use '{name}+blocks'"
    raise UnsupportedStrategy(site=site, expected=expected, got=shortened(text), remedy=remedy)
