"""Read a mask again at other lengths, where its lengths are symbols of Dynamo's.

    arange(s0)[:, None] >= arange(s0), compiled at s0 = 512     k - q <= 0, as at every other length
    ... & (arange(s0) < 600)                                    another rule from 601 on

Before a plan is made for lengths that were not compiled, somebody has to know whether the rule is
the same: see `cp_inductor.ops.plan_batch`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.node import map_aggregate

from cp_inductor.mask.reader.read import Recognized, recognize
from cp_inductor.mask.reader.trace import KINDS, Trace, number_at, trace_copy
from cp_inductor.torch_private.sizes import Multiple, size_expression, solve

# A mask that is compiled at length n is read again at these lengths: a little and far below n, and
# a little and far above. If the rule differs on both sides, the graph is compiled for n alone.
SIDES = ((lambda n: n - 1, lambda n: n // 2 + 2), (lambda n: n + 1, lambda n: 8 * n + 3))
# The lengths, in tokens, between which a rule is looked for. Dynamo's symbols are at least 2.
LEAST, MOST = 2, 1 << 20


@dataclass(frozen=True, slots=True)
class Frozen:
    """A value of a Dynamo graph as it was when it was compiled.

    A copy is needed because Dynamo may change what it knows of symbols after the compile.
    """

    sizes: tuple[sympy.Expr, ...]  # of a tensor, or a symbolic number as the only one
    kind: Any  # the dtype of a tensor, or the type of the number

    def at(self, numbers: Mapping[sympy.Symbol, int]) -> Any:
        """Return the value for some numbers of its symbols; a tensor is on the meta device.

        Raises:
            ValueError: the numbers leave a length open.
        """
        sizes = [number_at(size, numbers) for size in self.sizes]
        if None in sizes or isinstance(self.kind, torch.layout):
            raise ValueError(str(self))
        if isinstance(self.kind, torch.dtype):
            return torch.empty(tuple(map(int, sizes)), dtype=self.kind, device="meta")
        return self.kind(sizes[0])

    def said(self, names: Mapping[sympy.Symbol, sympy.Symbol]) -> str:
        """Return the value as text, with other names for its symbols."""
        return f"{self.kind}{[str(size.xreplace(dict(names))) for size in self.sizes]}"


def freeze(value: Any) -> Any:
    """Freeze a tensor or a symbolic number; other values unchanged."""
    if type(value) in KINDS:
        return Frozen((size_expression(value),), KINDS[type(value)])
    if isinstance(value, torch.Tensor):
        kind = value.layout if value.layout != torch.strided else value.dtype
        return Frozen(tuple(map(size_expression, value.shape)), kind)
    return value


@dataclass(frozen=True, slots=True)
class MaskOfLengths:
    """A mask whose lengths are symbols, and which can be read again at other lengths."""

    mask: fx.Node  # of a copy of the nodes that compute it
    values: dict[fx.Node, Any]  # of each node of the copy, frozen
    # The nodes of the copy whose tensors some other node of the Dynamo graph writes to.
    written: frozenset[fx.Node]
    lengths: Sequence[Multiple | int]  # of queries and keys
    recognized: Recognized  # as it was read when the graph was compiled, of nodes of the copy

    @staticmethod
    def of(
        mask: fx.Node, recognized: Recognized, trace: Trace, lengths: Sequence[Multiple | int]
    ) -> MaskOfLengths:
        """Keep what was recognized at the lengths for which the graph is compiled."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, is_input in trace.nodes.items():
            for source in [node] if is_input else node.all_input_nodes:
                if source not in copies:
                    copies[source] = graph.placeholder(source.name)
            if not is_input:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta.clear()
        values = {c: map_aggregate(n.meta["example_value"], freeze) for n, c in copies.items()}
        written = frozenset(map(copies.__getitem__, trace.written))
        tables = tuple(map(copies.__getitem__, recognized.tables))
        own = Recognized(recognized.rule, tables)
        return MaskOfLengths(copies[mask], values, written, lengths, own)

    def holds(self, query_length: int, key_length: int) -> bool:
        """Whether the mask is the same rule of the same tables at other lengths."""
        numbers = solve(self.lengths, (query_length, key_length))
        return numbers is not None and self._holds_at(numbers)

    def _holds_at(self, numbers: Mapping[sympy.Symbol, int]) -> bool:
        try:
            for node, value in self.values.items():
                node.meta["example_value"] = map_aggregate(
                    value, lambda part: part.at(numbers) if isinstance(part, Frozen) else part
                )
        except ValueError:
            return False
        trace = trace_copy(self.mask, self.written)
        return trace is not None and recognize(trace) == self.recognized

    def bounds(
        self, compiled: Mapping[sympy.Symbol, int]
    ) -> dict[sympy.Symbol, tuple[int, int]] | None:
        """Return the range of each symbol within which the rule stays the same.

        A sliding window is another rule at lengths up to the window: one graph serves these
        lengths, and another one those beyond. If the rule changes and changes back, only the range
        around the numbers for which the graph is compiled is found; `holds` tells the rest when
        such a length comes. None if it differs soon on both sides of them.
        """
        here = next(iter(compiled.values()))

        def numbers_at(first: int) -> dict[sympy.Symbol, int]:
            return {symbol: max(LEAST, n * first // here) for symbol, n in compiled.items()}

        @cache
        def holds(first: int) -> bool:
            return first >= LEAST and self._holds_at(numbers_at(first))

        def last_that_holds(lengths: range) -> int:
            if not holds(here + lengths.step):
                return here
            if holds(lengths[-1]):
                return lengths[-1]
            return lengths[bisect_left(lengths, True, lo=1, key=lambda n: not holds(n)) - 1]

        if not any(all(holds(probe(here)) for probe in side) for side in SIDES):
            return None
        low = numbers_at(last_that_holds(range(here, LEAST - 1, -1)))
        high = numbers_at(last_that_holds(range(here, max(MOST, here + 1) + 1)))
        return {symbol: (low[symbol], high[symbol]) for symbol in compiled}

    @property
    def name(self) -> str:
        """A name that only this mask has: the same on every rank, and in every process."""
        symbols = dict.fromkeys(n.symbol for n in self.lengths if not isinstance(n, int))
        canonical = {symbol: sympy.Symbol(f"n{place}") for place, symbol in enumerate(symbols)}
        mask = self.recognized
        said = [mask.rule.format(), repr(tuple(mask.indices)), *map(str, mask.tables)]
        for n in self.lengths:
            said.append(str(n if isinstance(n, int) else n.factor * canonical[n.symbol]))
        for node, value in self.values.items():
            frozen = [n for n in pytree.tree_leaves(value) if isinstance(n, Frozen)]
            said += [node.format_node() or node.name, *(n.said(canonical) for n in frozen)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
