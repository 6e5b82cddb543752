"""Read the mask that a graph computes for an attention, as a function of indices.

    kv_idx <= q_idx, of two aranges                        =>  k - q <= 0
    docs[b, q_idx] == docs[b, kv_idx], docs an input       =>  Eq(t0(b, k), t0(b, q)), t0 = docs

The slice of the graph that the mask depends on is traced in core aten ops, and each op is read by
its row of a table (`cp_inductor.mask`). A value that depends on run-time tensors stays a table of
which only the indices and the range are known. So does a value that cannot be read, which may be
the whole mask; it is then used as it is. A rule holds for every index and for whatever the tables
may hold.

Assumes: a graph from Dynamo, whose nodes carry `example_value`; shapes are of whole tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache

import sympy
import torch.utils._pytree as pytree
from torch import fx

from cp_inductor.mask.language import FULL
from cp_inductor.mask.reader.lengths import Frozen
from cp_inductor.mask.reader.read import known_nodes, read
from cp_inductor.mask.reader.to_rule import Recognized, as_it_is, as_rule, misread, with_bias
from cp_inductor.mask.reader.trace import Trace, Traceable, trace_nodes
from cp_inductor.mask.rule import Rule
from cp_inductor.torch_private.sizes import Multiple, number_of, solve


def read_mask(mask: fx.Node) -> tuple[Recognized, Trace]:
    """Return what a mask is, and the trace that it was read from.

    It is bool, or added to the scores, and has up to 4 dims that broadcast to (B, H, S, T).
    """
    trace = trace_nodes([mask], mask.graph)
    recognized = _recognize(trace)
    example = mask.meta["example_value"]
    if example.requires_grad and (recognized is None or recognized.rule.bias):
        # The gradient goes to the whole tensor; the rule still says which pairs exist.
        recognized = with_bias(recognized or Recognized(Rule(FULL)), mask)
    elif recognized is None:
        recognized = as_it_is(mask)
    return replace(recognized, computed_by=known_nodes(trace)), trace


# A mask that is compiled at length n is read again at these lengths: a little and far below n, and
# a little and far above. If the rule differs on both sides, the graph is compiled for n alone.
SIDES = ((lambda n: n - 1, lambda n: n // 2 + 2), (lambda n: n + 1, lambda n: 8 * n + 3))
# The lengths, in tokens, between which a rule is looked for. Dynamo's symbols are at least 2.
LEAST, MOST = 2, 1 << 20


@dataclass(frozen=True, slots=True)
class MaskOfLengths:
    """A mask whose lengths are symbols, and which can be read again at other lengths.

    Attributes:
        source: the nodes that compute the mask.
        lengths: of queries and keys.
        recognized: as it was read when the graph was compiled, of nodes of `source`.
    """

    source: Traceable
    lengths: tuple[Multiple | int, Multiple | int]
    recognized: Recognized

    @staticmethod
    def of(
        mask: fx.Node,
        recognized: Recognized,
        trace: Trace,
        lengths: tuple[Multiple | int, Multiple | int],
    ) -> MaskOfLengths:
        """Keep what was recognized at the lengths for which the graph is compiled."""
        source = Traceable.of(trace, mask)
        tables = tuple(source.nodes[table] for table in recognized.tables)
        return MaskOfLengths(
            source, lengths, Recognized(recognized.rule, tables, recognized.indices)
        )

    def holds(self, query_length: int, key_length: int) -> bool:
        """Whether the mask is the same rule of the same tables at other lengths."""
        numbers = solve(self.lengths, (query_length, key_length))
        trace = None if numbers is None else self.source.trace(numbers)
        return trace is not None and _recognize(trace) == self.recognized

    def bounds(self, lengths: tuple[int, int]) -> dict[sympy.Symbol, tuple[int, int]] | None:
        """Return the range of each symbol within which the rule stays the same.

        A sliding window is another rule at lengths up to the window: one graph serves these
        lengths, and another one those beyond. If the rule changes and changes back, only the range
        around the `lengths` of queries and keys for which the graph is compiled is found; `holds`
        tells the rest when such a length comes. None if it differs soon on both sides of them.
        """
        compiled = solve(self.lengths, lengths)
        assert compiled is not None
        here = next(iter(compiled.values()))

        def numbers_at(first: int) -> dict[sympy.Symbol, int]:
            return {symbol: max(LEAST, n * first // here) for symbol, n in compiled.items()}

        @cache
        def holds(first: int) -> bool:
            numbers = numbers_at(first)
            return first >= LEAST and self.holds(*(number_of(one, numbers) for one in self.lengths))

        def last_that_holds(end: int, step: int) -> int:
            good, bad = here, end
            if not holds(here + step):
                return here
            if holds(end):
                return end
            while abs(good - bad) > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if holds(middle) else (good, middle)
            return good

        if not any(all(holds(probe(here)) for probe in side) for side in SIDES):
            return None
        low, high = numbers_at(last_that_holds(LEAST, -1)), numbers_at(last_that_holds(MOST, 1))
        return {symbol: (low[symbol], high[symbol]) for symbol in compiled}

    @property
    def name(self) -> str:
        """A name that only this mask has: the same on every rank, and in every process."""
        symbols = dict.fromkeys(one.symbol for one in self.lengths if not isinstance(one, int))
        canonical = {symbol: sympy.Symbol(f"n{place}") for place, symbol in enumerate(symbols)}
        mask = self.recognized
        said = [mask.rule.format(), repr(mask.indices), *map(str, mask.tables)]
        said += [
            str(one if isinstance(one, int) else one.factor * canonical[one.symbol])
            for one in self.lengths
        ]
        for node, value in self.source.values.items():
            frozen = [one for one in pytree.tree_leaves(value) if isinstance(one, Frozen)]
            said += [node.format_node() or node.name, *(one.said(canonical) for one in frozen)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _recognize(trace: Trace) -> Recognized | None:
    """Return a mask as a rule; None if it cannot be written as one."""
    held: set[fx.Node] = set()
    while True:
        reading = read(trace, held)
        value = reading.values.get(trace.result)
        recognized = None if value is None else as_rule(value, reading.tables)
        if value is None or recognized is None:
            return None
        # Slices of a table that cannot be read at other indices are tables of their own.
        misread_tables = misread(recognized, value.shape, reading.tables)
        if misread_tables <= held:
            return None if misread_tables else recognized
        held |= misread_tables
