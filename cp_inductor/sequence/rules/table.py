"""The table of rules: what an op makes of types, by its overload or its tag."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cp_inductor.sequence.rules.call import OpCall
from cp_inductor.sequence.types import Type

Rule = Callable[[OpCall], "list[Type]"]
RULES: dict[torch._ops.OpOverload, Rule] = {}
TAGGED: dict[torch.Tag, Rule] = {}


def overloads(ops: Iterable[Any]) -> set[torch._ops.OpOverload]:
    """Return overloads, and all overloads of packets."""
    found = set()
    for op in ops:
        is_one = isinstance(op, torch._ops.OpOverload)
        found |= {op} if is_one else {getattr(op, name) for name in op.overloads()}
    return found


def rule(*ops: Any, tag: torch.Tag | None = None) -> Callable[[Rule], Rule]:
    """Register a rule for overloads, or for all overloads of packets.

    Args:
        ops: overloads and packets.
        tag: the rule is also that of all ops which torch has tagged so, if they have no other.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads(ops), rule))
        if tag is not None:
            TAGGED[tag] = rule
        return rule

    return register


def find_rule(op: torch._ops.OpOverload) -> Rule | None:
    """Return the rule of an op, or of its tag."""
    return RULES.get(op) or next((TAGGED[tag] for tag in op.tags if tag in TAGGED), None)
