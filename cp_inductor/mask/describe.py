"""Describe a rule in words, for people: "causal, window 128"."""

from __future__ import annotations

from typing import Any

import sympy
from sympy import And, Not, Or
from sympy.core.function import AppliedUndef

from cp_inductor.mask.language import FULL, HEAD, KEY, QUERY, SCORE, Step
from cp_inductor.mask.rule import Rule


def describe(rule: Rule) -> str:
    """Return a rule in words: "causal, window 128", "document equality, key padding", ..."""
    if isinstance(rule.allowed, Or):
        text = " or ".join(sorted(f"({describe(Rule(part))})" for part in rule.allowed.args))
    else:
        parts = rule.allowed.args if isinstance(rule.allowed, And) else [rule.allowed]
        text = ", ".join(sorted(map(_describe_part, parts), key=lambda word: word != "causal"))
    if rule.bias:
        # ALiBi is (k - q) times a slope, which may depend on the head.
        slope = sympy.cancel(rule.bias / (KEY - QUERY))
        text += ", bias" if slope.free_symbols - {HEAD} else ", ALiBi"
    if rule.score != SCORE:
        text += f", score {rule.score}"
    return text


def _describe_part(part: Any) -> str:
    if part == FULL:
        return "full"
    if isinstance(part, sympy.Le) and part.rhs == 0:
        constant, rest = part.lhs.as_coeff_Add()
        if rest == KEY - QUERY:
            return "causal" + (
                f", {abs(constant)} {'ahead' if constant < 0 else 'behind'}" * bool(constant)
            )
        if rest == QUERY - KEY and constant < 0:
            return f"window {1 - constant}"
        if rest == QUERY - KEY:
            return f"not before {constant} ahead"
        if rest == KEY:
            return f"prefix {1 - constant}"
    if isinstance(part, (sympy.Eq, sympy.Ne, Not)):
        inner = part.args[0] if isinstance(part, Not) else part
        of_keys = {f for f in inner.atoms(AppliedUndef) if KEY in f.free_symbols}
        of_queries = {f for f in inner.atoms(AppliedUndef) if QUERY in f.free_symbols}
        swapped = {f.xreplace({KEY: QUERY}) for f in of_keys}
        if isinstance(part, sympy.Eq) and swapped and swapped == of_queries:
            return "document equality"
        if isinstance(part, sympy.Eq) and inner.atoms(Step):
            return f"{1 + len(inner.atoms(Step)) // 2} documents"
        if isinstance(part, sympy.Eq) and inner.atoms(sympy.floor):
            sizes = {
                int(sympy.fraction(sympy.together(f.args[0]))[1]) for f in inner.atoms(sympy.floor)
            }
            return f"chunks of {min(sizes)}"
        if of_keys and not of_queries:
            return "key padding"
        if of_keys & of_queries:
            return "a mask tensor"
    return str(part)
